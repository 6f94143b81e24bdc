"""Changes to logits before verification: the ``penalties`` sampler, Python processors, and masks of a grammar."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specrt.engines.contract import LOGITS, UNDRAFTED
from specrt.engines.errors import UsageError
from specrt.engines.interface import Array, Binding, Memory
from specrt.engines.samplers import (
    CONTEXT_COUNTS,
    ENDING_LIMIT,
    FREQUENCY_PENALTY,
    LOGIT_BIAS,
    NUM_UNENDING_ROWS,
    OUTPUT_COUNTS,
    PENALTIES,
    PRESENCE_PENALTY,
    PROCESSED_LOGITS,
    REPETITION_PENALTY,
)
from specrt.runtime.options import LogitsProcessor
from specrt.runtime.sampling.grammar import Constraint
from specrt.runtime.sampling.samplers import SlotSamplers
from specrt.runtime.settings import Settings


class Penalties:
    """The ``penalties`` sampler of one generation. Its counts follow the tokens: rejected drafted tokens are
    subtracted again.
    """

    def __init__(self, samplers: SlotSamplers, settings: Settings, num_prompt_tokens: int) -> None:
        self._binding = samplers.sampler(PENALTIES)
        host = samplers.host
        self._context, self._output = host[CONTEXT_COUNTS], host[OUTPUT_COUNTS]  # [V] f32 each
        self._unending = host[NUM_UNENDING_ROWS]
        self._num_prompt_tokens, self._min_new_tokens = num_prompt_tokens, settings.min_new_tokens
        self._counted: list[int] = []
        self._num_committed = 0
        for name in (CONTEXT_COUNTS, OUTPUT_COUNTS, LOGIT_BIAS):
            host[name][:] = 0
        host[ENDING_LIMIT][:] = np.inf
        vocab_size = len(host[LOGIT_BIAS])
        for token_id, bias in settings.logit_bias.items():
            if token_id < vocab_size:
                host[LOGIT_BIAS][token_id] = bias
        host[LOGIT_BIAS][[i for i in settings.banned_token_ids if i < vocab_size]] = -np.inf
        host[ENDING_LIMIT][[i for i in settings.ending_ids if i < vocab_size]] = -np.inf
        host[REPETITION_PENALTY][:] = settings.repetition_penalty
        host[PRESENCE_PENALTY][:] = settings.presence_penalty
        host[FREQUENCY_PENALTY][:] = settings.frequency_penalty
        self._binding.upload()

    def run(self, width: int, rows: int, committed: Sequence[int], ahead: Sequence[int]) -> None:
        """Process ``rows`` rows. The first one follows ``committed`` and ``ahead``."""
        self._count(committed, ahead)
        num_new = len(committed) + len(ahead) - self._num_prompt_tokens
        self._unending[0] = max(0, self._min_new_tokens - num_new)
        self._binding.upload(NUM_UNENDING_ROWS)
        self._binding.run(width, rows)

    def _count(self, committed: Sequence[int], ahead: Sequence[int]) -> None:
        """Subtract the tokens that were not yet committed when counted, then count to the end of ``ahead``."""
        counted, changed = self._counted, []
        while len(counted) > self._num_committed:
            changed.append(counted.pop())
            self._add(changed[-1], len(counted), -1)
        new = [*committed[len(counted) :], *ahead]
        for token in new:
            self._add(token, len(counted), 1)
            counted.append(token)
        self._num_committed = len(committed)
        ids = [token for token in {*changed, *new} if token < len(self._context)]
        self._binding.upload_items(CONTEXT_COUNTS, ids)
        self._binding.upload_items(OUTPUT_COUNTS, ids)

    def _add(self, token: int, position: int, amount: int) -> None:
        if token < len(self._context):
            self._context[token] += amount
            if position >= self._num_prompt_tokens:
                self._output[token] += amount


class Processors:
    """Python callables on the rows of ``processed_logits``, in turn.

    A processor is called for a row only if the processors allow every drafted id before it, so it never sees a prefix
    that it forbids. Later rows cannot be reached and are not changed. Banned ids stay banned. Each call gets
    ``vocab_size`` logits, the target's number, even for a draft with another vocabulary.
    """

    def __init__(self, processors: Sequence[LogitsProcessor], vocab_size: int, num_columns: int) -> None:
        self._processors = processors
        self._vocab_size, self._num_shared = vocab_size, min(vocab_size, num_columns)

    def apply(self, logits: Array, committed: Sequence[int], ahead: Sequence[int], drafted: Sequence[int]) -> int:
        """Change rows [R, V] f32; return the number of rows before the first in which no id is allowed.

        That row is not changed. Raises ``UsageError`` if a processor returns another shape.
        """
        prefix = (*committed, *ahead)
        for row in range(len(logits)):
            if not self._process(prefix, logits[row]):
                return row
            if row >= len(drafted) or logits[row, drafted[row]] == -np.inf:
                break
            prefix = (*prefix, drafted[row])
        return len(logits)

    def _process(self, prefix: tuple[int, ...], row: Array) -> bool:
        """Whether an id is allowed."""
        logits = np.full(self._vocab_size, -np.inf, np.float32)
        logits[: self._num_shared] = row[: self._num_shared]
        is_banned = logits == -np.inf
        for processor in self._processors:
            changed = processor(prefix, logits)
            if changed is not None and changed is not logits:
                if np.shape(changed) != logits.shape:
                    raise UsageError(
                        f"logits_processors: {processor!r} returned shape {np.shape(changed)}, expected {logits.shape}"
                    )
                logits[:] = changed
        logits[is_banned] = -np.inf
        if not UNDRAFTED < logits.max() < np.inf:
            return False
        row[: self._num_shared] = logits[: self._num_shared]
        return True


class HostRows:
    """Rows of ``processed_logits`` that the host changes: on the CPU the memory itself, else a copy.

    They are read from tensor ``source`` of binding ``maker``.
    """

    def __init__(self, maker: Binding, source: str, output: Binding) -> None:
        self._maker, self._source, self._output = maker, source, output

    @property
    def num_columns(self) -> int:
        return self._maker.memory[self._source].shape[1]

    def read(self, rows: int) -> Array:
        """The first rows, to be changed in place. [rows, V] f32"""
        found = self._maker.read(self._source)[0][:rows]
        if self._output.is_async:
            return found.copy()
        logits = self._output.host[PROCESSED_LOGITS][:rows]
        if self._source != PROCESSED_LOGITS:
            logits[:] = found
        return logits

    def write(self, logits: Array) -> None:
        """Write back the changed rows that ``read`` returned."""
        if self._output.is_async:
            self._output.write(PROCESSED_LOGITS, logits)


class Processing:
    """Penalties, processors and grammar of one generation, in turn. ``replaced`` is the next sampler's input."""

    def __init__(
        self,
        samplers: SlotSamplers,
        settings: Settings,
        num_prompt_tokens: int,
        vocab_size: int,
        constraint: Constraint | None = None,
    ) -> None:
        self._penalties = Penalties(samplers, settings, num_prompt_tokens) if settings.penalizes else None
        self._stages: list[Processors | Constraint] = []
        self.replaced: dict[str, Memory] = {}
        self._constraint = constraint
        if settings.logits_processors or constraint is not None:
            output = samplers.sampler(PENALTIES)
            maker, source = (output, PROCESSED_LOGITS) if self._penalties else (samplers.model, LOGITS)
            self._rows = HostRows(maker, source, output)
            if settings.logits_processors:
                self._stages.append(Processors(settings.logits_processors, vocab_size, self._rows.num_columns))
            self._stages += [] if constraint is None else [constraint]
        if self._penalties or self._stages:
            self.replaced = {LOGITS: samplers.memory[PROCESSED_LOGITS]}

    def run(self, width: int, rows: int, committed: Sequence[int], ahead: Sequence[int], drafted: Sequence[int]) -> int:
        """Process ``rows`` rows. The first follows ``committed`` and ``ahead``, each next one a drafted id more.

        Returns the number of rows before the first in which no id is allowed.
        """
        if self._penalties is not None:
            self._penalties.run(width, rows, committed, ahead)
        if not self._stages:
            return rows
        logits = self._rows.read(rows)
        num_open = min(stage.apply(logits, committed, ahead, drafted) for stage in self._stages)
        self._rows.write(logits)
        return num_open

    def no_id_left(self, num_tokens: int) -> UsageError:
        """The error where no id is left after ``num_tokens`` tokens."""
        if self._constraint is None:
            return UsageError(
                f"logits_processors: no id is left after {num_tokens} tokens; "
                "they must allow at least one after every prefix that they accept"
            )
        failure = self._constraint.failure
        return UsageError(
            f"{self._constraint.name}: no id is left after {num_tokens} tokens{f' ({failure})' if failure else ''}; "
            "bans, logits_processors and the tokenizer must leave one that continues the text"
        )

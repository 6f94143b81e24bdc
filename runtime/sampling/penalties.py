"""Changes to logits before verification: the ``penalties`` sampler with its counts, and processors in Python."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specrt.engines.contract import LOGITS
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

    A processor is called for a row only if the processors allow every drafted id before it, so a grammar never sees a
    prefix that it forbids. Later rows cannot be reached and are not changed. Banned ids stay banned. Each call gets
    ``vocab_size`` logits, the target's number, even for a draft with another vocabulary. Logits are read from tensor
    ``source`` of the binding that computed them and written to ``processed_logits`` of ``output``.
    """

    def __init__(
        self, maker: Binding, source: str, output: Binding, processors: Sequence[LogitsProcessor], vocab_size: int
    ) -> None:
        self._maker, self._source, self._output, self._processors = maker, source, output, processors
        self._vocab_size, self._num_shared = vocab_size, min(vocab_size, maker.memory[source].shape[1])

    def run(self, rows: int, committed: Sequence[int], ahead: Sequence[int], drafted: Sequence[int]) -> int:
        """Change rows [R, V] f32; return the number of rows before the first in which no id is allowed.

        That row is not changed. Raises ``UsageError`` if a processor returns another shape.
        """
        logits = self._maker.read(self._source)[0][:rows].copy()
        num_open = self._process(logits, (*committed, *ahead), drafted)
        self._output.write(PROCESSED_LOGITS, logits)
        return num_open

    def _process(self, logits: Array, prefix: tuple[int, ...], drafted: Sequence[int]) -> int:
        for row in range(len(logits)):
            if not self._apply(prefix, logits[row]):
                return row
            if row >= len(drafted) or logits[row, drafted[row]] == -np.inf:
                break
            prefix = (*prefix, drafted[row])
        return len(logits)

    def _apply(self, prefix: tuple[int, ...], row: Array) -> bool:
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
        if not np.isfinite(logits.max()):
            return False
        row[: self._num_shared] = logits[: self._num_shared]
        return True


class Processing:
    """Penalties, then processors, of one generation. ``replaced`` is the memory that the next sampler reads."""

    def __init__(self, samplers: SlotSamplers, settings: Settings, num_prompt_tokens: int, vocab_size: int) -> None:
        self._penalties = Penalties(samplers, settings, num_prompt_tokens) if settings.penalizes else None
        self._processors: Processors | None = None
        self.replaced: dict[str, Memory] = {}
        if settings.logits_processors:
            output = samplers.sampler(PENALTIES)
            maker, source = (output, PROCESSED_LOGITS) if self._penalties else (samplers.model, LOGITS)
            self._processors = Processors(maker, source, output, settings.logits_processors, vocab_size)
        if self._penalties or self._processors:
            self.replaced = {LOGITS: samplers.memory[PROCESSED_LOGITS]}

    def run(self, width: int, rows: int, committed: Sequence[int], ahead: Sequence[int], drafted: Sequence[int]) -> int:
        """Process ``rows`` rows. The first follows ``committed`` and ``ahead``, each next one a drafted id more.

        Returns the number of rows before the first in which no id is allowed.
        """
        if self._penalties is not None:
            self._penalties.run(width, rows, committed, ahead)
        if self._processors is not None:
            return self._processors.run(rows, committed, ahead, drafted)
        return rows

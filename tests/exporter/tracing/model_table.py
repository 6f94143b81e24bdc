"""docs/models.md, made from the results of ``observe``: ``python -m tests.exporter.tracing.model_table --write``.

The rows are the tiny configs of ``tests.exporter.tracing.architectures`` and one for every model type that transformers
has a causal LM for. ``--check NAME...`` compares an export of rows or model types with transformers, without names all.
"""

from __future__ import annotations

import logging
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from specrt.engines.errors import UnsupportedModelError
from specrt.exporter.tracing.attention import SUPPORTED
from specrt.exporter.tracing.observe import Observation, observe
from tests.exporter.tracing.architectures import ROWS, tiny_config
from tests.exporter.tracing.model_types import MODEL_TYPES, tiny_config_of

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "models.md"
_PREFIX = "cannot export this model faithfully: "
COMMAND = "python -m tests.exporter.tracing.model_table --write"


@dataclass(frozen=True)
class Verdict:
    """The result of ``observe`` for a config: facts, or the reason of a refusal."""

    observation: Observation | None
    reason: str = ""


def verdict_of(config: Any) -> Verdict:
    """Whether the model of ``config`` can be exported. Other errors than a refusal are raised."""
    try:
        return Verdict(observe(config))
    except UnsupportedModelError as error:
        line = str(error)
        if "\n" in line or not (line.startswith(_PREFIX) and line.endswith(f"; {SUPPORTED}")):
            raise AssertionError(f"not a refusal in one line: {line!r}") from error
        return Verdict(None, line.removeprefix(_PREFIX).removesuffix(f"; {SUPPORTED}"))


def _facts(observation: Observation) -> str:
    """Heads, KV and masks of the layers, each kind once."""
    kinds = []
    for site in observation.sites:
        text = f"{site.num_heads} heads of {site.head_dim} on {site.num_kv_heads}"
        if site.kv_head_dim != site.head_dim:
            text += f" (KV of {site.kv_head_dim})"
        text += f", window {site.window}" if site.window else ""
        text += f", soft cap {site.softcap:g}" if site.softcap else ""
        kinds.append(text)
    return "; ".join(dict.fromkeys(kinds))


def table() -> list[str]:
    """The lines of both tables, in order."""
    lines = ["## Tiny configs", "", "| config | class | verdict | layers |", "|---|---|---|---|"]
    for name, (kind, _) in ROWS.items():
        verdict = verdict_of(tiny_config(name))
        known = verdict.observation
        lines.append(f"| {name} | `{kind}` | {_word(verdict)} | {_facts(known) if known else verdict.reason} |")
    lines += ["", "## Model types", "", "| model type | verdict | reason of a refusal |", "|---|---|---|"]
    for model_type in sorted(MODEL_TYPES):
        verdict = verdict_of(tiny_config_of(model_type))
        lines.append(f"| {model_type} | {_word(verdict)} | {verdict.reason} |")
    return lines


def _word(verdict: Verdict) -> str:
    return "exported" if verdict.observation else "refused"


def document() -> str:
    """The whole of docs/models.md."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            lines = table()
        finally:
            logging.disable(logging.NOTSET)
    return "\n".join([_INTRODUCTION.format(version=transformers.__version__, command=COMMAND), *lines, ""])


_INTRODUCTION = """# What can be exported

This file is written by `{command}` and checked by
[tests/exporter/tracing/test_model_table.py](../tests/exporter/tracing/test_model_table.py). It says what `specrt
export` answers with transformers {version}: before a weight is read, the model is built without weights and one pass of
it is watched. The same model type may be refused with other options in its config, so the answer for a model is what
`specrt export` or `specrt plan` says of it. Encoders such as BERT are shown as decoders (`is_decoder`); as encoders
they are refused, since their attention is bidirectional.

What is exported: decoder-only models with softmax attention over a KV cache, which call transformers' attention, mask
and cache interfaces, for all positions, norms, biases and activations. Layers may have sliding windows of
any size, groups of queries on one KV head, soft caps, and scales of their own.

**Head sizes.** ONNX Runtime's GroupQueryAttention takes heads of a multiple of 8, and TensorRT's Attention those
from 16 to 256. Other heads are padded with zeros to the next multiple of 8, after rotation: zeros add nothing to q.k,
the scale stays that of the model's own size, and the padding is cut off the result. The KV cache has the padded size,
and so have `inspect`, `plan` and the byte counts (a model with heads of 100 stores 104, 4 % more). Values of another
size than keys are padded to the larger of both. For TensorRT, heads below 16 or above 256 are computed in single
operators, since there is no fused kernel. No head size is refused.

**What is compared.** `make test-slow` exports every tiny config of the first table, and every exported model type of
the second one as a random model of two layers, and compares logits and 40 greedy ids with transformers'. Five of the
first table are compared by `make test`.
"""


def main(arguments: list[str]) -> int:
    """Write the document, check exports, or without arguments list the lines of the document that are out of date."""
    if arguments[:1] == ["--check"]:
        from tests.exporter.tracing.model_check import print_checks

        return print_checks(arguments[1:])
    text = document()
    if arguments == ["--write"]:
        DOCUMENT.write_text(text, encoding="utf-8")
        return 0
    found = DOCUMENT.read_text(encoding="utf-8") if DOCUMENT.exists() else ""
    wrong = sorted(set(text.splitlines()) ^ set(found.splitlines()))
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The prompts of measurements: the built-in ones, in ``prompts.jsonl`` next to this file, or the user's.

A file of JSON lines: ``{"category": "math", "prompt": "..."}``, or ``"messages"`` in place of ``"prompt"``, a list of
``{"role", "content"}`` that ends with the user's turn. ``"raw": true`` makes a prompt plain text; without it, a prompt
is a user's message where the bundle has a chat template.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from specrt.engines.errors import UsageError
from specrt.engines.manifest import Manifest
from specrt.runtime.text.codec import TextCodec
from specrt.tools.prompting.textfiles import lines_of, read_text

CODE_PREFIX = "code-"
NUM_SHORT_LIST = 12  # the first rows of prompts.jsonl, each of another category: used by demo, identity and verify
PER_CATEGORY = 8
BUCKETS = {"short": 0, "medium": 100, "long": 300}  # minimum tokens of each, template included


@dataclass(frozen=True)
class Prompt:
    """A task for an instruct model; ``earlier``: (role, content) turns before it. ``number`` counts in a category.

    ``is_raw``: the text is continued as plain text, even if there is a chat template.
    """

    category: str
    text: str
    earlier: tuple[tuple[str, str], ...] = ()
    number: int = 1
    is_raw: bool = False

    @property
    def name(self) -> str:
        """A name that is unique in a set."""
        return self.category if self.number == 1 else f"{self.category} {self.number}"

    @property
    def is_code(self) -> bool:
        return self.category.startswith(CODE_PREFIX)

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages for a chat template."""
        turns = (*self.earlier, ("user", self.text))
        return [{"role": role, "content": content} for role, content in turns]


def bucket_of(num_tokens: int) -> str:
    """``short``, ``medium`` or ``long``."""
    return [name for name, least in BUCKETS.items() if num_tokens >= least][-1]


def load_prompts() -> tuple[Prompt, ...]:
    """The twelve prompts of the short list, ordered so that the first few are of different categories."""
    return _shipped()[:NUM_SHORT_LIST]


def bench_prompts(per_category: int = PER_CATEGORY, categories: Sequence[str] = ()) -> tuple[Prompt, ...]:
    """The first ``per_category`` of each of twelve categories, or of those named.

    All first prompts come before any second one. Raises ``UsageError`` for an unknown category.
    """
    counts = Counter(prompt.category for prompt in _shipped())
    known = [category for category, count in counts.items() if count == PER_CATEGORY]
    if unknown := [name for name in categories if name not in known]:
        raise UsageError(f"categories: got {unknown[0]!r}, expected some of {', '.join(known)}")
    wanted = set(categories or known)
    chosen = [p for p in _shipped() if p.category in wanted and p.number <= per_category]
    return tuple(sorted(chosen, key=lambda prompt: prompt.number))


def _shipped() -> tuple[Prompt, ...]:
    text = resources.files("specrt.tools.prompting").joinpath("prompts.jsonl").read_text(encoding="utf-8")
    return _numbered([_prompt(json.loads(line), "") for line in lines_of(text) if line])


def choose_prompts(wanted: str | None = None) -> tuple[Prompt, ...]:
    """A number N selects the first N, ``code`` those of code, other names their categories; None selects all.

    Raises ``UsageError`` for what is none of these.
    """
    prompts = load_prompts()
    if wanted is None:
        return prompts
    if wanted.isdecimal() and 1 <= int(wanted) <= len(prompts):
        return prompts[: int(wanted)]
    rows = {"code": [p for p in prompts if p.is_code], **{p.category: [p] for p in prompts}}
    names = [name.strip() for name in wanted.split(",")]
    if unknown := [name for name in names if name not in rows]:
        raise UsageError(f"prompts: got {unknown[0]!r}, expected 1 to {len(prompts)}, or some of {', '.join(rows)}")
    chosen = {prompt for name in names for prompt in rows[name]}
    return tuple(prompt for prompt in prompts if prompt in chosen)


def prompts_from_file(path: Path) -> tuple[Prompt, ...]:
    """The user's prompts: JSON lines in a ``.jsonl`` file (see above), else one prompt per line.

    Raises ``UsageError`` for a file that cannot be read as such, or holds none.
    """
    lines = [(place, line) for place, line in enumerate(lines_of(read_text(path)), 1) if line.strip()]
    if not lines:
        raise UsageError(f"{path}: got no prompts, expected one a line")
    if path.suffix.lower() != ".jsonl":
        return tuple(Prompt(f"line {number}", line) for number, (_, line) in enumerate(lines, 1))
    prompts = []
    for number, (place, line) in enumerate(lines, 1):
        try:
            prompts.append(_prompt(json.loads(line), f"line {number}"))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UsageError(
                f'{path}: line {place} is not a JSON object with a "prompt", such as {{"prompt": "Hello"}} (and '
                '"raw": true for plain text), or with "messages" of {"role", "content"} that end with the user'
            ) from error
    return _numbered(prompts)


def _prompt(row: dict[str, Any], category: str) -> Prompt:
    """Raises ``KeyError``, ``TypeError`` or ``ValueError`` for a row that is not a prompt."""
    messages = row["messages"] if "messages" in row else [{"role": "user", "content": row["prompt"]}]
    turns = [(message["role"], message["content"]) for message in messages]
    if not all(isinstance(text, str) for turn in turns for text in turn) or (turns[-1:] and turns[-1][0] != "user"):
        raise TypeError
    is_raw = row.get("raw", False)
    if not isinstance(is_raw, bool) or (is_raw and "messages" in row):
        raise TypeError
    *earlier, (_, text) = turns
    return Prompt(str(row.get("category", category)), text, tuple(earlier), is_raw=is_raw)


def _numbered(prompts: Sequence[Prompt]) -> tuple[Prompt, ...]:
    counts: Counter[str] = Counter()
    numbered = []
    for prompt in prompts:
        counts[prompt.category] += 1
        numbered.append(replace(prompt, number=counts[prompt.category]))
    return tuple(numbered)


def encode_own_or_ours(
    file: Path | None, bundle: Path, manifest: Manifest, max_new_tokens: int, most: int | None = None
) -> list[list[int]]:
    """Token ids of the prompts in ``file``, or of the first ``most`` built-in ones that fit into the context.

    Raises ``UsageError`` for a prompt of ``file`` that does not fit, and when no built-in one does.
    """
    if file is not None:
        return encode_prompts(prompts_from_file(file), bundle, manifest, max_new_tokens)
    ids: list[list[int]] = []
    reason: UsageError | None = None
    for prompt in choose_prompts():
        try:
            ids += encode_prompts([prompt], bundle, manifest, max_new_tokens)
        except UsageError as error:
            reason = error
    if not ids:
        raise UsageError(
            f"max_new_tokens: none of the prompts can be used with {max_new_tokens} new tokens ({reason}); "
            "use fewer, or give your own prompts"
        ) from reason
    return ids[:most]


def encode_prompts(
    prompts: Sequence[Prompt], bundle: Path, manifest: Manifest, max_new_tokens: int = 1
) -> list[list[int]]:
    """Token ids of each prompt by the bundle's tokenizer: a user's message where the bundle has a chat template.

    Raw prompts, and all where there is no default template, are plain text, turns with an empty line between them.
    Raises ``UsageError`` for a prompt that leaves no room for ``max_new_tokens`` in the bundle's context.
    """
    spec = manifest.target.spec
    codec = TextCodec.from_bundle(bundle, manifest.tokenizer, spec.vocab_size)
    has_template = manifest.tokenizer.chat_template is not None
    encoded = []
    for prompt in prompts:
        plain = "\n\n".join(message["content"] for message in prompt.messages)
        ids = codec.encode(prompt.messages if has_template and not prompt.is_raw else plain)
        if len(ids) + max_new_tokens > spec.max_seq_len:
            raise UsageError(
                f"prompt {prompt.name}: its {len(ids)} tokens and {max_new_tokens} new ones do not fit into the "
                f"bundle's context of {spec.max_seq_len}; use fewer, or other prompts"
            )
        encoded.append(ids)
    return encoded

"""The prompts that comparisons run on: our own, twelve kinds of task, in ``prompts.json`` beside this file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from specrt.engines.codec import from_json
from specrt.engines.errors import UsageError
from specrt.engines.manifest import Manifest
from specrt.runtime.text import TextCodec

CODE_PREFIX = "code-"


@dataclass(frozen=True)
class Prompt:
    """A task for an instruct model. ``category`` is unique; those of code start with ``code-``."""

    category: str
    text: str

    @property
    def is_code(self) -> bool:
        return self.category.startswith(CODE_PREFIX)


def load_prompts() -> tuple[Prompt, ...]:
    """All of them, ordered so that the first few differ in kind."""
    text = resources.files("specrt.tools").joinpath("prompts.json").read_text(encoding="utf-8")
    return tuple(from_json(Prompt, item) for item in json.loads(text))


def choose_prompts(wanted: str | None = None) -> tuple[Prompt, ...]:
    """A number takes the first so many, ``code`` those of code, other names their categories; None takes all.

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
    """Prompts of the user's own: JSON lines of {prompt, category?} in a ``.jsonl`` file, else one prompt a line.

    Raises ``UsageError`` for a file that cannot be read as such, or holds none.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read as text ({error}); give a UTF-8 file of prompts") from error
    if not lines:
        raise UsageError(f"{path}: got no prompts, expected one a line")
    if path.suffix != ".jsonl":
        return tuple(Prompt(f"line {number}", line) for number, line in enumerate(lines, 1))
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            prompts.append(Prompt(str(row.get("category", f"line {number}")), row["prompt"]))
            if not isinstance(row["prompt"], str):
                raise TypeError
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f'{path}: line {number} is not a JSON object with a "prompt", such as {{"prompt": "Hello"}}'
            ) from error
    return tuple(prompts)


def encode_own_or_ours(
    file: Path | None, bundle: Path, manifest: Manifest, max_new_tokens: int, most: int | None = None
) -> list[list[int]]:
    """Token ids of the prompts of the caller's ``file``, or of the first ``most`` of ours that fit into the context.

    Raises ``UsageError`` for a prompt of the caller's that does not fit, and where none of ours does.
    """
    if file is not None:
        return encode_prompts(prompts_from_file(file), bundle, manifest, max_new_tokens)
    ids: list[list[int]] = []
    for prompt in choose_prompts():
        with suppress(UsageError):
            ids += encode_prompts([prompt], bundle, manifest, max_new_tokens)
    if not ids:
        raise UsageError(
            f"max_new_tokens: none of the prompts leaves room for {max_new_tokens} in the bundle's context of "
            f"{manifest.target.spec.max_seq_len}; ask for fewer"
        )
    return ids[:most]


def encode_prompts(
    prompts: Sequence[Prompt], bundle: Path, manifest: Manifest, max_new_tokens: int = 1
) -> list[list[int]]:
    """Token ids of each prompt by the bundle's tokenizer: a user's message where the bundle has a chat template.

    Raises ``UsageError`` for a prompt that leaves no room for ``max_new_tokens`` in the bundle's context.
    """
    spec = manifest.target.spec
    codec = TextCodec.from_bundle(bundle, manifest.tokenizer, spec.vocab_size)
    has_template = manifest.tokenizer.chat_template is not None
    encoded = []
    for prompt in prompts:
        ids = codec.encode([{"role": "user", "content": prompt.text}] if has_template else prompt.text)
        if len(ids) + max_new_tokens > spec.max_seq_len:
            raise UsageError(
                f"prompt {prompt.category}: its {len(ids)} tokens and {max_new_tokens} new ones do not fit into the "
                f"bundle's context of {spec.max_seq_len}; ask for fewer, or for other prompts"
            )
        encoded.append(ids)
    return encoded

"""The tokenizer of a bundle: load it, write it, and check it with the runtime's codec before any weight is read."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from transformers import AutoTokenizer

from specrt.engines.errors import SourceError, UnsupportedModelError, UsageError, one_line
from specrt.engines.manifest import TokenizerEntry
from specrt.engines.progress import Progress
from specrt.runtime.text.codec import TextCodec

_FILES = "tokenizer.json, tokenizer.model, vocab.json with merges.txt, or vocab.txt"
_TEXT = "Grüße, 世界 😀! It isn't a test.\n\ndef area(radius):\n\treturn 3.14159 * radius ** 2  # naïve"
_USER = [{"role": "user", "content": _TEXT}]
_SYSTEM = [{"role": "system", "content": "Be brief, s'il vous plaît."}, *_USER]
_FOLDER = "tokenizer"


def load_tokenizer(name: str, location: str, options: dict[str, Any]) -> Any:
    """The transformers tokenizer of a model. Raises ``SourceError`` where its files are missing or have no fast form.

    Without files, transformers builds a tokenizer of only the added tokens for some classes, which encodes every text
    to no ids. Other errors that transformers raises are left to the caller.
    """
    folder = Path(location)
    is_whole = any((folder / file).is_file() for file in ("tokenizer.json", "merges.txt"))
    if folder.is_dir() and "gguf_file" not in options and (folder / "vocab.json").is_file() and not is_whole:
        raise _missing(name, "vocab.json without merges.txt")
    try:
        tokenizer = AutoTokenizer.from_pretrained(location, **options)
    except ValueError as error:
        if "instantiate the backend tokenizer" in str(error):
            raise _missing(name, "no file of a tokenizer that transformers can read") from error
        raise
    if not getattr(tokenizer, "is_fast", False):
        raise SourceError(
            f"{name}: its tokenizer has no fast (tokenizer.json) form; convert it with transformers first"
        )
    added = {token.content for token in tokenizer.backend_tokenizer.get_added_tokens_decoder().values()}
    if set(tokenizer.get_vocab()) <= added:
        raise _missing(name, f"{len(added)} added tokens and no vocabulary")
    return tokenizer


def _missing(name: str, found: str) -> SourceError:
    return SourceError(f"{name}: its tokenizer is missing: found {found}, expected {_FILES}; download the whole model")


def write_tokenizer(name: str, tokenizer: Any, folder: Path, vocab_size: int, progress: Progress) -> TokenizerEntry:
    """Write ``tokenizer.json`` and the chat templates to the bundle ``folder``; check them with the runtime's codec.

    ``vocab_size`` is the number of the model's ids. Raises ``SourceError`` for a tokenizer that does not fit the model,
    ``UnsupportedModelError`` where the runtime's result differs from that of transformers.
    """
    _check_ids(name, tokenizer, vocab_size, progress)
    place = folder / _FOLDER
    (place / "chat_templates").mkdir(parents=True)
    tokenizer.backend_tokenizer.save(str(place / "tokenizer.json"))
    files = {}
    for key, template in _templates(name, tokenizer, progress).items():
        file = "chat_template.jinja" if key == "default" else f"chat_templates/{key}.jinja"
        (place / file).write_text(template, encoding="utf-8", newline="")
        files[key] = f"{_FOLDER}/{file}"
    if not any((place / "chat_templates").iterdir()):
        (place / "chat_templates").rmdir()
    entry = TokenizerEntry(
        file=f"{_FOLDER}/tokenizer.json",
        chat_template=files.pop("default", None),
        special_tokens=dict(tokenizer.special_tokens_map),
        named_chat_templates=files,
        clean_up_spaces=_cleans_up(tokenizer),
    )
    _try(name, tokenizer, TextCodec.from_bundle(folder, entry, vocab_size))
    for file in entry.templates.values():
        alone = replace(entry, chat_template=file, named_chat_templates={})
        template = (folder / file).read_text(encoding="utf-8")
        _try_template(name, tokenizer, TextCodec.from_bundle(folder, alone, vocab_size), template, progress)
    return entry


def _cleans_up(tokenizer: Any) -> bool:
    """Whether transformers removes spaces before punctuation from decoded text; for BPE this takes a second setting."""
    forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    is_bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    return bool(tokenizer.clean_up_tokenization_spaces and (not is_bpe or getattr(tokenizer, forced, False)))


def _check_ids(name: str, tokenizer: Any, vocab_size: int, progress: Progress) -> None:
    """Check that each token has an embedding. Special tokens that no text contains, such as ``[PAD]``, need none."""
    ids: dict[str, int] = tokenizer.get_vocab()
    beyond = sorted((token_id, token) for token, token_id in ids.items() if token_id >= vocab_size)
    if beyond:
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
        what = (
            f"{name}: the tokenizer has {len(ids)} tokens, the model {vocab_size} ids; {len(beyond)} tokens cannot be "
            f"fed, the first is {beyond[0][1]!r} (id {beyond[0][0]})"
        )
        if not all(token_id in added and added[token_id].special for token_id, _ in beyond):
            raise SourceError(f"{what}; take the tokenizer that the model was trained with, or resize its embeddings")
        progress.note(f"{what}; all are special, and prompts that contain one are refused")
    if num_without_text := vocab_size - sum(token_id < vocab_size for token_id in set(ids.values())):
        progress.note(
            f"{num_without_text} of the model's {vocab_size} ids have no token and so no text; sampling may draw them"
        )


def _templates(name: str, tokenizer: Any, progress: Progress) -> dict[str, str]:
    """The chat templates by name, except those that do not compile, which transformers cannot use either."""
    given = tokenizer.chat_template
    found: dict[str, str] = dict(given) if isinstance(given, dict) else {"default": given} if given else {}
    for key, template in list(found.items()):
        if not re.fullmatch(r"[\w-][\w.-]*", key):
            raise SourceError(f"{name}: chat template {key!r}: expected letters and digits in its name; rename it")
        try:
            tokenizer.apply_chat_template(_USER, chat_template=template, tokenize=False)
        except TemplateSyntaxError as error:
            progress.note(
                f"chat template {key!r} cannot be compiled and is left out: {one_line(error)}; "
                "prompts will be plain text"
            )
            del found[key]
        except Exception:  # third-party code; _try_template checks it
            continue
    if found and "default" not in found:
        progress.note(
            f"the model has no default chat template; --chat-template-name selects one of {', '.join(sorted(found))}"
        )
    return found


def _try(name: str, tokenizer: Any, codec: TextCodec) -> None:
    """Encode, decode and stream a text; each result must equal that of transformers."""
    try:
        ids = codec.encode(_TEXT)
    except UsageError as error:
        raise SourceError(f"{name}: its tokenizer cannot encode a text: {error}") from error
    _compare(name, "the ids of a text are", ids, tokenizer(_TEXT)["input_ids"])
    expected = tokenizer.decode(ids, skip_special_tokens=True)
    stream = codec.stream()
    _compare(name, "decoded text is", codec.decode(ids), expected)
    _compare(name, "streamed text is", "".join([*map(stream.push, ids), stream.flush()]), expected)


def _try_template(name: str, tokenizer: Any, codec: TextCodec, template: str, progress: Progress) -> None:
    """Render and encode messages without and with a system message, which some templates refuse."""
    for messages, kind in ((_USER, "a user message"), (_SYSTEM, "a system message")):
        apply = partial(tokenizer.apply_chat_template, messages, chat_template=template, tokenize=False)
        expected, reason = _outcome(partial(apply, add_generation_prompt=True))
        got, own_reason = _outcome(partial(codec.render, messages))
        if got != expected:  # a template may write the time
            expected, reason = _outcome(partial(apply, add_generation_prompt=True))
        if got != expected:
            shown, wanted = _shown(got or own_reason), _shown(expected or reason)
            raise UnsupportedModelError(
                f"{name}: chat template: {kind} becomes {shown}, expected {wanted} as in transformers; "
                "please report this model"
            )
        if expected is None:
            progress.note(f"the chat template does not take {kind}: {reason}")
            continue
        ids = tokenizer(expected, add_special_tokens=False)["input_ids"]
        try:
            _compare(name, f"the ids of {kind} are", codec.encode(messages), ids)
        except UsageError as error:
            raise SourceError(f"{name}: the model cannot read what its chat template writes: {error}") from error


def _outcome(render: Callable[[], str]) -> tuple[str | None, str]:
    """(what is rendered, "") or (None, why not)."""
    try:
        return render(), ""
    except Exception as error:  # a template is third-party code and may raise anything
        return None, one_line(error)


def _compare(name: str, what: str, got: Any, expected: Any) -> None:
    if got != expected:
        place = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), 0)
        raise UnsupportedModelError(
            f"{name}: {what} {_shown(got[place:])} from place {place} on, expected {_shown(expected[place:])} as in "
            "transformers; please report this model"
        )


def _shown(value: Any) -> str:
    return repr(value if len(value) <= 40 else value[:40])

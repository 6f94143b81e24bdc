"""A bundle on the backend ``fake`` whose model answers with the last user's message, so that tests choose its text.

A plain prompt is continued with printable characters, a function of the text before them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specrt.engines.interface import Array
from specrt.engines.manifest import MANIFEST_NAME, FileEntry, TokenizerEntry, manifest_from_bundle, manifest_text
from specrt.engines.storage.integrity import sha256_of
from tests.runtime.support.bundles import Backend, write_bundle
from tests.runtime.support.tables import hashed

SPECIAL = ("<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|end|>", "[TOOL_CALLS]")
USER, ASSISTANT, _, _, END, _ = range(256, 256 + len(SPECIAL))
VOCAB_SIZE, CONTEXT, K = 256 + len(SPECIAL), 1024, 4
TEMPLATE = (
    "{# calls are written in <tool_call> #}{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ message.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
GATE = threading.Event()  # the target computes while it is set
GATE.set()
_other = hashed(7, 90)


def parrot(prefix: Sequence[int]) -> int:
    """The next id after ``prefix``."""
    if ASSISTANT not in prefix:
        return 33 + _other(prefix)
    start = len(prefix) - list(reversed(prefix)).index(ASSISTANT)
    user = max(index for index in range(start) if prefix[index] == USER) + 1
    text = prefix[user : prefix.index(END, user)]
    num_spoken = len(prefix) - start
    return text[num_spoken] if num_spoken < len(text) else END


def target_logits(prefix: Sequence[int]) -> Array:
    """[V] f32: sure of ``parrot`` after a chat, less so after a plain prompt."""
    GATE.wait(30)
    return _logits(prefix)


def _logits(prefix: Sequence[int]) -> Array:
    logits = np.zeros(VOCAB_SIZE, np.float32)
    logits[256:] = -100
    logits[parrot(prefix)] = 40 if ASSISTANT in prefix else 4
    return logits


def draft_logits(prefix: Sequence[int]) -> Array:
    """The target's, but wrong after every fifth prefix."""
    logits = _logits(prefix)
    return np.roll(logits, 1) if len(prefix) % 5 == 0 else logits


@contextmanager
def held() -> Iterator[None]:
    """The model computes nothing within: what is submitted stays where it is."""
    GATE.clear()
    try:
        yield
    finally:
        GATE.set()


def parrot_backend() -> Backend:
    """For the table in ``specrt.engines.backends``."""
    return Backend(
        target_logits,
        draft_logits,
        K,
        contexts={"target": CONTEXT, "draft": CONTEXT},
        vocab_sizes={"target": VOCAB_SIZE, "draft": VOCAB_SIZE},
    )


def write_parrot(folder: Path, backend: Backend) -> Path:
    """Write the bundle."""
    write_bundle(folder, "model", [END], backend=backend)
    chars = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate(chars)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "template.jinja").write_text(TEMPLATE)
    manifest = manifest_from_bundle(folder)
    files = dict(manifest.files)
    for name in ("tokenizer.json", "template.jinja"):
        files[name] = FileEntry((folder / name).stat().st_size, sha256_of(folder / name))
    entry = TokenizerEntry("tokenizer.json", "template.jinja", {}, {}, False)
    (folder / MANIFEST_NAME).write_text(manifest_text(replace(manifest, tokenizer=entry, files=files)))
    return folder

"""A tiny target with a head that was trained for it, and their bundles, each made once for all workers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.exports import Exports, digest, made_once
from tests.progress import KeptProgress

K = 4
DIALECTS: dict[str, dict[str, str]] = {
    "onnxruntime": {"backend": "onnxruntime", "dtype": "fp16"},
    "standard": {"backend": "tensorrt-rtx", "dtype": "fp16"},
    "standard-22": {"backend": "tensorrt", "dtype": "fp16", "tensorrt_version": "10.3"},
}
PROMPTS = ([5, 18, 31, 44, 57], [7, 200, 31, 18, 5, 18, 31, 300, 12, 44, 5, 18, 9, 10, 11, 12, 13, 14, 15, 16])


class HeadPair(NamedTuple):
    """Folders of a target of eight layers and of its trained head."""

    target: Path
    head: Path


def head_pair(exports: Exports) -> HeadPair:
    """The pair; the head is in speculators' layout, and its config is true."""
    place = made_once(exports.folder / "head-pair", _make)
    return HeadPair(place / "target", place / "head")


def _make(root: Path) -> None:
    from specrt.exporter.heads.texts import opening_ids, write_texts
    from tests.exporter.heads.making import head_config, random_head, save_head, tiny_target
    from tests.tiny import tiny_tokenizer

    target = tiny_target(initializer_range=0.2)  # its own texts are not one repeated id
    target.save_pretrained(root / "target")
    tiny_tokenizer().save_pretrained(root / "target")
    head = random_head(head_config(), target)
    _learn(head, target, [text.ids for text in write_texts(target, opening_ids(tiny_tokenizer()))])
    save_head(root / "head", "speculators", head)
    (root / "head" / "LICENSE").write_text("a head's licence\n")


def _learn(head: Any, target: Any, texts: Sequence[Any], num_steps: int = 100) -> None:
    """Train ``head`` in place, by cross-entropy, to predict ``texts`` and what ``target`` writes after ``PROMPTS``."""
    import torch
    from torch.nn import functional

    from specrt.exporter.heads.unroll import unroll

    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        texts = [*texts, target.generate(ids, max_new_tokens=80, do_sample=False, eos_token_id=None)[0]]
    columns = torch.full((head.config.vocab_size,), -100)
    columns[torch.arange(head.config.draft_vocab_size) + head.d2t] = torch.arange(head.config.draft_vocab_size)
    length = max(map(len, texts))
    batch = torch.stack([functional.pad(ids, (0, length - len(ids))) for ids in texts])
    is_text = torch.stack([torch.arange(length) < len(ids) for ids in texts])
    with torch.no_grad():
        out = target(batch, output_hidden_states=True)
    labels = torch.where(is_text, columns[out.logits.argmax(-1)], -100)
    taps = torch.cat([out.hidden_states[tap] for tap in head.config.variant.taps], dim=-1)
    head.requires_grad_(True).embed_tokens.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(num_steps):
        loss = torch.zeros(())
        for depth, normalized in enumerate(unroll(head, batch, head.fuse(taps), 3), 1):
            logits = head.logits(normalized[:, :-depth]).flatten(0, 1)
            loss = loss + functional.cross_entropy(logits, labels[:, depth:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    head.requires_grad_(False)


def head_bundle(exports: Exports, **options: Any) -> Path:
    """The export of ``head_pair`` with these ``ExportOptions``."""
    from specrt.exporter.export import export
    from specrt.exporter.options import ExportOptions

    pair = head_pair(exports)
    wanted = {"num_speculative_tokens": K, "max_seq_len": 256, "prefill_chunk": 16, **options}
    place = exports.folder / f"head-bundle-{digest(wanted)}"

    def make(output: Path) -> None:
        progress = KeptProgress()
        export(ExportOptions(str(pair.target), output, f"eagle3:{pair.head}", **wanted), progress)
        notes_of(place).write_text("\n".join(progress.notes))

    return made_once(place, make)


def notes_of(bundle: Path) -> Path:
    """The file with the notes of the export of ``bundle``."""
    return bundle.with_name(f"{bundle.name}.notes.txt")

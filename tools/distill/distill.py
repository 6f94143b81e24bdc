"""``specrt distill``, step by step: the text, the training, the files, the pair, the verdict."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrt.engines.errors import UsageError
from specrt.engines.manifest import MANIFEST_NAME, Manifest, manifest_from_bundle
from specrt.engines.processor import available_cores
from specrt.engines.progress import SILENT, Progress
from specrt.tools.distill.options import PASSES_OVER_TEXT, TEXT_SHARE, DistillOptions
from specrt.tools.prompting.prompts import prompts_from_file

if TYPE_CHECKING:
    from specrt.exporter.training.prompts import Outlines
    from specrt.exporter.training.recipe import TextRecipe, TrainRecipe
    from specrt.exporter.training.run import Trained
    from specrt.exporter.training.store import Store
    from specrt.exporter.training.target import TrainingTarget

CHECKPOINT_MINUTES = 1


@dataclass(frozen=True)
class Source:
    """What the text is written by: the target's name for the export, and its bundle if one was given."""

    name: str
    revision: str | None = None
    bundle: Path | None = None
    manifest: Manifest | None = None


def distill(options: DistillOptions, progress: Progress = SILENT) -> Trained:
    """Train a draft and write it to ``options.output``. The same call continues a stopped run. Raises ``SpecrtError``
    where it cannot.
    """
    import torch

    from specrt.exporter.training.loading import load_target
    from specrt.exporter.training.store import Store

    _check_output(options)
    source = source_of(options.source)
    torch.set_num_threads(options.threads or available_cores())
    target, fingerprint = load_target(
        source.name, source.revision, options.trust_remote_code, () if options.kind == "layers" else None, progress
    )
    text, train = recipes(options)
    with _work_folder(options, text, train, fingerprint) as folder:
        store = Store(folder / "text", target.hidden_size, len(target.taps))
        write_text(options, source, target, text, store, progress)
        trained = _train(options, target, train, store, folder, progress)
        write_draft(options, target, trained, store, progress)
    if not options.keep_data:
        shutil.rmtree(folder)
    return trained


def source_of(name: str) -> Source:
    """The target of a bundle or of a source. Raises ``BundleError``."""
    folder = Path(name)
    if not (folder / MANIFEST_NAME).is_file():
        return Source(name)
    manifest = manifest_from_bundle(folder)
    entry = manifest.target
    if entry.adapter is not None:
        raise UsageError(
            f"{name}: its target has the adapter {entry.adapter.source} merged; give a target that it is merged into"
        )
    return Source(entry.source, entry.revision, folder, manifest)


def recipes(options: DistillOptions) -> tuple[TextRecipe, TrainRecipe]:
    """The parts of the time: a third for the text, the rest for the training. Or tokens, and passes over them."""
    from specrt.exporter.training.recipe import TextRecipe, TrainRecipe

    seed, vocab = options.seed, options.max_draft_vocab
    if options.minutes is not None:
        text = TextRecipe(minutes=options.minutes * TEXT_SHARE, seed=seed)
        train = TrainRecipe(minutes=options.minutes * (1 - TEXT_SHARE), seed=seed, max_draft_vocab=vocab)
        return text, train
    assert options.tokens is not None, "the options have minutes or tokens"
    text = TextRecipe(minutes=None, num_tokens=options.tokens, seed=seed)
    train = TrainRecipe(minutes=None, num_steps=1, seed=seed, max_draft_vocab=vocab)
    num_steps = max(1, round(PASSES_OVER_TEXT * options.tokens / train.tokens_per_step))
    return text, dataclasses.replace(train, num_steps=num_steps)


def write_text(
    options: DistillOptions,
    source: Source,
    target: TrainingTarget,
    recipe: TextRecipe,
    store: Store,
    progress: Progress,
) -> None:
    """Let the target write the text; what is in the store already is kept."""
    from specrt.exporter.bundle import check_disk
    from specrt.exporter.training.store import row_bytes
    from specrt.exporter.training.writing import TextWriter

    outlines = _outlines(options, source, target, recipe)
    writer = TextWriter(target, outlines, recipe)
    speed = writer.tokens_per_s()
    num_tokens = recipe.num_tokens or round(speed * (recipe.minutes or 0) * 60)
    needed = num_tokens * row_bytes(target.hidden_size, len(target.taps))
    progress.note(
        f"text: about {num_tokens} tokens in {num_tokens / speed / 60:.1f} min by torch in fp32, {recipe.num_lanes} "
        f"conversations at a time; {needed / 1e9:.2f} GB of hidden states in {store.folder}"
    )
    check_disk(store.folder, max(0, needed - store.num_bytes))
    writer.write(store, progress)
    progress.note(
        f"text: {store.num_tokens} tokens in {len(store.entries)} conversations, {store.num_bytes / 1e9:.2f} GB, "
        f"{store.num_tokens / max(store.seconds, 1e-3):.0f} tokens/s"
    )


def _outlines(options: DistillOptions, source: Source, target: TrainingTarget, recipe: TextRecipe) -> Outlines:
    from specrt.exporter.training.prompts import GivenPrompts, own_prompts

    if options.prompts is None:
        return own_prompts(target.tokenizer, target.eos_ids, recipe)
    return GivenPrompts([_encoded(target.tokenizer, p) for p in prompts_from_file(options.prompts)], recipe)


def _encoded(tokenizer: Any, prompt: Any) -> list[int]:
    """A prompt's ids: a user's message where there is a chat template, else plain text."""
    if prompt.is_raw or not getattr(tokenizer, "chat_template", None):
        text, adds = "\n\n".join(message["content"] for message in prompt.messages), True
    else:
        text = tokenizer.apply_chat_template(prompt.messages, tokenize=False, add_generation_prompt=True)
        adds = False
    ids: list[int] = tokenizer(text, add_special_tokens=adds)["input_ids"]
    return ids


def _train(
    options: DistillOptions,
    target: TrainingTarget,
    recipe: TrainRecipe,
    store: Store,
    folder: Path,
    progress: Progress,
) -> Trained:
    from specrt.exporter.training.run import train_head, train_layers

    if options.kind == "layers":
        return train_layers(target, store, recipe, folder, options.num_layers, progress)
    return train_head(target, store, recipe, folder, progress)


def write_draft(
    options: DistillOptions, target: TrainingTarget, trained: Trained, store: Store, progress: Progress
) -> None:
    """Write the head in speculators' layout, or the small model, with the record of its training."""
    from specrt.engines.storage.folders import new_folder
    from specrt.tools.distill.record import write_record

    module: Any = trained.learner.module
    with new_folder(options.output, progress) as folder:
        if options.kind == "layers":
            module.save_pretrained(folder)
            target.tokenizer.save_pretrained(folder)
        else:
            from specrt.exporter.heads.files import write_head

            architectures = getattr(target.model.config, "architectures", None) or ()
            write_head(folder / "head", module, target.name, architectures)
            for path in (folder / "head").iterdir():
                path.rename(folder / path.name)
            (folder / "head").rmdir()
        write_record(folder, trained, store, options)


def _check_output(options: DistillOptions) -> None:
    from specrt.engines.storage.folders import check_place

    if options.output.exists() and not options.force:
        raise UsageError(f"{options.output}: exists already; pass --force to replace it, or choose another --output")
    check_place(options.output, "choose another --output")


@contextmanager
def _work_folder(options: DistillOptions, text: Any, train: Any, fingerprint: str) -> Iterator[Path]:
    from specrt.exporter.training.run import claim

    prompts = None if options.prompts is None else hashlib.sha256(options.prompts.read_bytes()).hexdigest()
    settings = {
        "target": fingerprint,
        "kind": options.kind,
        "num_layers": options.num_layers if options.kind == "layers" else None,
        "prompts": prompts,
        "text": dataclasses.asdict(text),
        "training": dataclasses.asdict(train),
    }
    claim(options.work_folder, json.loads(json.dumps(settings)))
    yield options.work_folder

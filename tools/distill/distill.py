"""``specrt distill``, step by step: the text, the training, the files, the pair, the verdict."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrt.engines.errors import UsageError
from specrt.engines.manifest import MANIFEST_NAME
from specrt.engines.processor import available_cores
from specrt.engines.progress import SILENT, Progress
from specrt.engines.storage.folders import LOCK_NAME, check_place, new_folder
from specrt.engines.storage.locks import lock
from specrt.tools.distill.options import MIN_LANES, PASSES_OVER_TEXT, TEXT_SHARE, TOKENS_OF_LANE, DistillOptions
from specrt.tools.distill.record import add_verdict, write_record
from specrt.tools.distill.source import Source, source_of
from specrt.tools.distill.verdict import HEAD, SELF, VERDICT_TOKENS, Verdict, export_pair, fitting, judge
from specrt.tools.prompting.prompts import Prompt, bench_prompts, prompts_from_file

if TYPE_CHECKING:
    from specrt.exporter.training.prompts import Outlines
    from specrt.exporter.training.recipe import TextRecipe, TrainRecipe
    from specrt.exporter.training.run import Trained
    from specrt.exporter.training.store import Store
    from specrt.exporter.training.target import TrainingTarget

TEXT = "text"  # in the work folder
NUM_PER_CATEGORY = 2  # built-in prompts of each category for the verdict


def distill(options: DistillOptions, progress: Progress = SILENT) -> Verdict:
    """Train a draft, write it to ``options.output``, export the pair and measure it.

    The same call continues a stopped run. Raises ``SpecrtError``.
    """
    import torch

    _check_output(options, progress)
    source = source_of(options.source, options.trust_remote_code)
    torch.set_num_threads(options.threads or available_cores())
    with _claimed(options) as folder:
        _train(options, source, folder, progress)
        verdict = _judge(options, source, folder, progress)
        add_verdict(options.output, verdict)
    if not options.keep_data:
        shutil.rmtree(folder)
    return verdict


def _train(options: DistillOptions, source: Source, folder: Path, progress: Progress) -> None:
    """Write the text, train on it and write the draft. Nothing is left in memory."""
    from specrt.exporter.training.loading import load_target
    from specrt.exporter.training.run import check_trainable, train_head, train_layers
    from specrt.exporter.training.store import Store

    taps = () if options.kind == "layers" else None
    target = load_target(source.options(folder), taps, progress)
    text, recipe = recipes(options)
    check_trainable(target, options.kind, options.num_layers)
    check_measurable(options, source, target)
    store = Store(folder / TEXT, target.hidden_size, len(target.taps))
    write_text(options, source, target, text, store, progress)
    if options.kind == "layers":
        trained = train_layers(target, store, recipe, folder, options.num_layers, progress)
    else:
        trained = train_head(target, store, recipe, folder, progress)
    write_draft(options, target, trained, store, progress)


def _judge(options: DistillOptions, source: Source, folder: Path, progress: Progress) -> Verdict:
    """Export the pair and measure it on prompts that the training did not use."""
    draft = str(options.output) if options.kind == "layers" else f"{HEAD}:{options.output}"
    pair = options.bundle or folder / "pair"
    others = {} if source.quantization == "int4" else {SELF: folder / "self-int4"}
    for name, bundle in {draft: pair, **others}.items():
        exported = folder / ("self.exported" if name == SELF else "pair.exported")
        if not (exported.is_file() and (bundle / MANIFEST_NAME).is_file()):  # an older pair has another draft
            progress.step(f"exporting with {SELF if name == SELF else 'the trained draft'}")
            export_pair(source, bundle, name)
            exported.touch()
    return judge(options.kind, pair, others, fitting(verdict_prompts(options), pair), options.threads, progress)


def recipes(options: DistillOptions) -> tuple[TextRecipe, TrainRecipe]:
    """The parts of the time: two fifths for the text, the rest for the training. Or tokens, and passes over them."""
    from specrt.exporter.training.recipe import TextRecipe, TrainRecipe

    seed, vocab = options.seed, options.max_draft_vocab
    if options.minutes is not None:
        text = TextRecipe(minutes=options.minutes * TEXT_SHARE, seed=seed)
        train = TrainRecipe(minutes=options.minutes * (1 - TEXT_SHARE), seed=seed, max_draft_vocab=vocab)
        return text, train
    assert options.tokens is not None, "the options have minutes or tokens"
    lanes = min(TextRecipe.num_lanes, max(MIN_LANES, options.tokens // TOKENS_OF_LANE))
    text = TextRecipe(minutes=None, num_tokens=options.tokens, num_lanes=lanes, seed=seed)
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
    context = _context_of(source, target)
    outlines = _outlines(options, target, recipe.with_short_prompts(context))
    recipe = recipe.with_short_answers(outlines.longest_opening, context)
    if recipe.is_met_by(store.num_tokens, store.seconds):
        pass  # an interrupted run wrote all of it
    elif _writes_by_torch(options, source):
        from specrt.exporter.training.writing import TextWriter

        torch_writer = TextWriter(target, outlines, recipe)
        how = f"torch in fp32, {recipe.num_lanes} conversations at a time"
        _say_needs(store, target, recipe, torch_writer.tokens_per_s(), how, progress)
        torch_writer.write(store, progress)
    else:
        from specrt.tools.distill.bundle_text import BundleWriter, export_with_features

        bundle = store.folder.with_name("text-bundle")
        if not (bundle / MANIFEST_NAME).is_file():
            export_with_features(target, source, bundle, progress)
        with BundleWriter(bundle, target, outlines, recipe, options.threads) as writer:
            _say_needs(
                store, target, recipe, writer.tokens_per_s(), "the runtime, one conversation at a time", progress
            )
            writer.write(store, progress)
    progress.note(
        f"text: {store.num_tokens} tokens in {len(store.entries)} conversations, {store.num_bytes / 1e6:.0f} MB, "
        f"{store.num_tokens / max(store.seconds, 1e-3):.0f} tokens/s"
    )


def _writes_by_torch(options: DistillOptions, source: Source) -> bool:
    """Whether torch writes the text. Raises ``UsageError`` for a quantized target, whose text torch cannot write."""
    if options.writer == "torch" and source.quantization != "none":
        raise UsageError("--writer torch: the target is quantized, and torch would write another text; leave it out")
    return options.writer == "torch" or (options.writer == "auto" and source.quantization == "none")


def _say_needs(
    store: Store, target: TrainingTarget, recipe: TextRecipe, tokens_per_s: float, how: str, progress: Progress
) -> None:
    """Say time and disk before they are used. Raises ``ResourceError`` if the disk is too small."""
    from specrt.exporter.bundle import check_disk
    from specrt.exporter.training.store import row_bytes

    num_tokens = recipe.num_tokens or round(tokens_per_s * recipe.budget)
    needed = num_tokens * row_bytes(target.hidden_size, len(target.taps))
    progress.note(
        f"text: about {num_tokens} tokens in {num_tokens / tokens_per_s / 60:.1f} min by {how}; "
        f"{needed / 1e6:.0f} MB of hidden states in {store.folder}"
    )
    check_disk(store.folder, max(0, needed - store.num_bytes))


def _context_of(source: Source, target: TrainingTarget) -> int:
    """The tokens of a conversation at most: those of the bundle, or of one that is exported by default."""
    from specrt.exporter.options import DEFAULT_MAX_SEQ_LEN

    longest = getattr(target.model.config.get_text_config(), "max_position_embeddings", None)
    wanted = DEFAULT_MAX_SEQ_LEN if source.manifest is None else source.manifest.target.spec.max_seq_len
    return min(wanted, longest or wanted)


def check_measurable(options: DistillOptions, source: Source, target: TrainingTarget) -> None:
    """Raise ``UsageError`` before any work if no prompt for the verdict fits into the context."""
    shortest = min(len(_encoded(target.tokenizer, prompt)) for prompt in verdict_prompts(options))
    context = _context_of(source, target)
    if shortest + VERDICT_TOKENS > context:
        raise UsageError(
            f"{options.source}: its context is {context} tokens, expected {shortest + VERDICT_TOKENS} or more, for a "
            "prompt that the draft is measured with; give a bundle with a larger --max-seq-len, or shorter --prompts"
        )


def verdict_prompts(options: DistillOptions) -> list[Prompt]:
    """The prompts that the draft is measured with: the user's that the training holds out, or built-in ones."""
    from specrt.exporter.training.prompts import is_held_out_place

    if options.prompts is None:
        return list(bench_prompts(NUM_PER_CATEGORY))
    prompts = prompts_from_file(options.prompts)
    return [prompt for place, prompt in enumerate(prompts) if is_held_out_place(place, len(prompts))]


def _outlines(options: DistillOptions, target: TrainingTarget, recipe: TextRecipe) -> Outlines:
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


def write_draft(
    options: DistillOptions, target: TrainingTarget, trained: Trained, store: Store, progress: Progress
) -> None:
    """Write the head in speculators' layout, or the small model, with the record of its training."""
    module: Any = trained.learner.module
    with new_folder(options.output, progress) as folder:
        if options.kind == "layers":
            from specrt.exporter.training.saving import save_model

            save_model(module, target.tokenizer, folder)
        else:
            from specrt.exporter.heads.files import write_head

            architectures = getattr(target.model.config, "architectures", None) or ()
            write_head(folder / "head", module, target.name, architectures)
            for path in (folder / "head").iterdir():
                path.rename(folder / path.name)
            (folder / "head").rmdir()
        write_record(folder, trained, store, options)


def _check_output(options: DistillOptions, progress: Progress) -> None:
    """Raise before any work if an output exists or cannot be written."""
    from specrt.exporter.bundle import check_output

    is_continued = options.work_folder.exists()
    if options.output.exists() and not options.force and not is_continued:
        raise UsageError(f"{options.output}: exists already; pass --force to replace it, or choose another --output")
    check_place(options.output, "choose another --output")
    if options.bundle is not None:
        check_output(options.bundle, options.force or is_continued, progress)


@contextmanager
def _claimed(options: DistillOptions) -> Iterator[Path]:
    """The work folder, locked, if it is new or an interrupted run of the same options left it.

    It is removed again if the block fails before any text is written.
    Raises ``UsageError`` for other options, ``ResourceError`` while another process works in it.
    """
    from specrt.exporter.training.run import claim
    from specrt.exporter.training.store import INDEX

    text, train = recipes(options)
    prompts = None if options.prompts is None else hashlib.sha256(options.prompts.read_bytes()).hexdigest()
    settings = {
        "source": options.source,
        "kind": options.kind,
        "writer": options.writer,
        "num_layers": options.num_layers if options.kind == "layers" else None,
        "prompts": prompts,
        "text": dataclasses.asdict(text),
        "training": dataclasses.asdict(train),
    }
    folder = options.work_folder
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_NAME).open("ab") as file:
        lock(file, f"{folder}: another process trains in it; wait for it, or choose another --output")
        claim(folder, settings)
        try:
            yield folder
        except BaseException:
            if not (folder / TEXT / INDEX).exists():  # nothing to continue, so that other options are not refused
                shutil.rmtree(folder, ignore_errors=True)
            raise

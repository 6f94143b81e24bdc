"""``specrt bench``: methods compared on the same prompt ids, limits and threads of one machine.

Every method answers every prompt, prompt by prompt, in an order that is shuffled for each. A time budget limits tokens,
prompts and repeats; incomplete measurements are left out.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from specrt.engines.errors import SpecrtError, UsageError
from specrt.engines.manifest import Manifest, ModelEntry, manifest_from_bundle
from specrt.engines.progress import SILENT, Progress
from specrt.runtime.text.codec import TextCodec
from specrt.tools.bench.journal import Journal
from specrt.tools.bench.methods import Method, own_or_shared, processes
from specrt.tools.bench.records import Bench, PromptEntry, Settings
from specrt.tools.bench.sample import sample_of
from specrt.tools.bench.scores import score
from specrt.tools.bench.work import Work
from specrt.tools.machine import Machine, Watch
from specrt.tools.prompting.prompts import Prompt, bucket_of, encode_prompts


def run_bench(
    bundle: Path,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    settings: Settings,
    machine: Machine,
    progress: Progress = SILENT,
    journal_file: Path | None = None,
    resume: bool = False,
    required: Iterable[str] | None = None,
) -> Bench:
    """Run the bench. Ids are compared with those of the first method (above temperature 0: of specrt's first one).

    ``progress`` gets a step for all that is about to start. A method that fails to load or to answer is left out and
    reported, but for the ``required`` ones (None: all), whose failure is raised. Raises ``SpecrtError``.
    """
    started, watch = time.monotonic(), Watch()
    manifest = manifest_from_bundle(bundle)
    if settings.k > manifest.num_speculative_tokens:
        raise UsageError(f"k: got {settings.k}, this bundle was exported for 1 to {manifest.num_speculative_tokens}")
    kept, ids, skipped = fitting(prompts, bundle, manifest, settings)
    identity = {"bundle": manifest.created_utc, "settings": asdict(settings), "prompts": ids}
    journal = Journal(journal_file, identity, resume)
    work = Work(bundle, settings, kept, ids, journal, progress, started)
    work.required = None if required is None else set(required)
    groups = _groups(manifest, methods, settings)
    for number, batch in enumerate([[group] for group in groups] if settings.one_at_a_time else [groups]):
        share = (number + 1) / len(groups) if settings.one_at_a_time else 1.0
        work.run(batch, share)
    busy_percent = watch.busy_percent()
    running = [method for method in methods if method.name not in work.failed]
    used = sorted({index for _, index in work.done})
    if not used:
        raise SpecrtError(
            "bench: the time was over before all methods answered one prompt; give it more --budget-minutes"
        )
    answers = work.answers(running, used)
    chosen = [kept[index] for index in used]
    skipped += _cuts(work, len(used), max(map(len, next(iter(answers.values())))))
    journal.finish()
    return Bench(
        created_utc=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        machine=machine,
        bundle=described(manifest),
        sources={role: entry.source for role, entry in _entries(manifest).items()},
        settings=replace(settings, max_new_tokens=work.max_new_tokens),
        processes=tuple(tuple(c.name for c in group) for group in groups),
        repeats=max(map(len, next(iter(answers.values())))),
        prompts=tuple(PromptEntry(kept[i].name, kept[i].category, bucket_of(len(ids[i])), len(ids[i])) for i in used),
        skipped=tuple(skipped),
        failed=work.failed,
        scores=score(answers, chosen, [len(ids[i]) for i in used], settings.temperature),
        passes=work.passes,
        started={name: reply for name, reply in work.replies.items() if name not in work.failed},
        sample=sample_of(
            answers, chosen, TextCodec.from_bundle(bundle, manifest.tokenizer, manifest.target.spec.vocab_size)
        ),
        busy_percent_during=busy_percent,
    )


def fitting(
    prompts: Sequence[Prompt], bundle: Path, manifest: Manifest, settings: Settings
) -> tuple[list[Prompt], list[list[int]], list[str]]:
    """(prompts that fit into the bundle's context, their ids, notes on others). Raises ``UsageError`` if none fits."""
    kept, ids, skipped = [], [], []
    for prompt in prompts:
        try:
            ids += encode_prompts([prompt], bundle, manifest, settings.max_new_tokens)
            kept.append(prompt)
        except UsageError as error:
            skipped.append(str(error))
    if not kept:
        raise UsageError(skipped[0] if skipped else "prompts: got none, expected at least one")
    return kept, ids, skipped


def _cuts(work: Work, num_prompts: int, num_repeats: int) -> list[str]:
    """What the time budget cut: shorter answers, missing prompts, missing repeats."""
    settings, asked = work.settings, len(work.prompts)
    more = "; more --budget-minutes, or 0 for no limit, would include them"
    cuts = []
    if work.max_new_tokens < settings.max_new_tokens:
        cuts.append(
            f"answers were cut to {work.max_new_tokens} tokens, {settings.max_new_tokens} did not fit in the time"
        )
    if num_prompts < asked:
        cuts.append(f"no time was left for {asked - num_prompts} of {asked} prompts")
    elif num_repeats < settings.repeats or len(work.done) < num_prompts * num_repeats:
        cuts.append(
            f"no time was left for {settings.repeats * asked - len(work.done)} of {settings.repeats * asked} answers"
        )
    return [cut + more for cut in cuts]


def _groups(manifest: Manifest, methods: Sequence[Method], settings: Settings) -> list[list[Method]]:
    import psutil

    if settings.one_at_a_time:
        return processes(methods)
    return own_or_shared(manifest, methods, psutil.virtual_memory().available)


def _entries(manifest: Manifest) -> dict[str, Any]:
    draft = manifest.draft.model
    return {"target": manifest.target, **({"draft": draft} if draft is not None else {})}


def described(manifest: Manifest) -> str:
    """A short description of the pair."""
    target, draft = manifest.target, manifest.draft.model
    if draft is None:
        name = "itself" if manifest.draft.kind == "self" else manifest.draft.kind
    elif manifest.draft.shares_kv:
        name = f"itself ({_precision(draft)}, on the target's KV)"
    elif draft.source == target.source:
        name = f"{len(draft.spec.kv_layers)} of its {len(target.spec.kv_layers)} layers ({_precision(draft)})"
    else:
        name = f"{Path(draft.source).name} ({_precision(draft)})"
    return f"{Path(target.source).name} ({_precision(target)}), draft {name}"


def _precision(entry: ModelEntry) -> str:
    return entry.spec.dtype if entry.quantization == "none" else f"{entry.spec.dtype}, {entry.quantization}"

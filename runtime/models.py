"""The target and the draft of a bundle, loaded once with their samplers, and the slots that are opened on them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from specrt.engines.backends import RUNS_BUNDLES_OF, open_backend
from specrt.engines.errors import SpecrtError, UsageError
from specrt.engines.interface import Backend
from specrt.engines.manifest import Manifest
from specrt.runtime.slots import LoadedModel, Slot, SlotModel, sampler_engines
from specrt.runtime.widths import require_equal_widths


class Models:
    """Target and draft on ``target``, the target's backend, and on the draft's, by default the same.

    ``places`` are backend and device of both, as text.

    Raises ``UsageError`` for a backend or device of a draft that the bundle does not have, or that is a head.
    """

    def __init__(
        self,
        bundle: Path,
        manifest: Manifest,
        target: Backend,
        threads: int | None = None,
        draft_backend: str | None = None,
        draft_device: str | None = None,
    ) -> None:
        self._bundle, self._manifest, self._backend, self._threads = bundle, manifest, target, threads
        entry = manifest.draft.model or manifest.target
        self._has_head = entry.spec.reads_features
        drafting = self._open_draft_backend(draft_backend, draft_device)
        self.backends = [target, *([] if drafting is target else [drafting])]
        self.places = (f"{target.name} on {target.device}", f"{drafting.name} on {drafting.device}")
        self.shares_memory = drafting.device == target.device
        self._target = LoadedModel(target, manifest.target)
        if target.name in RUNS_BUNDLES_OF:
            with closing(self._target.open()) as model:
                require_equal_widths(target.name, model, manifest.target, bundle)
        vocab_size, max_rows = manifest.target.spec.vocab_size, manifest.target.spec.max_rows
        self._target_samplers = sampler_engines(target, manifest.target, max_rows, vocab_size)
        if manifest.draft.kind == "self" and drafting is target:
            self._draft: LoadedModel | None = self._target
        else:
            self._draft = LoadedModel(drafting, entry) if manifest.draft.kind != "ngram" else None
        self._draft_samplers = sampler_engines(drafting, entry, 1, vocab_size)

    def new_slot(self) -> Slot:
        """A slot with the target. A head is opened with it, since the target writes to the head's memory."""
        if not self._has_head:
            return Slot(SlotModel(self._target.open(), self._target_samplers))
        assert self._draft is not None
        head = self._draft.open_head()
        try:
            target = self._target.open(head=head)
        except SpecrtError:
            head.close()
            raise
        return Slot(SlotModel(target, self._target_samplers), SlotModel(head, self._draft_samplers))

    def with_draft(self, slot: Slot) -> Slot:
        """``slot`` with its draft opened, if the bundle has a draft model."""
        if slot.draft is None and self._draft is not None:
            slot.draft = self._new_draft(slot, self._manifest.draft.shares_kv and self.shares_memory)
        return slot

    def open_slot(self, draft: str) -> Slot:
        """See ``specrt.runtime.runtime.Runtime.open_slot``."""
        if draft == "model" and self._has_head:
            return self.new_slot()
        slot = Slot(SlotModel(self._target.open(), self._target_samplers))
        if draft == "self":
            target = self._manifest.target
            samplers = sampler_engines(self._backend, target, 1, target.spec.vocab_size)
            slot.draft = SlotModel(self._target.open(), samplers, min_width=2)
        elif draft == "model":
            slot.draft = self._new_draft(slot, shares_kv=False)
        return slot

    def _new_draft(self, slot: Slot, shares_kv: bool) -> SlotModel:
        assert self._draft is not None, "settings allow draft 'model' only where the bundle has one"
        assert not self._has_head, "a head is opened with its slot"
        return SlotModel(self._draft.open(slot.target.model if shares_kv else None), self._draft_samplers)

    def _open_draft_backend(self, name: str | None, device: str | None) -> Backend:
        """The draft's backend: the target's, unless another backend or device is given."""
        target = self._backend
        if self._manifest.draft.kind == "ngram" and (name or device):
            raise UsageError(f"draft device: this bundle has no draft model, got {name or device}; leave it out")
        if name in (None, target.name):
            name, device = target.name, device or target.device
        if (name, device) == (target.name, target.device):
            return target
        if self._has_head:
            raise UsageError(
                f"draft device: the draft is a head, which runs where its target does ({target.name} on "
                f"{target.device}), got {name} on {device or 'its own'}; leave it out"
            )
        return open_backend(self._bundle, self._manifest, name, device, self._threads)

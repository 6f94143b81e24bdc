"""Load a model, and compare every loaded tensor with the file that it came from.

transformers initializes missing tensors at random, skips tensors that it does not use, and converts others. Here the
files are read a second time, by ``specrt.exporter.sources.checkpoint``, and each tensor of the torch model is compared
with them bit by bit, after the known conversions. The check and the fingerprint hold one tensor in memory at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from optimum.exporters.tasks import TasksManager

from specrt.engines.errors import SourceError, one_line
from specrt.engines.progress import SILENT, Progress
from specrt.exporter.sources.checkpoint import Checkpoint, GgufCheckpoint
from specrt.exporter.sources.diagnosis import describe_missing, describe_unread
from specrt.exporter.sources.fingerprint import Fingerprint, fingerprint_of, raw_bytes
from specrt.exporter.sources.gguf.mapping import map_gguf_names
from specrt.exporter.sources.gguf.reader import quick_reader
from specrt.exporter.sources.mapping import FileMap, TensorMap, map_names
from specrt.exporter.sources.source import Source, reading
from specrt.exporter.sources.unread import is_computed_buffer, split_unread

# With peft installed, transformers applies an adapter that is in the model's folder. This prevents it.
_NO_ADAPTER = {"subfolder": ".specrt-reads-no-adapter"}
# Computed values may differ by rounding in another order: up to this number of epsilons, relative to the largest value.
_ROUNDING = 4


class LoadedModel(NamedTuple):
    """A torch model in evaluation mode, each tensor of which equals its files', and the fingerprint of the files."""

    model: Any
    fingerprint: str


def load_model(source: Source, dtype: torch.dtype, progress: Progress = SILENT) -> LoadedModel:
    """Load ``source`` with its weights in ``dtype``.

    Raises ``SourceError`` when the model has tensors that the files do not hold, when nothing reads a tensor of the
    files (``specrt.exporter.sources.unread`` lists those that are only noted), and when a loaded tensor differs.
    """
    stored = source.checkpoint()
    checkpoint = stored if source.decode is None else source.decode(stored)
    model, info = _from_pretrained(source, checkpoint, dtype)
    try:
        file_map = _map(model, checkpoint)
        _check_names(model, checkpoint, file_map, info, progress)
        fingerprint = _check_values(model, checkpoint, file_map, progress)
        return LoadedModel(model, fingerprint if checkpoint is stored else fingerprint_of(stored))
    except SourceError as error:
        raise SourceError(f"{source.name}: {error}") from error


class _Deferred:
    """A tensor of a checkpoint with the interface of a safetensors slice: it is read on access."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._checkpoint, self._name = checkpoint, name

    def __getitem__(self, _: Any) -> torch.Tensor:
        return self._checkpoint.read(self._name)


def _from_pretrained(source: Source, checkpoint: Checkpoint, dtype: torch.dtype) -> tuple[Any, Mapping[str, Any]]:
    """(model, transformers' loading info). The files are read by transformers; decoded tensors are given to it."""
    options: dict[str, Any] = {
        "config": source.config,
        "dtype": dtype,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # reported by the loading info, and refused with the shapes
        "adapter_kwargs": _NO_ADAPTER,
    }
    with reading(source.name), torch.no_grad(), quick_reader():
        if source.decode is None:
            load = partial(_model_class().from_pretrained, source.location, **source.options)
        else:
            state = {name: _Deferred(checkpoint, name) for name in checkpoint.names()}
            load = partial(type(_without_weights(source)).from_pretrained, None, state_dict=state)
        try:
            model, info = load(**options)
        except RuntimeError:  # conversions that failed are only named in transformers' log
            _check_conversions(_without_weights(source), checkpoint, source.name)
            raise
        if source.gguf is not None:
            source.gguf.restore_order(model)
    return model.eval(), info


def _model_class() -> Any:
    return TasksManager.get_model_class_for_task("text-generation", framework="pt")


def _without_weights(source: Source) -> Any:
    """The model of the source's config on the meta device."""
    with torch.device("meta"):
        return _model_class().from_config(
            source.config, trust_remote_code=source.options.get("trust_remote_code", False)
        )


def _check_conversions(model: Any, checkpoint: Checkpoint, name: str) -> None:
    """Raise ``SourceError`` that names the first tensors of the files that cannot be converted for ``model``."""
    try:
        for row in _map(model, checkpoint).maps:
            _converted(row, [checkpoint.read(source).to("meta") for source in row.sources])
    except SourceError as error:
        raise SourceError(f"{name}: {error}") from error


def _map(model: Any, checkpoint: Checkpoint) -> FileMap:
    if isinstance(checkpoint, GgufCheckpoint):
        return map_gguf_names(model, checkpoint.architecture, checkpoint.types)
    return map_names(model, checkpoint.names())


def _check_names(
    model: Any, checkpoint: Checkpoint, file_map: FileMap, info: Mapping[str, Any], progress: Progress
) -> None:
    """Refuse tensors of another shape, tensors that are not in the files, and tensors that nothing reads."""
    config = model.config.get_text_config()
    names = checkpoint.names()
    for name, in_file, in_model in sorted(info["mismatched_keys"]):
        raise SourceError(
            f"{name} is {list(in_file)} in its files, and config.json makes it {list(in_model)}: "
            "correct config.json, or download the model again"
        )
    harmless, unread = split_unread(file_map.unread, checkpoint.read, config)
    if missing := _missing(model, file_map, info):
        raise SourceError(describe_missing(missing, unread, names, config))
    if unread:
        raise SourceError(describe_unread(unread, names, config))
    if errors := info.get("error_msgs"):
        raise SourceError(one_line(errors[0]))
    if note := _untied(model, config):
        progress.note(note)
    for what, number in harmless.items():
        progress.note(f"{number} tensors of the files are not read: {what}")


def _untied(model: Any, config: Any) -> str | None:
    """A note when the files hold a head of their own and the config says that it is the embedding."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if not getattr(config, "tie_word_embeddings", False) or head is None or embedding is None:
        return None
    if _place(head.weight) == _place(embedding.weight):
        return None
    return "lm_head.weight of the files differs from the embedding and is used, though config has tie_word_embeddings"


def _missing(model: Any, file_map: FileMap, info: Mapping[str, Any]) -> list[str]:
    """The model's tensors that come from no tensor of the files, and share memory with none that does."""
    state = model.state_dict()
    filled = file_map.targets - set(info["missing_keys"])
    places = {_place(state[name]) for name in filled}
    return [
        name
        for name, tensor in state.items()
        if name not in filled and _place(tensor) not in places and not is_computed_buffer(name, model)
    ]


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where ``tensor`` is in memory. Tied tensors have the same place."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def _check_values(model: Any, checkpoint: Checkpoint, file_map: FileMap, progress: Progress) -> str:
    """Compare each loaded tensor with ``checkpoint``; return the fingerprint of the checkpoint."""
    state = model.state_dict()
    fingerprint = Fingerprint()
    progress.step("comparing the loaded weights with the files", sum(state[t].nbytes for t in file_map.targets))
    for row in file_map.maps:
        tensors = [checkpoint.read(name) for name in row.sources]
        for name, tensor in zip(row.sources, tensors, strict=True):
            fingerprint.add(name, tensor)
        for name, expected in _converted(row, tensors).items():
            _compare(state[name], expected, name, row)
            progress.advance(state[name].nbytes)
    for name in file_map.unread:
        fingerprint.add(name, checkpoint.read(name))
    return fingerprint.hexdigest()


def _converted(row: TensorMap, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    try:
        return row.convert(tensors)
    except Exception as error:  # conversions of damaged tensors can raise anything
        line = one_line(error)
        raise SourceError(
            f"{row.sources[0]} of its files cannot be converted to {row.targets[0]} ({line}); download the model again"
        ) from error


def _compare(loaded: torch.Tensor, expected: torch.Tensor, name: str, row: TensorMap) -> None:
    if expected.shape != loaded.shape:
        raise SourceError(
            f"{name} is {list(expected.shape)} in its files and {list(loaded.shape)} in the loaded model: "
            "correct config.json, or download the model again"
        )
    if not _same(loaded.cpu(), expected.to(loaded.dtype), row.is_computed):
        raise SourceError(
            f"{name} of the loaded model is not what its files hold in {', '.join(row.sources[:2])}: "
            "transformers changed it while loading; install the versions of transformers and torch that specrt names"
        )


def _same(loaded: torch.Tensor, expected: torch.Tensor, is_computed: bool) -> bool:
    """Whether the bits are equal; for computed values, whether the values are equal up to rounding."""
    if torch.equal(raw_bytes(loaded), raw_bytes(expected)):
        return True
    if not is_computed:
        return False
    bound = _ROUNDING * torch.finfo(loaded.dtype).eps * float(expected.abs().max())
    return float((loaded.float() - expected.float()).abs().max()) <= bound

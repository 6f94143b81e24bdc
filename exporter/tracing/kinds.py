"""Which layers of a model run the same computation, each on its own weights.

One pass over the export's example inputs is recorded at torch's dispatcher: every operator that runs, its numbers, and
where each of its tensors comes from. Two layers are of one kind when their records are equal. A number that the code
derives from a layer's index (a scale, a window, a rope base) therefore makes a different kind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

OUTSIDE = -1  # the scope of what runs before, between and after the layers


@dataclass(frozen=True)
class Records:
    """What each layer and the rest of the model compute, in a form that is only meant for comparison."""

    layers: tuple[Hashable, ...]
    outside: Hashable


def record(
    run: torch.nn.Module,
    layers: Sequence[torch.nn.Module],
    inputs: Mapping[str, torch.Tensor],
    owners: Mapping[str, int],
) -> Records:
    """The records of one pass of ``run`` over ``inputs`` by name, whose outputs are tensors.

    ``owners`` maps each input that belongs to a layer to the layer's index; its name is recorded without digits.
    """
    recorder = _Recorder(run, layers, inputs, owners)
    with torch.no_grad(), layer_hooks(layers, recorder.enter, recorder.leave), recorder:
        outputs = run(list(inputs.values()))
    recorder.finish(outputs)
    return Records(
        tuple(tuple(recorder.records[index]) for index in range(len(layers))), tuple(recorder.records[OUTSIDE])
    )


@contextmanager
def layer_hooks(layers: Sequence[torch.nn.Module], enter: Any, leave: Any) -> Iterator[None]:
    """Call ``enter(index, hidden)`` before each layer and ``leave(index, hidden)`` after it; use what they return."""
    handles = []
    for index, layer in enumerate(layers):
        handles.append(layer.register_forward_pre_hook(_entering(enter, index), with_kwargs=True))
        handles.append(layer.register_forward_hook(_leaving(leave, index)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _entering(enter: Any, index: int) -> Any:
    def hook(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (enter(index, args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": enter(index, kwargs["hidden_states"])}

    return hook


def _leaving(leave: Any, index: int) -> Any:
    def hook(module: torch.nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (leave(index, output[0]), *output[1:])
        return leave(index, output)

    return hook


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Labels of tensors are absolute; ``_seen_from`` makes them relative to the running layer."""

    def __init__(
        self,
        run: torch.nn.Module,
        layers: Sequence[torch.nn.Module],
        inputs: Mapping[str, torch.Tensor],
        owners: Mapping[str, int],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records: dict[int, list[Hashable]] = {index: [] for index in (OUTSIDE, *range(len(layers)))}
        self._scope = OUTSIDE
        self._entry: torch.Tensor | None = None  # of the layer that runs
        self._exit: torch.Tensor | None = None  # of the last one that ran
        self._alive: list[torch.Tensor] = []  # so that no id() is reused
        self._made: dict[int, tuple[Hashable, ...]] = {}
        self._shared: dict[Hashable, int] = {}
        named = {**dict(_tensors(run)), **{name: tensor for name, tensor in inputs.items() if name not in owners}}
        self._named = {id(tensor): name for name, tensor in named.items()}
        self._own: dict[int, dict[int, str]] = {OUTSIDE: {}}
        for index, layer in enumerate(layers):
            self._own[index] = {id(tensor): name for name, tensor in _tensors(layer)}
        for name, index in owners.items():
            self._own[index][id(inputs[name])] = "".join(filter(lambda c: not c.isdigit(), name))

    def enter(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """Start layer ``index``. If its input is not the previous layer's output, its record equals no other."""
        if index == 0:
            self._note("entry", self._seen_from(hidden))
        chained = index == 0 or hidden is self._exit
        self._scope, self._entry = index, hidden
        if not chained:
            self._note("unchained", index)
        return hidden

    def leave(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        self._note("exit", self._seen_from(hidden))
        self._scope, self._entry, self._exit = OUTSIDE, None, hidden
        return hidden

    def finish(self, outputs: Sequence[torch.Tensor]) -> None:
        """Record where the outputs come from; a layer's KV outputs are recorded relative to the layer."""
        for output in outputs:
            made = self._made.get(id(output), (OUTSIDE,))
            self._scope = made[0] if made[0] in self.records else OUTSIDE
            self._note("output", self._seen_from(output))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        operands, structure = tree_flatten((args, kwargs or {}))
        seen = tuple(self._seen_from(x) if isinstance(x, torch.Tensor) else repr(x) for x in operands)
        key = (str(func), seen, str(structure))
        shared = not func._schema.is_mutable and not any(isinstance(x, tuple) and x[0] == "own" for x in seen)
        if shared and self._scope != OUTSIDE:
            place: tuple[Hashable, ...] = ("shared", self._shared.setdefault(key, len(self._shared)))
        else:
            place = (self._scope, len(self.records[self._scope]))
            self._note(*key)
        for number, tensor in enumerate(x for x in tree_flatten(result)[0] if isinstance(x, torch.Tensor)):
            self._made[id(tensor)] = (*place, number, str(tensor.dtype), tuple(tensor.shape))
            self._alive.append(tensor)
        return result

    def _note(self, *entry: Hashable) -> None:
        self.records[self._scope].append(entry)

    def _seen_from(self, tensor: torch.Tensor) -> tuple[Hashable, ...]:
        if self._scope != OUTSIDE and tensor is self._entry:
            return ("own", "entry")
        if self._scope == OUTSIDE and tensor is self._exit:
            return ("exit",)
        made = self._made.get(id(tensor))
        if made is not None:
            return ("own", *made[1:]) if made[0] == self._scope else ("elsewhere", *made)
        facts = (str(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()))
        if id(tensor) in self._own[self._scope]:
            return ("own", self._own[self._scope][id(tensor)], *facts)
        if id(tensor) in self._named:
            return ("named", self._named[id(tensor)], *facts)
        content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return ("constant", hashlib.sha256(content).hexdigest(), *facts)


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)

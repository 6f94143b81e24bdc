"""The codec: what is written is read back equal; what does not fit is refused with its place."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrt.engines.codec import from_json, to_json
from specrt.engines.contract import KVLayer, ModelSpec, TensorSpec


@dataclass(frozen=True)
class Leaf:
    count: int
    share: float
    flag: bool


@dataclass(frozen=True)
class Tree:
    name: str
    note: str | None
    dims: tuple[int | str, ...]
    leaf: Leaf | None
    leaves: tuple[Leaf, ...]
    by_name: dict[str, Leaf]


finite = st.floats(allow_nan=False, allow_infinity=False)
leaves = st.builds(Leaf, st.integers(), finite, st.booleans())
trees = st.builds(
    Tree,
    name=st.text(),
    note=st.none() | st.text(),
    dims=st.lists(st.integers() | st.text(), max_size=4).map(tuple),
    leaf=st.none() | leaves,
    leaves=st.lists(leaves, max_size=3).map(tuple),
    by_name=st.dictionaries(st.text(), leaves, max_size=3),
)
sizes = st.integers(1, 1 << 40)
specs = st.builds(
    ModelSpec,
    vocab_size=sizes,
    max_seq_len=sizes,
    capacity=sizes,
    max_width=sizes,
    max_rows=sizes,
    dtype=st.sampled_from(("float32", "float16")),
    kv_layers=st.lists(st.builds(KVLayer, sizes, sizes), max_size=3).map(tuple),
)
tensors = st.builds(
    TensorSpec,
    name=st.text(),
    dtype=st.text(),
    shape=st.lists(sizes | st.text(), max_size=4).map(tuple),
    alias=st.none() | st.text(),
)


def through_json(value: Any) -> Any:
    return from_json(type(value), json.loads(json.dumps(to_json(value))))


@given(trees | specs | tensors | leaves)
def test_what_is_written_is_read_back_equal(value: Any) -> None:
    assert through_json(value) == value


def test_a_whole_float_written_as_an_integer_is_read_as_a_float() -> None:
    share = from_json(Leaf, {"count": 1, "share": 2, "flag": True}).share
    assert (share, type(share)) == (2.0, float)


TREE: dict[str, Any] = to_json(Tree("t", None, (1, "width"), None, (Leaf(1, 0.5, True),), {"a": Leaf(2, 1.5, False)}))


def replaced(path: tuple[Any, ...], value: Any) -> Any:
    """A copy of ``TREE`` with the item at ``path`` set to ``value``."""
    data = json.loads(json.dumps(TREE))
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("extra",), 1, "Tree: unknown key 'extra'"),
        (("leaves", 0, "extra"), 1, "Tree.leaves[0]: unknown key 'extra'"),
        (("by_name", "a", "extra"), 1, "Tree.by_name.a: unknown key 'extra'"),
        (("name",), None, "Tree.name: got NoneType, expected str"),
        (("note",), 3, "Tree.note: got int, expected str"),
        (("dims",), "width", "Tree.dims: got str, expected list"),
        (("dims", 1), 1.5, "Tree.dims[1]: got float, expected int"),
        (("dims", 0), None, "Tree.dims[0]: got NoneType, expected int"),
        (("leaf",), [], "Tree.leaf: got list, expected dict"),
        (("by_name",), [], "Tree.by_name: got list, expected dict"),
        (("leaves", 0, "count"), True, "Tree.leaves[0].count: got bool, expected int"),
        (("leaves", 0, "count"), 1.0, "Tree.leaves[0].count: got float, expected int"),
        (("leaves", 0, "share"), "0.5", "Tree.leaves[0].share: got str, expected float"),
        (("leaves", 0, "flag"), 1, "Tree.leaves[0].flag: got int, expected bool"),
    ],
)
def test_what_does_not_fit_names_its_place(path: tuple[Any, ...], value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        from_json(Tree, replaced(path, value))


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Tree)])
def test_a_missing_key_names_its_place(name: str) -> None:
    data = {key: value for key, value in TREE.items() if key != name}
    with pytest.raises(ValueError, match=f"^bundle.json: key {name!r} is missing$"):
        from_json(Tree, data, where="bundle.json")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | finite | st.text(),
        lambda s: st.lists(s) | st.dictionaries(st.text(), s),
    )
)
def test_any_json_is_read_or_refused_with_a_value_error(data: Any) -> None:
    with pytest.raises(ValueError, match="Tree"):
        from_json(Tree, data)

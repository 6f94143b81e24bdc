"""Whether a draft's engine has a profile for passes of one token: by role, and by the bytes that were measured."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from specrt.engines.contract import STANDARD_22_DIALECT, STANDARD_DIALECT, KVLayer, ModelSpec
from specrt.engines.trt.decode import Built, OneTokenPasses, choose, described, one_token_passes
from specrt.engines.trt.layers import EngineLayers, Layer, LayerTensor, cache_copies, copied_bytes, layers_in

# SmolLM2-135M at a context of 2048 and K = 5, in fp16
SPEC = ModelSpec(49_152, 2048, 2053, 512, 6, "float16", (KVLayer(3, 64),) * 30, STANDARD_DIALECT)
WEIGHTS_BYTES = 269_000_000
PASSES = OneTokenPasses(SPEC, WEIGHTS_BYTES)
COPY = LayerTensor("copy", (1, 3, 2053, 64), 2)


def engine(has_decode: bool, copies: int, copies_in_decode: int = 0) -> EngineLayers:
    """As the builder lists it: ``verify`` and, if wanted, ``decode``, each in one kernel."""
    counts = {"verify": copies, "prefill": copies, **({"decode": copies_in_decode} if has_decode else {})}
    layers = {name: (Layer("k", (), (COPY,) * count),) for name, count in counts.items()}
    return EngineLayers(WEIGHTS_BYTES * (2 if has_decode else 1), layers, dict.fromkeys(counts, 0))


def chosen(passes: OneTokenPasses, *engines: EngineLayers | None) -> tuple[bool, int, int]:
    """(whether it has ``decode``, engines built, engines measured); the first of ``engines`` is without it."""
    built: list[bool] = []

    def build(has_decode: bool) -> Built:
        built.append(has_decode)
        return Built(memoryview(b""), has_decode, engines[has_decode])

    found, candidates = choose(passes, build)
    assert built == [False, True][: len(built)]
    return found.has_decode, len(built), len(candidates)


def test_a_draft_with_copies_that_decode_does_not_have() -> None:
    """As measured on SmolLM2: 60 copies, 47.3 MB."""
    assert chosen(PASSES, engine(False, 60), engine(True, 60)) == (True, 2, 2)


def test_copies_that_are_few_cost_no_second_build() -> None:
    """The rule alone would choose ``decode``."""
    assert PASSES.are_expected_to_gain
    assert chosen(PASSES, engine(False, 0), None) == (False, 1, 1)
    assert chosen(PASSES._replace(weights_bytes=5 * WEIGHTS_BYTES), engine(False, 60), None) == (False, 1, 1)


def test_a_decode_that_copies_as_well_is_not_kept() -> None:
    """Attention in single operators: weights would be stored twice for nothing."""
    assert chosen(PASSES, engine(False, 60), engine(True, 60, 60)) == (False, 2, 2)
    assert chosen(PASSES, engine(False, 60), engine(True, 60, 10)) == (True, 2, 2)


def test_without_a_list_of_layers_the_sizes_decide() -> None:
    assert chosen(PASSES, None, engine(True, 60)) == (True, 2, 0)
    short = PASSES._replace(spec=replace(SPEC, max_seq_len=512, capacity=517))
    assert chosen(short, None, None) == (False, 1, 0)
    assert not PASSES._replace(weights_bytes=5 * WEIGHTS_BYTES).are_expected_to_gain


@pytest.mark.parametrize(
    ("role", "dialect", "is_considered"),
    [("draft", STANDARD_DIALECT, True), ("target", STANDARD_DIALECT, False), ("draft", STANDARD_22_DIALECT, False)],
)
def test_a_target_and_a_cache_that_is_written_anyway_have_none(role: str, dialect: str, is_considered: bool) -> None:
    entry: Any = SimpleNamespace(spec=replace(SPEC, dialect=dialect), bytes_per_pass=WEIGHTS_BYTES)
    assert (one_token_passes(role, entry) is not None) == is_considered


def test_the_decision_in_one_line() -> None:
    _, candidates = choose(PASSES, lambda has: Built(memoryview(b""), has, engine(has, 60)))
    assert described(PASSES, candidates, True) == (
        "a pass of one token, measured without decode 47.3 MB of the cache copied and 410.9 MB moved, 269.0 MB of "
        "weights; with decode 0.0 MB of the cache copied and 316.3 MB moved, 538.0 MB of weights: built with it"
    )


LISTED = """Layers:
Name: __myl_A_myl0_1, LayerType: kgen, Inputs: [ { Name: in, Dimensions: [1,3,40,64], Format: x, Datatype: Half } ], \
Constants: [  ], Outputs: [ { Name: out, Dimensions: [1,3,41,64], Format: x, Datatype: Half }, \
{ Name: ids, Dimensions: [1,-1], Format: x, Datatype: Fp4 } ], Tactic: 1
Name: __myl_B_myl1_1, LayerType: kgen, Inputs: [ { Name: in, Dimensions: [1,3,40,64], Format: x, Datatype: Half } ], \
Constants: [  ], Outputs: [ { Name: in, Dimensions: [1,3,40,64], Format: x, Datatype: Half } ], Tactic: 1
"""
SIZES = ["Total Activation Memory: 10 bytes", "Total Activation Memory: 20 bytes", "Total Weights Memory: 30 bytes"]


def test_layers_are_read_from_messages() -> None:
    """A copy is what is as large as a head's keys, is not updated in place, and may have its capacity rounded up."""
    found = layers_in(["other", LISTED, *SIZES], ["verify", "decode"])
    assert found is not None
    assert (found.weights_bytes, found.scratch_bytes) == (30, {"verify": 10, "decode": 20})
    copies = {name: cache_copies(layers, 40, 64) for name, layers in found.layers.items()}
    assert copied_bytes(copies["verify"], 1) == 3 * 41 * 64 * 2 and not copies["decode"]
    for messages, profiles in (
        (SIZES, ["verify", "decode"]),
        ([LISTED, *SIZES], ["verify"]),
        ([LISTED, *SIZES[:2]], ["verify", "decode"]),
        ([LISTED.replace("myl1", "myl0"), *SIZES], ["verify", "decode"]),
        ([LISTED.replace("myl1", "myl7"), *SIZES], ["verify", "decode"]),
    ):
        assert layers_in(messages, profiles) is None

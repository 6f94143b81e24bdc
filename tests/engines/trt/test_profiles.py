"""Whether an engine has a profile for passes of one token: by role, and by the bytes that it saves."""

from __future__ import annotations

from dataclasses import replace

from specrt.engines.contract import STANDARD_22_DIALECT, STANDARD_DIALECT, KVLayer, ModelSpec
from specrt.engines.trt.profiles import wants_decode

# SmolLM2-135M at a context of 2048 and K = 5, in fp16
SPEC = ModelSpec(49_152, 2048, 2053, 512, 6, "float16", (KVLayer(3, 64),) * 30, STANDARD_DIALECT)
WEIGHTS_BYTES = 269_000_000


def test_a_small_draft_with_a_long_cache_has_it() -> None:
    assert wants_decode("draft", SPEC, WEIGHTS_BYTES)


def test_where_it_saves_less_than_a_tenth_it_is_left_out() -> None:
    assert not wants_decode("draft", replace(SPEC, max_seq_len=512, capacity=517), WEIGHTS_BYTES)
    assert not wants_decode("draft", SPEC, 5 * WEIGHTS_BYTES)


def test_a_target_and_a_cache_that_is_copied_anyway_have_none() -> None:
    assert not wants_decode("target", SPEC, WEIGHTS_BYTES)
    assert not wants_decode("draft", replace(SPEC, dialect=STANDARD_22_DIALECT), WEIGHTS_BYTES)

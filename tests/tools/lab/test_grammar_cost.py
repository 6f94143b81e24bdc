"""The lab's measurement of masks, on a small tokenizer; figures are not checked."""

from __future__ import annotations

from specrt.runtime.structured import grammar_of
from specrt.runtime.text.codec import TextCodec
from specrt.tools.lab.grammar_cost import REPEATS, measure
from tests.tiny import tiny_tokenizer


def test_rounds_and_forced_positions_are_counted() -> None:
    tokenizer = tiny_tokenizer().backend_tokenizer
    codec = TextCodec(tokenizer, tokenizer.get_vocab_size(), None, {})
    grammar = grammar_of(regex="0{10}|0{4}1")
    assert grammar is not None
    cost = measure(codec, tokenizer.get_vocab_size(), grammar, "0" * 10, 2)
    assert cost.num_tokens == 10 and cost.num_forced == 9, "after four there is a choice"
    assert len(cost.rounds_ms) == 4 * REPEATS and all(ms >= 0 for ms in cost.rounds_ms)

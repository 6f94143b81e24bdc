"""The lab's measurement of masks, on a small tokenizer; figures are not checked."""

from __future__ import annotations

from specrt.runtime.structured import grammar_of
from specrt.runtime.text.codec import TextCodec
from specrt.tools.lab.grammar_cost import CASES, REPEATS, case_of, grammars_of, measure
from tests.tiny import tiny_tokenizer


def test_rounds_and_forced_positions_are_counted() -> None:
    tokenizer = tiny_tokenizer().backend_tokenizer
    vocab_size = tokenizer.get_vocab_size()
    codec = TextCodec(tokenizer, vocab_size, None, {})
    grammars, _ = grammars_of(codec, vocab_size)
    grammar = grammar_of(regex="0{10}|0{4}1")
    assert grammar is not None
    cost = measure(grammars, grammar, codec.ids_of_text("0" * 10, add_special_tokens=False), vocab_size, 2)
    assert cost.num_tokens == 10 and cost.num_forced == 9, "after four there is a choice"
    for rounds_ms in (cost.sampled_ms, cost.greedy_ms):
        assert len(rounds_ms) == 4 * REPEATS and all(ms >= 0 for ms in rounds_ms)
    for name in CASES:
        constraint, text = grammars.constraint(case_of(name)[0], (), 0), case_of(name)[1]
        ids = codec.ids_of_text(text, add_special_tokens=False)
        assert constraint.extended((), ids, len(ids)) == ids and constraint.is_complete((), ids), name

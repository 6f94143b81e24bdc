"""A constraint allows the masks of a fresh matcher, in any order of prefixes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from specrt.engines.errors import BackendError, UsageError
from specrt.runtime.sampling.grammar import Constraint
from specrt.runtime.sampling.masks import Mask, MaskedRows
from specrt.runtime.structured import Grammar, grammar_of
from tests.runtime.sampling.grammars import constraint_of, grammars_of, regex

LETTERS = [bytes([i]) for i in range(256)] + [b"na", b"name", b"na", b"", b"<tool>", b"<eos>"]
EMPTY, SPECIAL, EOS = 259, 260, 261
PATTERN = "(na|b)*name[0-9]{1,3}"


def allowed(constraint: Constraint, committed: Sequence[int], ahead: Sequence[int] = ()) -> list[int]:
    mask = constraint.mask(committed, ahead)
    return [token for token in range(len(LETTERS)) if mask.allows(token)]


def test_every_id_that_continues_a_text_is_allowed_not_only_the_canonical_one() -> None:
    constraint = constraint_of(LETTERS, "name(x|y)", [EOS])
    assert allowed(constraint, ()) == [ord("n"), 256, 257, 258]
    assert allowed(constraint, (), [256]) == [ord("m")]
    assert constraint.forced((), [256]) == ord("m")
    assert constraint.forced((), [257]) is None
    assert allowed(constraint, [257, ord("x")]) == [EOS]


def test_the_end_is_allowed_where_the_text_may_end_and_ends_it_where_it_must() -> None:
    for eos in ([EOS], []):
        constraint = constraint_of(LETTERS, "ab?", eos)
        assert allowed(constraint, [ord("a")]) == [ord("b"), *eos]
        assert not constraint.is_complete([ord("a")])
        assert constraint.is_complete([ord("a"), ord("b")])
    assert constraint_of(LETTERS, "ab?", [EOS]).is_complete([ord("a"), EOS])
    assert constraint_of(LETTERS, "ab?", []).forced([ord("a")]) == ord("b"), "no end can be chosen"


def test_special_tokens_and_ids_without_text_are_not_text() -> None:
    tool = grammar_of(grammar='start: <tool> "a"+\n')
    assert tool is not None
    grammars = grammars_of(LETTERS, [EOS], [SPECIAL, EOS])
    assert allowed(grammars.constraint(tool, [EOS], 0), ()) == [SPECIAL]
    anything = allowed(grammars.constraint(regex("(?s:.*)x"), [EOS], 0), ())
    assert not {EMPTY, SPECIAL, EOS} & set(anything) and len(anything) > 130


@hypothesis_settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 7), max_size=5)), max_size=6))
def test_masks_depend_on_the_prefix_alone(rounds: list[tuple[int, list[int]]]) -> None:
    """Rounds that draft some allowed ids, look at each prefix, and commit some of them and another one."""
    constraint, committed = constraint_of(LETTERS, PATTERN, [EOS]), list[int]()

    def pick(prefix: list[int], ahead: list[int], choice: int) -> int | None:
        fresh = constraint_of(LETTERS, PATTERN, [EOS])
        ids = allowed(constraint, prefix, ahead)
        assert ids == allowed(fresh, (), [*prefix, *ahead])
        return None if constraint.is_complete(prefix, ahead) else ids[choice % len(ids)]

    for num_kept, choices in rounds:
        ahead = list[int]()
        for choice in choices:
            if (token := pick(committed, ahead, choice)) is None or token == EOS:
                break
            ahead.append(token)
        committed += ahead[:num_kept]
        own = pick(committed, [], num_kept)
        if own is None or own == EOS:
            return
        committed.append(own)


def test_a_draft_is_cut_at_the_first_forbidden_id_and_extended_by_forced_ones() -> None:
    constraint = constraint_of(LETTERS, "(abc|xyz)!!", [EOS], num_prompt_tokens=2)
    prompt = [5, 6]
    a, b, c, x, mark = b"abcx!"
    assert constraint.extended(prompt, [a, b, x, c], 4) == [a, b, c, mark]
    assert constraint.extended(prompt, [c], 4) == []
    assert constraint.extended([*prompt, a], [], 2) == [b, c]
    assert constraint.extended([*prompt, a], [b, c, mark, mark, a], 8) == [b, c, mark, mark], "the text has ended"
    assert constraint.extended(prompt, [], 4) == []


def test_rows_beyond_a_forbidden_id_stay_as_they_are_and_the_bonus_row_is_masked() -> None:
    constraint = constraint_of(LETTERS, "ab[cd]", [EOS])
    a, b, c, d = b"abcd"
    for drafted, masked in (([a, b], 3), ([a, c], 2), ([c, a], 1), ([], 1)):
        logits = np.zeros((3, len(LETTERS) + 10), np.float32)
        assert constraint.apply(logits, (), (), drafted) == 3
        expected = [[a], [b], [c, d]]
        for row, ids in enumerate(expected[:masked]):
            assert np.flatnonzero(np.isfinite(logits[row])).tolist() == ids
        assert np.isfinite(logits[masked:]).all()


def test_no_id_left_is_found_and_the_row_stays() -> None:
    constraint = constraint_of(LETTERS, "ab[cd]", [EOS])
    logits = np.zeros((2, len(LETTERS)), np.float32)
    logits[1, ord("b")] = -np.inf
    before = logits[1].copy()
    assert constraint.apply(logits, (), (), [ord("a")]) == 1
    assert np.array_equal(logits[1], before)


def test_a_text_that_the_tokenizer_cannot_write_is_a_dead_end_which_stops_nothing_else() -> None:
    constraint = constraint_of([b"x", b"y", b"q"], "x(z|y)y|qz", [])
    assert [constraint.mask((), [0]).allows(i) for i in range(3)] == [False, True, False]
    dead = constraint.mask((), [2])
    assert not dead.is_end and dead.only is None and not any(dead.allows(i) for i in range(3))
    logits = np.zeros((1, 3), np.float32)
    assert constraint.apply(logits, (), [2], ()) == 0
    assert constraint.failure == "the tokenizer has no token for what comes next"
    assert constraint.forced((), [0]) == 1


@hypothesis_settings(max_examples=60)
@given(st.lists(st.integers(0, 7), max_size=9), st.sampled_from([PATTERN, "(ab?)*", "x?", "(na|a)[^b]*n?"]))
def test_one_id_is_allowed_where_a_mask_allows_it(choices: list[int], pattern: str) -> None:
    """Ids with text, without text, special ones and the end; and the text is complete where the mask says so."""
    for eos in ([EOS], []):
        grammars = grammars_of(LETTERS, eos, [SPECIAL, EOS])
        masks, prefix = grammars.constraint(regex(pattern), eos, 0), list[int]()
        for choice in [*choices, 0]:
            other = grammars.constraint(regex(pattern), eos, 0)
            ids = allowed(masks, (), prefix)
            assert ids == [token for token in range(len(LETTERS)) if other.allows(token, (), prefix)]
            assert not any(other.allows(token, (), prefix) for token in (len(LETTERS), 9 * len(LETTERS)))
            assert masks.is_complete((), prefix) == other.is_complete((), prefix) == masks.mask((), prefix).is_end
            ids = [token for token in ids if token != EOS]
            if not ids:
                break
            prefix.append(ids[choice % len(ids)])


@pytest.mark.parametrize("best_only", [False, True])
def test_greedy_rows_keep_their_choice_and_need_no_mask_if_it_is_allowed(best_only: bool) -> None:
    """The first of the largest allowed logits is that of a masked row; other rows are masked."""
    grammars, rng = grammars_of(LETTERS, [EOS], [SPECIAL, EOS]), np.random.default_rng(5)
    num_unmasked = 0
    for _ in range(60):
        drafted = list(b"nab"[: rng.integers(0, 4)])
        logits = rng.integers(0, 3, (4, len(LETTERS) + 4)).astype(np.float32)  # many ties
        for row, token in enumerate(rng.integers(0, len(LETTERS) + 4, 4)):
            logits[row, token] = rng.choice([9, -np.inf])
        logits[0, [ord("n"), 256, 258]] += rng.choice([0, 20])
        masked, changed = logits.copy(), logits.copy()
        one = grammars.constraint(regex(PATTERN), [EOS], 0)
        other = grammars.constraint(regex(PATTERN), [EOS], 0, best_only=best_only)
        num_open = one.apply(masked, (), (), drafted)
        assert other.apply(changed, (), (), drafted) == num_open
        assert masked[:num_open].argmax(1).tolist() == changed[:num_open].argmax(1).tolist()
        num_unmasked += int((changed[0] == logits[0]).all())
    assert (num_unmasked > 10) == best_only


@pytest.mark.parametrize("vocab_size", [31, 32, 33, 63, 64, 200])
def test_masks_of_all_sizes(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    for wanted in ([0], [vocab_size - 1], [vocab_size], [0, vocab_size], rng.permutation(vocab_size)[:9].tolist()):
        flags = np.zeros(32 * (vocab_size // 32 + 1), bool)
        flags[wanted] = True
        mask = Mask(np.packbits(flags, bitorder="little"), vocab_size, [1])
        expected = {i for i in wanted if i < vocab_size} | ({1} if vocab_size in wanted else set())
        assert {i for i in range(vocab_size) if mask.allows(i)} == expected
        assert mask.is_end == (wanted == [vocab_size])
        assert mask.only == (wanted[0] if len(wanted) == 1 and vocab_size not in wanted else None)
        row = np.ones(vocab_size + 7, np.float32)
        assert MaskedRows().apply(mask, row)
        assert set(np.flatnonzero(np.isfinite(row)).tolist()) == expected


# --- grammars that are refused -------------------------------------------------------------------------------------

REFUSED = [
    ({"json_schema": '{"type": "strin"}'}, "json_schema: Invalid type: strin;"),
    ({"json_schema": '{"not": {"type": "null"}}'}, 'json_schema: Unimplemented keys: ["not"];'),
    ({"json_schema": '{"type": "array", "uniqueItems": true}'}, 'json_schema: Unimplemented keys: ["uniqueItems"];'),
    ({"json_schema": '{"type": "string", "pattern": "(?=a)b"}'}, "json_schema: pattern: regex parse error: (?=a)b"),
    ({"json_schema": '{"type": "string", "format": "nope"}'}, "json_schema: Unknown format: nope;"),
    ({"json_schema": '{"$ref": "#/x"}'}, "json_schema: $ref: Pointer '/x' does not exist;"),
    ({"json_schema": '{"$ref": "http://x/y"}'}, "json_schema: $ref: Resource 'http://x/y' is not present"),
    ({"json_schema": "false"}, "json_schema: Unsatisfiable schema: "),
    (
        {"json_schema": '{"type": "array", "minItems": 3, "maxItems": 1}'},
        "json_schema: Unsatisfiable schema: minItems (3)",
    ),
    ({"regex": "("}, 'regex: invalid regex "(" (in regex): regex parse error: ( error: unclosed group;'),
    ({"regex": r"(a)\1"}, "regex: invalid regex"),
    ({"regex": "()"}, "regex: allows only the empty text"),
    ({"grammar": "start: foo"}, 'grammar: unknown name: "foo";'),
    ({"grammar": 'begin: "a"'}, "grammar: no start rule found;"),
    ({"grammar": 'start: "a'}, "grammar: lexer error;"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[str(options) for options, _ in REFUSED])
def test_what_is_invalid_or_not_supported_is_one_line_that_names_it(options: dict[str, str], message: str) -> None:
    grammar = grammar_of(**options)  # type: ignore[arg-type]
    assert grammar is not None
    with pytest.raises(UsageError) as caught:
        grammars_of(LETTERS, [EOS]).compiled(grammar)
    assert str(caught.value).startswith(message)
    assert len(str(caught.value).splitlines()) == 1


def test_without_llguidance_the_error_gives_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(BackendError, match=r"regex: needs llguidance.*pip install 'specrt\[grammar\]'"):
        grammars_of(LETTERS).compiled(regex("a"))


def test_a_grammar_is_compiled_once_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specrt.runtime.sampling.grammar.MAX_COMPILED", 2)
    grammars = grammars_of(LETTERS)
    first, second, third = (regex(pattern) for pattern in "abc")
    kept = grammars.compiled(first)
    grammars.compiled(second)
    assert grammars.compiled(Grammar(*first)) is kept
    grammars.compiled(third)  # drops the second
    assert grammars.compiled(first) is kept

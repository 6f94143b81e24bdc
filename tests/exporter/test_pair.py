"""A draft is refused for another token at an id, and for nothing that leaves the meaning of ids."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from specrt.engines.errors import PairError
from specrt.exporter.pair import check_pair, compare_tokenizers


def tokenizer(
    *tokens: str, merges: list[tuple[str, str]] | None = None, added: dict[str, bool] | None = None
) -> Tokenizer:
    """``tokens`` have the ids 0, 1, ...; ``added`` follow, each special or not."""
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges or []))
    for token, special in (added or {"</s>": True}).items():
        add = made.add_special_tokens if special else made.add_tokens
        add([AddedToken(token, special=special)])
    return made


FIX = "in the draft; pick a draft of the same family, or --draft ngram"


@pytest.mark.parametrize(
    ("draft", "difference"),
    [
        (tokenizer("a", "c", "ab"), "id 1 is 'b' in the target and 'c'"),
        (tokenizer("b", "a", "ab"), "id 0 is 'a' in the target and 'b'"),
        (tokenizer("a", "b"), "id 2 is 'ab' in the target and '</s>'"),
        (tokenizer("a", "b", "ab", added={"<|end|>": True}), "id 3 is '</s>' in the target and '<|end|>'"),
        (tokenizer("a", "b", "ab", added={"</s>": False}), "id 3 is special ('</s>') in the target and plain ('</s>')"),
        (tokenizer("a", "b", "ab", added={"</s>": True, "\n": False}), r"id 4 is no token in the target and '\n'"),
    ],
    ids=["token", "order", "missing", "added", "flag", "extra"],
)
def test_the_first_difference_is_named(draft: Tokenizer, difference: str) -> None:
    with pytest.raises(PairError) as caught:
        compare_tokenizers(tokenizer("a", "b", "ab"), draft)
    assert str(caught.value) == f"draft does not share the target's tokenizer: {difference} {FIX}"


def test_a_token_that_only_the_draft_has_is_named_from_either_side() -> None:
    with pytest.raises(PairError, match=r"id 2 is 'c' in the target and no token in the draft"):
        compare_tokenizers(tokenizer("a", "b", "c", added={"b": False}), tokenizer("a", "b", added={"b": False}))


def test_how_text_is_split_is_not_compared() -> None:
    target = tokenizer("a", "b", "ab", merges=[("a", "b")])
    draft = tokenizer("a", "b", "ab")
    draft.normalizer = normalizers.Lowercase()
    draft.pre_tokenizer = pre_tokenizers.Whitespace()
    compare_tokenizers(target, draft)


def test_a_token_of_the_model_may_be_an_added_one_in_the_other() -> None:
    compare_tokenizers(tokenizer("a", "b", added={"b": True}), tokenizer("a", "b", added={"a": True}))


@pytest.mark.parametrize(
    ("target_eos", "draft_eos", "lengths", "expected"),
    [
        ((1, 2), (2, 1), (2048, 2048), []),
        ((1,), (1,), (2048, 8192), []),
        (
            (2, 1),
            (),
            (2048, 2048),
            ["end-of-sequence ids are 1, 2 in the target and none in the draft; the target's decide"],
        ),
        (
            (1,),
            (1,),
            (8192, 2048),
            [
                "the draft's context is 2048 tokens, the target's 8192; "
                "from position 2048 on, rounds run without a draft"
            ],
        ),
    ],
    ids=["equal", "draft is longer", "eos", "draft is shorter"],
)
def test_harmless_differences_are_noted(
    target_eos: tuple[int, ...], draft_eos: tuple[int, ...], lengths: tuple[int, int], expected: list[str]
) -> None:
    assert check_pair(target_eos, draft_eos, *lengths) == expected

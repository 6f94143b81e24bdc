"""Whether a draft fits a target. The same id must be the same token; other differences are only noted."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from specrt.engines.errors import PairError

FIX = "pick a draft of the same family, or --draft ngram"


def compare_tokenizers(target: Tokenizer, draft: Tokenizer) -> None:
    """Raise ``PairError`` with the first id that is not the same token in both.

    A token that both add to their vocabulary must be special in both or in neither. How text is split (normalizer,
    pre-tokenizer, merges) is not compared, since the target's tokenizer encodes for both; nor are the widths of the
    embeddings, which may be padded.
    """
    ours, theirs = _tokens_by_id(target), _tokens_by_id(draft)
    added = [tokenizer.get_added_tokens_decoder() for tokenizer in (target, draft)]
    for token_id in sorted(ours.keys() | theirs.keys()):
        wanted, got = ours.get(token_id), theirs.get(token_id)
        if wanted != got:
            raise _mismatch(token_id, _shown(wanted), _shown(got))
        flags = [tokens[token_id].special for tokens in added if token_id in tokens]
        if len(set(flags)) == 2:
            kinds = [f"{'special' if flag else 'plain'} ({wanted!r})" for flag in flags]
            raise _mismatch(token_id, *kinds)


def check_pair(
    target_eos_ids: Sequence[int], draft_eos_ids: Sequence[int], target_max_seq_len: int, draft_max_seq_len: int
) -> list[str]:
    """One line for each difference that does not harm the output. Lengths in tokens."""
    notices = []
    if set(target_eos_ids) != set(draft_eos_ids):
        notices.append(
            f"end-of-sequence ids are {_listed(target_eos_ids)} in the target and {_listed(draft_eos_ids)} in the "
            "draft; the target's decide"
        )
    if draft_max_seq_len < target_max_seq_len:
        notices.append(
            f"the draft's context is {draft_max_seq_len} tokens, the target's {target_max_seq_len}; "
            f"from position {draft_max_seq_len} on, rounds run without a draft"
        )
    return notices


def _tokens_by_id(tokenizer: Tokenizer) -> dict[int, str | None]:
    return {token_id: tokenizer.id_to_token(token_id) for token_id in tokenizer.get_vocab().values()}


def _mismatch(token_id: int, in_target: str, in_draft: str) -> PairError:
    return PairError(
        f"draft does not share the target's tokenizer: id {token_id} is {in_target} in the target and {in_draft} "
        f"in the draft; {FIX}"
    )


def _shown(token: str | None) -> str:
    return "no token" if token is None else repr(token)


def _listed(ids: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(ids))) or "none"

"""One generated text with the origin of each token, for display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specrt.runtime.text.codec import TextCodec
from specrt.tools.bench.methods import Answer
from specrt.tools.prompting.prompts import Prompt

CHOOSES_K = "auto"
ACCEPTED, CORRECTED, PLAIN = "accepted", "corrected", "plain"


@dataclass(frozen=True)
class Sample:
    """``pieces`` are (text, origin), ``drafted`` is K of each round.

    Origins: ``accepted`` for drafts, ``corrected`` for the target's token after a rejection, ``plain`` for its token
    after full acceptance or without a draft.
    """

    method: str
    prompt: str
    pieces: tuple[tuple[str, str], ...]
    drafted: tuple[int, ...]


def sample_of(
    answers: Mapping[str, Sequence[Sequence[Answer]]], prompts: Sequence[Prompt], codec: TextCodec
) -> Sample | None:
    """A text of ``auto``, which chooses K in each round, or else of the last method that drafted anything.

    Among its answers with at least half of the largest number of rounds, the one with the median share of accepted
    tokens.
    """
    for name in sorted(reversed(list(answers)), key=lambda name: name != CHOOSES_K):
        firsts = [repeats[0] for repeats in answers[name]]
        if any(drafted for answer in firsts for drafted, _ in answer.rounds):
            most = max(len(answer.rounds) for answer in firsts)
            long = [i for i, answer in enumerate(firsts) if 2 * len(answer.rounds) >= most]
            order = sorted(long, key=lambda i: _accepted_share(firsts[i]))
            index = order[len(order) // 2]
            answer = firsts[index]
            pieces = _pieces(answer, codec)
            return Sample(name, prompts[index].name, pieces, tuple(int(drafted) for drafted, _ in answer.rounds))
    return None


def _accepted_share(answer: Answer) -> float:
    return sum(accepted for _, accepted in answer.rounds) / max(1, len(answer.token_ids))


def origins(answer: Answer) -> list[str]:
    """The origin of each id of ``answer``; the first is the prefill's."""
    found = [PLAIN]
    for drafted, accepted in answer.rounds:
        found += [ACCEPTED] * int(accepted)
        found.append(CORRECTED if drafted > accepted else PLAIN)
    return found[: len(answer.token_ids)]


def _pieces(answer: Answer, codec: TextCodec) -> tuple[tuple[str, str], ...]:
    """The text of each id; a character of several ids belongs to the last of them."""
    pieces, stream = [], codec.stream()
    for token, origin in zip(answer.token_ids, origins(answer), strict=True):
        pieces.append((stream.push(token), origin))
    return tuple(pieces)

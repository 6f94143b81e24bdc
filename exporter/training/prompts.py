"""What conversations begin with: the user's prompts, or prompts that the model writes itself in its chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from specrt.engines.errors import UsageError
from specrt.exporter.training.recipe import HELD_OUT, HELD_OUT_EVERY, TextRecipe

_MARK = "THE-USER-WRITES-HERE"


@dataclass(frozen=True)
class Outline:
    """A conversation to be written. ``opening`` ids are given. With ``closing`` the model first writes a prompt of its
    own, at temperature 1, which ``closing`` ends. Then it answers at ``temperature``; 0 is greedy.
    """

    number: int
    opening: tuple[int, ...]
    closing: tuple[int, ...]
    temperature: float
    is_held_out: bool


class Outlines(Protocol):
    """The outline of each conversation by its number, from 0."""

    def __call__(self, number: int) -> Outline: ...

    @property
    def longest_opening(self) -> int: ...


class OwnPrompts:
    """Prompts that the model writes, between the parts of its chat template before and after a user's message."""

    def __init__(self, opening: Sequence[int], closing: Sequence[int], recipe: TextRecipe) -> None:
        self._opening, self._closing, self._recipe = tuple(opening), tuple(closing), recipe
        self.longest_opening = len(self._opening) + len(self._closing) + recipe.max_prompt_tokens * bool(self._closing)

    def __call__(self, number: int) -> Outline:
        is_held_out = number % HELD_OUT_EVERY == HELD_OUT
        return Outline(number, self._opening, self._closing, _temperature(number, self._recipe), is_held_out)


class GivenPrompts:
    """The user's prompts in turn, as ids. One prompt in 20 (at least one) is held out, with all of its answers.

    The first answer to a prompt is greedy, or sampled, in turn; later ones are sampled, since a greedy one would be the
    same text again.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], recipe: TextRecipe) -> None:
        if len(prompts) < 2:
            raise UsageError(f"--prompts: got {len(prompts)} prompt, expected 2 or more, since one is held out")
        self._prompts, self._recipe = [tuple(ids) for ids in prompts], recipe
        self.longest_opening = max(map(len, self._prompts))

    def __call__(self, number: int) -> Outline:
        cycle, place = divmod(number, len(self._prompts))
        temperature = self._recipe.temperature if cycle else _temperature(number, self._recipe)
        is_held_out = is_held_out_place(place, len(self._prompts))
        return Outline(number, self._prompts[place], (), temperature, is_held_out)


def is_held_out_place(place: int, num_prompts: int) -> bool:
    """Whether the prompt at ``place`` of the user's is held out."""
    return place % HELD_OUT_EVERY == min(num_prompts - 1, HELD_OUT)


def _temperature(number: int, recipe: TextRecipe) -> float:
    """Half of the answers are greedy; held-out ones alternate too."""
    return 0.0 if (number + number // HELD_OUT_EVERY) % 2 else recipe.temperature


def own_prompts(tokenizer: Any, eos_ids: Sequence[int], recipe: TextRecipe) -> OwnPrompts:
    """Prompts of the model's own for its tokenizer. Without a chat template it writes plain text after its first id."""
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=True
        )
        before, found, after = text.partition(_MARK)
        if found and after:
            opening, closing = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, after))
            return OwnPrompts(opening or _first_id(tokenizer, eos_ids), closing, recipe)
    return OwnPrompts(_first_id(tokenizer, eos_ids), (), recipe)


def _first_id(tokenizer: Any, eos_ids: Sequence[int]) -> list[int]:
    bos = getattr(tokenizer, "bos_token_id", None)
    return [bos if bos is not None else eos_ids[0] if eos_ids else 0]

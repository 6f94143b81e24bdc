"""The command line's options of a generation: those of the table, with its ranges, defaults and sentences."""

from __future__ import annotations

import click
import pytest

from specrt.runtime.options import OPTIONS, Options, options_of
from specrt.tools.commands.texts.chat import chat
from specrt.tools.commands.texts.generate import generate
from specrt.tools.prompting.options import generation_options, options_from_command

# A command line has no word for them.
ONLY_IN_PYTHON = {
    "logit_bias",
    "banned_token_ids",
    "logits_processors",
    "add_generation_prompt",
    "visible_special_tokens",
}


@click.command()
@generation_options
def command(**values: object) -> Options:
    return options_from_command(values)


def given(*arguments: str) -> Options:
    found: Options = command.main(list(arguments), standalone_mode=False)
    return found


def test_the_command_line_has_every_option_of_the_table() -> None:
    found = {option.name for option in generate.params}
    assert {*OPTIONS} - found == ONLY_IN_PYTHON
    assert {*OPTIONS} - {option.name for option in chat.params} == {*ONLY_IN_PYTHON, "continue_final_message"}


def test_every_option_has_the_sentence_of_the_table() -> None:
    for option in generate.params:
        if option.name in OPTIONS:
            assert isinstance(option, click.Option)
            assert str(option.help).startswith(OPTIONS[option.name].help)


def test_nothing_given_is_every_default() -> None:
    assert options_of(given()) == options_of({})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("-k 3 --draft ngram --rule match", {"num_speculative_tokens": 3, "draft": "ngram", "rule": "match"}),
        ("--temperature 0.5 --top-k 7 --seed 1", {"temperature": 0.5, "top_k": 7, "seed": 1}),
        ("--stop a --stop b --stop-token-id 4", {"stop": ("a", "b"), "stop_token_ids": (4,)}),
        ("--ignore-eos --reproducible", {"ignore_eos": True, "reproducible": True}),
        ('--chat-template-kwargs {"a":1}', {"chat_template_kwargs": {"a": 1}}),
    ],
)
def test_what_is_given_is_an_option_of_a_generation(arguments: str, expected: dict[str, object]) -> None:
    options = options_of(given(*arguments.split()))
    assert {name: getattr(options, name) for name in expected} == expected


def test_defaults_are_shown() -> None:
    texts = {option.name: str(option.help) for option in command.params if isinstance(option, click.Option)}
    assert texts["max_new_tokens"].endswith("  [default: 256]")
    assert texts["top_p"].endswith("  [default: 1]")
    assert texts["num_speculative_tokens"].endswith("  [default: the bundle's]")
    assert "[default" not in texts["ignore_eos"] + texts["seed"] + texts["reproducible"]

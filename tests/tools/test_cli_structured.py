"""``--json-schema``, ``--regex``, ``--grammar`` and ``--json-object`` of ``generate``: texts, files and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result

from tests.tools.commands import PROMPT, invoke, one_error_line


def generate(bundle: Path, *options: object) -> Result:
    return invoke("generate", bundle, "--raw", "--prompt", PROMPT, "--max-new-tokens", 60, *options)


def test_each_option_takes_a_text_or_a_file(tiny_bundle: Path, tmp_path: Path) -> None:
    texts = {
        "--json-schema": json.dumps({"enum": ["a b"]}),
        "--regex": '"a b"',
        "--grammar": 'start: "\\"a" " " "b\\""',
    }
    for number, (option, text) in enumerate(texts.items()):
        file = tmp_path / f"{number}.txt"
        file.write_text(text + "\n", encoding="utf-8")
        for given in (text, file):
            assert generate(tiny_bundle, option, given).stdout == '"a b"\n'


def test_the_settings_have_the_grammar(tiny_bundle: Path) -> None:
    done = json.loads(generate(tiny_bundle, "--regex", "[ab]", "--json").stdout)
    assert done["text"] in ("a", "b") and done["finish_reason"] == "stop"
    shown = done["settings"]["structure"]
    assert shown["source"] == "given" and shown["value"][0] == "regex" and "[ab]" in shown["value"][1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--json-schema", '{"not": {}}'], 'json_schema: Unimplemented keys: ["not"]'),
        (["--json-schema", "no/such/file.json"], "json_schema: not JSON"),
        (["--grammar", 'root ::= "a"'], "grammar: got GBNF"),
        (["--regex", "a", "--json-object"], "regex, json_object: got 2 of"),
    ],
)
def test_what_is_refused_is_exit_code_2(tiny_bundle: Path, options: list[str], message: str) -> None:
    done = generate(tiny_bundle, *options)
    assert done.exit_code == 2
    assert message in one_error_line(done)

"""The command ``specrt bench``: who competes, what is refused, what is reported beforehand."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from specrt.engines.errors import UsageError
from specrt.engines.manifest import manifest_from_bundle
from specrt.tools.bench.command import chosen_prompts, methods_of
from specrt.tools.bench.records import Settings
from specrt.tools.cli import main
from specrt.tools.machine import notes
from specrt.tools.report import readme_table
from tests.tools.bench.benches import MACHINE


def test_the_methods_of_the_command(tiny_bundle: Path) -> None:
    manifest = manifest_from_bundle(tiny_bundle)
    names = [method.name for method in methods_of("eager,assisted", manifest)]
    assert names == ["eager", "assisted", "plain", "auto", "ngram", "model"]


def test_the_command(bench_file: Path) -> None:
    bench = json.loads(bench_file.read_text())
    assert [row["equal_prompts"] for row in bench["scores"]] == [3, 3, 3, 3]
    assert bench["sources"] == {"target": "model"}, "no folder of this machine"


def test_the_table_of_the_docs_comes_out_of_a_bench(bench_file: Path, tmp_path: Path) -> None:
    """From the command's own file into a document with the marks of performance.md, whose text is otherwise kept."""
    stored, document = bench_file, tmp_path / "R.md"
    text = (Path(__file__).parents[3] / "docs" / "performance.md").read_text(encoding="utf-8")
    begin, end = readme_table.lines_around(readme_table.MARK)
    assert (text.count(begin), text.count(end)) == (1, 1)
    document.write_text(text, encoding="utf-8")
    run = CliRunner().invoke(readme_table.main, [str(stored), "--write", str(document)])
    assert run.exit_code == 0, run.output
    bench = json.loads(stored.read_text())
    before, _, rest = document.read_text(encoding="utf-8").partition(begin)
    table, _, after = rest.partition(end)
    assert before == text.partition(begin)[0] and after == text.partition(end)[2]
    for row in bench["scores"]:
        assert f"| {row['method']} | {row['tokens_per_s']:.1f} |" in table
    assert bench["created_utc"][:10] in table and f"specrt {bench['machine']['versions']['specrt']}" in table


@pytest.mark.slow
def test_a_bench_that_was_killed_goes_on_with_what_real_workers_had_answered(tiny_bundle: Path, tmp_path: Path) -> None:
    """Killed without warning after three answers; its workers end too. A marked answer shows that it is used again."""
    prompts, stored = tmp_path / "p.txt", tmp_path / "b.json"
    prompts.write_text("the dog and the dog\ndef area(radius):\nthe cat and the dog\n")
    options = ["--baseline", "plain", "--prompts", str(prompts), "--threads", "1", "--max-new-tokens", "100"]
    command = [sys.executable, "-m", "specrt.tools.cli", "bench", str(tiny_bundle), *options, "--num-runs", "3"]
    command += ["--json", str(stored), "--budget-minutes", "0"]
    partial = stored.with_name("b.json.partial")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 300
        while not partial.exists() or len(partial.read_text().splitlines()) < 5:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        workers = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    assert workers and not stored.exists()
    assert psutil.wait_procs(workers, timeout=20)[1] == []
    first, tokens, *lines = partial.read_text().splitlines(keepends=True)
    answered = [line for line in lines if line.endswith("\n")]
    name, prompt, repeat, answer = json.loads(answered[0])
    marked = json.dumps([name, prompt, repeat, {**answer, "peak_bytes": 10**15}]) + "\n"
    partial.write_text("".join([first, tokens, marked, *lines[1:]]))
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    bench = json.loads(stored.read_text())
    rows = {row["method"]: row for row in bench["scores"]}
    assert rows[name]["peak_bytes"] == 10**15
    assert {row["equal_prompts"] for row in rows.values()} == {3} and bench["repeats"] == 3
    assert not partial.exists()


def test_every_kind_of_prompt_comes_before_any_kind_s_second(tmp_path: Path) -> None:
    own = tmp_path / "p.jsonl"
    rows = [("a", 1), ("a", 2), ("b", 1), ("a", 3), ("b", 2), ("c", 1)]
    own.write_text("".join(json.dumps({"category": c, "prompt": f"{c}{n}"}) + "\n" for c, n in rows))
    assert [p.text for p in chosen_prompts(own, None, None)] == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert [p.text for p in chosen_prompts(own, None, 1)] == ["a1", "b1", "c1"]
    ours = chosen_prompts(None, None, 2)
    assert [p.number for p in ours] == [1] * 12 + [2] * 12
    assert len({p.category for p in ours[:12]}) == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--resume"], "give the same --json"),
        (["--json", "nowhere/x.json"], "its folder does not exist"),
        (["--baseline", "fast"], "methods: got 'fast'"),
        (["--categories", "poetry"], "categories: got 'poetry'"),
        (["--categories", "chat", "--prompts", "x.txt"], "leave one out"),
        (["--budget-minutes", "-1"], "expected minutes, or 0 for no limit"),
    ],
)
def test_bad_options_are_refused(tiny_bundle: Path, options: list[str], message: str) -> None:
    run = CliRunner().invoke(main, ["bench", str(tiny_bundle), *options])
    assert (run.exit_code, message in run.output) == (2, True), run.output


@pytest.mark.parametrize("name", ["k", "threads", "max_new_tokens", "repeats"])
def test_settings_are_positive(name: str) -> None:
    with pytest.raises(UsageError, match="got 0, expected 1 or more"):
        replace(Settings(1, 1), **{name: 0})  # type: ignore[arg-type]


def test_too_little_memory_names_the_way_out() -> None:
    available = psutil.virtual_memory().available
    assert "--one-at-a-time" in notes(MACHINE, [available, available], False)[0]
    assert "--one-at-a-time" not in notes(MACHINE, [1, 2], False)[0]

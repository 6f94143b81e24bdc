"""The lab's comparison of HTTP and library, on a tiny bundle; figures are not checked."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from specrt.tools.lab import http_latency
from specrt.tools.lab.http_latency import main, prompts_of


def test_library_and_server_take_turns_on_prompts_that_no_cache_holds(tiny_bundle: Path) -> None:
    done = CliRunner().invoke(main, [str(tiny_bundle), "--quick", "--only-ours", "--threads", "1"])
    assert done.exit_code == 0, done.output
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith(("| library", "| server"))]
    assert [row[1:3] for row in rows] == [["1", str(http_latency.NUM_QUICK_PAIRS)]] * 2
    assert rows[1][-1].startswith(str(http_latency.NUM_QUICK_PAIRS)), "all texts are the same"
    texts = [prompt.text for prompt in prompts_of(50, 1000)]
    assert len({text[:4] for text in texts}) == 50

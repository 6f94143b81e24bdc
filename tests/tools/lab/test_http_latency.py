"""The lab's comparison of HTTP and library, on a tiny bundle; figures are not checked."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from specrt.tools.bench.remote.clients import Timing
from specrt.tools.bench.remote.run import Measured
from specrt.tools.lab import http_latency
from specrt.tools.lab.http_latency import main, prompts_of, turns_of
from specrt.tools.lab.http_peers import NUM_SLOTS


def test_library_and_server_take_turns_on_prompts_that_no_cache_holds(tiny_bundle: Path) -> None:
    done = CliRunner().invoke(main, [str(tiny_bundle), "--quick", "--only-ours", "--threads", "1"])
    assert done.exit_code == 0, done.output
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith(("| library", "| server"))]
    assert [row[1:3] for row in rows] == [["1", str(http_latency.NUM_QUICK_PAIRS)]] * 2
    assert rows[1][-1].startswith(str(http_latency.NUM_QUICK_PAIRS)), "all texts are the same"
    texts = [prompt.text for prompt in prompts_of(50, 1000)]
    assert len({text[:4] for text in texts}) == 50


def test_each_server_is_compared_with_its_own_and_texts_only_among_equal_weights() -> None:
    library, four, *others = turns_of("b", "b4", None, 2, 3, 5)
    assert [turns.num for turns in (library, four, *others)] == [3, 3, 5, 5 * NUM_SLOTS]
    speeds = {"server": 1.0, "server, int4": 2.0, "llama-server": 6.0, "genai": 4.0}
    found = [Measured(name, 1, [Timing(1 / of, 2 / of, 8, "text")] * 5, [of] * 5) for name, of in speeds.items()]
    cells = [[cell.strip() for cell in row.split("|")] for row in others[0].rows(found)]
    rows = {row[1]: row[-5:-1] for row in cells}
    assert rows["server"] == rows["server, int4"] == [""] * 4
    assert rows["llama-server"][0] == "server, int4" and rows["llama-server"][2].startswith("3.000")
    assert rows["llama-server"][3] == "", "other weights"
    assert rows["genai"][0] == "server" and rows["genai"][3] == "5"
    assert all(turns.ours[turns.peers[1].name] is turns.peers[0] for turns in (library, four))
    assert "llama-server" in turns_of("b", None, "x.gguf", 2, 3, 5)[1].ours
    assert len(turns_of("b", None, "", 2, 3, 5)) == 1

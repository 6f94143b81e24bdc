"""``specrt bench --url``: servers from outside, and the library with them."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from specrt.engines.errors import SpecrtError, UsageError
from specrt.tools.bench.remote.clients import Client, HttpClient, LibraryClient, Timing
from specrt.tools.bench.remote.run import Measured, compared, measure
from specrt.tools.cli import main
from specrt.tools.prompting.prompts import Prompt
from tests.tools.commands import invoke, one_error_line
from tests.tools.serving.serving import Served

PROMPTS = [Prompt("a", "abc" * 9), Prompt("b", "naïve " * 5), Prompt("c", "x"), Prompt("d", "dog " * 9)]


def test_a_server_and_the_library_give_the_same_answer(served: Served) -> None:
    clients: list[Client] = [LibraryClient(served.service.runtime), HttpClient(f"{served.url}/v1", "parrot")]
    library, server = measure(clients, PROMPTS, 1, num_runs=2, max_new_tokens=20, temperature=0)
    assert [timing.text for timing in server.timings] == [prompt.text[:20] for prompt in PROMPTS[:1]] + [
        timing.text for timing in library.timings[1:]
    ]
    figures = server.as_dict()
    assert figures["answers"] == 8 and figures["tokens"] == 2 * (20 + 20 + 2 + 20)
    assert figures["ttft_ms"]["mean"] > 0 and figures["tpot_ms"]["interval"][0] < figures["tpot_ms"]["mean"]
    ratios = compared(library, server)
    assert ratios["same_texts"] == 8 and ratios["ttft"]["mean"] > 0


def test_several_clients_ask_at_once(served: Served) -> None:
    client = HttpClient(f"{served.url}/v1")
    (found,) = measure([client], PROMPTS * 2, 4, num_runs=1, max_new_tokens=20, temperature=0)
    assert (found.num_clients, len(found.timings), len(found.throughputs)) == (4, 8, 1)
    slowest = max(timing.last_s for timing in found.timings)
    assert found.throughputs[0] * slowest < sum(timing.num_tokens for timing in found.timings) * 1.01


def test_a_connection_is_kept_and_replaced_where_it_has_ended(served: Served) -> None:
    client = HttpClient(f"{served.url}/v1")
    texts = [client.ask(PROMPTS[0], 20, 0).text]
    first = client._connection().sock
    texts.append(client.ask(PROMPTS[0], 20, 0).text)
    assert client._connection().sock is first
    first.shutdown(socket.SHUT_RDWR)
    texts.append(client.ask(PROMPTS[0], 20, 0).text)
    assert client._connection().sock is not first
    assert texts == [PROMPTS[0].text[:20]] * 3
    with pytest.raises(SpecrtError, match="status 400"):
        client.ask(Prompt("long", "x" * 5000), 2, 0)
    assert client.ask(PROMPTS[0], 20, 0).text == texts[0], "after an answer that was not read to its end"


def test_intervals_and_ratios() -> None:
    ours, theirs = Measured("a", 1), Measured("b", 1)
    for number in range(1, 6):
        ours.timings.append(Timing(0.1 * number, 0.1 * number + 1.0, 11, "x"))
        theirs.timings.append(Timing(0.2 * number, 0.2 * number + 1.5, 11, "x" if number > 1 else "y"))
        ours.throughputs.append(10.0)
        theirs.throughputs.append(5.0)
    figures = ours.as_dict()
    assert figures["ttft_ms"]["mean"] == pytest.approx(300) and figures["tpot_ms"]["mean"] == pytest.approx(100)
    low, high = figures["ttft_ms"]["interval"]
    assert 300 - low == pytest.approx(high - 300) == pytest.approx(2.776 * 158.114 / 5**0.5, rel=1e-3)
    ratios = compared(ours, theirs)
    assert ratios["ttft"]["mean"] == pytest.approx(2) and ratios["tpot"]["mean"] == pytest.approx(1.5)
    assert ratios["throughput"]["interval"] == pytest.approx((0.5, 0.5)) and ratios["same_texts"] == 4


def test_what_is_no_server(served: Served) -> None:
    with pytest.raises(UsageError, match="--url: got 'ftp://x'"):
        HttpClient("ftp://x")
    with pytest.raises(SpecrtError, match="is it running"):
        HttpClient("http://127.0.0.1:9/v1").ask(PROMPTS[0], 2, 0)
    with pytest.raises(SpecrtError, match=r"status 404: .*model_not_found"):
        HttpClient(f"{served.url}/v1", "other").ask(PROMPTS[0], 2, 0)


def test_the_command(served: Served, parrot_bundle: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "p.txt", tmp_path / "b.json"
    file.write_text("hello there\nand you\nyes\n")
    options = [
        "--prompts",
        str(file),
        "--max-new-tokens",
        "12",
        "--num-runs",
        "1",
        "--clients",
        "1,2",
        "--json",
        str(out),
    ]
    command = ["bench", str(parrot_bundle), "--url", f"{served.url}/v1", *options]
    run = CliRunner().invoke(main, command, standalone_mode=False)
    assert run.exit_code == 0, run.output
    assert "3 of 3 texts as of library" in run.output
    one, two = json.loads(out.read_text())["measured"]
    assert [row["server"] for row in one["servers"]] == ["library", f"{served.url}/v1"]
    assert [row["clients"] for row in two["servers"]] == [2] and two["ratios"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "bench: got no bundle, expected BUNDLE or --url"),
        (["x", "--clients", "2"], "--clients: it is for servers"),
        (["--url", "http://x", "--quick"], "--url: got quick too"),
        (["--url", "http://x", "--clients", "0"], "--clients: got '0'"),
    ],
)
def test_options_that_do_not_go_together(arguments: list[str], message: str) -> None:
    result = invoke("bench", *arguments)
    assert result.exit_code == 2 and message in one_error_line(result)

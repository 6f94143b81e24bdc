"""The report of a bench: one page that fetches nothing, its charts, a text in colours; the tables on a terminal."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from specrt.engines.manifest import manifest_from_bundle
from specrt.runtime.text.codec import TextCodec
from specrt.tools.bench.methods import (
    Answer,
)
from specrt.tools.bench.records import Bench
from specrt.tools.bench.sample import origins, sample_of
from specrt.tools.bench.tables import print_bench
from specrt.tools.prompting.prompts import Prompt
from specrt.tools.report.report import write_report


class _Page(HTMLParser):
    """Whether tags close, and what the page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta",):
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and not (value or "").startswith("#"):
                self.fetched.append(value or "")
            if name == "id":
                self.ids.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in ("meta",):
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_report_is_one_whole_page_that_fetches_nothing(benched: Bench, tmp_path: Path) -> None:
    written = write_report(benched, tmp_path / "r.html")
    text = written[0].read_text(encoding="utf-8")
    page = _Page()
    page.feed(text)
    assert (page.open, page.fetched) == ([], [])
    assert len(page.ids) == len(set(page.ids))
    assert text.index("<svg") < text.index("<h2") < text.index("<table")
    assert [path.name for path in written[1:]] == [
        f"r-{name}.png" for name in ("speeds", "categories", "positions", "rounds", "widths", "ks")
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written[1:])
    assert "prefers-color-scheme: dark" in text and "@import" not in text and "url(http" not in text
    assert benched.sample is not None
    shown = "".join(part for part, _ in benched.sample.pieces)
    marked = text[text.index("<pre>") : text.index("</pre>")]
    assert len(re.sub(r"<[^>]+>|&[#\w]+;|\s", "", marked)) <= len(shown)
    assert 'class="accepted"' in marked
    assert "K chosen over time, in the text below" in text
    assert "tokens/s by category, and times plain (95 %)" in text and "<td>a (1)</td>" in text


def test_a_bench_is_printed(benched: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    print_bench(benched)
    assert "break-even" in capsys.readouterr().out


def test_the_sample_is_of_the_method_that_chooses_k(tiny_bundle: Path) -> None:
    """Else of the last that drafted; of three answers that whose share of accepted tokens is in the middle."""
    manifest = manifest_from_bundle(tiny_bundle)
    codec = TextCodec.from_bundle(tiny_bundle, manifest.tokenizer, manifest.target.spec.vocab_size)

    def answers(k: int) -> list[list[Answer]]:
        return [[Answer(tuple(range(30, 36)), 1.0, (), ((k, n),) * (6 - n))] for n in (2, 0, 1)]

    prompts = [Prompt(name, "") for name in "xyz"]
    found = sample_of({"plain": answers(0), "auto": answers(3), "ngram": answers(4)}, prompts, codec)
    assert found is not None and (found.method, found.prompt, found.drafted) == ("auto", "z", (3,) * 5)
    short = [[Answer((30, 31, 32), 1.0, (), ((2, 2),))], *answers(3)[:2]]  # a text of one round shows nothing
    found = sample_of({"auto": short}, prompts, codec)
    assert found is not None and found.prompt == "y"
    found = sample_of({"auto": answers(0), "model": answers(4), "plain": answers(0)}, prompts, codec)
    assert found is not None and found.method == "model"
    assert sample_of({"plain": answers(0)}, prompts, codec) is None


def test_origins_of_tokens() -> None:
    answer = Answer((1, 2, 3, 4, 5, 6), 1.0, (), ((2, 2), (2, 0), (0, 0), (2, 1)))
    assert origins(answer) == ["plain", "accepted", "accepted", "plain", "corrected", "plain"]

"""The report of a bench: one HTML file that needs no network, light and dark, and its charts as PNGs next to it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from specrt.engines.storage.files import write_text_file
from specrt.tools.bench.records import Bench
from specrt.tools.bench.tables import answers_text, categories_table, decode_table, ratio_text, remarks
from specrt.tools.report.charts import CHARTS, chart_svg, drafting, save_png


def write_report(bench: Bench, path: Path) -> list[Path]:
    """Write ``path`` and a PNG for each chart; return the written files."""
    names = charts_of(bench)
    write_text_file(path, report_html(bench, names))
    pngs = [path.with_name(f"{path.stem}-{name}.png") for name in names]
    for name, png in zip(names, pngs, strict=True):
        save_png(bench, name, png)
    return [path, *pngs]


def charts_of(bench: Bench) -> list[str]:
    """The charts for which the bench has data."""
    absent = set()
    if not drafting(bench) or "plain" not in bench.scores[0].ratio_to:
        absent |= {"categories", "positions"}
    if not any(row.round_ms for row in bench.scores):
        absent.add("rounds")
    if bench.passes is None:
        absent.add("widths")
    if bench.sample is None:
        absent.add("ks")
    return [name for name in CHARTS if name not in absent]


def report_html(bench: Bench, charts: Sequence[str]) -> str:
    """The whole page."""
    from jinja2 import Environment

    text = resources.files("specrt.tools.report").joinpath("report.html.jinja").read_text(encoding="utf-8")
    temperature = bench.settings.temperature
    return (
        Environment(autoescape=True, keep_trailing_newline=True)
        .from_string(text)
        .render(
            bench=bench,
            mode=f"temperature {temperature:g}, one seed" if temperature else "greedy",
            answers=answers_text(bench),
            remarks=remarks(bench),
            speeds=_speeds(bench),
            latencies=_latencies(bench),
            charts=[chart_svg(bench, name) for name in charts],
            categories=categories_table(bench),
            decode=decode_table(bench),
            by_bucket=bench.scores[-1].ratio_by_bucket.get("plain", {}),
            prompts=[(entry.name, entry.bucket, entry.num_tokens) for entry in bench.prompts],
        )
    )


Table = tuple[list[str], list[list[str]]]  # headings, rows


def _speeds(bench: Bench) -> Table:
    references = list(bench.scores[0].ratio_to)
    headings = ["method", "tokens/s", "decode", *(f"x {name}" for name in references), "accepted", "same ids"]
    rows = []
    for row in bench.scores:
        ratios = [ratio_text(row, name) for name in references]
        rate = "" if row.draft_acceptance_rate is None else f"{row.draft_acceptance_rate:.0%}"
        same = f"{row.equal_prompts} of {row.num_prompts}"
        rows.append([row.method, f"{row.tokens_per_s:.1f}", _figure(row.decode_tokens_per_s, 1), *ratios, rate, same])
    return headings, rows


def _latencies(bench: Bench) -> Table:
    headings = ["method", "first token ms", "gap p50 ms", "gap p95 ms", "tokens a round", "peak GB"]
    rows = []
    for row in bench.scores:
        gaps = [_figure(row.gap_ms.get(name), 1) for name in ("p50", "p95")]
        length, peak = _figure(row.mean_acceptance_length, 2), f"{row.peak_bytes / 1e9:.2f}"
        rows.append([row.method, f"{row.first_token_ms:.0f}", *gaps, length, peak])
    return headings, rows


def _figure(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"

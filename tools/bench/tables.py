"""A bench as tables on a terminal, with remarks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Console

from specrt.tools.bench.intervals import Interval
from specrt.tools.bench.records import Bench
from specrt.tools.bench.scores import Score, is_below
from specrt.tools.terminal.tables import figures_table

WIDTH = 150  # columns of output that is not a terminal


def print_bench(bench: Bench) -> None:
    """Print the machine, the pair, the scores and the remarks on standard output."""
    console, settings = Console(highlight=False, soft_wrap=True), bench.settings
    if not console.is_terminal:
        console.width = WIDTH
    console.print(str(bench.machine))
    mode = "greedy" if not settings.temperature else f"temperature {settings.temperature:g}, one seed"
    console.print(
        f"{bench.bundle}, K = {settings.k}; {mode}, at most {settings.max_new_tokens} tokens for each of "
        f"{len(bench.prompts)} prompts, {answers_text(bench)}"
    )
    _print_scores(console, bench.scores)
    _print_drafting(console, bench.scores)
    console.print(figures_table(*categories_table(bench)))
    if decode := decode_table(bench):
        console.print(figures_table(*decode))
    _print_passes(console, bench)
    for line in remarks(bench):
        console.print(f"- {line}", markup=False)


def answers_text(bench: Bench) -> str:
    """The number of answers per prompt."""
    return "one answer each" if bench.repeats == 1 else f"medians of up to {bench.repeats} answers"


def remarks(bench: Bench) -> list[str]:
    """Sentences on where speculation is slower, which methods returned other ids, and what is missing."""
    lines = []
    for row in bench.scores:
        if row.draft_acceptance_rate is not None and "plain" in row.ratio_to:
            lines.append(_against_plain(row))
        for difference in row.differences[:5]:
            lines.append(f"{row.method} differs from {bench.scores[0].method} at {difference}")
        if len(row.differences) > 5:
            lines.append(f"{row.method}: {len(row.differences)} of {row.num_prompts} prompts differ in all")
    most = max((row.completion_tokens for row in bench.scores), default=0)
    for row in bench.scores:
        if row.completion_tokens < most:
            lines.append(f"{row.method} returned {row.completion_tokens} tokens where others returned {most}")
    lines += [f"{name} is missing: {why}" for name, why in bench.failed.items()]
    lines += [_of_llama_cpp(started) for name, started in bench.started.items() if "gguf" in started]
    lines += [_of_genai(started) for started in bench.started.values() if "genai" in started]
    lines += [f"left out: {why}" for why in bench.skipped]
    passes = bench.passes
    if passes is not None and passes.bandwidth_bytes_per_s is not None and passes.bound_ms is None:
        lines.append(
            f"no memory bound is shown: a pass is faster than the bandwidth measured here "
            f"({passes.bandwidth_bytes_per_s / 1e9:.1f} GB/s) allows, so the machine was busy when it was measured"
        )
    if bench.is_busy:
        before, during = bench.machine.busy_percent_before, bench.busy_percent_during
        lines.append(
            f"other programs kept the CPU {before:.0f} % busy before and {during:.0f} % while it ran: these "
            "times are unreliable"
        )
    return lines


def _against_plain(row: Score) -> str:
    """Faster or slower if the whole interval is, else neither; then every category that is below 1.00."""
    ratio, interval = row.ratio_to["plain"], row.interval_of.get("plain")
    shown = with_interval(ratio, interval)
    if interval is None:
        line = f"{row.method}: {shown} plain decoding, from one prompt only"
    elif interval[0] > 1:
        line = f"{row.method} wins over plain decoding: {shown}"
    elif is_below(interval[1]):
        line = f"{row.method} LOSES to plain decoding: {shown}"
    else:
        line = f"{row.method} cannot be distinguished from plain decoding: {shown}"
    slower = row.slower_categories
    losses = {name: figures for name, figures in slower.items() if figures[1] is not None and is_below(figures[1][1])}
    unsure = {name: figures for name, figures in slower.items() if name not in losses}
    if losses:
        line += f"; it loses in {_listed(losses)}"
    if unsure:
        line += f"; below 1.00, but not distinguishable from it, in {_listed(unsure)}"
    return line


def _listed(slower: Mapping[str, tuple[float, Interval | None]]) -> str:
    parts = [f"{name} {with_interval(*figures)}" for name, figures in slower.items()]
    return ", ".join(
        part if slower[name][1] else f"{part} (one prompt)" for name, part in zip(slower, parts, strict=True)
    )


def _of_llama_cpp(started: Mapping[str, str]) -> str:
    return (
        f"llama.cpp (xllamacpp {started['xllamacpp']}) reads the quantized weights of {started['gguf']}, so its ids "
        f"may differ; its kernels: {started['kernels']}"
    )


def _of_genai(started: Mapping[str, str]) -> str:
    line = f"genai is onnxruntime-genai {started['genai']} with {started['precision']} weights of its own builder"
    return line if started["precision"] == "fp32" else f"{line}, which rounds them in another way; its ids may differ"


def ratio_text(row: Score, reference: str) -> str:
    """A method's ratio to a reference, without an interval where they are the same."""
    return with_interval(row.ratio_to[reference], row.interval_of[reference] if row.method != reference else None)


def with_interval(ratio: float, interval: Sequence[float] | None, unit: str = "x") -> str:
    """``1.50x (1.32 to 1.71)``."""
    return f"{ratio:.2f}{unit}" + (f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else "")


def _print_scores(console: Console, scores: Sequence[Score]) -> None:
    references = list(scores[0].ratio_to)
    headings = ["method", "tokens/s", "decode", *(f"x {name} (95 %)" for name in references)]
    headings += ["first token ms", "gap p50", "gap p95", "peak GB", "same ids"]
    rows = []
    for row in scores:
        ratios = [ratio_text(row, name) for name in references]
        gaps = [_figure(row.gap_ms.get(name), 1) for name in ("p50", "p95")]
        same, peak = f"{row.equal_prompts} of {row.num_prompts}", f"{row.peak_bytes / 1e9:.2f}"
        speeds = [f"{row.tokens_per_s:.1f}", _figure(row.decode_tokens_per_s, 1)]
        rows.append([row.method, *speeds, *ratios, f"{row.first_token_ms:.0f}", *gaps, peak, same])
    console.print(figures_table("tokens/s: completion tokens over all seconds, prompt included", headings, rows))


def _print_drafting(console: Console, scores: Sequence[Score]) -> None:
    rows = []
    for row in scores:
        if row.draft_acceptance_rate is not None:
            phases = [f"{row.round_ms.get(phase, 0):.1f}" for phase in ("draft", "verify", "host")]
            positions = " ".join(f"{share:.2f}" for share in row.acceptance_by_position)
            length = _figure(row.mean_acceptance_length, 2)
            rows.append([row.method, f"{row.draft_acceptance_rate:.0%}", length, positions, *phases])
    if rows:
        headings = ["method", "accepted", "tokens per round", "by position", "draft ms", "verify ms", "other ms"]
        console.print(figures_table("rounds", headings, rows))


def categories_table(bench: Bench) -> tuple[str, list[str], list[list[str]]]:
    """(title, headings, rows): speeds by category, and the speed-up over plain with its interval."""
    scores = bench.scores
    reference = list(scores[0].ratio_to)[-1:]
    counts = Counter(entry.category for entry in bench.prompts)
    rows = []
    for category in scores[0].tokens_per_s_by_category:
        cells = [
            f"{row.tokens_per_s_by_category[category]:.1f}{''.join(_against(row, reference, category))}"
            for row in scores
        ]
        rows.append([f"{category} ({counts[category]})", *cells])
    if reference:
        means = [row.mean_of_categories[reference[0]] if row.method != reference[0] else None for row in scores]
        rows.append(["mean of the categories", *("" if mean is None else with_interval(*mean) for mean in means)])
    against = f", and times {reference[0]} (95 %)" if reference else ""
    title = f"tokens/s by category{against}; in brackets the prompts, {_runs_text(bench)}"
    return title, ["category", *(row.method for row in scores)], rows


def decode_table(bench: Bench) -> tuple[str, list[str], list[list[str]]] | None:
    """(title, headings, rows): speed-up over plain by category after the first token. None if nothing is compared."""
    scores = [row for row in bench.scores if row.method != "plain" and row.decode_by_category.get("plain")]
    if not scores:
        return None
    categories = list(bench.scores[0].tokens_per_s_by_category)
    found = [[row.decode_by_category["plain"].get(category) for row in scores] for category in categories]
    rows = [
        [category, *("-" if cell is None else with_interval(*cell) for cell in cells)]
        for category, cells in zip(categories, found, strict=True)
    ]
    means = [with_interval(*row.decode_mean_of_categories["plain"]) for row in scores]
    title = "decode alone, without the prompt and the first token: times plain (95 %)"
    return title, ["category", *(row.method for row in scores)], [*rows, ["mean of the categories", *means]]


def _against(row: Score, references: Sequence[str], category: str) -> list[str]:
    """The ratio to each of ``references`` except itself."""
    return [
        f", {with_interval(row.ratio_by_category[name][category], row.interval_by_category[name].get(category))}"
        for name in references
        if name != row.method
    ]


def _runs_text(bench: Bench) -> str:
    return "one run each" if bench.repeats == 1 else f"up to {bench.repeats} runs each"


def _print_passes(console: Console, bench: Bench) -> None:
    passes = bench.passes
    if passes is None:
        return
    rows = []
    for index, ms in enumerate(passes.target_ms):
        even = passes.break_even_by_k.get(index)
        shown = "-" if index == 0 else "never" if even is None else f"{even:.2f}"
        over = [] if passes.bound_ms is None else [f"{ms / passes.bound_ms:.2f}"]
        rows.append([str(index + 1), f"{ms:.2f}", f"{ms / passes.target_ms[0]:.2f}", *over, shown])
    bound = ""
    if passes.bound_ms is not None and passes.bandwidth_bytes_per_s is not None:
        bound = f"; the memory's bound is {passes.bound_ms:.1f} ms at {passes.bandwidth_bytes_per_s / 1e9:.1f} GB/s"
    title = f"a target pass of M tokens{bound}; a drafted token takes {passes.draft_ms:.1f} ms"
    over = ["over the bound"] if bound else []
    console.print(figures_table(title, ["M", "ms", "v(M)", *over, "break-even acceptance of K = M - 1"], rows))


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"

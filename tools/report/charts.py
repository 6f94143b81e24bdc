"""The charts of a bench, with matplotlib: as SVG with text in the page's colour, and as PNG on white."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specrt.engines.storage.files import write_file
from specrt.tools.bench.records import Bench
from specrt.tools.bench.scores import Score

INK = "#010203"  # a colour that no chart uses; in SVG it is replaced by the page's
COLOURS = ("#7c8798", "#2f7ed8", "#e8862e", "#2aa775", "#b455c4", "#c9a500", "#d6455d", "#4bb3c9", "#8a6d4f", "#5c5fc7")
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "specrt",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    **{name: INK for name in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")},
}
Draw = Callable[[Any, Bench], None]


def draw_speeds(axes: Any, bench: Bench) -> None:
    """Tokens per second of every method."""
    names = [row.method for row in bench.scores]
    values = [row.tokens_per_s for row in bench.scores]
    bars = axes.barh(names[::-1], values[::-1], color=[COLOURS[i % len(COLOURS)] for i in range(len(names))][::-1])
    axes.bar_label(bars, fmt="%.1f", padding=3, color=INK)
    axes.set_xlabel("tokens/s, prompt included")
    axes.margins(x=0.12)


def draw_categories(axes: Any, bench: Bench) -> None:
    """Speed over plain by category, with 95 % intervals if there are two prompts or more."""
    rows, categories = drafting(bench), list(bench.scores[0].tokens_per_s_by_category)
    height = 0.8 / max(1, len(rows))
    for index, row in enumerate(rows):
        places = [place + index * height for place in range(len(categories))]
        ratios = row.ratio_by_category["plain"]
        axes.barh(places, [ratios[c] for c in categories], height, label=row.method, color=colour(bench, row))
        for place, category in zip(places, categories, strict=True):
            if found := row.interval_by_category["plain"].get(category):
                axes.plot(found, [place, place], color=INK, linewidth=1.2)
    axes.axvline(1.0, color=INK, linewidth=1, linestyle=":")
    axes.set_yticks([place + 0.4 - height / 2 for place in range(len(categories))], categories)
    axes.invert_yaxis()
    axes.set_xlabel("times plain decoding (left of the dotted line speculation loses)")
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(rows))


def draw_positions(axes: Any, bench: Bench) -> None:
    """The acceptance rate of each drafted token, given that those before it were accepted."""
    for row in drafting(bench):
        places = range(1, len(row.acceptance_by_position) + 1)
        axes.plot(places, row.acceptance_by_position, marker="o", label=row.method, color=colour(bench, row))
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("drafted token of the round")
    axes.set_ylabel("accepted, those before it accepted")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, loc="lower left")


def draw_rounds(axes: Any, bench: Bench) -> None:
    """Where the time of a round goes."""
    rows = [row for row in bench.scores if row.round_ms]
    left = [0.0] * len(rows)
    for index, phase in enumerate(("draft", "verify", "host")):
        widths = [row.round_ms[phase] for row in rows]
        axes.barh([row.method for row in rows], widths, left=left, label=phase, color=COLOURS[(2, 1, 0)[index]])
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("ms a round")
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3)


def draw_widths(axes: Any, bench: Bench) -> None:
    """v(M) = T(M) / T(1), and the memory bound if there is one."""
    passes = bench.passes
    if passes is None:
        return
    first = passes.target_ms[0]
    axes.plot(
        range(1, len(passes.target_ms) + 1), [ms / first for ms in passes.target_ms], marker="o", color=COLOURS[1]
    )
    if (bound := passes.bound_ms) is not None:
        axes.axhline(bound / first, color=INK, linestyle=":", linewidth=1)
        axes.annotate(f"memory's bound, {bound:.1f} ms", (1, bound / first), (0, -12), textcoords="offset points")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of the pass, M")
    axes.set_ylabel(f"v(M); T(1) is {first:.1f} ms")
    axes.xaxis.get_major_locator().set_params(integer=True)


def draw_ks(axes: Any, bench: Bench) -> None:
    """Drafted tokens of each round of the sample."""
    drafted = bench.sample.drafted if bench.sample is not None else ()
    axes.step(range(1, len(drafted) + 1), drafted, where="mid", marker="o", markersize=3, color=COLOURS[2])
    axes.set_ylim(0, max(drafted, default=0) + 1)
    axes.set_xlabel("round")
    axes.set_ylabel("drafted tokens")
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)


CHARTS: dict[str, tuple[str, float, Draw]] = {  # file name: (title, inches of height, how to draw)
    "speeds": ("Tokens per second", 2.4, draw_speeds),
    "categories": ("Speed by category", 5.2, draw_categories),
    "positions": ("Acceptance by position", 3.0, draw_positions),
    "rounds": ("Where a round's time goes", 2.2, draw_rounds),
    "widths": ("What a wider pass costs", 3.0, draw_widths),
    "ks": ("K chosen over time, in the text below", 2.4, draw_ks),
}


def drafting(bench: Bench) -> list[Score]:
    """The methods with statistics of their drafts."""
    return [row for row in bench.scores if row.draft_acceptance_rate is not None]


def colour(bench: Bench, row: Score) -> str:
    """The colour of a method, the same in every chart."""
    return COLOURS[[other.method for other in bench.scores].index(row.method) % len(COLOURS)]


def chart_svg(bench: Bench, name: str) -> str:
    """An ``<svg>`` element whose ids are unique on the page."""
    buffer = io.StringIO()
    _figure(bench, name).savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    return re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", svg)


def save_png(bench: Bench, name: str, path: Path) -> None:
    """Save the chart on white."""
    buffer = io.BytesIO()
    _figure(bench, name).savefig(buffer, format="png", dpi=110)
    write_file(path, buffer.getvalue())


def _figure(bench: Bench, name: str) -> Any:
    import matplotlib
    from matplotlib.figure import Figure

    title, height, draw = CHARTS[name]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, height), layout="constrained")
        axes = figure.add_subplot()
        draw(axes, bench)
        axes.set_title(title, loc="left")
    figure.set_label(name)
    return _Styled(figure)


class _Styled:
    """A figure that is saved in the style it was drawn in."""

    def __init__(self, figure: Any) -> None:
        self._figure = figure

    def savefig(self, *arguments: Any, **options: Any) -> None:
        import matplotlib

        with matplotlib.rc_context(STYLE):
            self._figure.savefig(*arguments, **options)

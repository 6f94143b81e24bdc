"""The record of a training in the draft's folder: figures as JSON, and a chart."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrt.engines.storage.files import write_file, write_text_file

if TYPE_CHECKING:
    from specrt.exporter.training.run import Trained
    from specrt.exporter.training.store import Store
    from specrt.exporter.training.trainer import Point
    from specrt.tools.distill.options import DistillOptions
    from specrt.tools.distill.verdict import Verdict

RECORD, CHART = "training.json", "training.svg"


def write_record(folder: Path, trained: Trained, store: Store, options: DistillOptions) -> None:
    """Write the figures of a training, and its chart where matplotlib is installed."""
    state, vocabulary, best = trained.state, trained.vocabulary, trained.state.best
    record = {
        "source": options.source,
        "kind": options.kind,
        "minutes": options.minutes,
        "tokens": options.tokens,
        "seed": options.seed,
        "text": {
            "num_tokens": store.num_tokens,
            "num_conversations": len(store.entries),
            "num_held_out": sum(entry.is_held_out for entry in store.entries),
            "seconds": store.seconds,
            "num_bytes": store.num_bytes,
        },
        "draft_vocab": None
        if vocabulary is None
        else {"num_ids": len(vocabulary.ids), "coverage": vocabulary.coverage},
        "best": None if best is None else asdict(best),
        "history": [asdict(point) for point in state.history],
    }
    write_text_file(folder / RECORD, json.dumps(record, indent=1) + "\n")
    try:
        chart = chart_svg(state.history)
    except ImportError:
        return
    write_file(folder / CHART, chart.encode("utf-8"))


def add_verdict(folder: Path, verdict: Verdict) -> None:
    """Add what was measured of the pair to the record."""
    path = folder / RECORD
    record = json.loads(path.read_text(encoding="utf-8"))
    record["verdict"] = {"text": verdict.text, "alignments": {n: asdict(found) for n, found in verdict.found.items()}}
    write_text_file(path, json.dumps(record, indent=1) + "\n")


def chart_svg(history: list[Point]) -> str:
    """Held-out acceptance by step of the chain over the training, as SVG."""
    import matplotlib
    from matplotlib.figure import Figure

    from specrt.tools.report.charts import COLOURS, STYLE

    style: Any = {name: value for name, value in STYLE.items() if not name.endswith("color")}
    buffer = io.StringIO()
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(7.2, 3.0), layout="constrained")
        axes = figure.add_subplot()
        minutes = [point.seconds / 60 for point in history]
        for index in range(len(history[0].accepted)):
            rates = [point.accepted[index] for point in history]
            axes.plot(minutes, rates, marker="o", markersize=3, color=COLOURS[index + 1], label=f"token {index + 1}")
        axes.set_ylim(0, 1)
        axes.set_xlabel("minutes of training")
        axes.set_ylabel("accepted, held out")
        axes.legend(frameon=False, loc="upper left", ncols=3)
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()

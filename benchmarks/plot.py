"""One picture of all figures that have a floor: the ratio of each, its aim, and where bare ZeroMQ stands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Row

BAR_INCHES = 0.28


def save(results: Sequence[tuple[str, str, Sequence[Row]]], path: Path) -> bool:
    """Write a PNG of the results (name, title and rows of each benchmark) to `path`. Return false, and write nothing,
    when no row has a ratio."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    bars = [(name, row) for name, _, rows in results for row in rows if row.ratio]
    if not bars:
        return False
    figure = Figure(figsize=(10, 1.6 + BAR_INCHES * len(bars)), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    places = range(len(bars))
    colours = ["#c44e52" if row.met is False else "#4c72b0" for _, row in bars]
    axes.barh(places, [row.ratio or 0.0 for _, row in bars], color=colours, height=0.7)
    for place, (_, row) in zip(places, bars, strict=True):
        if row.aim is not None and row.aim.of_ratio:
            axes.plot([row.aim.limit, row.aim.limit], [place - 0.4, place + 0.4], color="black", linewidth=2)
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # legible over an aim's mark
        axes.annotate(f"{row.ratio:.2f}", (1.04 * (row.ratio or 0.0), place), va="center", fontsize=7, bbox=behind)
    axes.axvline(1.0, color="grey", linewidth=1, linestyle="--")
    axes.set_xscale("log")
    axes.set_yticks(list(places), [f"{name}: {row.case}, {row.metric}" for name, row in bars], fontsize=7)
    axes.set_ylim(len(bars) - 0.4, -0.6)  # the first on top, no empty margin
    low, high = axes.get_xlim()
    axes.set_xlim(low, 1.5 * high)  # room for the last number
    axes.set_xlabel("times the floor measured in the same run (black mark: aim, red: missed)")
    axes.set_title("pdbus beside its floors")
    canvas: Any = FigureCanvasAgg(figure)
    canvas.print_png(path)  # `savefig` would draw it twice, because its layout is automatic
    return True

"""Plots of a comparison (matplotlib, the `bench` extra). Owns their look; computes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bus.errors import ConfigError
from pdbus.lab.compare import Result

MAX_COLUMNS = 400
FEW_TOKENS = 1_000  # shown as empty


def write_plots(results: Sequence[Result], directory: Path, title: str) -> list[Path]:
    """`ttft.png` and `load.png` in `directory`. ConfigError when matplotlib is missing or nothing can be written."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install matplotlib, or leave out --out") from None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        paths = [directory / "ttft.png", directory / "load.png"]
        for path, draw in zip(paths, (_draw_ttft, _draw_load), strict=True):
            figure = draw(pyplot, results, title)
            figure.savefig(path, dpi=120)
            pyplot.close(figure)
    except OSError as error:
        raise ConfigError(f"cannot write plots to {directory}: {error.strerror}") from None
    return paths


def _draw_ttft(pyplot: Any, results: Sequence[Result], title: str) -> Any:
    """Share of requests by TTFT; the legend from best to worst mean."""
    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    colors = pyplot.get_cmap("tab10").colors
    styles = ("-", "--", ":")
    for order, result in enumerate(sorted(results, key=lambda r: r.summary.ttft_mean_s)):
        count = len(result.ttfts)
        shares = [(number + 1) / count for number in range(count)]
        axes.plot(
            result.ttfts,
            shares,
            color=colors[order % len(colors)],
            linestyle=styles[order // len(colors) % len(styles)],
            label=f"{result.method}  (mean {result.summary.ttft_mean_s:.2f} s)",
        )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlim(left=max(0.01, min(result.ttfts[len(result.ttfts) // 100] for result in results)))
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("time to first token, seconds (log scale)")
    axes.set_ylabel("share of requests that had it by then")
    axes.set_title(f"Time to first token: further left is better\n{title}", loc="left", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=9)
    return figure


def _draw_load(pyplot: Any, results: Sequence[Result], title: str) -> Any:
    """A strip a method: ranks from top to bottom, time from left to right, colour for the tokens queued."""
    from matplotlib.colors import LogNorm

    grids = [_binned(result.load) for result in results]
    most = max(max(max(row) for row in grid) for grid in grids)
    norm = LogNorm(FEW_TOKENS, max(FEW_TOKENS * 10, most), clip=False)
    figure, panels = pyplot.subplots(
        len(results), 1, figsize=(9, 0.8 + 1.15 * len(results)), sharex=True, squeeze=False, layout="constrained"
    )
    colormap = pyplot.get_cmap("inferno_r").with_extremes(under="white", bad="white")
    for (axes,), result, grid in zip(panels, results, grids, strict=True):
        minutes = len(result.load) * result.sample_s / 60
        image = axes.imshow(
            grid,
            aspect="auto",
            interpolation="nearest",
            cmap=colormap,
            norm=norm,
            extent=(0, minutes, len(grid) - 0.5, -0.5),
        )
        axes.set_yticks([0, len(grid) - 1])
        axes.set_ylabel("rank", fontsize=8)
        axes.set_title(
            f"{result.method}: mean TTFT {result.summary.ttft_mean_s:.2f} s, fullest rank holds "
            f"{result.summary.imbalance:.1f}x the mean",
            loc="left",
            fontsize=9,
        )
    panels[-1][0].set_xlabel("minutes")
    bar = figure.colorbar(image, ax=[row[0] for row in panels], label="prompt tokens queued at a rank", pad=0.01)
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value / 1000:g} k")
    figure.suptitle(f"Load by rank over time: pale is idle, dark is a long queue\n{title}", fontsize=10)
    return figure


def _binned(load: Sequence[Sequence[int]]) -> list[list[float]]:
    """By rank, then by time in at most MAX_COLUMNS bins: the mean of each bin."""
    width = math.ceil(len(load) / MAX_COLUMNS)
    bins = [load[at : at + width] for at in range(0, len(load), width)]
    return [[sum(row[rank] for row in rows) / len(rows) for rows in bins] for rank in range(len(load[0]))]

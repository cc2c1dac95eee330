"""Plots of a comparison of methods or of a plan, as PNG files (matplotlib, the `bench` extra). Owns their appearance;
defines no figures."""

from __future__ import annotations

import math
import textwrap
import zlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bus.errors import ConfigError
from pdbus.lab.anchors import Row
from pdbus.lab.compare import Result
from pdbus.lab.metrics import estimate
from pdbus.lab.plan import Plan
from pdbus.lab.tables import COLUMNS, by_method, estimate_of, merit, written

DPI = 120
MAX_COLUMNS = 400
FEW_TOKENS = 1_000  # shown as empty
POINTS = 300  # of a curve
# Paul Tol's "muted" scheme and an orange, which colour-blind readers can distinguish too. A method looks the same in
# every plot; broken lines leave the lines below them visible.
LOOKS: dict[str, tuple[str, Any]] = {
    "round_robin": ("#CC6677", (0, (6, 2))),
    "follow_bootstrap_room": ("#882255", (0, (1, 1))),
    "total_requests": ("#88CCEE", (0, (6, 2))),
    "total_tokens": ("#332288", "-"),
    "cache_aware": ("#117733", "-"),
    "late_tokens": ("#EE7733", (0, (3, 3))),
    "late_cache": ("#DDCC77", (0, (3, 3))),
    "overwrite": ("#999933", (0, (3, 1))),
    "vllm_counts": ("#AA4499", (0, (6, 2, 1, 2))),
    "power_of_two": ("#44AA99", (0, (3, 1, 1, 1, 1, 1))),
    "oracle": ("#888888", (0, (1, 2))),
    "oracle_cache": ("#000000", (0, (1, 2))),
}
OTHERS = ("#EE3377", "#0077BB", "#CCBB44", "#AA3377")  # for other methods, by name
TEXT = 0.35  # maximal share of an axis for a figure with its interval
MARKS = ("TTFT mean", "ttft_mean_s"), ("TTFT p99", "ttft_p99_s"), ("SLO kept", "slo_attainment")


def prepare(directory: Path) -> None:
    """Make `directory` if it is missing; call it before a long run whose plots go there. Raises ConfigError when
    matplotlib is missing or the directory cannot be made."""
    try:
        import matplotlib

        matplotlib.use("Agg")
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install matplotlib, or leave out --out") from None
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write plots to {directory}: {error.strerror}") from None


def write_plots(results: Sequence[Result], directory: Path, title: str) -> list[Path]:
    """Draw `methods.png`, `ttft.png` and `load.png` in `directory`, and `throughput.png` where there are several
    numbers of sessions under way; return their paths. `title` is printed above each. Raises ConfigError as `prepare`
    does, or when a file cannot be written."""
    prepare(directory)
    from matplotlib import pyplot

    draws: dict[str, Callable[..., Any]] = {"methods": _draw_methods, "ttft": _draw_ttft, "load": _draw_load}
    if len({result.concurrency for result in results}) > 1:
        draws["throughput"] = _draw_throughput
    paths = []
    for name, draw in draws.items():
        paths.append(directory / f"{name}.png")
        figure = draw(pyplot, _best_first(results), textwrap.fill(title, 115))
        _save(pyplot, figure, paths[-1])
    return paths


def look_of(method: str) -> dict[str, Any]:
    """Return matplotlib's colour, line style and width of a method's row; `NAME (virtual)` is thinner than the live
    NAME, `NAME slo` is dotted."""
    name, *variant = method.split(" ")
    color, style = LOOKS.get(name) or (OTHERS[zlib.crc32(name.encode()) % len(OTHERS)], (0, (4, 1, 1, 1)))
    if "slo" in variant:
        style = (0, (1, 1))
    return {"color": color, "linestyle": style, "linewidth": 1.2 if "(virtual)" in variant else 2.0}


def _best_first(results: Sequence[Result]) -> dict[str, list[Result]]:
    methods = by_method(results)
    return dict(sorted(methods.items(), key=lambda item: merit(item[1])))


def _beside(mean: float, half: float, most: float) -> tuple[float, tuple[int, int], str, str]:
    """Return position, offset and alignment for the text of a dot and its interval on an axis up to `most`: on the side
    with more space, or above the dot where neither side has enough."""
    before, after = mean - half, most - mean - half
    if max(before, after) < TEXT * most:
        return min(max(mean, TEXT / 2 * most), (1 - TEXT / 2) * most), (0, 5), "center", "bottom"
    if before > after:
        return mean - half, (-7, 0), "right", "center"
    return mean + half, (7, 0), "left", "center"


def _draw_methods(pyplot: Any, methods: dict[str, list[Result]], title: str) -> Any:
    """Draw a dot and its interval for each method and figure, the best method on top."""
    several = max(map(len, methods.values())) > 1
    first = next(iter(methods.values()))
    searched = not math.isnan(estimate_of(first, "kept_rate_per_s").mean)
    marks = (("highest rate/s", "kept_rate_per_s"), *MARKS) if searched else MARKS
    figure, panels = pyplot.subplots(
        1, len(marks), figsize=(10, 1.7 + 0.34 * len(methods)), sharey=True, layout="constrained"
    )
    columns = {column.field: column for column in COLUMNS}
    for axes, (heading, field) in zip(panels, marks, strict=True):
        column = columns[field]
        bars = []
        for runs in methods.values():
            found = estimate_of(runs, field)
            half_width = 0.0 if math.isnan(found.half_width) else found.half_width
            bars.append((found.mean * column.scale, half_width * column.scale, written(column, found)))
        most = 100.0 if field == "slo_attainment" else 1.3 * max(mean + half for mean, half, _ in bars)
        for number, (method, (mean, half, text)) in enumerate(zip(methods, bars, strict=True)):
            color = look_of(method)["color"]
            axes.errorbar(mean, number, xerr=half, fmt="o", markersize=5, color=color, capsize=3)
            at, apart, across, up = _beside(mean, half, most)
            axes.annotate(
                text, (at, number), xytext=apart, textcoords="offset points", ha=across, va=up, fontsize=8,
                color="#444444",
            )  # fmt: skip
        axes.set_xlim(0, most)
        if field == "slo_attainment":
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}%")
            axes.set_xlabel("requests; further right is better", fontsize=8)
        elif field == "kept_rate_per_s":
            axes.set_xlabel("starts a second; further right is better", fontsize=8)
        else:
            axes.set_xlabel("seconds; further left is better", fontsize=8)
        axes.set_title(heading, fontsize=10)
        axes.margins(y=0.08)
        axes.grid(axis="x", alpha=0.3)
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
    panels[0].set_yticks(range(len(methods)), list(methods), fontsize=9)
    panels[0].set_ylim(len(methods) - 0.4, -0.8)
    what = ": mean and 95 % confidence interval over seeds" if several else ""
    figure.suptitle(f"Methods side by side{what}\n{title}", fontsize=9, x=0.01, ha="left")
    return figure


def _draw_ttft(pyplot: Any, methods: dict[str, list[Result]], title: str) -> Any:
    """Draw the share of requests by TTFT: the mean over seeds with its interval; the legend goes from best to worst
    mean.

    The best line of each kind is drawn last; broken lines are above solid ones, and the oracles' dots above all."""
    figure, axes = pyplot.subplots(figsize=(9, 5.6), layout="constrained")
    least = max(0.01, min(run.ttfts[len(run.ttfts) // 100] for runs in methods.values() for run in runs))
    most = max(run.ttfts[-1] for runs in methods.values() for run in runs)
    times = [least * (most / least) ** (point / POINTS) for point in range(POINTS + 1)]
    for place, (method, runs) in enumerate(methods.items()):
        shares = [estimate([bisect_right(run.ttfts, at_s) / len(run.ttfts) for run in runs]) for at_s in times]
        look = look_of(method)
        above = 300 if method.startswith("oracle") else 100 - place if look["linestyle"] == "-" else 200 - place
        mean = written(COLUMNS[0], estimate_of(runs, "ttft_mean_s"))
        axes.plot(times, [each.mean for each in shares], label=f"{method}  (mean {mean} s)", zorder=above, **look)
        if len(runs) > 1:
            low = [max(0.0, each.mean - each.half_width) for each in shares]
            high = [min(1.0, each.mean + each.half_width) for each in shares]
            axes.fill_between(times, low, high, color=look["color"], alpha=0.1, linewidth=0, zorder=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlim(least, most)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("time to first token, seconds (log scale)")
    axes.set_ylabel("share of requests that had it by then")
    bands = "; bands: 95 % confidence over seeds" if max(map(len, methods.values())) > 1 else ""
    axes.set_title(f"Time to first token: further left is better{bands}\n{title}", loc="left", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8, handlelength=4)
    return figure


def _draw_throughput(pyplot: Any, methods: dict[str, list[Result]], title: str) -> Any:
    """Draw mean TTFT and mean TPOT over requests/s, one point for each number of sessions under way: in a closed loop
    the two go together, because a method that answers sooner is asked more."""
    lines: dict[str, list[list[Result]]] = {}
    for runs in methods.values():
        lines.setdefault(runs[0].line, []).append(runs)
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4.6), layout="constrained")
    for axes, field in zip(panels, ("ttft_mean_s", "tpot_mean_s"), strict=True):
        column = next(column for column in COLUMNS if column.field == field)
        for method, points in lines.items():
            points.sort(key=lambda runs: runs[0].concurrency)
            rates = [estimate_of(runs, "requests_per_s").mean for runs in points]
            found = [estimate_of(runs, field) for runs in points]
            half = [0.0 if math.isnan(each.half_width) else each.half_width * column.scale for each in found]
            means = [each.mean * column.scale for each in found]
            axes.errorbar(rates, means, yerr=half, marker="o", markersize=4, capsize=2, label=method, **look_of(method))
            for rate, mean, runs in zip(rates, means, points, strict=True):
                axes.annotate(f"{runs[0].concurrency}", (rate, mean), xytext=(4, 4), textcoords="offset points",
                              fontsize=7, color="#444444")  # fmt: skip
        axes.set_xlabel("requests in a second; further right is better", fontsize=8)
        unit = "seconds" if field == "ttft_mean_s" else "milliseconds"
        axes.set_title(f"{column.heading[0]} mean, {unit}; further down is better", fontsize=9)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(fontsize=8, handlelength=4)
    figure.suptitle(f"Latency over throughput, by sessions under way\n{title}", fontsize=9, x=0.01, ha="left")
    return figure


def _draw_load(pyplot: Any, methods: dict[str, list[Result]], title: str) -> Any:
    """Draw a strip for each method (its first seed): ranks from top to bottom, time from left to right, colour for
    queued tokens."""
    from matplotlib.colors import LogNorm

    firsts = {method: runs[0] for method, runs in methods.items()}
    grids = [_binned(result.load) for result in firsts.values()]
    most = max(max(max(row) for row in grid) for grid in grids)
    norm = LogNorm(FEW_TOKENS, max(FEW_TOKENS * 10, most), clip=False)
    figure, panels = pyplot.subplots(
        len(firsts), 1, figsize=(9, 0.9 + 1.05 * len(firsts)), sharex=True, squeeze=False, layout="constrained"
    )
    colormap = pyplot.get_cmap("inferno_r").with_extremes(under="white", bad="white")
    for (axes,), (method, result), grid in zip(panels, firsts.items(), grids, strict=True):
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
        queued = sum(map(sum, result.load)) / sum(map(len, result.load))
        axes.set_title(
            f"{method}: mean TTFT {result.summary.ttft_mean_s:.2f} s, {queued / 1000:,.1f} k tokens queued at a rank "
            "on average",
            loc="left",
            fontsize=9,
        )
    panels[-1][0].set_xlabel("minutes")
    bar = figure.colorbar(image, ax=[row[0] for row in panels], label="prompt tokens queued at a rank", pad=0.01)
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value / 1000:g} k")
    seed = f", seed {next(iter(firsts.values())).seed}"
    figure.suptitle(
        f"Load by rank over time{seed}: pale is idle, dark is a long queue\n{title}", fontsize=9, x=0.01, ha="left"
    )
    return figure


def write_plan(plan: Plan, path: Path, title: str) -> None:
    """Draw the file `path`: the share of requests that keep both SLOs, by split and by choice. Raises ConfigError as
    `prepare` does, or when it cannot be written."""
    prepare(path.parent)
    from matplotlib import pyplot

    height = max(3.2, 0.9 + 0.3 * len(plan.tried))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, height), layout="constrained")
    splits = [found.choice for found in plan.splits]
    shares = [100 * found.kept.mean for found in plan.splits]
    left.plot([each.prefill for each in splits], shares, "o-", color="#332288")
    left.set_xticks(
        [each.prefill for each in splits], [f"{each.prefill}\n{each.decode}" for each in splits], fontsize=8
    )
    left.set_xlabel("prefill ranks, and below them decode ranks", fontsize=9)
    what = f"{splits[0].prefill_method}, {splits[0].decode_method}, order {splits[0].queue_order}"
    left.set_title(f"By split: {what}", loc="left", fontsize=9)
    for number, found in enumerate(plan.tried):
        mean = found.kept.mean
        half = 0.0 if math.isnan(found.kept.half_width) else found.kept.half_width
        ends = [[100 * min(half, mean)], [100 * min(half, 1 - mean)]]
        color = "#332288" if number else "#117733"
        right.errorbar(100 * mean, number, xerr=ends, fmt="o", markersize=5, capsize=3, color=color)
    right.set_yticks(range(len(plan.tried)), [str(found.choice) for found in plan.tried], fontsize=8)
    right.set_ylim(len(plan.tried) - 0.4, -0.6)
    right.set_title("Methods and orders at the best split, and beside it", loc="left", fontsize=9)
    for axes, axis in ((left, left.yaxis), (right, right.xaxis)):
        axis.set_major_formatter(lambda value, _: f"{value:.0f}%")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    left.set_ylim(0, 102)
    figure.suptitle(f"Requests that keep both SLOs\n{title}", fontsize=9, x=0.01, ha="left")
    _save(pyplot, figure, path)


def _save(pyplot: Any, figure: Any, path: Path) -> None:
    """Write the figure to the file `path`, and close it. It is drawn once: `savefig` would draw it twice, because its
    layout is automatic."""
    figure.set_dpi(DPI)
    try:
        figure.canvas.print_png(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    pyplot.close(figure)


def write_anchors(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw the file `path`: for each anchor with a figure of ours, the published ratio, the band that agrees with it,
    and ours. Raises ConfigError as `prepare` does, or when it cannot be written."""
    prepare(path.parent)
    from matplotlib import pyplot

    shown = [row for row in rows if row.ours is not None]
    figure, axes = pyplot.subplots(figsize=(11, 1.8 + 0.34 * len(shown)), layout="constrained")
    for place, row in enumerate(shown):
        assert row.ours is not None
        mean, half = row.ours.mean, 0.0 if math.isnan(row.ours.half_width) else row.ours.half_width
        if row.anchor.band is not None:
            low, high = row.anchor.band
            axes.plot([max(low, 0.1), high], [place, place], color="#DDDDDD", linewidth=9, solid_capstyle="butt")
            axes.plot(row.anchor.theirs, [place] * len(row.anchor.theirs), "|", color="#332288", markersize=12)
        color = {"yes": "#117733", "no": "#CC6677"}.get(row.agrees, "#888888")
        ends = [[min(half, 0.9 * mean)], [half]]
        axes.errorbar(mean, place, xerr=ends, fmt="o", markersize=5, capsize=3, color=color)
    axes.axvline(1.0, color="grey", linewidth=1, linestyle="--")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_yticks(range(len(shown)), [f"{row.anchor.name}: {row.anchor.case}" for row in shown], fontsize=7)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3)
    what = "Ratios: published (bar), what agrees with it (grey), and ours (dot: green inside, red outside)"
    figure.suptitle(f"{what}\n{title}", fontsize=9, x=0.01, ha="left")
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    pyplot.close(figure)


def _binned(load: Sequence[Sequence[int]]) -> list[list[float]]:
    """Return the load by rank, then by time in at most MAX_COLUMNS bins, as the mean of each bin."""
    width = math.ceil(len(load) / MAX_COLUMNS)
    bins = [load[at : at + width] for at in range(0, len(load), width)]
    return [[sum(row[rank] for row in rows) / len(rows) for rows in bins] for rank in range(len(load[0]))]

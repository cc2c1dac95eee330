"""The lab's table of methods and its JSON, for terminal and Markdown. Owns the columns and the format of figures;
computes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Group
from rich.table import Table
from rich.text import Text

from pdbus.lab.compare import Result
from pdbus.lab.config import LabConfig
from pdbus.lab.metrics import Estimate, Summary, estimate

PADDING = 3  # columns of the terminal beside each cell


@dataclass(frozen=True, slots=True)
class Column:
    """A column: a field of Summary, shown with `scale`, `unit` and up to `digits` decimals."""

    field: str
    heading: tuple[str, str]
    about: str
    digits: int
    scale: float = 1.0
    unit: str = ""
    closed: bool = False  # it tells methods apart where answers delay requests, and is not shown elsewhere
    optional: bool = False  # not shown where no run has this figure

    @property
    def title(self) -> str:
        """The heading in one line."""
        return " ".join(self.heading).replace("- ", "").strip()


COLUMNS = (
    Column("ttft_mean_s", ("TTFT", "mean s"), "from a request's arrival to its first token at the client, seconds", 3),
    Column("ttft_p50_s", ("TTFT", "p50"), "", 3),
    Column("ttft_p99_s", ("TTFT", "p99"), "", 2),
    Column("tpot_mean_s", ("TPOT", "mean ms"), "a token after the first, milliseconds", 2, 1e3),
    Column("tpot_p99_s", ("TPOT", "p99"), "", 2, 1e3),
    Column("slo_attainment", ("SLO", "kept"), "requests within both --slo-ttft-s and --slo-tpot-s", 1, 1e2, "%"),
    Column("kept_rate_per_s", ("highest", "rate/s"),
           "with --keep: the highest rate, in starts a second, that keeps the share; the other figures are those at it",
           3, optional=True),
    Column("kept_ratio", ("to the", "first"), "that rate over the first method's, with the same requests", 3,
           optional=True),
    Column("imbalance", ("imba-", "lance"),
           "tokens queued at the fullest rank over those at the mean rank, over the whole run: 1 is even. Not bad in "
           "itself: where queues are short, one long prompt makes it large", 2),
    Column("cache_hit_rate", ("cache", "hits"), "share of all prompt tokens that were found cached", 1, 1e2, "%"),
    Column("regret_mean_tokens", ("regret", "tokens"),
           "tokens to be computed before the first one at the rank chosen, beyond those at the rank that was best at "
           "that moment, caches included; 0 is a perfect choice each time", 0),
    Column("requests_per_s", ("req", "/s"),
           "with --concurrency: requests that came, in a second of the time that counts", 2, closed=True),
    Column("goodput_per_s", ("good", "/s"), "of those, the ones within both limits", 2, closed=True),
    Column("prefill_busy", ("busy", ""), "share of the time that prefill ranks computed", 0, 1e2, "%"),
    Column("unified_busy", ("unified", "busy"), "the same of unified ranks", 0, 1e2, "%", optional=True),
    Column("fetch_mean_s", ("fetch", "mean ms"),
           "with --link-s-per-token, --fetch-by-layer or --decode-cache: from a prompt's end until its KV cache is at "
           "the decode rank, milliseconds", 1, 1e3, optional=True),
    Column("moved_share", ("KV", "moved"), "and the share of the prompt tokens whose KV cache moved", 1, 1e2, "%",
           optional=True),
    Column("here_share", ("prefill", "here"),
           "with --decode-prefills: requests whose prompt was computed where they decode", 1, 1e2, "%", optional=True),
    Column("delta_share", ("delta", ""),
           "with --decode-cache: requests of which the decode rank fetched only what it lacked", 1, 1e2, "%",
           optional=True),
    Column("back_share", ("read", "back"),
           "those whose prefill rank first read what the decode rank had", 1, 1e2, "%", optional=True),
    Column("whole_share", ("whole", ""), "those of which the decode rank had nothing", 1, 1e2, "%", optional=True),
    Column("read_share", ("KV", "read"), "and the share of the prompt tokens whose KV cache was read so", 1, 1e2, "%",
           optional=True),
)  # fmt: skip


def by_method(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Return the results grouped by method (row), in their order."""
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result.method, []).append(result)
    return found


def columns_of(results: Sequence[Result]) -> list[Column]:
    """Return the columns for these results."""
    closed = any(result.concurrency for result in results)

    def shown(column: Column) -> bool:
        if column.optional:
            return any(not math.isnan(getattr(result.summary, column.field)) for result in results)
        return closed or not column.closed

    return [*filter(shown, COLUMNS)]


def estimate_of(runs: Sequence[Result], field: str) -> Estimate:
    """Return mean and 95 % interval of a field of `Summary` over the runs."""
    return estimate([getattr(run.summary, field) for run in runs])


def merit(runs: Sequence[Result]) -> float:
    """Return a number by which the best method is the least: the mean TTFT, or the highest rate (negative) where that
    was searched."""
    rate = estimate_of(runs, "kept_rate_per_s").mean
    return estimate_of(runs, "ttft_mean_s").mean if math.isnan(rate) else -rate


def table_of(results: Sequence[Result], title: str, width: int) -> Group:
    """Return tables for a terminal of `width` columns, with a row for each method, in the given order and in bold for
    the best by `merit`; as many tables as `width` requires."""
    methods = by_method(results)
    best = min(methods, key=lambda method: merit(methods[method])) if len(methods) > 1 else None
    cells = {column: [_cell(column, runs) for runs in methods.values()] for column in columns_of(results)}
    room = width - 1 - max(map(cell_len, methods)) - PADDING
    tables = []
    for columns in _fitting(cells, room):
        table = Table(box=SIMPLE_HEAD)
        table.add_column("method", no_wrap=True)
        for column in columns:
            table.add_column("\n".join(column.heading), justify="right", no_wrap=True)
        for number, method in enumerate(methods):
            row = (cells[column][number] for column in columns)
            table.add_row(method, *row, style="bold" if method == best else None)
        tables.append(table)
    return Group(Text(title, style="italic"), *tables, Text(_caption(methods), style="dim"))


def markdown_of(results: Sequence[Result]) -> str:
    """Return the table in Markdown, a row for each method."""
    columns = columns_of(results)
    headings = [column.title for column in columns]
    lines = [f"| method | {' | '.join(headings)} |", "| --- |" + " ---: |" * len(columns)]
    for method, runs in by_method(results).items():
        lines.append(f"| `{method}` | {' | '.join(_cell(column, runs) for column in columns)} |")
    return "\n".join(lines)


def json_of(
    results: Sequence[Result], trace: str, requests: int, config: LabConfig, options: dict[str, Any]
) -> dict[str, Any]:
    """Return the JSON object: means by method, 95 % intervals where there are several seeds, every run, and the
    settings."""
    methods = by_method(results)
    names = [field.name for field in fields(Summary)]
    estimates = {m: {name: estimate_of(runs, name) for name in names} for m, runs in methods.items()}
    return {
        "version": _version(),
        "trace": trace,
        "requests": requests,
        "ranks": config.ranks,
        "seeds": list(dict.fromkeys(result.seed for result in results)),
        "options": options,
        "settings": asdict(config),
        "methods": {
            m: {name: number_or_none(found.mean) for name, found in row.items()} for m, row in estimates.items()
        },
        "half_width_95": {
            m: {name: number_or_none(found.half_width) for name, found in row.items()} for m, row in estimates.items()
        },
        "runs": [
            {"method": result.method, "seed": result.seed}
            | {name: number_or_none(value) for name, value in asdict(result.summary).items()}
            for result in results
        ],
    }


def written(column: Column, found: Estimate) -> str:
    """Return mean and interval as text in the column's unit, rounded to at most two leading digits of the interval;
    without an interval for NaN, and `–` if the mean is NaN."""
    mean, half_width = found.mean * column.scale, found.half_width * column.scale
    if math.isnan(mean):
        return "–"
    digits = column.digits
    if half_width > 0:  # not NaN
        digits = min(digits, max(0, 1 - math.floor(math.log10(half_width))))
    interval = "" if math.isnan(half_width) else f" ±{half_width:,.{digits}f}"
    return f"{mean:,.{digits}f}{interval}{column.unit}"


def _version() -> str:
    try:
        return version("pdbus")
    except PackageNotFoundError:  # not installed but run from its source
        return "unknown"


def _cell(column: Column, runs: Sequence[Result]) -> str:
    return written(column, estimate_of(runs, column.field))


def _caption(methods: dict[str, list[Result]]) -> str:
    seeds = max(map(len, methods.values()))
    interval = f"mean of {seeds} seeds ±95 % confidence interval (Student's t); " if seeds > 1 else ""
    return f"{interval}TTFT in s, TPOT in ms, regret in tokens; what a column is: pdbus replay --help"


def _fitting(cells: dict[Column, list[str]], room: int) -> Iterator[list[Column]]:
    """Yield the columns in groups no wider than `room`, with at least one column in each."""
    group: list[Column] = []
    left = room
    for column, texts in cells.items():
        wide = max(map(cell_len, (*column.heading, *texts))) + PADDING
        if group and wide > left:
            yield group
            group, left = [], room
        group.append(column)
        left -= wide
    yield group


def number_or_none(value: float) -> float | None:
    """Return the rounded value; None for NaN, which JSON does not have."""
    return None if math.isnan(value) else round(value, 6)

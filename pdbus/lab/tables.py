"""The lab's table and its JSON. Owns their form; computes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from pdbus.lab.compare import Result
from pdbus.lab.config import LabConfig
from pdbus.lab.metrics import Summary


def table_of(results: Sequence[Result], title: str) -> Table:
    """One row a method, in the order given; the best mean TTFT stands out."""
    table = Table(title=title, title_justify="left")
    table.add_column("method", no_wrap=True)
    for heading in ("TTFT mean", "p50", "p99", "TPOT mean", "p99", "SLO", "imbalance", "cache hits", "regret", "busy"):
        table.add_column(heading, justify="right", no_wrap=True)
    best = min(result.summary.ttft_mean_s for result in results)
    for result in results:
        s = result.summary
        table.add_row(
            result.method, *_cells(s), style="bold" if s.ttft_mean_s == best and len(results) > 1 else None
        )  # fmt: skip
    table.caption = "TTFT in s, TPOT in ms, regret in tokens; busy: share of the time that prefill ranks computed"
    table.caption_justify = "left"
    return table


def markdown_of(results: Sequence[Result]) -> str:
    """The same rows for a document."""
    lines = [
        "| method | TTFT mean s | p50 | p99 | TPOT mean ms | p99 | SLO | imbalance | cache hits | regret | busy |",
        "| --- |" + " ---: |" * 10,
    ]
    lines += [f"| `{result.method}` | {' | '.join(_cells(result.summary))} |" for result in results]
    return "\n".join(lines)


def json_of(results: Sequence[Result], trace: str, requests: int, config: LabConfig) -> dict[str, Any]:
    """`trace`, `ranks`, `methods` by name, and the settings that gave them."""
    return {
        "trace": trace,
        "requests": requests,
        "ranks": config.ranks,
        "settings": asdict(config),
        "methods": {
            result.method: {name: _number(value) for name, value in asdict(result.summary).items()}
            for result in results
        },
    }


def _cells(s: Summary) -> list[str]:
    return [
        f"{s.ttft_mean_s:.3f}",
        f"{s.ttft_p50_s:.3f}",
        f"{s.ttft_p99_s:.2f}",
        _milliseconds(s.tpot_mean_s),
        _milliseconds(s.tpot_p99_s),
        f"{s.slo_attainment:.1%}",
        f"{s.imbalance:.2f}",
        f"{s.cache_hit_rate:.1%}",
        "–" if math.isnan(s.regret_mean_tokens) else f"{s.regret_mean_tokens:,.0f}",
        f"{s.prefill_busy:.0%}",
    ]


def _milliseconds(value: float) -> str:
    return "–" if math.isnan(value) else f"{value * 1e3:.2f}"


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else round(value, 6)

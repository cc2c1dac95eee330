"""The screen of `pdbus top`: figures and a view (the user's choices) become lines for any width and height. Pure.

Text from peers passes `printable` before it is shown; names of ranks cannot hold anything that needs it.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence

from rich.text import Text

from bus.runtime.cli import printable
from bus.wire.messages import Load, Status
from pdbus.fleet.conditions import held_tokens
from pdbus.fleet.figures import DEAD, Figures, RankFigures, slo_of
from pdbus.fleet.formatting import age, name_of, number, queue_words, seconds, share
from pdbus.fleet.history import WINDOW_S, History, News
from pdbus.fleet.verdict import MARKS, headline_of, shortened
from pdbus.fleet.verdict import lines_of as lines_about
from pdbus.top.table import COLUMNS, table_of
from pdbus.top.view import KEYS, View, key_of
from pdbus.top.widgets import DIM, PLAIN, bar, colour_of, fact, quantiles, spark, warning

NEWS_LINES = 4  # at least, unless ranks need the space
LEAST_ROWS = 5  # rows of the table that come before any news
TROUBLE_LINES, VERDICT_LINES = 3, 8  # sentences of one kind in full, and lines of all
_STYLES = {"bad": "bold red", "late": "bold dark_orange", "warn": "yellow", "well": "green"}
_FOOTER = (("q", "quit"), ("↑↓", "choose"), ("enter", "detail"), ("s", "sort"), ("r", "reverse"), ("p", "pause"),
           ("?", "help"))  # fmt: skip


def lines_of(history: History, view: View, width: int, height: int, *, where: str, silent: str = "") -> list[Text]:
    """Return the screen, one Text for each of `height` lines, each cut to `width` columns. `where` is the controller's
    address, `silent` the reason why there is no newer status, shown in red (empty: none)."""
    figures = history.figures()
    lines = [_title(figures, view, width, where)]
    if silent:
        lines.append(Text.assemble((f" {silent} ".ljust(width), "bold white on red")))
    if view.page == "help":
        lines += _help()
    elif figures is None:
        lines += [Text(), Text(f" waiting for a controller at {where}")]
    else:
        lines += _summary(history, figures, width)
        chosen = next((each for each in figures.ranks if key_of(each) == view.chosen), None)
        if view.page == "rank" and chosen is not None:
            lines += _detail(chosen, history, width)
        else:
            lines += _ranks_and_news(figures, list(history.news), view, width, height - len(lines) - 1)
    lines = lines[: height - 1]
    lines += [Text()] * (height - 1 - len(lines))
    lines.append(_footer(view))
    for line in lines:
        line.no_wrap = True
        line.truncate(width)
    return lines


def _title(figures: Figures | None, view: View, width: int, where: str) -> Text:
    if figures is None:
        return Text.assemble((" pdbus top", "bold"))
    status = figures.sample.status
    line = Text.assemble(
        (" pdbus top  ", "bold"), (status.controller, "bold cyan"), (f" up {seconds(status.uptime_s)}", DIM)
    )
    for state, count in sorted(
        Counter(rank.state for rank in status.ranks).items(), key=lambda item: item[0] != "ready"
    ):
        line.append("  ").append(f"{count} {state}", style=colour_of(state))
    clock = time.strftime("%H:%M:%S ", time.localtime(figures.sample.wall))
    paused = "PAUSED  " if view.paused else ""
    room = width - line.cell_len - len(paused) - len(clock)
    if room > len(where) + 4:
        line.append(f"  {where}", style=DIM)
        room -= len(where) + 2
    return line.append(" " * max(1, room)).append(paused, style="bold yellow").append(clock, style=DIM)


def _summary(history: History, figures: Figures, width: int) -> list[Text]:
    """Return two columns of figures, then failures, refusals and what is wrong."""
    status, broker = figures.sample.status, figures.sample.broker
    counts, waiting = status.counts, status.counts.get("queue_requests", 0)
    done = "-" if figures.done_s is None else f"{number(figures.done_s)}/s"
    left = [
        fact("requests", (done, "bold"), f"{counts.get('requests', 0)} live", (f"{waiting} queued", warning(waiting))),
        fact("tokens", (f"{number(figures.prompt_s)}/s in", "bold"), (f"{number(figures.output_s)}/s out", "bold")),
        fact("rooms", ("no broker answers", "red")),
    ]
    if broker is not None:
        expired = broker.counts.get("rooms_expired", 0)
        alive = f"{number(broker.counts.get('rooms_alive', 0))} alive"
        left[2] = fact("rooms", (alive, "bold"), (f"{number(expired)} expired", warning(expired)))
    right = [
        fact("ttft", *quantiles(figures.ttft)),
        fact("tpot", *quantiles(figures.tpot)),
        fact("cache", (share(figures.hits), "bold"), "prompt tokens cached"),
    ]
    for one, other in zip(left, right, strict=True):
        one.append(" " * max(1, max(38, width // 2 - 2) - one.cell_len)).append_text(other)
    if slo := slo_of(status):
        kept, missed, exempt = (f"{count} {name}" for name, count in slo.items())
        left.append(fact("in time", kept, (missed, warning(slo["missed"])), exempt, "of first tokens with an SLO"))
    left += _queue(status)
    left.append(_faults("failed", figures.failed).append(" ").append_text(_faults("refused", figures.refused)))
    if status.ranks and not any(rank.endpoint for rank in status.ranks):
        left.append(Text.assemble((" loads are shown to a viewer's or an admin's key alone", "yellow")))
    return [*left, *_verdict(history), Text()]


def _verdict(history: History) -> list[Text]:
    """Return the headline and the sentences about the fleet, the worst first, and how many more there are."""
    every = [line for line in lines_about(history, asks_broker=True) if line.kind != "note"]
    lines = [
        Text.assemble((f" {MARKS[line.level]} {printable(line.text)}", _STYLES[line.level]))
        for line in shortened(every, TROUBLE_LINES)
    ]
    level, words = headline_of(every, history)
    if len(every) != 1:
        lines.insert(0, Text.assemble((f" {MARKS[level]} {printable(words)}", f"bold {_STYLES[level]}")))
    return lines if len(lines) <= VERDICT_LINES else [*lines[:VERDICT_LINES], Text.assemble((" ...", DIM))]


def _queue(status: Status) -> list[Text]:
    """Return a line of what waits in the central queue, if anything does."""
    queue, waiting = status.queue, status.counts.get("queue_requests", 0)
    if queue is None:
        return [fact("queue", "- (this controller is older, and does not say what waits)")] if waiting else []
    return [fact("queue", *map(printable, queue_words(queue)))] if queue.requests else []


def _faults(what: str, by_name: dict[str, tuple[int, int]]) -> Text:
    """Return the total, its most frequent kinds, and the growth in the window."""
    total, new = (sum(each) for each in zip(*by_name.values(), strict=True)) if by_name else (0, 0)
    most = sorted(by_name.items(), key=lambda item: -item[1][0])[:4]
    words = [f"{printable(name)} {count}" + (f" (+{more})" if more else "") for name, (count, more) in most]
    return fact(what, (str(total), "bold red" if new else warning(total)), *([", ".join(words)] if words else ()))


def _ranks_and_news(figures: Figures, news: Sequence[News], view: View, width: int, height: int) -> list[Text]:
    ranks = view.ordered(figures.ranks)
    kept = min(len(news), NEWS_LINES, max(0, height - 2 - min(LEAST_ROWS, len(ranks))))
    silent = figures.sample.status.events is None and any(each.rank.endpoint for each in ranks)
    kept += silent
    lines = table_of(ranks, view, width, height - (kept + 1 if kept else 0))
    if kept:
        lines.append(Text())
        if silent:
            lines.append(Text.assemble((" this controller is older than this pdbus, and keeps no events", DIM)))
        for each in news[-max(kept, height - len(lines)) :]:
            clock = time.strftime("%H:%M:%S", time.localtime(each.wall))
            style = "red" if each.bad else PLAIN
            lines.append(Text.assemble((f" {clock}  {each.about:<10}  ", DIM), (printable(each.text), style)))
    return lines


def _detail(each: RankFigures, history: History, width: int) -> list[Text]:
    rank, load = each.rank, each.rank.load
    bars = max(10, min(40, width - 50))
    series = history.series(key_of(each))
    lines = [
        Text.assemble((f" {name_of(rank)}", "bold"), f"  {rank.role}  ", (rank.state, colour_of(rank.state)),
                      (f" for {age(rank.state_age_s)}", DIM)),
        fact("model", printable(rank.model), f"context {number(rank.max_context)}", f"at {rank.endpoint or '-'}"),
        fact("start", f"{age(rank.epoch_age_s)} ago", f"epoch {rank.epoch}",
             (f"{rank.restarts} restarts", warning(rank.restarts))),
        fact("report", "never" if rank.report_age_s < 0 else f"{age(rank.report_age_s)} old",
             f"since then sent: {rank.in_flight_requests} requests, {number(rank.in_flight_tokens)} tokens"),
        fact("estimate", f"{rank.estimate_requests} requests", f"{number(rank.estimate_tokens)} tokens"),
        fact("requests", (f"{number(each.requests_s)}/s", "bold"), f"{rank.outstanding} here",
             f"{rank.dispatched_total} sent", f"{rank.ended_total} ended",
             (f"{rank.failed_total} ended badly", "red" if rank.failed_total else PLAIN)),
        fact("tokens", *([] if each.prompt_s is None else [(f"{number(each.prompt_s)}/s in", "bold")]),
             (f"{number(each.output_s)}/s out", "bold"), f"cache hits {share(each.hits)}"),
        fact("ttft", *quantiles(each.ttft)),
        fact("tpot", *quantiles(each.tpot)),
    ]  # fmt: skip
    if load is not None:
        if rank.state in DEAD:
            lines.append(fact("", (f"what follows is as it last reported, {age(rank.report_age_s)} ago", "yellow")))
        slots = f" {load.running}+{load.waiting} of {load.max_running}"
        memory = f" {number(held_tokens(rank, load))} of {number(load.kv_capacity)} tokens"
        lines += [
            fact("slots").append_text(bar(each.slots, bars)).append(slots),
            fact("kv").append_text(bar(each.kv, bars)).append(memory),
            fact(
                "memory",
                f"{_reported(load.kv_pinned)} kept for other ranks",
                f"{_reported(load.kv_cached)} in its cache",
            ),
            fact(
                "moved",
                f"{_reported(load.kv_sent_bytes_total, 'B')} of KV caches sent",
                f"{_reported(load.kv_received_bytes_total, 'B')} received",
            ),
            _steps(each, load, bars),
        ]
        if None in (load.kv_pinned, load.kv_cached, load.kv_sent_bytes_total):
            lines.append(fact("", ("-: its engine, or its version, does not say it", DIM)))
    lines += [fact(found.what, (printable(found.why), "yellow")) for found in each.conditions]
    for label, values in (
        ("requests", [row.estimate_requests for row in series]),
        ("queued", [_known(row.waiting_tokens) for row in series]),
        ("kv", [_known(row.kv_tokens) for row in series]),
    ):
        if not values:
            continue
        values = values[-bars:]
        graph = Text.assemble(
            (spark(values, bars), "cyan"), (f"  {number(values[-1])}, at most {number(max(values))}", DIM)
        )
        lines.append(fact(label).append_text(graph))
    return lines


def _steps(each: RankFigures, load: Load, bars: int) -> Text:
    """Return how long its steps take, and of a prefill rank how busy it is."""
    median = "" if each.median_step_s is None else f" ({seconds(each.median_step_s)} is the median of its kind)"
    steps = f"{number(load.step)} steps, {seconds(each.step_s)} each{median}"
    if each.busy is None:
        return fact("steps", steps)
    return fact("busy").append_text(bar(each.busy, bars)).append(f" {share(each.busy)}, {steps}")


def _known(value: float) -> float:
    return 0.0 if math.isnan(value) else value


def _reported(value: int | None, unit: str = "") -> str:
    return "-" if value is None else number(value) + unit


def _help() -> list[Text]:
    keys = [Text.assemble((f" {key:<9}", "bold cyan"), what) for key, what in KEYS]
    half = (len(keys) + 1) // 2
    lines = [one.append(" " * (40 - one.cell_len)) for one in keys[:half]]
    for line, other in zip(lines, keys[half:], strict=False):
        line.append_text(other)
    lines.append(
        Text.assemble((f" Rates and latencies are of the last {WINDOW_S:.0f} seconds, graphs of minutes.", DIM))
    )
    return lines + [Text.assemble((f" {column.name:<9}", "bold"), column.meaning) for column in COLUMNS]


def _footer(view: View) -> Text:
    line = Text(" ")
    for key, what in (("enter", "back"), ("q", "quit")) if view.page != "ranks" else _FOOTER:
        line.append(f" {key} ", style="black on cyan").append(f" {what} ")
    return line

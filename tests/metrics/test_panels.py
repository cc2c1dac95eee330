"""Each panel of the dashboard shows what its cluster did."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from metrics_panels import EXPECTED, TwoLines, drawn, faults
from metrics_world import EXAMPLES, World

pytestmark = pytest.mark.timeout(600)

PLANTED = [  # what a slip of the pen makes of a query
    ("Requests", 'event="done"', 'event="submitted"'),
    ("Requests", "sum by (code)", "max by (code)"),
    ("Time to first token", 'role!="prefill"', ""),
    ("Time per output token", "tpot", "ttft"),
    ("Tokens", "admitted", "computed"),
    ("Tokens", 'role!="decode"', ""),
    ("Live and waiting", "sum(", "max("),
    ("Prefix-cache hits", "cached_tokens", "computed_tokens"),
    ("States", "max by (role, state, instance, dp_rank) (pdbus_controller_rank_state)", "pdbus_controller_rank_state"),
    ("Wanted roles", "max by", "sum by"),
    ("Restarts", "max by", "sum by"),
    ("Estimated load", "max by", "sum by"),
    ("Forward steps, p99 by rank", "instance, ", ""),
    ("Engine busy", "busy_seconds_total", "steps_total"),
    ("KV caches moved", "received", "sent"),
    ("Refused messages", "by (reason)", ""),
    ("Rooms", "registered", "refreshed"),
]


def panels() -> dict[str, dict[str, str]]:
    """The queries of dashboard.json by title and legend."""
    board: dict[str, Any] = json.loads((EXAMPLES / "dashboard.json").read_text(encoding="utf-8"))
    return {
        panel["title"]: {target["legendFormat"]: target["expr"] for target in panel["targets"]}
        for panel in board["panels"]
        if panel["type"] != "row"
    }


def test_each_line_of_each_panel_has_an_expected_value() -> None:
    there = {title: set(queries) for title, queries in panels().items()}
    assert {title: set(expected) for title, expected in EXPECTED.items()} == there
    assert all(looks for expected in EXPECTED.values() for looks in expected.values())


def wrong_in(title: str, queries: dict[str, str], world: World) -> list[str]:
    wrong = []
    for legend, query in queries.items():
        for look in EXPECTED[title][legend]:
            chapter = world.chapters[look.chapter]
            at = chapter.at[look.moment] if look.moment else chapter.end
            interval = f"{(at - chapter.start) * 1000:.0f}ms"
            shown = drawn(legend, world.ask(query.replace("$__rate_interval", interval), at))
            where = f"{look.chapter}{f', {look.moment}' if look.moment else ''}"
            wrong += [f"{where}: {fault}" for fault in faults(look.lines(chapter), shown)]
    return wrong


@pytest.mark.parametrize("title", panels())
def test_it_shows_what_happened(title: str, world: World) -> None:
    wrong = wrong_in(title, panels()[title], world)
    assert not wrong, "\n".join([title, *wrong])


@pytest.mark.parametrize(("title", "right", "planted"), PLANTED)
def test_a_planted_fault_is_noticed(title: str, right: str, planted: str, world: World) -> None:
    queries = panels()[title]
    assert any(right in query for query in queries.values())
    with suppress(TwoLines):
        assert wrong_in(title, {legend: query.replace(right, planted) for legend, query in queries.items()}, world)

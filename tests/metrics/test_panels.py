"""Each panel of the dashboard shows what its cluster did."""

from __future__ import annotations

import json
from typing import Any

import pytest
from metrics_panels import EXPECTED, drawn, faults
from metrics_world import EXAMPLES, World

pytestmark = pytest.mark.timeout(240)


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


@pytest.mark.parametrize("title", panels())
def test_it_shows_what_happened(title: str, world: World) -> None:
    wrong = []
    for legend, query in panels()[title].items():
        for look in EXPECTED[title][legend]:
            chapter = world.chapters[look.chapter]
            at = chapter.at[look.moment] if look.moment else chapter.end
            interval = f"{(at - chapter.start) * 1000:.0f}ms"
            shown = drawn(legend, world.ask(query.replace("$__rate_interval", interval), at))
            where = f"{look.chapter}{f', {look.moment}' if look.moment else ''}"
            wrong += [f"{where}: {fault}" for fault in faults(look.lines(chapter), shown)]
    assert not wrong, "\n".join([title, *wrong])

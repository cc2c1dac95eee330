"""Timelines opened in Perfetto: it takes all that was written, without an error, and no arrow goes backwards."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from perfetto import Perfetto

from bus.runtime.cli import printable
from bus.wire.messages import RankStep, RankWork
from pdbus.launcher import Cluster, ClusterSpec
from pdbus.timeline.facts import RankTrack, Timeline
from pdbus.timeline.output import TimelineFile

HOSTILE = '</script><img src=x onerror=alert(1)>"\\\n\x00\u202e{{}}'
ERRORS = "select name, severity, value from stats where severity in ('error', 'data_loss') and value > 0"
ARROWS = """
select count(*), min(target.ts - source.ts - source.dur) from flow
join slice source on source.id = slice_out join slice target on target.id = slice_in
"""


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[[Path], Perfetto]]:
    pages: list[Perfetto] = []

    def go(file: Path) -> Perfetto:
        pages.append(Perfetto(browser, file))
        return pages[-1]

    yield go
    for each in pages:
        each.close()
        assert not each.errors


def written(file: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    data = file.read_bytes()
    found = json.loads(gzip.decompress(data) if file.suffix == ".gz" else data)
    return found["traceEvents"], found["otherData"]


def pdbus(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pdbus", *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def check(page: Perfetto, file: Path) -> None:
    """The page has what was written, and nothing was wrong with it."""
    events, about = written(file)
    assert page.query(ERRORS) == []
    phases = Counter(each["ph"] for each in events)
    assert page.query("select count(*) from slice") == [[about["slices"]]] == [[phases["X"] + phases["i"]]]
    assert page.query("select count(*) from counter") == [[about["counters"]]] == [[phases["C"]]]
    ((arrows, least_ns),) = page.query(ARROWS)
    assert arrows == about["flows"] == phases["s"]
    assert least_ns is None or least_ns >= 0, "an arrow goes backwards"
    named = {each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert {name for (name,) in page.query("select name from process where name is not null")} >= named
    counters = {name for (name,) in page.query("select distinct name from counter_track")}
    assert counters <= {"decode batch", "KV tokens", "running requests", "waiting requests"}
    notes = [name for (name,) in page.query("select name from slice where category = 'note' order by id")]
    assert notes == [printable(note) for note in about["notes"]]


def picture(page: Perfetto, name: str) -> None:
    """Unfold both ends of an arrow that is in the middle, look at it, and keep the picture where PICTURES names a
    folder."""
    page.show_an_arrow()
    shown = page.page.get_by_text("Following Flows")
    shown.wait_for()
    if folder := os.environ.get("PICTURES"):
        page.page.screenshot(path=Path(folder) / f"timeline-{name}.png")


def test_a_virtual_run(opened: Callable[[Path], Perfetto], tmp_path: Path) -> None:
    file = tmp_path / "virtual.json.gz"
    pdbus("replay", "--duration-s", "30", "--methods", "cache_aware", "--queue-order", "slo", "--decode-cache",
          "--timeline", str(file))  # fmt: skip
    check(page := opened(file), file)
    assert page.query("select count(*) from slice where category = 'step'")[0][0] > 1000
    picture(page, "virtual")


def test_a_live_cluster(opened: Callable[[Path], Perfetto], tmp_path: Path) -> None:
    file, over = tmp_path / "live.json", Event()

    def ask(number: int) -> None:
        while not over.is_set():
            number += 1
            prompt = [3 + each % 500 for each in range(number, number + 40 + number * 331 % 4000)]
            client.generate_tokens(prompt, max_tokens=5 + number % 30, leg="pair").tokens()

    with Cluster(ClusterSpec(prefill=2, decode=2, engine="sim")) as cluster, cluster.client() as client:
        threads = [Thread(target=ask, args=(1000 * at,)) for at in range(4)]
        for thread in threads:
            thread.start()
        try:
            pdbus("record", "3s", str(file), "--controller", cluster.controller)
        finally:
            over.set()
            for thread in threads:
                thread.join()
    check(page := opened(file), file)
    for kind in ("step", "chunk", "fetch"):
        assert page.query(f"select count(*) from slice where category = '{kind}'")[0][0] > 2, kind
    picture(page, "live")


def test_hostile_names_and_clocks_that_disagree(opened: Callable[[Path], Perfetto], tmp_path: Path) -> None:
    """A decode rank's clock is 20 ms late, and what they know of each other's is 1 ms."""
    file = tmp_path / "hostile.json"
    prefill = RankTrack(HOSTILE, 0, "prefill", 0, 1_000, [RankStep(1, 10_000, 20_000, 0, 64, 0)])
    prefill.work = [RankWork("chunk", HOSTILE, 1, 10_000, 20_000, 64, 0, 64)]
    decode = RankTrack("decode-0", 0, "decode", 0, 1_000, [RankStep(1, 15_000, 9_000, 1, 0, 64)])
    decode.work = [RankWork("fetch", HOSTILE, 1, 10_500, 3_000, 64, 0, 64, HOSTILE, 0)]
    with TimelineFile(file) as out:
        counts = out.write(Timeline(HOSTILE, [prefill, decode]))
    assert (counts.flows, counts.clamped, counts.beyond) == (1, 1, 1)
    check(page := opened(file), file)
    ((cut_us,),) = page.query("select int_value from args where key = 'args.cut by µs'")
    assert cut_us == 30_000 - 10_500
    assert page.page.locator("img[src=x]").count() == 0

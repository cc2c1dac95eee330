"""Checks of trace events, as a timeline's file has them."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any


def check_slices_and_arrows(events: list[dict[str, Any]]) -> None:
    """No two slices of a thread overlap, a thread is of one process and has a name, and no arrow goes backwards."""
    named = [each["tid"] for each in events if each["name"] == "thread_name"]
    assert sorted(named) == sorted({each["tid"] for each in events if each["ph"] in "Xi"})
    threads, pids = defaultdict(list), defaultdict(set)
    for each in events:
        if each["ph"] == "X":
            assert each["ts"] >= 0 < each["dur"]
            threads[each["tid"]].append((each["ts"], each["ts"] + each["dur"]))
            pids[each["tid"]].add(each["pid"])
    assert all(len(found) == 1 for found in pids.values())
    for spans in threads.values():
        assert all(before[1] <= after[0] for before, after in pairwise(sorted(spans)))
    ends = {(each["tid"], each["ts"]): each["ts"] + each["dur"] for each in events if each["ph"] == "X"}
    arrows = defaultdict(dict)
    for each in events:
        if each["ph"] in "sf":
            arrows[each["id"]][each["ph"]] = each["tid"], each["ts"]
    for arrow in arrows.values():
        assert arrow["f"] in ends  # it ends at the beginning of a slice
        assert ends[arrow["s"]] <= arrow["f"][1]

"""What a fleet's page is sent: deltas that add up to a snapshot, readers at their own pace, and what is said at its
top."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fleet_world import HOSTILE, SITUATIONS, ScriptedSource, filled
from msgspec.structs import replace
from status_world import rank, sample

from bus.wire.messages import ListedRequest, RankStatus, RequestLists, Status
from pdbus.fleet.figures import Sample
from pdbus.fleet.frames import NAMES_OF, RATED, Frames, host_of
from pdbus.fleet.history import History
from pdbus.fleet.readers import GONE_S, LATE_S, MAX_READERS, Reader, Readers
from pdbus.fleet.verdict import ALIKE, Line, lines_of, shortened


def event_of(message: bytes) -> tuple[str, dict[str, Any]]:
    assert message.endswith(b"\n\n")
    assert message.count(b"\n") == 3, "an event of two lines"
    first, second = message.decode().strip().split("\n")
    return first.removeprefix("event: "), json.loads(second.removeprefix("data: "))


class Page:
    """Applies messages as the page's script does."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[int, list[Any]]] = {}
        self.rest: dict[str, list[Any]] = {}

    def apply(self, message: bytes) -> dict[str, Any]:
        event, body = event_of(message)
        if event == "snapshot":
            self.tables = {"facts": {}, "figures": {}, "rates": {}}
            self.rest = {"rows": [], "news": []}
        for number in body.get("gone", ()):
            for table in self.tables.values():
                table.pop(number, None)
        for kind, table in self.tables.items():
            table.update({row[0]: row for row in body.get(kind, ())})
        for kind, all_of in self.rest.items():
            all_of += body.get(kind, ())
        return body


def churning(now: float) -> list[RankStatus]:
    """A rank joins each three seconds and one goes each five; some are busy, some idle."""
    names = range(int(now / 5), 6 + int(now / 3))
    return [rank(f"decode-{n}", load={"step": int(now * 10) if n % 2 else 1, "running": n % 4}) for n in names]


def test_a_snapshot_and_the_deltas_after_it_are_what_a_later_snapshot_says() -> None:
    frames, page = Frames(), Page()
    for second in range(40):
        delta = frames.add(sample(float(second), *churning(second)))
        if second == 3:
            page.apply(frames.snapshot())
        elif second > 3:
            page.apply(delta)
    fresh = Page()
    fresh.apply(frames.snapshot())
    assert page.tables == fresh.tables
    assert len(fresh.tables["facts"]) == len(churning(39))
    assert page.rest["rows"] == fresh.rest["rows"]
    assert all(len(row) == len(NAMES_OF[kind]) for kind, table in fresh.tables.items() for row in table.values())
    assert all(len(row) == len(NAMES_OF["row"]) for row in fresh.rest["rows"])


def test_a_rank_that_does_nothing_is_not_sent_again_and_a_snapshot_is_encoded_once() -> None:
    frames = Frames()
    frames.add(sample(0.0, rank(), rank("decode-1")))
    for second in range(1, 31):  # until its rates are of a whole window
        body = event_of(frames.add(sample(float(second), rank(), rank("decode-1", load={"running": second}))))[1]
    assert [row[0] for row in body["figures"]] == [1]
    assert "facts" not in body
    assert "rates" not in body
    assert frames.snapshot() is frames.snapshot()
    before = frames.snapshot()
    frames.add("the controller does not answer; what is shown is old")
    assert frames.snapshot() is not before
    assert event_of(frames.snapshot())[1]["head"]["silent"].startswith("the controller does not answer")


def test_of_many_ranks_rates_come_in_turns_and_of_each_within_seconds() -> None:
    frames, seen = Frames(), set()
    ranks = [rank(f"decode-{n}") for n in range(3 * RATED + 10)]
    for second in range(4):
        rated = event_of(frames.add(sample(float(second), *ranks)))[1]["rates"]
        assert len(rated) <= RATED
        seen |= {row[0] for row in rated}
    assert len(seen) == len(ranks)


def test_each_event_is_sent_once() -> None:
    frames, page = Frames(), Page()
    source = ScriptedSource("dead", 8)
    frames.add(source.at(-70.0))
    page.apply(frames.snapshot())
    for second in range(-69, -40):
        page.apply(frames.add(source.at(float(second))))
    assert [news[3:] for news in page.rest["news"]] == [
        ["", "controller"], ["prefill-0/0", "rank"], ["", "requests"]
    ]  # fmt: skip
    assert "its lease of 4 s has ended" in page.rest["news"][1][1]


def test_lists_of_requests_are_sent_where_they_changed_and_all_of_them_in_a_snapshot() -> None:
    frames, lists = Frames(), RequestLists((ListedRequest("r", 5_500_000, 0.0, "m", 9, 1),))
    for at, requests in enumerate((None, lists, lists, replace(lists, slowest=lists.running), RequestLists())):
        its = sample(float(at), rank())
        body = event_of(frames.add(Sample(its.at, its.wall, replace(its.status, requests=requests))))[1]
        assert body["head"]["requests"] == (requests is not None)
        row = ["r", 5.5, None, "m", 9, 1, [], False]
        changed = {0: None, 1: {"running": [row], "waiting": [], "slowest": []}, 2: None, 3: {"slowest": [row]}}
        assert body.get("requests") == changed.get(at, {"running": [], "slowest": []})
        assert len(row) == len(NAMES_OF["request"])
        if at == 3:
            whole = event_of(frames.snapshot())[1]["requests"]
            assert whole == {"running": [row], "waiting": [], "slowest": [row]}


def test_the_line_of_an_slo_is_the_readers_own_or_the_controllers() -> None:
    its = sample(0.0, rank())
    status = replace(its.status, ttft_slo_s=2.0, tpot_slo_s=0.1)
    for own, drawn in ((0.0, (2.0, 0.1)), (0.5, (0.5, 0.1))):
        head = event_of(Frames(ttft_slo_s=own).add(Sample(its.at, its.wall, status)))[1]["head"]
        assert (head["ttft_slo_s"], head["tpot_slo_s"]) == drawn


def test_names_are_in_it_as_they_are_and_a_host_is_that_of_tcp() -> None:
    _, frames = filled("hostile", 2, 5)
    body = event_of(frames.snapshot())[1]
    assert {row[NAMES_OF["facts"].index("host")] for row in body["facts"]} == {HOSTILE}
    assert (host_of("tcp://[::1]:5000"), host_of("ipc:///tmp/x"), host_of("tcp://h:1")) == ("::1", "", "h")


# --- readers ---------------------------------------------------------------------------------------------------------


def reading() -> tuple[Readers, Reader]:
    readers = Readers()
    reader = readers.enter(lambda: None)
    assert reader is not None
    return readers, reader


def test_a_reader_that_keeps_up_gets_each_message_once() -> None:
    readers, reader = reading()
    readers.publish(b"0", 0.0)
    assert reader.take(lambda: b"all", 0.0) == b"all", "in which 0 is"
    for second in range(1, 20):
        readers.publish(b"%d " % second, float(second))
        readers.publish(b"x ", second + 0.1)
        assert reader.take(lambda: b"never", second + 0.2) == b"%d x " % second
        assert reader.take(lambda: b"never", second + 0.2) == b""
    assert not readers.too_late(100.0), "it waits, and nothing came"


def test_a_reader_five_seconds_behind_gets_a_snapshot_and_keeps_no_more_bytes() -> None:
    readers, reader = reading()
    assert reader.take(lambda: b"old", 0.0) == b"old"
    most = 0
    for second in range(1, int(LATE_S) + 10):
        readers.publish(bytes(1000), float(second))
        most = max(most, reader.kept)
    assert most < 1000 * LATE_S
    assert reader.kept == 0
    assert reader.take(lambda: b"new", 16.0) == b"new"
    readers.publish(b"next", 16.5)
    assert reader.take(lambda: b"never", 17.0) == b"next", "it has caught up"


def test_a_reader_twenty_seconds_behind_is_to_be_cut_off() -> None:
    readers, reader = reading()
    other = readers.enter(lambda: None)
    assert other is not None
    assert reader.take(lambda: b"all", 0.0)
    assert other.take(lambda: b"all", 0.0)
    other.take(lambda: b"", 1.0)
    assert readers.too_late(GONE_S - 0.1) == []
    assert readers.too_late(GONE_S) == [reader]


def test_there_are_as_many_readers_as_there_may_be_and_all_end() -> None:
    readers, first = reading()
    woken: list[int] = []
    for number in range(1, MAX_READERS):
        assert readers.enter(lambda number=number: woken.append(number)) is not None
    assert readers.enter(lambda: None) is None
    readers.leave(first)
    assert readers.enter(lambda: None) is not None
    readers.end()
    assert woken == list(range(1, MAX_READERS))


# --- what is said ----------------------------------------------------------------------------------------------------


def said(situation: str, ranks: int = 8) -> list[Line]:
    source, frames = filled(situation, ranks, 75)
    frames.add(source.at(0.0))
    return lines_of(frames.history, asks_broker=True)


@pytest.mark.parametrize("ranks", [8, 128])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_each_situation_is_said_and_no_other(situation: str, ranks: int) -> None:
    kinds = {line.kind for line in said(situation, ranks)}
    expected = {
        "slow": {"slow"}, "full": {"full"}, "queue": {"queue", "full"}, "dead": {"dead"}, "empty": {"unserved"},
        "old": {"note"}, "hidden": {"note"},
    }  # fmt: skip
    assert kinds == expected.get(situation, set())


def test_the_sentences() -> None:
    (dead,) = said("dead")
    assert dead.text.startswith("prefill-0/0 has been lost for 60s (its connection closed")
    assert dead.text.endswith("; 3 of 4 prefill ranks are ready")
    assert dead.rank == ("prefill-0", 0)
    queue = said("queue")[0]
    assert queue.text.startswith(
        "241 requests wait at the controller, 210 of them for room at a decode rank; the first"
    )
    assert said("empty")[0].text == "no rank has joined this controller"
    assert "older than this page" in said("old")[0].text
    assert "a viewer's or an admin's key" in said("hidden")[0].text


def test_sentences_that_are_alike_are_few_and_the_worst_come_first() -> None:
    lines = shortened(said("queue", 128))
    assert [line.kind for line in lines] == ["queue", *["full"] * (ALIKE + 1)]
    assert lines[-1].text == f"and {64 - ALIKE} more are full"


def test_slos_that_are_missed_are_said_where_enough_were_counted() -> None:
    def said(kept: int, missed: int, seconds: int = 30) -> list[str]:
        history = History()
        for at in sorted({0, seconds - 30, seconds}):
            share = at / seconds
            counts = {"ttft_slo_kept": 5 + round(kept * share), "ttft_slo_missed": 900 + round(missed * share)}
            history.add(sample(float(at), rank(), ttft_slo=1, **counts))
        return [line.text for line in lines_of(history, asks_broker=False) if line.kind == "slo"]

    assert said(80, 20) == ["20% of first tokens missed their SLO in the last minute"]
    assert said(3, 3) == said(95, 5) == []
    assert said(60, 20, seconds=300) == [], "6 and 2 of them in the last minute"


def test_a_broker_that_does_not_answer_is_said_where_one_was_asked() -> None:
    history = History()
    one = sample(0.0, rank())
    history.add(Sample(one.at, one.wall, Status(1, "c", 1, 1.0, {}, {}, one.status.ranks, events=()), None))
    assert [line.kind for line in lines_of(history, asks_broker=True)] == ["broker"]
    assert lines_of(history, asks_broker=False) == []


@pytest.mark.parametrize(
    ("failed", "said"),
    [
        ({"overloaded": 30, "peer_lost": 2},
         "32 of 1,032 requests that ended in the last 20 seconds failed or were refused: 30 with the code overloaded, "
         "2 with the code peer_lost"),
        ({"too_many": 40, "cancelled": 500},  # its clients ask for more than they may: they are refused all the same
         "40 of 1,040 requests that ended in the last 20 seconds were refused: 40 with the code too_many"),
        ({"overloaded": 9}, ""),  # too few
        ({"overloaded": 10}, ""),  # not one in a hundred
        ({"cancelled": 500, "bad_request": 90, "overloaded": 9}, ""),  # clients'
    ],
)  # fmt: skip
def test_failures_are_said_where_they_are_more_than_one_in_a_hundred(failed: dict[str, int], said: str) -> None:
    def lines(*samples: tuple[float, int, dict[str, int]]) -> list[str]:
        history = History()
        for at, done, codes in samples:
            counts = {f"failed_{code}": count for code, count in codes.items()}
            history.add(sample(at, rank(), done=done, **counts))
        return [line.text for line in lines_of(history, asks_broker=False) if line.kind == "failing"]

    over = {code: count + 5000 * (code == "overloaded") for code, count in ({"overloaded": 0} | failed).items()}
    assert lines((0.0, 0, {"overloaded": 5000}), (10.0, 1000, over)) == ([said] if said else [])
    assert lines((0.0, 0, {"overloaded": 5000}), (10.0, 1000, over), (15.0, 1000, over), (40.0, 1000, over)) == []

"""A live recording, with a controller that answers at once: what it asks, and what it makes of the answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from threading import Event
from typing import Any, cast

import pytest
from msgspec.structs import replace

from bus.errors import PeerLost, RequestFailed
from bus.wire.codes import Code
from bus.wire.messages import (
    ControllerEvent,
    Load,
    MemberKey,
    QueueStatus,
    RankStatus,
    RankStep,
    RankWork,
    RecordReply,
    Status,
)
from pdbus.timeline import live
from pdbus.timeline.facts import Timeline
from pdbus.timeline.live import LEASE_S, AskingClient, LiveRecording, record

AHEAD_US = 7_000_000_000  # the controller's clock
LOAD = Load(seq=1, step=1, running=2, waiting=3, waiting_tokens=0, kv_tokens=40, kv_capacity=100, max_running=4)


def rank(dp_rank: int, epoch: int = 1) -> RankStatus:
    return RankStatus("d", dp_rank, "decode", "m", "ready", epoch, "ipc:///d", 100, 0.0, LOAD, *(0,) * 8)


def status(*ranks: RankStatus, epoch: int = 5, events: tuple[int, ...] = (), waiting: int = 0) -> Status:
    known = tuple(ControllerEvent(number, now_us() + AHEAD_US, "rank_joined") for number in events)
    queue = QueueStatus(waiting, 0.0)
    return Status(1, "c", epoch, 1.0, {}, {}, ranks or (rank(0),), events=known, queue=queue)


def now_us() -> int:
    return time.time_ns() // 1000


def step(number: int, at_us: int | None = None) -> RankStep:
    return RankStep(number, (now_us() + AHEAD_US + 100) if at_us is None else at_us, 50, 1, 0, 9)


class Controller:
    """The client's side of it: `replies` and `statuses` are made when they are asked for; an exception is the
    outcome."""

    def __init__(self) -> None:
        self.asked: list[tuple[MemberKey, float, int, int]] = []
        self.events_from: list[int] = []
        self.reply: Callable[[int], RecordReply | Exception] = lambda steps_from: RecordReply(1)
        self.status: Status | Exception = status()

    def ask_status(self, events_from: int) -> Future[Any]:
        self.events_from.append(events_from)
        return _done(self.status)

    def ask_record(self, key: MemberKey, lease_s: float, steps_from: int, work_from: int) -> Future[Any]:
        self.asked.append((key, lease_s, steps_from, work_from))
        reply = self.reply(steps_from)
        if isinstance(reply, RecordReply):
            reply = replace(reply, at_us=now_us() + AHEAD_US, epoch=reply.epoch or 1)
        return _done(reply)


def _done(outcome: Any) -> Future[Any]:
    answer: Future[Any] = Future()
    if isinstance(outcome, Exception):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)
    return answer


@pytest.fixture
def controller() -> Controller:
    return Controller()


def begun(controller: Controller, *ranks: RankStatus) -> LiveRecording:
    return LiveRecording(cast(AskingClient, controller), status(*ranks, events=(1, 2)), "t")


def test_each_poll_asks_from_where_the_last_one_ended_and_again_while_there_is_more(controller: Controller) -> None:
    recording = begun(controller)
    work = RankWork("chunk", "r", 1, now_us() + AHEAD_US + 100, 5, 4, 0, 4)
    replies = iter([
        RecordReply(1), RecordReply(1, (step(5), step(6)), (work,), 0, True), RecordReply(1, (step(7),), (work,), 1)
    ])  # fmt: skip
    controller.reply = lambda steps_from: next(replies)
    recording.poll()
    recording.poll(last=True)
    assert controller.asked == [
        (("d", 0), LEASE_S, 0, 0), (("d", 0), 0.0, 0, 0), (("d", 0), 0.0, 7, 1),
    ]  # fmt: skip
    (track,) = recording.done().ranks
    assert [each.number for each in track.steps] == [5, 6, 7]
    assert track.work == [work, work]
    assert track.note == ""


def test_what_a_rank_no_longer_had_is_counted(controller: Controller) -> None:
    recording = begun(controller)
    work = RankWork("chunk", "r", 1, now_us() + AHEAD_US, 5, 4, 0, 4)
    replies = iter([RecordReply(1, (step(5),), (work,), 0), RecordReply(1, (step(9), step(11)), (), 3)])
    controller.reply = lambda steps_from: next(replies)
    recording.poll()
    recording.poll()
    note = recording.done().ranks[0].note
    assert note == "6 steps and pieces of work are missing: they came faster than they were read"


def test_a_new_start_of_a_rank_is_read_from_its_beginning_once_and_a_new_rank_too(controller: Controller) -> None:
    recording = begun(controller)
    made = {1: (step(1), step(2), step(3)), 2: (step(1), step(2), step(3), step(4))}
    start = 1
    controller.reply = lambda steps_from: RecordReply(
        1, tuple(each for each in made[start] if each.number >= steps_from), work_first=0, epoch=start
    )
    recording.poll()
    start = 2
    controller.asked.clear()
    recording.poll()
    assert [steps_from for _, _, steps_from, _ in controller.asked] == [4, 0], "it is asked again at once"
    controller.status = status(rank(0, epoch=2), rank(1))
    recording.poll()
    recording.poll()
    first, second = recording.done().ranks
    assert (first.name, first.steps, first.note) == ("d/0", [*made[1], *made[2]], "")
    assert (second.name, second.steps) == ("d/1", [*made[2]])


def test_loads_queue_and_events_are_by_the_controllers_clock_and_each_event_comes_once(controller: Controller) -> None:
    recording = begun(controller)
    controller.status = status(events=(3, 4), waiting=2)
    recording.poll()
    controller.status = status(events=(5,))
    recording.poll()
    controller.status = status(epoch=6, events=(1,))  # a new start
    recording.poll()
    recording.poll()
    assert controller.events_from == [3, 5, 6, 2]
    timeline = recording.done()
    assert [event.number for event in timeline.events["c"]] == [3, 4, 5, 1, 1]
    (track,) = timeline.ranks
    assert [(each.running, each.waiting, each.kv_tokens) for each in track.samples] == [(2, 3, 40)] * 4
    assert [requests for _, requests in timeline.queues["c"]] == [2, 0, 0, 0]
    for at_us in (track.samples[0].at_us, timeline.queues["c"][0][0]):
        assert abs(at_us - now_us() - AHEAD_US) < 10_000_000
    assert not timeline.notes


def test_what_another_reader_had_recorded_before_is_left_out(controller: Controller) -> None:
    recording = begun(controller)
    ahead_us = 4_000_000
    early, late = (step(number, now_us() + AHEAD_US + ahead_us + by) for number, by in ((1, -9_000_000), (2, 500_000)))
    controller.reply = lambda steps_from: RecordReply(1, (early, late), offset_us=ahead_us, rtt_us=8)
    recording.poll()
    (track,) = recording.done().ranks
    assert track.steps == [late]
    assert (track.offset_us, track.rtt_us) == (ahead_us, 8)


def test_an_engine_that_does_not_say_its_steps_is_said(controller: Controller) -> None:
    recording = begun(controller)
    controller.reply = lambda steps_from: RecordReply(1, no_steps=True)
    recording.poll()
    (track,) = recording.done().ranks
    assert track.note.startswith("its engine does not say its steps: here are prompts")


def test_ranks_that_do_not_record_or_answer_are_said(controller: Controller) -> None:
    recording = begun(controller, rank(0), rank(1), rank(2))
    outcomes: list[RecordReply | Exception] = [
        RecordReply(1, records=False), RecordReply(1, silent=True), RequestFailed("bad_rank", "it is forgotten")
    ]  # fmt: skip
    replies = iter([*outcomes, RecordReply(1, records=False), PeerLost("no answer"), outcomes[2]])
    controller.reply = lambda steps_from: next(replies)
    recording.poll()
    recording.poll()
    assert [track.note for track in recording.done().ranks] == [
        "its version does not say what it does: here is its load alone, each 0.5 s",
        "it did not answer 2 of 2 questions",
        "",
    ]  # fmt: skip


@pytest.mark.parametrize("code", ["bad_identity", "bad_message"])
def test_a_key_without_the_right_and_an_older_controller_end_it(controller: Controller, code: Code) -> None:
    recording = begun(controller)
    controller.reply = lambda steps_from: RequestFailed(code, "no")
    with pytest.raises(RequestFailed, match="no"):
        recording.poll()


def test_a_controller_that_is_away_for_a_while_is_no_end_but_one_that_stays_away_is_said(
    controller: Controller,
) -> None:
    recording = begun(controller)
    controller.status = PeerLost("away")
    recording.poll()
    assert "the controller did not answer any more" in recording.lost
    controller.status = status()
    recording.poll()
    assert not recording.lost
    controller.status = PeerLost("away")
    recording.poll()
    assert recording.done().notes == [recording.lost]


def test_it_ends_by_time_by_a_stop_and_when_there_is_enough(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    polls: list[float] = []
    stop = Event()
    recording = begun(controller)
    spent_s = record(recording, 0.6, stop, polls.append)
    assert 0.6 <= spent_s < 5.0
    assert 1 <= len(polls) <= 3
    assert [lease_s for _, lease_s, _, _ in controller.asked][-1] == 0.0, "the last question asks for no more"
    stop.set()
    assert record(recording, 60.0, stop, polls.append) < 5.0
    stop.clear()
    monkeypatch.setattr(live, "MAX_FACTS", 3)
    controller.reply = lambda steps_from: RecordReply(1, (step(steps_from + 1),) * 2, more=True)
    full = begun(controller)
    assert record(full, 60.0, stop, polls.append) < 5.0
    timeline: Timeline = full.done()
    assert "it ended early: it has 3 facts" in timeline.notes

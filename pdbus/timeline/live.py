"""Records a live cluster for a timeline: steps and work as its ranks say them, their loads, and queue and events of
their controller. Owns the questions and what came of them; a rank is asked through its controller.

Ranks record while they are asked. A rank whose engine does not say its steps, such as vLLM's, says
prompts and KV transfers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from threading import Event

from bus.errors import PeerLost, RequestFailed
from bus.wire.messages import MemberKey, RankStatus, RecordQuery, RecordReply, Status
from pdbus.client import Client
from pdbus.timeline.facts import MAX_FACTS, LoadSample, RankTrack, Timeline

POLL_S, POLL_MANY_S = 0.5, 1.0  # between questions; where there are MANY ranks
MANY = 64
LEASE_S = 4.0  # ranks record for so long after the last question
ANSWER_S = 2.0  # to wait for an answer: longer than a controller waits for a rank

NOT_RECORDED = "its version does not say what it does: here is its load alone, each {:g} s"
NO_STEPS = "its engine does not say its steps: here are prompts from their coming on, KV transfers, and its load"
SILENT = "it did not answer {} of {} questions"


@dataclass(slots=True)
class _Rank:
    """A rank that is asked. `epoch` names the start of it that answered last."""

    track: RankTrack
    epoch: int = 0
    steps_from: int = 0
    work_from: int = 0
    asked: int = 0
    silent: int = 0
    lost: int = 0  # steps and work that it no longer had
    records: bool = True
    no_steps: bool = False


@dataclass(slots=True)
class _Asked:
    """A question under way, by this process's clock since 1970."""

    sent_us: int
    came_us: int = 0

    @property
    def middle_us(self) -> int:
        """When the other side answered, about."""
        return (self.sent_us + self.came_us) // 2


class AskingClient(Client):
    """A client that asks for recordings, without waiting for the answers."""

    def ask_status(self, events_from: int) -> Future[Status]:
        """Ask for the status, with the events from a number on."""
        return self._ask_status(self._channel, ANSWER_S, events_from, requests=False)

    def ask_record(self, key: MemberKey, lease_s: float, steps_from: int, work_from: int) -> Future[RecordReply]:
        """Ask a rank what it recorded from these numbers on."""
        make = partial(
            RecordQuery, instance=key[0], dp_rank=key[1], lease_s=lease_s, steps_from=steps_from, work_from=work_from
        )
        return self._channel.ask(self._controllers.decode, make, RecordReply, ANSWER_S)


class LiveRecording:
    """The recording of the cluster of one controller, which begins with the first `poll`. `first` is a status of it, so
    recent that its events are older than the recording. For one thread."""

    def __init__(self, client: AskingClient, first: Status, title: str) -> None:
        self.timeline = Timeline(title)
        self.lost = ""  # why the controller did not answer the last poll; empty: it did
        self._client = client
        self._ranks: dict[MemberKey, _Rank] = {}
        self._controller = first.controller
        self._epoch = first.epoch
        self._events_from = first.events[-1].number + 1 if first.events else 0
        self._offset_us: int | None = None  # how far the controller's clock is ahead of ours,
        self._offset_rtt_us = 0  # by this round trip, the shortest
        self._statuses: list[tuple[int, Status]] = []  # by our clock, until the controller's is known
        self._began_us = time.time_ns() // 1000
        self._facts = 0
        self.poll_s = POLL_S
        self._see(first.ranks)

    @property
    def ranks(self) -> int:
        """The number of ranks that were asked."""
        return len(self._ranks)

    @property
    def full(self) -> bool:
        """True when as much was recorded as a file may hold."""
        return self._facts >= MAX_FACTS

    def poll(self, *, last: bool = False) -> None:
        """Ask the controller and each rank, and take in the answers: it waits for them up to ANSWER_S seconds, and goes
        on asking ranks that have more. `last`: they need not go on recording. Raises RequestFailed when the key has not
        the right, or the controller does not know such questions."""
        asked = _Asked(_now_us())
        status = self._client.ask_status(self._events_from)
        status.add_done_callback(partial(_came, asked))
        open_now = list(self._ranks.items())
        while open_now:
            open_now = self._ask(open_now, 0.0 if last else LEASE_S)
        wait([status], ANSWER_S + 1.0)
        self._take_status(status, asked)

    def done(self) -> Timeline:
        """Return the timeline, with what a reader has to know of it. Facts from before the recording are left out."""
        timeline, offset_us = self.timeline, self._offset_us or 0
        timeline.queues.setdefault(self._controller, [])
        for at_us, status in self._statuses:
            self._sample(at_us + offset_us, status)
        self._statuses.clear()
        began_us = self._began_us + offset_us
        for rank in self._ranks.values():
            track = rank.track
            track.steps = [step for step in track.steps if step.began_us - track.offset_us >= began_us]
            track.work = [work for work in track.work if work.began_us - track.offset_us >= began_us]
            notes = []
            if not rank.records:
                notes.append(NOT_RECORDED.format(self.poll_s))
            if rank.no_steps:
                notes.append(NO_STEPS)
            if rank.silent:
                notes.append(SILENT.format(rank.silent, rank.asked))
            if rank.lost:
                notes.append(f"{rank.lost} steps and pieces of work are missing: they came faster than they were read")
            track.note = "; ".join(notes)
        timeline.ranks = [rank.track for rank in self._ranks.values()]
        if self._offset_us is None:
            timeline.notes.append("the controller's clock is not known: the queue and loads are by this machine's")
        if self.full:
            timeline.notes.append(f"it ended early: it has {MAX_FACTS} facts")
        if self.lost:
            timeline.notes.append(self.lost)
        return timeline

    # --- inside ---------------------------------------------------------------------------------------------------

    def _see(self, ranks: tuple[RankStatus, ...]) -> None:
        """Note new ranks."""
        for status in ranks:
            key = status.instance, status.dp_rank
            if key not in self._ranks:
                self._ranks[key] = _Rank(RankTrack(*key, status.role))
        self.poll_s = POLL_S if len(self._ranks) <= MANY else POLL_MANY_S

    def _ask(self, ranks: list[tuple[MemberKey, _Rank]], lease_s: float) -> list[tuple[MemberKey, _Rank]]:
        """Ask these ranks once; return those that have more."""
        asked = []
        for key, rank in ranks:
            stamp = _Asked(_now_us())
            answer = self._client.ask_record(key, lease_s, rank.steps_from, rank.work_from)
            answer.add_done_callback(partial(_came, stamp))
            asked.append((key, rank, answer, stamp))
        wait([answer for _, _, answer, _ in asked], ANSWER_S + 1.0)
        more = []
        for key, rank, answer, stamp in asked:
            rank.asked += 1
            try:
                reply = answer.result(timeout=0)
            except (PeerLost, TimeoutError):
                rank.silent += 1
                continue
            except RequestFailed as error:
                if error.code == "bad_rank":  # it was forgotten, long after it left
                    continue
                if error.code != "too_many":
                    raise
                rank.silent += 1
                continue
            if self._take(rank, reply, stamp) and not self.full:
                more.append((key, rank))
        return more

    def _take(self, rank: _Rank, reply: RecordReply, stamp: _Asked) -> bool:
        """Take in a rank's answer; return true if there is more."""
        rtt_us = stamp.came_us - stamp.sent_us
        if reply.at_us and (self._offset_us is None or rtt_us < self._offset_rtt_us):
            self._offset_us, self._offset_rtt_us = reply.at_us - stamp.middle_us, rtt_us
        rank.records = reply.records
        rank.silent += reply.silent
        if reply.silent or not reply.records:
            return False
        if reply.epoch != rank.epoch:
            rank.epoch = reply.epoch
            if rank.steps_from or rank.work_from:  # another start: its numbers begin again
                rank.steps_from = rank.work_from = 0
                return True
        rank.no_steps = reply.no_steps
        track = rank.track
        track.offset_us, track.rtt_us = reply.offset_us, reply.rtt_us
        if rank.work_from:
            rank.lost += reply.work_first - rank.work_from
        track.steps += reply.steps
        track.work += reply.work
        self._facts += len(reply.steps) + len(reply.work)
        rank.work_from = reply.work_first + len(reply.work)
        for step in reply.steps:
            if rank.steps_from:
                rank.lost += step.number - rank.steps_from
            rank.steps_from = step.number + 1
        return reply.more

    def _take_status(self, answer: Future[Status], asked: _Asked) -> None:
        try:
            status = answer.result(timeout=0)
        except (PeerLost, TimeoutError):
            self.lost = f"the controller did not answer any more, from {_ago(self._began_us)} after the beginning on"
            return
        self.lost = ""
        if status.epoch != self._epoch:
            self._epoch, self._events_from = status.epoch, 0  # another start numbers its events from 1
        if status.events:
            self._events_from = status.events[-1].number + 1
            self.timeline.events.setdefault(status.controller, []).extend(status.events)
        self._see(status.ranks)
        self._statuses.append((asked.middle_us, status))
        self._facts += len(status.ranks)

    def _sample(self, at_us: int, status: Status) -> None:
        """Make facts of a status, which the controller answered at `at_us` by its clock."""
        if status.queue is not None:
            self.timeline.queues[self._controller].append((at_us, status.queue.requests))
        for each in status.ranks:
            load = each.load
            if load is not None:
                rank = self._ranks[each.instance, each.dp_rank]
                rank.track.samples.append(LoadSample(at_us, load.running, load.waiting, load.kv_tokens))


def record(recording: LiveRecording, seconds: float, stop: Event, on_poll: Callable[[float], object]) -> float:
    """Record for so many seconds, or until `stop` is set or the recording is full; return the seconds that it took.
    `on_poll` is called before each poll with the seconds since the beginning."""
    began = time.monotonic()
    while (spent_s := time.monotonic() - began) < seconds and not stop.is_set() and not recording.full:
        on_poll(spent_s)
        recording.poll()
        until = min(began + seconds, began + spent_s + recording.poll_s)
        stop.wait(max(0.0, until - time.monotonic()))
    recording.poll(last=True)
    return spent_s


def _came(asked: _Asked, answer: Future[object]) -> None:
    asked.came_us = _now_us()


def _now_us() -> int:
    return time.time_ns() // 1000


def _ago(began_us: int) -> str:
    return f"{(_now_us() - began_us) / 1e6:.1f} s"

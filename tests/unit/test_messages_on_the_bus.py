"""The rules of docs/protocol.md for the broker and for publishers, held against their cores (no socket, own clock)."""

from __future__ import annotations

from typing import Any

import pytest

from bus.actions import Publish, Send
from bus.broker.core import Asked, BrokerCore, BrokerLimits, Published, Tick
from bus.embed.publications import PublisherCore
from bus.wire import topics
from bus.wire.messages import (
    Answer,
    Beacon,
    Conflict,
    Drop,
    Found,
    Load,
    LoadReport,
    Location,
    Lost,
    Member,
    Message,
    Query,
    Registration,
    Resync,
    Rooms,
    Topology,
    TopologyQuery,
    Unwatch,
)

TTL_S = 10.0


class Bus:
    """A broker core and a clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.core = BrokerCore(BrokerLimits(room_ttl_s=TTL_S), epoch=5, now=self.now)
        self.published: list[Message] = []

    def hear(self, message: Message) -> list[Send]:
        return self._do(Published(topics.of(message), message))

    def ask(self, message: Message, peer: bytes = b"decode") -> list[Send]:
        return self._do(Asked(peer, message))

    def wait(self, seconds: float) -> list[Send]:
        sends, end = [], self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.025)
            sends += self._do(Tick())
        return sends

    def _do(self, event: Any) -> list[Send]:
        actions = self.core.handle(event, self.now)
        self.published += [action.message for action in actions if isinstance(action, Publish)]
        return [action for action in actions if isinstance(action, Send)]

    def lookup(self, room: int) -> Found | Lost | None:
        (send,) = self.ask(Query(1, (room,)))
        answer = send.message
        assert isinstance(answer, Answer)
        return next(iter(answer.found + answer.lost), None)

    def told(self, kind: type[Message]) -> list[Any]:
        return [message for message in self.published if isinstance(message, kind)]


class Prefill:
    """A rank that publishes what a test wants, with the right numbers."""

    def __init__(self, bus: Bus, dp_rank: int, epoch: int, dp_size: int = 2) -> None:
        self.bus, self.dp_rank, self.epoch, self.dp_size = bus, dp_rank, epoch, dp_size
        self.seq = {"rooms": 0, "member": 0}
        self.location = Location("p", dp_rank, epoch, f"ipc:///p{dp_rank}")
        self.member()

    def member(self, state: Any = "ready", missed: int = 0) -> list[Send]:
        self.seq["member"] += 1
        return self.bus.hear(
            Member("p", self.dp_rank, self.epoch, self.seq["member"], None, "prefill", "m", self.dp_size, state,
                   self.location.endpoint, False, self.seq["rooms"] + missed, 1.0)
        )  # fmt: skip

    def rooms(self, *register: tuple[int, int], drop: tuple[Drop, ...] = (), skip: int = 0) -> list[Send]:
        self.seq["rooms"] += 1 + skip
        claims = tuple(Registration(room, attempt) for room, attempt in register)
        message = Rooms("p", self.dp_rank, self.epoch, self.seq["rooms"], None, self.location.endpoint, claims, drop)
        return self.bus.hear(message)


@pytest.fixture
def bus() -> Bus:
    return Bus()


# --- rooms ------------------------------------------------------------------------------------------------------------


def test_a_room_lives_for_exactly_its_ttl(bus: Bus) -> None:
    """M29 M30: and registering it again starts the TTL anew."""
    rank = Prefill(bus, 0, 11)
    rank.rooms((7, 1))
    bus.now += TTL_S - 0.001
    assert bus.lookup(7) == Found(rank.location, 1, (7,))
    rank.rooms((7, 1))
    bus.now += TTL_S - 0.001
    assert bus.lookup(7) == Found(rank.location, 1, (7,))
    bus.now += 0.001
    assert bus.lookup(7) is None


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_the_higher_attempt_wins_in_any_order(bus: Bus, order: tuple[int, int]) -> None:
    """M31."""
    ranks = {1: Prefill(bus, 0, 11), 2: Prefill(bus, 1, 12)}
    for attempt in order:
        ranks[attempt].rooms((7, attempt))
    assert bus.lookup(7) == Found(ranks[2].location, 2, (7,))
    assert not bus.told(Conflict)


def test_one_attempt_of_two_ranks_is_a_conflict_told_to_both(bus: Bus) -> None:
    """M32."""
    first, later = Prefill(bus, 0, 11), Prefill(bus, 1, 12)
    first.rooms((7, 1))
    later.rooms((7, 1))
    assert bus.lookup(7) == Found(first.location, 1, (7,))
    assert {(each.dp_rank, each.epoch, each.kept, each.other) for each in bus.told(Conflict)} == {
        (0, 11, True, later.location),
        (1, 12, False, first.location),
    }
    assert {topics.of(each) for each in bus.told(Conflict)} == {b"to/p/0/", b"to/p/1/"}


def test_a_drop_removes_and_a_reason_answers(bus: Bus) -> None:
    """M33."""
    rank = Prefill(bus, 0, 11)
    rank.rooms((7, 1), (8, 1))
    rank.rooms(drop=(Drop(7, 1), Drop(8, 1, "engine_failed")))
    assert bus.lookup(7) is None
    assert bus.lookup(8) == Lost(8, "engine_failed", 1)


def test_a_drop_touches_only_what_is_its_own(bus: Bus) -> None:
    """M34."""
    rank, other = Prefill(bus, 0, 11), Prefill(bus, 1, 12)
    rank.rooms((7, 2))
    rank.rooms(drop=(Drop(7, 1), Drop(7, 1, "cancelled")))
    other.rooms(drop=(Drop(7, 2), Drop(7, 2, "cancelled")))
    assert bus.lookup(7) == Found(rank.location, 2, (7,))


def test_a_new_epoch_voids_the_old_ones_rooms_and_messages(bus: Bus) -> None:
    """M19 M20."""
    old = Prefill(bus, 0, 11)
    old.rooms((7, 1))
    new = Prefill(bus, 0, 12)
    assert bus.lookup(7) is None
    old.rooms((8, 1))
    old.member()
    assert bus.lookup(8) is None
    new.rooms((9, 1))
    assert bus.lookup(9) == Found(new.location, 1, (9,))


def test_goodbye_voids_rooms(bus: Bus) -> None:
    """M20."""
    rank = Prefill(bus, 0, 11)
    rank.rooms((7, 1))
    rank.member("gone")
    assert bus.lookup(7) is None


# --- queries ----------------------------------------------------------------------------------------------------------


def test_a_query_is_answered_at_once_with_what_is_known(bus: Bus) -> None:
    """M36 M37 M38."""
    rank = Prefill(bus, 0, 11)
    rank.rooms((7, 1), (8, 1))
    rank.rooms(drop=(Drop(8, 1, "cancelled"),))
    rooms = (7, 8, 9, 9)
    (send,) = bus.ask(Query(3, rooms))
    known = Answer(3, (Found(rank.location, 1, (7,)),), (), (Lost(8, "cancelled", 1),))
    assert send.message == known
    (send,) = bus.ask(Query(4, rooms, 5.0))
    assert send.message == Answer(4, known.found, (9,), known.lost)


def test_a_registration_settles_a_watch_once_and_at_once(bus: Bus) -> None:
    """M38 M39."""
    rank = Prefill(bus, 0, 11)
    bus.ask(Query(4, (7, 8), 5.0))
    (send,) = rank.rooms((7, 1))
    assert (send.peer, send.message) == (b"decode", Answer(4, (Found(rank.location, 1, (7,)),)))
    assert rank.rooms((7, 1)) == []
    (send,) = rank.rooms(drop=(Drop(8, 1, "cancelled"),))
    assert send.message == Answer(4, lost=(Lost(8, "cancelled", 1),))
    assert bus.wait(10.0) == []


def test_a_deadline_settles_a_watch_with_unknown_room(bus: Bus) -> None:
    """M38 M39."""
    bus.ask(Query(4, (7,), 5.0))
    assert bus.wait(4.9) == []
    (send,) = bus.wait(0.2)
    assert send.message == Answer(4, lost=(Lost(7, "unknown_room"),))
    assert Prefill(bus, 0, 11).rooms((7, 1)) == []


def test_unwatch_ends_the_watches_of_that_connection_alone(bus: Bus) -> None:
    """M40."""
    bus.ask(Query(4, (7,), 5.0), b"one")
    bus.ask(Query(5, (7,), 5.0), b"one")
    bus.ask(Query(4, (7,), 5.0), b"two")
    assert bus.ask(Unwatch((7,)), b"one") == []
    assert [send.peer for send in Prefill(bus, 0, 11).rooms((7, 1))] == [b"two"]
    assert bus.wait(6.0) == []


def test_an_instance_is_ready_when_each_of_its_ranks_is(bus: Bus) -> None:
    """M41."""

    def ready() -> bool:
        (send,) = bus.ask(TopologyQuery(1, "p"))
        assert isinstance(send.message, Topology)
        return send.message.instances[0].ready

    first = Prefill(bus, 0, 11)
    first.member()
    assert not ready()
    second = Prefill(bus, 1, 12)
    assert ready()
    second.member("draining")
    assert not ready()
    second.member("ready")
    assert ready()
    bus.wait(2.9)
    first.member()
    assert ready()
    bus.wait(0.2)
    assert not ready(), "the second was silent for three of its intervals"


# --- losses -----------------------------------------------------------------------------------------------------------


def test_the_broker_asks_again_when_numbers_show_a_loss(bus: Bus) -> None:
    """M18: a hole in `seq`, or a member that has published more than arrived."""
    rank = Prefill(bus, 0, 11)
    rank.rooms((7, 1))
    rank.member()
    bus.wait(1.0)
    assert not bus.told(Resync)
    rank.rooms((8, 1), skip=1)
    bus.wait(0.1)
    assert bus.told(Resync) == [Resync("p", 0, 11)]


def test_a_lost_last_publication_shows_in_the_next_member(bus: Bus) -> None:
    """M18."""
    rank = Prefill(bus, 0, 11)
    rank.rooms((7, 1))
    rank.member(missed=1)
    bus.wait(0.1)
    assert bus.told(Resync) == [Resync("p", 0, 11)]


def test_a_publication_under_a_strange_topic_is_dropped(bus: Bus) -> None:
    """M13."""
    Prefill(bus, 0, 11)
    forged = Rooms("p", 0, 11, 1, None, "ipc:///evil", (Registration(7, 1),))
    for topic in (b"rooms/p/1/", b"rooms/p/0", b"member/p/0/", b"rooms/"):
        bus.core.handle(Published(topic, forged), bus.now)
    assert bus.lookup(7) is None


# --- publishers -------------------------------------------------------------------------------------------------------


def publisher() -> PublisherCore:
    return PublisherCore(
        instance="p", dp_rank=0, epoch=11, role="prefill", model="m", dp_size=2, endpoint="ipc:///p0",
        interval_s=0.25, room_ttl_s=TTL_S, state="ready",
    )  # fmt: skip


def load(running: int = 0) -> Load:
    return Load(
        seq=0,
        step=0,
        running=running,
        waiting=0,
        waiting_tokens=0,
        kv_tokens=0,
        kv_capacity=100,
        max_running=4,
    )


@pytest.mark.parametrize(("running", "at_most_s"), [(1, 0.25), (0, 1.0)])
def test_members_and_loads_come_at_least_each_interval(running: int, at_most_s: float) -> None:
    """M15 M28: of an idle rank less often, as it says."""
    core, now = publisher(), 100.0
    due = 100.0
    heard: dict[type, list[float]] = {Member: [], Load: []}
    for turn in range(400):
        now = 100.0 + turn * 0.01
        core.report(load(running=running), now)
        for action in core.tick(now):
            message = action.message
            if isinstance(message, Member):
                heard[Member].append(now)
                due = now + message.interval_s
            if isinstance(message, LoadReport | Member) and message.load is not None:
                heard[Load].append(now)
        assert now <= due + 0.011, "as it said itself"
    for times in heard.values():
        longest = max(b - a for a, b in zip([100.0, *times], [*times, now], strict=True))
        assert at_most_s - 0.011 <= longest <= at_most_s + 0.011


def test_a_change_of_state_is_published_at_once() -> None:
    """M15 M50: also the goodbye."""
    core = publisher()
    core.tick(100.0)
    (action,) = core.set_state("draining", 100.01)
    assert isinstance(action.message, Member)
    assert action.message.state == "draining"
    (action,) = core.goodbye(100.02)
    assert isinstance(action.message, Member)
    assert action.message.state == "gone"


def test_numbers_rise_by_one_for_each_tag() -> None:
    """M14: and those of load reports over all tags (M25 rests on it)."""
    core, seqs, loads = publisher(), {}, []  # type: ignore[var-annotated]
    for turn in range(300):
        now = 100.0 + turn * 0.02
        core.report(load(turn % 5), now)
        if turn % 7 == 0:
            core.register(turn, 1, now)
        actions = core.on_message(Resync("p", 0, 11), now) if turn % 50 == 0 else []
        for action in actions + core.tick(now):
            message: Any = action.message
            assert message.seq == seqs.get(type(message), 0) + 1
            seqs[type(message)] = message.seq
            if message.load is not None:
                loads.append(message.load.seq)
    assert len(seqs) == 3
    assert loads == sorted(loads)


@pytest.mark.parametrize("request_", [Beacon(6, 1, 0.25), Resync("p", 0, 11)])
def test_everything_is_stated_again_when_asked(request_: Message) -> None:
    """M16 M17: membership first, then the live rooms, as a snapshot."""
    core = publisher()
    core.on_message(Beacon(5, 9, 0.25), 100.0)
    core.register(7, 1, 100.0)
    core.register(8, 2, 100.0)
    core.drop(7, 1, "ok", 100.0)
    core.tick(100.0)
    member, rooms = (action.message for action in core.on_message(request_, 101.0))
    assert isinstance(member, Member)
    assert isinstance(rooms, Rooms)
    assert (rooms.register, rooms.snapshot) == ((Registration(8, 2),), True)


def test_what_is_not_addressed_to_this_start_changes_nothing() -> None:
    """M16 M17."""
    core = publisher()
    core.on_message(Beacon(5, 9, 0.25), 100.0)
    for other in (Beacon(5, 10, 0.25), Resync("p", 0, 10), Resync("p", 1, 11), Resync("q", 0, 11)):
        assert core.on_message(other, 101.0) == []

"""What one message may have to say fits in a frame, however many ranks and requests and however long their names.

Strings are as long as their types allow, in characters of four bytes where they may hold them.
"""

from __future__ import annotations

from typing import Any

import pytest
from controller_world import EPOCH, World, hello, load
from legs_world import Rank
from legs_world import World as LegsWorld
from msgspec.structs import replace

from bus.actions import Publish, Send
from bus.broker.core import BrokerCore, BrokerLimits
from bus.broker.events import Asked
from bus.broker.events import Published as Seen
from bus.wire import codec, topics
from bus.wire.messages import (
    CONTROLLER_TO_CLIENT,
    MAX_DP_SIZE,
    MAX_ROOM,
    NODE_TO_CONTROLLER,
    PUBLICATIONS,
    Ended,
    Hello,
    Load,
    Member,
    Message,
    Progress,
    RankStatus,
    Sent,
    Status,
    StatusQuery,
    Topology,
    TopologyQuery,
)
from bus.wire.status import RANKS_PER_MESSAGE, join
from controller.events import FromClient, NextPart, Tick
from controller.load.table import LoadTable
from controller.rank import Rank as Connected
from nodes.link import leg as rank_legs
from nodes.link.connection import MAX_ENDED_PER_MESSAGE, MAX_STARTED_PER_MESSAGE, Connection
from nodes.link.core import MAX_CLIENTS

NAME, MODEL, RID, ENDPOINT = "n" * 64, "\U0001f600" * 128, "\U0001f600" * 128, "e" * 150
LOAD = Load(**dict.fromkeys(Load.__struct_fields__, MAX_ROOM) | {"acks": ()})


def status(ranks: int) -> Status:
    counts = {f"something_counted_{n}": MAX_ROOM for n in range(256)}
    each = tuple(
        RankStatus(NAME, n, "prefill", MODEL, "draining", MAX_ROOM, ENDPOINT, MAX_ROOM, 1e9, LOAD, *(MAX_ROOM,) * 9)
        for n in range(ranks)
    )
    return Status(MAX_ROOM, NAME, MAX_ROOM, 1e9, {"prefill": "total_tokens"}, counts, each)


def split(status: Status, total: int | None = None) -> list[Status]:
    """The messages of a status, as a controller sends them; one of 0.1.0 does not say the `total`."""
    total = len(status.ranks) if total is None else total
    starts = range(0, max(1, len(status.ranks)), RANKS_PER_MESSAGE)
    parts = [status.ranks[at : at + RANKS_PER_MESSAGE] for at in starts]
    return [
        replace(status, ranks=part, remaining=len(status.ranks) - at - len(part), total=total)
        for at, part in zip(starts, parts, strict=True)
    ]


@pytest.mark.parametrize("ranks", [0, 1, 512, 513, MAX_DP_SIZE])
def test_a_status_of_any_size_arrives_whole(ranks: int) -> None:
    """M4."""
    whole, joined = replace(status(ranks), total=ranks), None
    parts = [codec.decode(codec.encode(part), CONTROLLER_TO_CLIENT) for part in split(whole)]
    for part in parts:
        assert joined is None or joined.remaining
        assert isinstance(part, Status)
        joined = join(joined, part)
    assert joined == whole


@pytest.mark.parametrize("total", [2000, 0])
def test_a_status_that_lost_a_part_is_begun_anew(total: int) -> None:
    whole = replace(status(2000), total=total)
    first, second, *_ = again = split(whole, total)
    so_far = join(None, second)
    for part in again:
        so_far = join(so_far, part)
    assert so_far == whole
    assert join(join(None, first), again[0]) == again[0]


@pytest.mark.parametrize("lost", range(7))
def test_a_status_with_a_hole_is_not_taken_for_whole(lost: int) -> None:
    parts = split(status(2000))
    so_far = None
    for part in [*parts[:lost], *parts[lost + 1 :]]:
        so_far = join(so_far, part)
    assert so_far is not None
    assert so_far.remaining
    for part in parts:
        so_far = join(so_far, part)
    assert so_far == replace(status(2000), total=2000)


def test_a_controller_of_4096_ranks_says_so_in_messages_that_fit() -> None:
    world = World(max_ranks=MAX_DP_SIZE)
    for n in range(MAX_DP_SIZE):  # straight into the core: `World` validates after each event
        greeting = hello(NAME, n, dp_size=MAX_DP_SIZE)
        opened = world.core.table.open(greeting)
        world.core.members.ranks[opened] = Connected(greeting, opened, "node", None)
        world.core.health.hello((NAME, n), 1, "ready", idle=True, now=0.0)
    published = [a.message for a in world.core.handle(Tick(), 1.1) if isinstance(a, Publish)]
    (sent,) = (codec.decode(codec.encode(message), PUBLICATIONS) for message in published)
    assert isinstance(sent, Sent)
    assert len(sent.counters) == MAX_DP_SIZE
    assert not world.core.handle(FromClient("op", StatusQuery(3), ()), 1.1), "a part with each turn"
    answers = []
    while world.core.unfinished:
        ((action),) = world.core.handle(NextPart(), 1.1)
        answers.append(action.message)
    assert all(isinstance(answer, Status) for answer in answers)
    assert [answer.remaining for answer in answers] == list(range(MAX_DP_SIZE - 256, -1, -256))
    assert {rank.dp_rank for answer in answers for rank in answer.ranks} == set(range(MAX_DP_SIZE))
    for answer in answers:
        codec.encode(answer)


def test_more_counters_than_a_message_holds_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """M14."""
    monkeypatch.setattr("controller.core.MAX_DP_SIZE", 2)
    world = World()
    for n in range(5):
        world.join(hello("u", n, dp_size=5))
    world.pass_time(1.1)
    sent = [m for m in world.published if isinstance(m, Sent)]
    assert [len(m.counters) for m in sent] == [2, 2, 1]
    assert [m.seq for m in sent] == [1, 2, 3]
    other = LoadTable(5)
    rank = other.open(hello("u", 4, dp_size=5))
    other.apply(rank.key, rank.epoch, load(1, acks=[(EPOCH, 0, 0)]), 1.0)
    for message in sent:
        assert other.apply_sent(replace(message, counters=tuple(replace(c, tokens=9) for c in message.counters)), 1.0)
    assert rank.others_tokens == 9


def test_the_longest_counters_fit() -> None:
    counter = (NAME, MAX_DP_SIZE - 1, MAX_ROOM, MAX_ROOM, MAX_ROOM)
    codec.encode(Sent(NAME, MAX_ROOM, MAX_ROOM, (counter,) * MAX_DP_SIZE))  # type: ignore[arg-type]


class Wire:
    """A link whose frames are kept."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.link = Connection(self, self, 0, "", lambda: 0.0, lambda *_: None)  # type: ignore[arg-type]
        self.instance, self.dp_rank, self.epoch = NAME, 4095, MAX_ROOM

    def connections(self, socket: Any) -> Any:
        return lambda: False

    def dealer(self, endpoint: str, *, maximum: int, role: str) -> Any:
        return self

    def send(self, frame: bytes, flags: int) -> None:
        self.frames.append(frame)

    def sent(self) -> list[Message]:
        return [codec.decode(frame, NODE_TO_CONTROLLER) for frame in self.frames]


def test_progress_of_very_many_legs_loses_none() -> None:
    started = [(RID[:120] + f"{n:08}", 1_000_000) for n in range(3 * MAX_STARTED_PER_MESSAGE + 1)]
    ended = [
        Ended(rid, attempt, "prefill", "prefill_failed", "\U0001f600" * 1024, MAX_ROOM, "computed", 1e9, MAX_ROOM)
        for rid, attempt in started[: 5 * MAX_ENDED_PER_MESSAGE + 1]
    ]
    wire = Wire()
    wire.link.progress(started, ended)
    told = wire.sent()
    assert all(isinstance(message, Progress) for message in told)
    assert [one for message in told for one in message.started] == started  # type: ignore[attr-defined]
    assert [one for message in told for one in message.ended] == ended  # type: ignore[attr-defined]
    assert not wire.link.unsent


@pytest.mark.parametrize("rid", ["{}", "a-usual-length-of-request-id-{:06}", RID[:120] + "{:08}"])
def test_a_rank_takes_no_more_than_its_hello_can_list(rid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_legs, "MAX_NAMES_BYTES", 2_000)  # in proportion
    rank = Rank(LegsWorld(), "unified", "u")
    count = 0
    while not rank.ended:
        rank.dispatch(rid.format(count), [5])
        count += 1
    assert rank.code(rid.format(count - 1)) == "overloaded"
    live = rank.core.running()[0]
    assert len(live) == count - 1
    rest = Hello(
        instance=NAME, dp_rank=4095, epoch=MAX_ROOM, role="prefill", model=MODEL, dp_size=4096, state="draining",
        endpoint=ENDPOINT, max_context=MAX_ROOM, kv_capacity=MAX_ROOM, max_running=MAX_ROOM, block_tokens=MAX_ROOM,
        clients=((f"clients/{'c' * 64}", MAX_ROOM),) * MAX_CLIENTS,
    )  # fmt: skip
    listed = len(codec.encode(replace(rest, running=live))) - len(codec.encode(rest))
    assert 900 < listed <= 2_000 + 4
    assert len(codec.encode(rest)) + 1_000_000 + 4 <= codec.MAX_HEADER_BYTES
    for gone, _ in live[:2]:
        rank.do(rank.core.cancel(0, cancel(gone), 0.0))
    rank.dispatch("x", [5])
    assert ("x", 1) not in rank.ended, "there is room again"


def cancel(rid: str) -> Any:
    from bus.wire.messages import CancelLeg

    return CancelLeg(rid, 1)


def test_the_topology_of_one_instance_always_fits_and_too_many_is_said() -> None:
    core = BrokerCore(BrokerLimits(), MAX_ROOM, 0.0)
    for instance in ("a" * 64, "b" * 64):
        for n in range(MAX_DP_SIZE):
            member = Member(
                instance, n, MAX_ROOM - n, 1, None, "prefill", MODEL, MAX_DP_SIZE, "draining", ENDPOINT, True, 0, 60.0
            )
            core.handle(Seen(topics.of(member), member), 0.0)
    (send,) = core.handle(Asked(b"peer", TopologyQuery(1, "a" * 64)), 1.0)
    assert isinstance(send, Send)
    assert isinstance(send.message, Topology)
    assert len(send.message.instances[0].ranks) == MAX_DP_SIZE
    codec.encode(send.message)

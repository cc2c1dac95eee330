"""A rank's link to one controller: what must arrive is kept while the queue is full, and a fence is passed on."""

from __future__ import annotations

from typing import Any

import pytest
import zmq

from bus.wire.codec import decode, encode
from bus.wire.messages import (
    NODE_TO_CONTROLLER,
    Bye,
    Ended,
    Hello,
    Message,
    NodeState,
    Ping,
    Pong,
    Progress,
    Refused,
    Welcome,
    Who,
)
from nodes.link import connection as module
from nodes.link.connection import HELLO_S, MAX_ENDED_PER_MESSAGE, Connection

ENDS = [Ended(f"r{n}", 1, "unified", "ok") for n in range(3 * MAX_ENDED_PER_MESSAGE)]


class World:
    """One link with its rank, its sockets and a queue of `space` messages."""

    instance, dp_rank, epoch, wall_s = "u", 0, 7, 0.0

    def __init__(self) -> None:
        self.now = 0.0
        self.space = 1000
        self.connected = False
        self.queue: list[Message] = []
        self.state: NodeState = "ready"
        self.why: list[str] = []
        self.link = Connection(self, self, 0, "", lambda: self.now, lambda *_: None)  # type: ignore[arg-type]

    def dealer(self, endpoint: str, *, maximum: int, role: str) -> Any:
        return self

    def connections(self, socket: Any) -> Any:
        def made() -> bool:
            made, self.connected = self.connected, False
            return made

        return made

    def send(self, frame: bytes, flags: int) -> None:
        assert flags == zmq.NOBLOCK
        if len(self.queue) >= self.space:
            raise zmq.Again
        self.queue.append(decode(frame, NODE_TO_CONTROLLER))

    def hello(self) -> Hello:
        return Hello(
            instance=self.instance, dp_rank=self.dp_rank, epoch=self.epoch, role="unified", model="m", dp_size=1,
            state=self.state, endpoint="ipc:///u", max_context=9, kv_capacity=9, max_running=9, block_tokens=4,
        )  # fmt: skip

    def welcomed(self, connection: Connection, welcome: Welcome, again: bool) -> None: ...

    def steps(self) -> tuple[int, bool, int]:
        return 0, False, 0

    def superseded(self, why: str) -> None:
        self.why.append(why)

    def ended(self) -> list[Ended]:
        return [end for message in self.queue if isinstance(message, Progress) for end in message.ended]


@pytest.fixture
def world() -> World:
    world = World()
    world.link.receive([encode(Welcome("c", 5, False, 3.0, 0))])
    return world


def test_progress_that_the_queue_does_not_take_is_sent_later_in_order(world: World) -> None:
    world.space = 1
    world.link.progress([("r0", 1)], ENDS)
    assert world.ended() == ENDS[:MAX_ENDED_PER_MESSAGE]
    late = Ended("late", 1, "unified", "ok")
    world.link.progress([], [late])
    assert world.link.owes
    world.space = 2
    world.link.tick()
    assert world.ended() == ENDS[: 2 * MAX_ENDED_PER_MESSAGE]
    world.space = 10
    world.link.tick()
    assert world.ended() == [*ENDS, late]
    assert not world.link.owes
    world.link.tick()
    assert len(world.queue) == 4, "each once"


def test_the_goodbye_waits_for_the_progress_before_it(world: World) -> None:
    world.space = 0
    world.link.progress([], ENDS[:1])
    world.link.send_bye()
    assert world.link.owes
    world.space = 10
    world.link.tick()
    assert [type(message) for message in world.queue] == [Progress, Bye]
    assert not world.link.owes


def test_news_of_a_state_is_said_again_although_the_controller_is_heard(world: World) -> None:
    world.space = 0
    world.state = "draining"
    world.link.send_hello()
    world.space = 10
    world.now = HELLO_S
    world.link.tick()
    assert [message.state for message in world.queue if isinstance(message, Hello)] == ["draining"]
    world.now = 2 * HELLO_S
    world.link.receive([encode(Welcome("c", 5, False, 3.0, 0))])
    world.link.tick()
    assert len(world.queue) == 1


def test_the_first_word_and_the_answer_to_who_is_hello() -> None:
    """M42."""
    world = World()
    world.link.tick()
    assert [type(message) for message in world.queue] == [Hello]
    world.now = 0.5
    world.link.receive([encode(Who())])
    assert [type(message) for message in world.queue] == [Hello, Hello]


def test_each_ping_is_answered_with_its_number(world: World) -> None:
    """M43."""
    for n in (7, 5, 5):
        world.link.receive([encode(Ping(n))])
    assert [message.n for message in world.queue if isinstance(message, Pong)] == [7, 5, 5]


def test_it_says_hello_over_each_new_connection_and_when_nothing_has_come_for_a_while(world: World) -> None:
    """M84: a controller that was started again does not know whom to ask."""

    def hellos() -> int:
        return sum(isinstance(message, Hello) for message in world.queue)

    world.link.tick()
    assert not hellos()
    world.connected = True
    world.link.tick()
    world.link.tick()
    assert hellos() == 1
    for _ in range(20):
        world.now += 1.0
        world.link.receive([encode(Ping(1))])
        world.link.tick()
    assert hellos() == 1
    world.now += 1.6  # half a lease
    world.link.tick()
    assert hellos() == 2
    for _ in range(10):
        world.now += HELLO_S / 2
        world.link.tick()
    assert hellos() == 7


def test_before_it_is_welcomed_a_connection_changes_nothing(world: World) -> None:
    """Its hello waits in the queue."""
    world.link.welcome = None
    world.link.tick()
    world.connected = True
    world.link.tick()
    assert len(world.queue) == 1


def test_what_is_kept_for_a_controller_that_takes_nothing_is_bounded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_OWED", 10)
    world.space = 0
    for end in ENDS:
        world.link.progress([(end.rid, 1)], [end])
    world.space = 10
    world.link.tick()
    assert world.ended() == ENDS[-10:]


def test_the_rank_hears_that_it_was_fenced_and_the_link_until_when(world: World) -> None:
    world.link.receive([encode(Refused("bad_identity", "no"))])
    assert (world.why, world.link.fenced) == ([], "")
    world.link.receive([encode(Refused("fenced", "u/0 was started again elsewhere (epoch 8)"))])
    assert world.why == [world.link.fenced] == ["u/0 was started again elsewhere (epoch 8)"]
    assert world.link.welcome is None, "a start that waits to serve waits for this controller again"
    world.now += module.LEASE_S + 0.1
    assert world.link.fenced == "", "the controller may have found the other start dead since it spoke last"
    world.link.receive([encode(Refused("fenced", "u/0 was started again elsewhere (epoch 8)"))])
    assert world.link.fenced
    world.link.receive([encode(Welcome("c", 5, False, 3.0, 0))])
    assert world.link.fenced == ""

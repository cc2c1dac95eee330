"""A host over real sockets, on a loop that the test turns: when its owner is told of changes, when it has drained; and
a node over one that waits."""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from link_world import FACTS, unified_leg
from structlog.testing import capture_logs

from bus.errors import StartError
from bus.runtime.loop import Loop
from bus.wire import topics
from bus.wire.codec import encode
from bus.wire.codes import client_retries
from bus.wire.hashing import token_bytes
from bus.wire.messages import Attach, Beacon, CancelLeg, Dispatch, Ended, Member, Message, Params
from nodes.config import NodeConfig
from nodes.link.config import LinkConfig
from nodes.link.host import GOODBYE_S, SLOW_TICK_S, STREAM_GRACE_S, Host
from nodes.link.leg import Identity
from nodes.link.runner import Finished
from nodes.link.streams import ATTACH_GRACE_S, UNREAD_S
from nodes.link.threaded_runner import ThreadedRunner
from nodes.node import Node


class Rig:
    """Two ranks. The clock stands unless the test moves it, and no turn waits."""

    def __init__(self, folder: str) -> None:
        self.now = 0.0
        self.changes = 0
        self.loop = Loop(lambda: self.now)
        config = LinkConfig("unified", "u", 2, (0, 1), f"ipc://{folder}/b", (f"ipc://{folder}/c",), f"ipc://{folder}")
        runners: Any = {rank: ThreadedRunner(FACTS, lambda leg, order: None) for rank in config.dp_ranks}
        self.host = Host(config, self.loop, runners, self._note)

    def _note(self) -> None:
        self.changes += 1

    def turn(self, seconds: float = 0.0) -> int:
        """How often the owner is told in one turn, `seconds` after the last."""
        self.now += seconds
        before = self.changes
        self.loop.call_threadsafe(lambda: None)
        self.loop.turn()
        return self.changes - before

    def hear(self, message: Message) -> None:
        """From the bus, in the next turn."""
        frames = [topics.of(message), encode(message)]
        self.loop.call_threadsafe(lambda: self.host._publication_received(frames))


@pytest.fixture
def rig() -> Iterator[Rig]:
    with tempfile.TemporaryDirectory(prefix="pd") as folder:
        rig = Rig(folder)
        yield rig
        rig.host.close(linger_ms=0)
        rig.loop.close()


def test_garbage_on_each_socket_is_counted_there_and_logged_once_for_each_peer(rig: Rig) -> None:
    garbage, host = [b"\x01\xc1"], rig.host
    (connection,) = host.ranks[0].connections
    with capture_logs() as logs:
        for _ in range(2):
            connection.receive(garbage)
            host._publication_received([b"load/u/0", b""])
            host._answer_received(garbage)
            host._data_received([b"\0peer", *garbage])
            host._data_received([b"\0other", *garbage])
    assert {name: count for name, count in host.rejected.items() if count} == {
        "controller:size": 2, "bus:size": 2, "bootstrap:frames": 2, "data:size": 4
    }  # fmt: skip
    told = [(line["socket"], line["peer"]) for line in logs if line["event"] == "message.rejected"]
    assert [socket for socket, _ in told] == ["controller", "bus", "bootstrap", "data", "data"]
    assert len(set(told)) == 5
    assert told[0] == ("controller", connection.endpoint)


def test_the_owner_is_told_in_the_turn_of_a_change_and_not_otherwise(rig: Rig) -> None:
    host = rig.host
    assert [rig.turn(0.3) for _ in range(20)] == [0] * 20
    rig.hear(Beacon(5, 1, 0.25))
    assert rig.turn() == 1
    rig.hear(Beacon(5, 2, 0.25))
    assert rig.turn() == 0
    mine = host.ranks[1]
    said = Member("u", 1, mine.epoch, 1, None, "unified", "m", 2, "ready", "", False, 0, 0.25)
    for told in (1, 0):  # each interval it comes again
        rig.hear(said)
        assert rig.turn() == told
    mine.drain("test")
    assert (rig.turn(), mine.state) == (1, "gone")
    assert rig.turn(0.3) == 0


def test_what_is_only_answered_again_is_told_in_the_same_turn(rig: Rig) -> None:
    """Nothing is to be done about a dispatch or a cancel of what has ended, and an idle rank has no other reason to
    speak."""
    rank = rig.host.ranks[0]
    (connection,) = rank.connections
    rank.core.reports.remember(0, Ended("r", 1, "unified", "ok"), Identity(None, None, None), rig.host.now)
    dispatch = Dispatch("r", 1, "unified", 0, 5, 1, 1, 1, 9)
    told: list[Ended] = []
    connection.progress = lambda started, ended: told.extend(ended)  # type: ignore[method-assign]
    rank.turn()
    for say in (
        lambda: rank.dispatched(connection, dispatch, []),
        lambda: rank.cancelled(connection, CancelLeg("r", 1)),
    ):
        told.clear()
        rig.loop.call_threadsafe(say)
        rig.turn()
        assert [end.code for end in told] == ["ok"]


def test_a_request_has_one_leg_in_a_process_which_is_the_one_that_its_client_reads(rig: Rig) -> None:
    """M49: an attempt that another rank has is fenced there, one that another had is answered with its end, and the
    leg whose stream a newer attempt took ends."""
    told: list[tuple[int, int, str]] = []
    ranks, numbers = rig.host.ranks, count(1)
    for number, rank in ranks.items():
        (connection,) = rank.connections
        connection.progress = lambda started, ended, number=number: told.extend(  # type: ignore[method-assign]
            (number, end.attempt, end.code) for end in ended
        )

    def dispatch(number: int, attempt: int) -> None:
        rank, frames = ranks[number], [token_bytes([5]), encode(Params())]
        rank.dispatched(
            rank.connections[0], Dispatch("r", attempt, "unified", number, 5, next(numbers), 1, 1, 9), frames
        )
        rank.turn()

    dispatch(0, 1)
    dispatch(1, 1)
    assert told == [(1, 1, "fenced")]
    dispatch(1, 2)
    rig.turn(SLOW_TICK_S)
    assert told[1:] == [(0, 1, "fenced")]
    assert [len(rank.core) for rank in ranks.values()] == [0, 1]
    ranks[1].driver.apply(ranks[1].core.handle(Finished(next(iter(ranks[1].core.legs)), "stop"), rig.now))
    ranks[1].turn()
    dispatch(0, 2)
    dispatch(0, 1)
    assert told[2:] == [(1, 2, "ok"), (0, 2, "ok"), (0, 1, "fenced")]


def test_a_stream_that_is_not_read_for_long_ends_so_that_its_client_may_try_again(rig: Rig) -> None:
    rank = rig.host.ranks[0]
    (connection,) = rank.connections
    told: list[Ended] = []
    connection.progress = lambda started, ended: told.extend(ended)  # type: ignore[method-assign]
    rank.dispatched(connection, Dispatch("r", 1, "unified", 0, 5, 1, 1, 1, 9), [token_bytes([5]), encode(Params())])
    rig.host.streams.attach(b"gone", Attach("r", 1), rig.now)
    rig.turn()
    rig.turn(UNREAD_S - 0.1)
    assert not told
    rig.turn(SLOW_TICK_S)
    (end,) = told
    assert client_retries(end.code)


def test_drained_when_the_bus_has_carried_the_goodbyes(rig: Rig) -> None:
    host = rig.host
    host.drain("test")
    rig.turn()
    assert not host.drained()
    for rank in host.ranks.values():
        rig.hear(Member("u", rank.dp_rank, rank.epoch, 1, None, "unified", "m", 2, "gone", "", False, 0, 0.25))
    assert rig.turn() == 1
    assert host.drained()


def test_a_stream_that_nobody_reads_holds_a_drained_host_up_no_longer_than_its_grace(rig: Rig) -> None:
    host = rig.host
    leg = unified_leg("r")
    host.streams.open(leg, 0.0)
    leg.end("ok", "length", 0.0)
    host.streams.finish(leg)
    rig.now = ATTACH_GRACE_S
    host.drain("test")
    rig.turn()
    assert rig.turn(GOODBYE_S) == 1
    assert host.drained()


def test_a_node_that_stood_still_while_it_waited_asks_as_long_as_another_one() -> None:
    now = 0.0
    with tempfile.TemporaryDirectory(prefix="pd") as folder, capture_logs() as logs:
        at = (f"ipc://{folder}/b", (f"ipc://{folder}/c",), f"ipc://{folder}")
        runners: Any = {0: ThreadedRunner(FACTS, lambda leg, order: None)}
        loop = Loop(lambda: now + time.monotonic())  # real time, but for what it stood still
        with Node(NodeConfig("unified", "u", 1, (0,), *at, wait_s=0.6), loop, runners) as node:
            loop.call_later(1.0, lambda: None)
            now = 60.0
            with pytest.raises(StartError, match=r"did not answer \(waited 0.6 s\)"):
                node.run(lambda node: None)
    (waiting,) = (line for line in logs if line["event"] == "node.waiting")
    assert len(waiting["waits_for"]) == 2
    assert waiting["gives_up_in_s"] == 0.6, "nothing could be heard while it stood still"


def test_a_node_that_is_told_to_leave_before_it_is_ready_finishes_what_runs_there() -> None:
    """The bus is not there yet, so it is not ready; a controller that has welcomed it dispatches to it all the same."""
    ahead_s = 0.0
    told: list[Ended] = []
    with tempfile.TemporaryDirectory(prefix="pd") as folder:
        at = (f"ipc://{folder}/b", (f"ipc://{folder}/c",), f"ipc://{folder}")
        runners: Any = {0: ThreadedRunner(FACTS, lambda leg, order: None)}
        loop = Loop(lambda: ahead_s + time.monotonic())
        with Node(NodeConfig("unified", "u", 1, (0,), *at), loop, runners) as node:
            rank = node.host.ranks[0]
            (connection,) = rank.connections
            connection.progress = lambda started, ended: told.extend(ended)  # type: ignore[method-assign]

            def leave() -> None:
                dispatch = Dispatch("r", 1, "unified", 0, 5, 1, 1, 1, 9)
                rank.dispatched(connection, dispatch, [token_bytes([5]), encode(Params())])
                node.on_signal(signal.SIGTERM)
                loop.call_later(0.0, finish)

            def finish() -> None:
                nonlocal ahead_s
                rank.driver.apply(rank.core.handle(Finished(next(iter(rank.core.legs)), "stop"), loop.clock()))
                rank.turn()
                ahead_s = STREAM_GRACE_S + GOODBYE_S  # no client reads, and no bus carries its goodbye

            loop.call_later(0.0, leave)
            node.run(lambda node: pytest.fail("it has had no answer"))
    assert [end.code for end in told] == ["ok"]


def test_tokens_leave_once_all_have_planned_and_before_controllers_are_told(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def note(of: Any, method: str, name: str) -> None:
        does = getattr(of, method)
        monkeypatch.setattr(of, method, lambda *arguments: (order.append(name), does(*arguments))[1])

    rig.turn()
    note(rig.host.streams, "flush", "tokens")
    for dp_rank, rank in rig.host.ranks.items():
        note(rank.runner, "turn", f"plan {dp_rank}")
        note(rank.core, "load", f"load {dp_rank}")
        rank.driver.dirty = True
    rig.turn()
    assert order == ["plan 0", "plan 1", "tokens", "load 0", "load 1"]

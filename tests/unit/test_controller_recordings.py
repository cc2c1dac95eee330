"""A viewer's questions for what a rank does: passed on to the rank, and its answer to the viewer."""

from __future__ import annotations

from typing import Any

import pytest
from controller_world import World, hello, peer_of
from msgspec.structs import replace

from bus.rights import Known
from bus.wire.messages import Ping, Pong, RankStep, RankWork, RecordQuery, RecordReply, Refused
from controller import recordings
from controller.events import FromClient, FromNode, Tick
from controller.recordings import WAIT_S

P, OLD = replace(hello("p", role="prefill", dp_size=1), records=True), hello("old", role="decode", dp_size=1)
STEP = RankStep(7, 1_000, 20, 3, 0, 99)
WORK = RankWork("chunk", "r", 1, 1_000, 20, 64, 0, 64)
QUERY = RecordQuery(9, "p", 0, 4.0, 7, 2)


@pytest.fixture
def world() -> World:
    world = World(now=5.0)
    for node in (P, OLD):
        world.join(node)
        world.report(node)
    return world


def ask(world: World, query: RecordQuery = QUERY, peer: Any = "viewer") -> None:
    world.feed(FromClient(peer, query))


def answer(world: World, node: Any = P, **fields: Any) -> None:
    passed_on = world.sent(RecordQuery, P)[-1]
    world.feed(FromNode(peer_of(node), RecordReply(passed_on.id, (STEP,), (WORK,), 2, **fields)))


def test_a_question_and_its_answer_are_passed_on_with_what_is_known_of_the_clock(world: World) -> None:
    world.now += 1.0
    world.feed(Tick())
    ping = world.sent(Ping, P)[-1]
    world.now += 0.2
    at_us = round((world.core.events._wall_s + world.now - 0.1 + 3.0) * 1e6)  # it is three seconds ahead
    world.feed(FromNode(peer_of(P), Pong(ping.n, 1, False, 1, at_us)))
    ask(world)
    assert [(each.instance, each.lease_s, each.steps_from, each.work_from) for each in world.sent(RecordQuery, P)] == [
        ("p", 4.0, 7, 2)
    ]
    answer(world, more=True, records=False, silent=True, offset_us=5)  # the last three are not the rank's to say
    now_us = round((world.core.events._wall_s + world.now) * 1e6)
    assert world.answers(RecordReply, "viewer") == [
        RecordReply(9, (STEP,), (WORK,), 2, True, True, False, now_us, 3_000_000, 200_000, P.epoch)
    ]
    answer(world)
    assert len(world.answers(RecordReply, "viewer")) == 1, "it is answered"


def test_two_viewers_with_the_same_number_get_their_own_answers(world: World) -> None:
    ask(world, peer="one")
    ask(world, peer="two")
    first, second = world.sent(RecordQuery, P)
    world.feed(FromNode(peer_of(P), RecordReply(second.id, (STEP,))))
    world.feed(FromNode(peer_of(P), RecordReply(first.id)))
    assert world.answers(RecordReply, "two")[0].steps == (STEP,)
    assert world.answers(RecordReply, "one")[0].steps == ()
    assert world.answers(RecordReply, "one")[0].rtt_us == -1, "no pong says its clock"


def test_a_rank_that_does_not_record_is_not_asked(world: World) -> None:
    ask(world, RecordQuery(9, "old", 0, 4.0))
    assert not world.sent(RecordQuery)
    (reply,) = world.answers(RecordReply, "viewer")
    assert (reply.id, reply.records, reply.steps) == (9, False, ())
    assert reply.at_us > 0


def test_a_rank_that_does_not_answer_is_said_to_be_silent_in_time(world: World) -> None:
    ask(world)
    world.now += WAIT_S - 0.01
    world.feed(Tick())
    assert not world.answers(RecordReply, "viewer")
    world.now += 0.02
    world.feed(Tick())
    (reply,) = world.answers(RecordReply, "viewer")
    assert (reply.id, reply.silent, reply.records) == (9, True, True)
    answer(world)
    assert len(world.answers(RecordReply, "viewer")) == 1


def test_another_rank_cannot_answer(world: World) -> None:
    ask(world)
    answer(world, OLD)
    assert not world.answers(RecordReply, "viewer")


@pytest.mark.parametrize(("key", "may"), [("clients/c", False), ("viewers/v", True), ("admins/a", True)])
def test_it_takes_a_viewers_or_an_admins_key(world: World, key: str, may: bool) -> None:
    peer = Known(b"peer")
    peer.key = key
    ask(world, peer=peer)
    refused = world.answers(Refused, peer)
    assert bool(world.sent(RecordQuery)) == may
    assert [(each.code, each.id) for each in refused] == ([] if may else [("bad_identity", 9)])


def test_an_unknown_rank_and_one_question_too_many_are_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "MAX_OPEN", 2)
    ask(world, RecordQuery(1, "p", 1, 4.0))
    ask(world, peer="a")
    ask(world, peer="b")
    ask(world, peer="c")
    assert [each.code for each in world.answers(Refused, "viewer")] == ["bad_rank"]
    assert [each.code for each in world.answers(Refused, "c")] == ["too_many"]
    world.now += WAIT_S
    world.feed(Tick())
    assert not world.core.recordings._open

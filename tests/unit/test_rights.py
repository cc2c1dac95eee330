"""Who may do what, by key: the table itself, and the cores that ask it. Without keys everybody may, as ever."""

from __future__ import annotations

import pytest
from controller_world import World, hello, submit
from link_world import unified_leg

from bus.rights import DOMAINS, Known, key_of, may, owns, publishes, speaks_for
from bus.wire.messages import (
    Accepted,
    Attach,
    Cancel,
    Detach,
    DrainRank,
    DrainRole,
    Failed,
    Refused,
    Status,
    StatusQuery,
    Tokens,
    TraceQuery,
)  # fmt: skip
from controller.events import ClientGone, FromClient
from nodes.link.streams import UNREAD_S, SendFailure, Streams

NODE = hello("u", 0)


def known(key: str, routing_id: bytes = b"id") -> Known:
    peer = Known(routing_id)
    peer.key = key
    return peer


ALICE, MALLORY, ADMIN = known("clients/alice"), known("clients/mallory"), known("admins/operator")
VIEWER = known("viewers/wall")


@pytest.fixture
def world() -> World:
    made = World()
    made.join(NODE)
    return made


def test_the_table() -> None:
    assert (key_of(ALICE), key_of(b"id"), key_of("local")) == ("clients/alice", "", "")
    assert may(ADMIN, "admins")
    assert may(b"nobody has keys here", "admins")
    assert not may(ALICE, "admins")
    assert speaks_for(known("nodes/p"), "p")
    assert not any(speaks_for(known(key), "p") for key in ("nodes/p2", "clients/p", "controllers/p", "nodes/p/x"))
    assert owns(ALICE, "clients/alice")
    assert not owns(MALLORY, "clients/alice")
    assert owns(MALLORY, "")
    assert owns(b"id", "clients/alice")


@pytest.mark.parametrize(
    ("key", "own", "others"),
    [
        ("nodes/p", [b"load/p/0/", b"rooms/p/7/", b"member/p/0/", b"kv/p/1/"],
         [b"load/p2/0/", b"load/", b"sent/p/", b"beacon/", b"to/p/0/"]),
        ("controllers/c", [b"sent/c/"], [b"sent/c2/", b"load/c/0/", b"beacon/"]),
        ("admins/a", [], [b"sent/a/", b"load/a/0/", b"beacon/"]),
    ],
)  # fmt: skip
def test_topics_of_a_key(key: str, own: list[bytes], others: list[bytes]) -> None:
    assert all(topic.startswith(publishes(key)) for topic in own)
    assert not any(topic.startswith(publishes(key)) for topic in others)


def test_a_request_belongs_to_the_key_that_submitted_it(world: World) -> None:
    world.submit(submit("r"), peer=ALICE)  # type: ignore[arg-type]
    assert world.dispatches()[0].client == "clients/alice"
    for attempt in (1, 2):
        world.submit(submit("r", attempt=attempt), peer=MALLORY)  # type: ignore[arg-type]
    assert [failed.code for failed in world.answers(Failed)] == ["duplicate_rid"] * 2
    world.feed(FromClient(MALLORY, Cancel("r")))
    assert world.core.life.requests
    again = known("clients/alice", b"her next connection")
    world.submit(submit("r"), peer=again)  # type: ignore[arg-type]
    assert len(world.answers(Accepted)) == 2
    world.feed(FromClient(again, Cancel("r")))
    world.assert_empty()


def test_an_admin_cancels_anything(world: World) -> None:
    world.submit(submit("r"), peer=ALICE)  # type: ignore[arg-type]
    world.feed(FromClient(ADMIN, Cancel("r")))
    world.assert_empty()


def test_draining_and_loads_are_for_admins(world: World) -> None:
    world.report(NODE, running=3)
    world.feed(FromClient(ALICE, DrainRank(1, "u", 0)))
    assert [refused.code for refused in world.answers(Refused)] == ["bad_identity"]
    assert world.rank(NODE).ready
    for peer, shown in ((ALICE, False), (ADMIN, True), ("no keys", True)):
        world.to_clients.clear()
        world.feed(FromClient(peer, StatusQuery(1)))
        (status,) = world.answers(Status)
        (rank,) = status.ranks
        assert (rank.instance, rank.role, rank.state, rank.max_context) == ("u", "unified", "ready", 1000)
        assert (rank.load is not None, bool(rank.endpoint), bool(status.counts)) == (shown,) * 3
    world.feed(FromClient(ALICE, DrainRole(2, "unified")))
    assert [refused.code for refused in world.answers(Refused)] == ["bad_identity"]
    assert world.rank(NODE).ready
    world.feed(FromClient(ADMIN, DrainRank(1, "u", 0)))
    assert not world.rank(NODE).ready
    (note,) = [note for note in world.notes if note.event == "drain.ordered"]
    assert note.fields["key"] == "admins/operator"


def test_a_viewer_sees_all_and_changes_nothing(world: World) -> None:
    """It may not run up to a rank's data port either, where it could read a stream."""
    world.report(NODE, running=3)
    world.submit(submit("hers"), peer=ALICE)  # type: ignore[arg-type]
    world.to_clients.clear()
    world.feed(FromClient(VIEWER, StatusQuery(1, events_from=0)))
    (status,) = world.answers(Status)
    assert status.ranks[0].load is not None
    assert status.counts
    assert status.events
    assert status.queue is not None
    world.feed(FromClient(VIEWER, TraceQuery(2, "hers")))
    assert not world.answers(Refused)

    world.submit(submit("its"), peer=VIEWER)  # type: ignore[arg-type]
    world.submit(submit("hers", attempt=2), peer=VIEWER)  # type: ignore[arg-type]
    assert [failed.code for failed in world.answers(Failed)] == ["bad_identity", "duplicate_rid"]
    world.feed(FromClient(VIEWER, Cancel("hers")))
    assert list(world.core.life.requests) == ["hers"]
    for order in (DrainRank(3, "u", 0), DrainRole(4, "unified")):
        world.feed(FromClient(VIEWER, order))
    assert [refused.code for refused in world.answers(Refused)] == ["bad_identity"] * 2
    assert world.rank(NODE).ready
    assert [domain for domain, roles in DOMAINS.items() if "viewers" in roles] == ["bootstrap", "clients"]
    assert publishes("viewers/wall") == ()


def test_limits_count_by_key_however_many_connections_it_has() -> None:
    world = World(client_requests=2)
    world.join(NODE)
    for number in range(3):
        world.submit(submit(f"r{number}"), peer=known("clients/alice", b"%d" % number))  # type: ignore[arg-type]
    assert [failed.code for failed in world.answers(Failed)] == ["too_many"]
    world.submit(submit("other"), peer=MALLORY)  # type: ignore[arg-type]
    assert len(world.answers(Failed)) == 1


def test_a_client_that_is_gone_when_its_request_is_placed_is_not_served(world: World) -> None:
    for rid, continue_on_disconnect in (("gone", False), ("stays", True), ("read elsewhere", False)):
        world.submit(submit(rid, continue_on_disconnect=continue_on_disconnect), peer=ALICE)  # type: ignore[arg-type]
    world.progress(NODE, started=[one for one in world.dispatches(NODE) if one.rid == "read elsewhere"])
    for rid in ("gone", "stays", "read elsewhere", "unknown"):
        world.feed(ClientGone(ALICE, rid))
    assert sorted(world.core.life.requests) == ["read elsewhere", "stays"]
    assert [cancel.rid for cancel in world.cancels()] == ["gone"]
    world.feed(ClientGone(known("clients/alice", b"an old connection"), "stays"))
    assert len(world.core.life.requests) == 2


def test_only_its_client_reads_a_stream() -> None:
    """M80"""
    streams = Streams()
    leg = unified_leg("r", client="clients/alice")
    streams.open(leg, 0.0)
    streams.push(leg, [5, 6])
    streams.attach(MALLORY, Attach("r", 1), 0.0)
    streams.detach(MALLORY, Detach("r", 1))
    (send,) = streams.flush(0.0)
    assert isinstance(send.message, Tokens)
    assert (send.message.finish, send.message.code, send.message.ids) == ("failed", "bad_identity", ())
    streams.attach(ALICE, Attach("r", 1), 0.0)
    (send,) = streams.flush(0.0)
    assert (send.peer, send.message.ids) == (ALICE, (5, 6))  # type: ignore[attr-defined]
    early = Streams()
    early.attach(MALLORY, Attach("r", 1), 0.0)  # before the dispatch
    leg = unified_leg("r", client="clients/alice")
    early.open(leg, 0.0)
    early.push(leg, [5, 6])
    assert [getattr(send.message, "ids", None) for send in early.flush(0.0)] == [()]


def test_what_nobody_reads_any_more_is_given_up_unless_it_is_to_live_on() -> None:
    streams = Streams()
    rids = ("never read", "lives on", "left", "read", "gone", "over")
    legs = {rid: unified_leg(rid, continue_on_disconnect=rid == "lives on") for rid in rids}
    for leg in legs.values():
        streams.open(leg, 0.0)
    for rid in ("left", "read", "gone"):
        streams.attach(b"reader", Attach(rid, 1), 0.0)
    legs["over"].end("ok", "stop", 0.0)
    streams.finish(legs["over"])
    assert streams.unread(UNREAD_S - 0.1) == []
    streams.detach(b"reader", Detach("left", 1))
    now = UNREAD_S
    streams.push(legs["gone"], [5])
    for send in streams.flush(now):
        if send.message.rid == "gone":  # type: ignore[attr-defined]
            streams.unsent(send, SendFailure.GONE, now)
    assert streams.unread(now) == [legs["never read"], legs["left"]]
    assert legs["gone"] in streams.unread(2 * UNREAD_S)
    assert legs["read"] not in streams.unread(2 * UNREAD_S)

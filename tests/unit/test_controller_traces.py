"""What a controller remembers of requests and gathers from its ranks, whose clocks differ; and its part of traces."""

from __future__ import annotations

from typing import Any

from controller_world import World, hello, peer_of, prompt, submit

from bus.rights import Known
from bus.tracecontext import child_of, parse
from bus.wire.codec import MAX_HEADER_BYTES, decode, encode
from bus.wire.messages import (
    CONTROLLER_TO_CLIENT,
    MAX_PHRASE,
    MAX_TRACE_EVENTS,
    Cancel,
    HistoryQuery,
    HistoryReply,
    Ping,
    Pong,
    Refused,
    TraceContext,
    TraceEvent,
    TraceQuery,
    TraceReply,
)
from controller.core import ControllerCore
from controller.events import FromClient, FromNode, Over, Tick
from controller.inquiries import MAX_OPEN, WAIT_S
from controller.rank import Clock
from controller.requests.record import span_of

HEADER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
P, D = hello("p", role="prefill", dp_size=1), hello("d", role="decode", dp_size=1)


def pair(**settings: Any) -> World:
    world = World(**settings)
    for node in (P, D):
        world.join(node)
        world.report(node)
    return world


def ask(world: World, rid: str = "r", peer: Any = "operator", id: int = 9) -> None:
    world.feed(FromClient(peer, TraceQuery(id, rid)))


def answers(world: World) -> list[TraceReply]:
    return world.answers(TraceReply, "operator")


def answer(world: World, node: Any, *events: TraceEvent) -> None:
    (recall,) = world.sent(HistoryQuery, node)[-1:]
    world.feed(FromNode(peer_of(node), HistoryReply(recall.id, events)))


def whats(world: World, part: int = 0) -> list[tuple[str, int, str | None]]:
    return [(mark.what, mark.attempt, mark.leg) for mark in answers(world)[-1].parts[part].events]


def run(world: World, rid: str = "r", **rest: Any) -> None:
    """A request from submit to done, in a second."""
    world.submit(submit(rid, "pair", **rest))
    p, d = world.dispatches(P)[-1], world.dispatches(D)[-1]
    world.now += 0.5
    world.progress(D, started=[d])
    world.progress(P, ended=[p])
    world.now += 0.5
    world.progress(D, ended=[d], output_tokens=5)


def test_controller_and_ranks_tell_what_they_know_of_a_request_that_is_over() -> None:
    world = pair()
    world.now = 10.0
    run(world, asked_us=9_900_000)
    ask(world)
    assert {rank.rid for rank in world.sent(HistoryQuery)} == {"r"}
    answer(world, P, TraceEvent(10_100_000, "taken", 1, "prefill"))
    assert not answers(world), "one rank has still to say something"
    answer(world, D, TraceEvent(10_200_000, "taken", 1, "decode"))
    (reply,) = answers(world)
    assert (reply.id, reply.controller, reply.silent, reply.kept) == (9, "controller-0", (), 1)
    assert [each.part for each in reply.parts] == ["client", "controller-0", "p/0", "d/0"]
    assert reply.parts[0].events == (TraceEvent(9_900_000, "asked"),)
    assert reply.parts[0].rtt_us == -1, "nobody knows the client's clock"
    assert [(mark.what, mark.at_us, mark.leg, mark.detail) for mark in reply.parts[1].events] == [
        ("received", 10_000_000, None, "10 tokens"),
        ("dispatched", 10_000_000, "prefill", "p/0"),
        ("dispatched", 10_000_000, "decode", "d/0"),
        ("output_reported", 10_500_000, None, ""),
        ("done", 11_000_000, None, ""),
    ]


def test_a_session_is_shown_and_is_its_clients_own() -> None:
    world = pair()
    for key in ("clients/a", "clients/b"):
        peer = Known(b"c")
        peer.key = key
        world.submit(submit(key[-1], "pair", session="s"), peer=peer)  # type: ignore[arg-type]
        ask(world, key[-1])
        for node in (P, D):
            answer(world, node)
    shown = [
        mark.detail
        for reply in answers(world)
        for part in reply.parts
        for mark in part.events
        if mark.what == "received"
    ]
    assert shown == ["10 tokens, session clients/a/s", "10 tokens, session clients/b/s"]


def test_a_request_is_found_by_what_its_rid_begins_with_where_none_has_all_of_it() -> None:
    """An edge's client knows no more of it. The newest counts, the others are named."""
    world = pair()
    for rid in ("r-old", "r-new", "rest"):
        run(world, rid)
    world.submit(submit("r-live", "pair"))
    ask(world, "r")
    assert {recall.rid for recall in world.sent(HistoryQuery)} == {"r-live"}
    for node in (P, D):
        answer(world, node)
    (reply,) = answers(world)
    assert (reply.rid, reply.others) == ("r-live", ("r-new", "r-old"))
    ask(world, "r-old")
    assert world.sent(HistoryQuery)[-1].rid == "r-old", "one that is asked for by its whole name"


def test_a_request_that_lives_waits_and_is_tried_again_shows_all_of_it() -> None:
    world = World(request_overcommit=0.25, attempts=3)
    first, second = (hello("u", n) for n in (0, 1))
    for node in (first, second):
        world.join(node)
        world.report(node)
    world.submit(submit("a"))
    world.submit(submit("b"))
    world.submit(submit("r"))  # each rank has one already
    ask(world)
    assert whats(world) == [("received", 1, None), ("queued", 1, None)], "no rank was sent anything: none is asked"
    for rid in ("a", "b"):
        (dispatch,) = [d for d in world.dispatches() if d.rid == rid]
        node = first if dispatch.dp_rank == 0 else second
        world.progress(node, started=[dispatch], ended=[dispatch])
        world.report(node, acks=[(77, 1, dispatch.charge)])
    (dispatch,) = [d for d in world.dispatches() if d.rid == "r"]
    failing, other = (first, second) if dispatch.dp_rank == 0 else (second, first)
    world.now += 1.0
    world.progress(failing, ended=[dispatch], code="engine_failed", message="it broke")
    ask(world)
    for node in (failing, other):
        answer(world, node)
    assert whats(world) == [
        ("received", 1, None), ("queued", 1, None), ("dispatched", 1, "unified"), ("retried", 1, "unified"),
        ("dispatched", 2, "unified"),
    ]  # fmt: skip
    retried = answers(world)[-1].parts[0].events[3]
    assert retried.detail == f"u/{dispatch.dp_rank}: engine_failed: it broke"
    last = [d for d in world.dispatches() if d.rid == "r"][-1]
    world.progress(other, ended=[last], code="too_long", message="x" * 1000)
    ask(world)
    for node in (failing, other):
        answer(world, node)
    end = answers(world)[-1].parts[0].events[-1]
    assert end.what == "failed"
    assert end.detail.startswith("too_long: xxx")


def test_of_what_nobody_remembers_it_says_so_and_how_much_it_keeps() -> None:
    world = pair(trace_bytes=450)
    for n in range(5):
        run(world, f"r{n}")
    world.now += 2.0
    ask(world, "r0")
    assert len(world.sent(HistoryQuery)) == 2, "it may have been another controller's: all ranks are asked"
    for node in (P, D):
        answer(world, node)
    (reply,) = answers(world)
    assert (reply.parts, reply.silent, reply.kept) == ((), (), 2)
    assert reply.kept_s == 3.0
    ask(world, "r4")
    answer(world, P)
    answer(world, D)
    assert whats(world)[-1][0] == "done"


def test_what_is_remembered_is_as_large_as_what_was_said_of_it() -> None:
    world = pair(trace_bytes=1_200)
    world.submit(submit("failed", "pair", instance="nobody", block_tokens=1, prompt_tokens=16, block_hashes=bytes(128)))
    world.submit(submit("cancelled", "pair"))
    world.core.life.cancel("client", Cancel("cancelled"), world.now, [])
    history = world.core.life.table.history
    assert [history.of(rid)[0].code for rid in ("failed", "cancelled")] == ["bad_rank", "cancelled"]
    world.submit(submit("retried", "pair"))
    world.progress(D, ended=world.dispatches(D)[-1:], code="decode_failed", message="x" * 1000)
    world.core.life.cancel("client", Cancel("retried"), world.now, [])
    assert not len(history), "larger than all the memory there is for it"


def test_what_ranks_know_of_another_controllers_request_is_told() -> None:
    world = pair()
    ask(world, "theirs")
    answer(world, P)
    answer(world, D, TraceEvent(5, "taken", 1, "decode"))
    assert [each.part for each in answers(world)[-1].parts] == ["d/0"]


def test_four_characters_of_any_rid_find_it_and_fewer_find_none() -> None:
    world = pair()
    run(world, "abcdef")
    run(world, "abcx-1")
    for beginning, found in (("abcd", "abcdef"), ("abcde", "abcdef"), ("abcx", "abcx-1"), ("abc", ""), ("abce", "")):
        ask(world, beginning)
        for node in (P, D):
            answer(world, node)
        reply = answers(world)[-1]
        assert (reply.rid if reply.parts else "") == found


def test_a_rank_that_does_not_answer_or_is_gone_is_named() -> None:
    world = pair()
    run(world)
    ask(world)
    answer(world, P, TraceEvent(1, "taken", 1, "prefill"))
    world.now += WAIT_S
    world.feed(Tick())
    assert [each.silent for each in answers(world)] == [("d/0",)]
    answer(world, D, TraceEvent(1, "taken", 1, "decode"))
    assert len(answers(world)) == 1, "too late"
    world.core.members.peers.clear()
    ask(world)
    assert answers(world)[-1].silent == ("d/0", "p/0")


def test_it_takes_an_admins_key_and_not_too_many_at_once() -> None:
    world = pair()
    client = Known(b"c")
    client.key = "clients/alice"
    ask(world, peer=client)
    (refused,) = world.answers(Refused)
    assert (refused.code, refused.id) == ("bad_identity", 9)
    for n in range(MAX_OPEN + 1):
        ask(world, id=n)
    assert [refused.code for refused in world.answers(Refused, "operator")] == ["too_many"]
    world.now += WAIT_S
    world.feed(Tick())
    ask(world)
    assert len(world.answers(Refused)) == 2, "they are over"


def test_the_largest_answer_fits_in_a_frame() -> None:
    world = pair()
    run(world, "😀" * 128, asked_us=2**63 - 1)
    for n in range(40):
        node = hello("n" * 62, n, dp_size=64)
        world.join(node)
    ask(world, "nobody's")
    for n in range(40):
        events = (TraceEvent(2**63 - 1, "w" * 32, 1_000_000, "prefill", "😀" * MAX_PHRASE),) * MAX_TRACE_EVENTS
        answer(world, hello("n" * 62, n, dp_size=64), *events)
    world.now += WAIT_S
    world.feed(Tick())
    frame = encode(answers(world)[-1])
    assert len(frame) <= MAX_HEADER_BYTES
    assert decode(frame, CONTROLLER_TO_CLIENT) == answers(world)[-1]


def test_a_rank_whose_clock_is_wrong_is_put_right_by_the_quickest_pong() -> None:
    clock = Clock()
    assert clock.best is None
    clock.add(100.0, 100.4, 160_300_000)  # 60 s ahead, and most of the way took the pong
    clock.add(101.0, 101.02, 161_010_000)
    clock.add(102.0, 103.0, 162_000_000)
    best = clock.best
    assert best is not None
    assert abs(best[0] - 0.02) < 1e-9
    assert abs(best[1] - 60.0) < 1e-6
    for n in range(8):
        clock.add(200.0 + n, 200.1 + n, 270_050_000 + n * 1_000_000)
    later = clock.best
    assert later is not None
    assert abs(later[1] - 70.0) < 1e-6, "the clock was set; what was heard long ago counts no more"
    world = pair()
    run(world)
    out: list[Any] = []
    world.core.members.ping(world.known(P), world.now, out)
    ping = out[0].message
    assert isinstance(ping, Ping)
    sent = world.now
    world.now += 0.01
    world.feed(FromNode(peer_of(P), Pong(ping.n, 0, False, at_us=round(1e6 * (sent + 0.005 + 3600)))))
    ask(world)
    answer(world, P, TraceEvent(1, "taken", 1, "prefill"))
    answer(world, D, TraceEvent(1, "taken", 1, "decode"))
    by_part = {each.part: each for each in answers(world)[-1].parts}
    assert (by_part["p/0"].offset_us, by_part["p/0"].rtt_us) == (3_600_000_000, 10_000)
    assert by_part["d/0"].rtt_us == -1


def test_a_trace_goes_on_to_the_ranks_and_has_a_span_where_spans_are_exported() -> None:
    trace = parse(HEADER, "a=1")
    assert trace is not None
    world = pair()
    run(world, trace=trace)
    assert [dispatch.trace for dispatch in world.dispatches()] == [trace, trace]
    run(world, "s")
    assert [dispatch.trace for dispatch in world.dispatches()][2:] == [None, None]
    world = pair(spans=True)
    world.now = 10.0
    run(world, trace=trace, model="m")
    run(world, "s")
    own = child_of(trace, "r/1")
    assert {dispatch.trace for dispatch in world.dispatches()} == {own, None}
    (ended,) = world.over
    span = span_of(ended.record, 1000.0)
    assert (span.trace, span.parent, span.began_s, span.ended_s, span.error) == (own, trace, 1010.0, 1011.0, "")
    assert dict(span.attributes).items() >= {
        "gen_ai.request.model": "m", "gen_ai.usage.input_tokens": 10, "gen_ai.usage.output_tokens": 5,
        "gen_ai.latency.time_to_first_token": 0.5, "pdbus.prefill.rank": "p/0", "pdbus.decode.rank": "d/0",
        "pdbus.attempt": 1,
    }.items()  # fmt: skip
    assert next(event[1] for event in span.events) == "received"


def test_a_traced_request_that_fails_has_a_span_with_the_reason_and_lines_with_its_trace() -> None:
    world = pair(spans=True)
    world.core.log_requests(True)
    core: ControllerCore = world.core
    bad = submit("r", "pair", trace=TraceContext(HEADER), instance="nobody")
    actions = core.handle(FromClient("client", bad, (prompt(10), b"")), 0.0)
    (over,) = [each for each in actions if isinstance(each, Over)]
    assert span_of(over.record, 0.0).error.startswith("bad_rank: ")
    (note,) = [each for each in actions if hasattr(each, "event")]
    assert note.fields["trace_id"] == HEADER[3:35]

"""What ranks remember of legs, for `pdbus trace` and for spans."""

from __future__ import annotations

import pytest
from legs_world import PROMPT, Rank, World, start

from bus.tracecontext import child_of, parse
from bus.wire.messages import Attach, CancelLeg, TraceContext
from nodes.link.config import Limits
from nodes.link.leg import MAX_LEG_EVENTS
from nodes.link.record import span_of
from nodes.link.runner import Dead, LegFailed

TRACE = TraceContext("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")


@pytest.fixture
def pair() -> tuple[Rank, Rank]:
    world = World()
    return Rank(world, "prefill", "p"), Rank(world, "decode", "d")


def whats(rank: Rank, rid: str = "r") -> list[str]:
    return [mark.what for mark in rank.core.recall(rid, 0.0)]


def test_both_legs_of_a_pair_tell_their_way_in_order(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    world = prefill.world
    began = world.now
    start(pair)
    assert whats(decode) == ["taken", "attached"], "of a leg that lives"
    world.run(5.0)
    assert whats(prefill) == ["taken", "began", "held", "ended"]
    assert whats(decode) == ["taken", "attached", "handed", "began", "first_token", "fetched", "ended"]
    of_prefill, of_decode = prefill.core.recall("r", 1000.0), decode.core.recall("r", 1000.0)
    for events in (of_prefill, of_decode):
        assert [mark.at_us for mark in events] == sorted(mark.at_us for mark in events)
        assert events[0].at_us == round(1e6 * (1000.0 + began))
    assert {(mark.attempt, mark.leg) for mark in of_decode} == {(1, "decode")}
    assert of_decode[-1].detail == "length, 6 tokens"
    assert of_prefill[-1].detail == "KV cache fetched"
    held, handed = of_prefill[2].at_us, of_decode[2].at_us
    assert held <= handed


def test_what_the_prefix_cache_gave_is_told_with_the_beginning(pair: tuple[Rank, Rank]) -> None:
    for rid in ("r", "s"):
        start(pair, rid, bootstrap_room=5 if rid == "r" else 6)
        pair[0].world.run(5.0)
    details = [mark.detail for rid in "rs" for mark in pair[0].core.recall(rid, 0.0) if mark.what == "began"]
    assert details == ["", "8 tokens cached"]


def test_a_leg_that_fails_tells_why_and_attempts_are_told_apart(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    start(pair)
    for rank in pair:
        rank.do(rank.core.cancel(0, CancelLeg("r", 1, "fenced"), rank.world.now))
    start(pair, attempt=2)
    prefill.world.run(5.0)
    ends = [(mark.attempt, mark.detail) for mark in decode.core.recall("r", 0.0) if mark.what == "ended"]
    assert [attempt for attempt, _ in ends] == [1, 2]
    assert ends[0][1].startswith("fenced: ")
    assert decode.core.recall("other", 0.0) == ()


def test_what_no_message_can_say_of_a_failed_leg_is_replaced() -> None:
    rank = Rank(World(), "unified", "u")
    rank.dispatch("r", PROMPT, bootstrap_room=None)
    (leg,) = rank.core.legs
    rank.do(rank.core.handle(LegFailed(leg, "engine_failed", "no file \udcff"), rank.world.now))
    assert rank.core.recall("r", 0.0)[-1].detail == "engine_failed: no file ?, 0 tokens"
    rank.dispatch("s", PROMPT, bootstrap_room=None)
    rank.do(rank.core.handle(Dead("\ud800"), rank.world.now))
    assert rank.core.recall("s", 0.0)[-1].detail == "peer_lost: the engine died: ?, 0 tokens"


def test_it_remembers_as_much_as_it_is_given_memory_for() -> None:
    rank = Rank(World(), "unified", "u", limits=Limits(trace_bytes=600))
    for n in range(8):
        rank.dispatch(f"r{n}", PROMPT, bootstrap_room=None)
        rank.world.run(2.0)
    remembered = [n for n in range(8) if whats(rank, f"r{n}")]
    assert remembered == list(range(8 - len(remembered), 8))
    assert 1 <= len(remembered) < 8
    rank.core.reconfigure(Limits(trace_bytes=0))
    assert not whats(rank, "r7")


def test_a_reader_that_comes_and_goes_does_not_fill_the_memory() -> None:
    rank = Rank(World(), "unified", "u")
    rank.dispatch("r", PROMPT, bootstrap_room=None)
    for n in range(3 * MAX_LEG_EVENTS):
        rank.streams.attach(b"client%d" % n, Attach("r", 1), rank.world.now)
    assert len(whats(rank)) <= MAX_LEG_EVENTS + 1


def test_legs_that_are_traced_have_spans_where_spans_are_exported(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    start(pair, trace=TRACE)
    prefill.world.run(5.0)
    assert not prefill.over, "nobody exports spans"
    for rank in pair:
        rank.core.spans = True
    start(pair, "s", bootstrap_room=6, trace=TRACE)
    start(pair, "t", bootstrap_room=7)
    prefill.world.run(5.0)
    (of_prefill,), (of_decode,) = prefill.over, decode.over
    span = span_of(of_decode.record, "d/0", "m", 1000.0)
    assert (span.name, span.parent, span.error) == ("pdbus decode", TRACE, "")
    assert span.trace == child_of(TRACE, "s/1/decode")
    assert span.trace != span_of(of_prefill.record, "p/0", "m", 1000.0).trace
    assert dict(span.attributes).items() >= {
        "gen_ai.request.model": "m", "gen_ai.usage.input_tokens": len(PROMPT), "gen_ai.usage.output_tokens": 6,
        "gen_ai.response.finish_reasons": ["length"], "pdbus.rank": "d/0", "pdbus.rid": "s", "pdbus.attempt": 1,
        "pdbus.room": "6",
    }.items()  # fmt: skip
    assert 1000.0 < span.began_s < span.ended_s
    assert span.attributes["gen_ai.latency.time_to_first_token"] > 0


def test_log_lines_of_a_traced_leg_name_the_trace() -> None:
    rank = Rank(World(), "unified", "u")
    rank.dispatch("r", PROMPT, bootstrap_room=None, trace=TRACE, max_tokens=10_000)
    rank.dispatch("s", PROMPT, bootstrap_room=None, trace=TRACE)
    rank.do(rank.core.cancel(0, CancelLeg("s", 1), rank.world.now))
    parsed = parse(TRACE.traceparent)
    assert parsed == TRACE
    assert [(note.event, note.fields["trace_id"]) for note in rank.notes] == [
        ("leg.rejected", TRACE.traceparent[3:35]), ("leg.ended", TRACE.traceparent[3:35]),
    ]  # fmt: skip

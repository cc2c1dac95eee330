"""Each stream of the bus was received by whom it is for, and said what it is to say.

One cluster an engine, in which every stream has something to carry. The tests look at what came over the sockets, once
it is all over: no figure, answer or state of a part counts, which may have come about in another way. `cut_streams`
drops each stream at its sender, and demands that its test fails.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from stream_record import CLIENT, Record, Seen, run
from stream_registry import ENGINES, STREAMS
from stream_scenario import HEARD_S, NOWHERE, SEPARATE, SHARED, STRAY, TRACE

from bus.wire import messages
from bus.wire.hashing import block_hashes
from bus.wire.kv_events import BlockStored
from bus.wire.messages import Load

CONTROLLER, BROKER, PREFILL, DECODE = "controller-0", "broker", "prefill-0/0", "decode-0/0"
RANKS = (PREFILL, DECODE)
IN_CI = ("sim", "sim-keys", "numpy")
NAMES = {("prefill-0", 0), ("decode-0", 0)}

recorded = cache(run)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test beside the engines whose ranks send its stream."""
    name = metafunc.function.__name__
    mine = {stream.name for stream in STREAMS.values() if stream.test == name} or set(STREAMS)
    metafunc.parametrize("record", [each for each in IN_CI if mine & ENGINES[each]], indirect=True)


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Record:
    """Of a run in which nothing is dropped, once for all tests."""
    return recorded(request.param)


def test_every_step_came_to_its_end(record: Record) -> None:
    assert record.over, record.log
    assert not record.failed, record.log
    assert record.facts["result"]["code"] == "ok"
    assert not record.dropped


# --- what ranks publish -----------------------------------------------------------------------------------------------


def _of_rank(message: object) -> tuple[str, int]:
    return message.instance, message.dp_rank  # type: ignore[attr-defined]


def test_load(record: Record) -> None:
    """A rank's reports themselves, not the load that comes along with rooms."""
    heard = record.of(messages.LoadReport, CONTROLLER)
    assert {_of_rank(report) for report in heard} >= NAMES, "no load report came"
    for rank in NAMES:
        of_rank = [report for report in heard if _of_rank(report) == rank]
        assert sorted(set(numbers := [report.seq for report in of_rank])) == numbers
    decode = [report.load for report in heard if report.instance == "decode-0"]
    # Totals, not what runs: a request may begin and end between two reports.
    assert any(load.output_tokens_total and load.prompt_tokens_total >= len(record.prompt) for load in decode), decode


def test_rooms(record: Record) -> None:
    heard = [rooms for rooms in record.of(messages.Rooms, BROKER) if _of_rank(rooms) == ("prefill-0", 0)]
    assert {each.room for rooms in heard for each in rooms.register} >= {*SEPARATE}, "no room was registered"
    assert {each.room for rooms in heard for each in rooms.drop} >= {*SEPARATE}, "no room was dropped"


def test_member(record: Record) -> None:
    for at in (BROKER, CONTROLLER):
        states = {(*_of_rank(member), member.state) for member in record.of(messages.Member, at)}
        assert states >= {(*rank, "ready") for rank in NAMES}, f"no member was heard at {at}"
        assert states >= {(*rank, "gone") for rank in NAMES}, f"no member has left at {at}"


def test_kv_events(record: Record) -> None:
    """The blocks of the prompt, by our names, on the bus itself."""
    heard = [events for at, topic, events in record.kv if at == CONTROLLER and topic == b"kv/prefill-0/0/"]
    stored = [event for events in heard for event in events if isinstance(event, BlockStored)]
    assert stored, "no KV event came"
    names = block_hashes(record.prompt, stored[0].block_tokens)
    assert len(names) > 2
    assert {name for event in stored for name in event.hashes} >= set(names)


def _loads(record: Record) -> list[tuple[tuple[str, int], Load]]:
    found: list[tuple[tuple[str, int], Load]] = []
    for each in record.seen:
        load = getattr(each.message, "load", None)
        if each.at == CONTROLLER and isinstance(load, Load):
            found.append((_of_rank(each.message), load))
    return found


def test_acknowledgements(record: Record) -> None:
    """Of what the controller sent, in whatever a load comes with."""
    for part, rank in zip(RANKS, (("prefill-0", 0), ("decode-0", 0)), strict=True):
        sent = record.of(messages.Dispatch, part)
        acks = [ack for of, load in _loads(record) if of == rank for ack in load.acks]
        assert acks, "no acknowledgement came"
        assert max(ack.dispatches for ack in acks) >= len({(each.rid, each.attempt) for each in sent})


def test_spans(record: Record) -> None:
    found = set()
    for body in record.spans:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            named = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                found |= {(named["service.name"], each.name) for each in scope.spans if each.trace_id.hex() == TRACE}
    wanted = {("pdbus-node", "pdbus prefill"), ("pdbus-node", "pdbus decode"), ("pdbus-controller", "pdbus request")}
    assert found >= wanted, f"spans came of {found} alone"


# --- ranks and their controller ---------------------------------------------------------------------------------------


def test_hello(record: Record) -> None:
    assert {(*_of_rank(hello), hello.state) for hello in record.of(messages.Hello, CONTROLLER)} >= {
        (*rank, "ready") for rank in NAMES
    }, "no rank said hello"


def test_welcome(record: Record) -> None:
    for part in RANKS:
        assert record.of(messages.Welcome, part), f"{part} was not welcomed"


def test_who(record: Record) -> None:
    assert record.of(messages.Who, CLIENT), "the stranger was not asked who it is"


def test_ping(record: Record) -> None:
    for part in RANKS:
        assert record.of(messages.Ping, part), f"{part} was not pinged"


def test_pong(record: Record) -> None:
    answered = {pong.n for pong in record.of(messages.Pong, CONTROLLER)} - {STRAY}
    pinged = {ping.n for part in RANKS for ping in record.of(messages.Ping, part)}
    assert answered & pinged, "no ping was answered"


def test_dispatch(record: Record) -> None:
    for part in RANKS:
        assert "first" in {each.rid for each in record.of(messages.Dispatch, part)}, f"nothing was dispatched to {part}"


def test_cancel_leg(record: Record) -> None:
    assert "cancelled" in {each.rid for each in record.of(messages.CancelLeg, DECODE)}, "no leg was cancelled"


def test_drain(record: Record) -> None:
    for part in RANKS:
        assert record.of(messages.Drain, part), f"{part} was not told to drain"


def test_progress(record: Record) -> None:
    ended = {(*_of_rank(each), leg.rid) for each in record.of(messages.Progress, CONTROLLER) for leg in each.ended}
    assert ended >= {(*rank, "first") for rank in NAMES}, "no progress was told of"


def test_bye(record: Record) -> None:
    assert {_of_rank(bye) for bye in record.of(messages.Bye, CONTROLLER)} == NAMES, "no rank said goodbye"


def test_recall(record: Record) -> None:
    for part in RANKS:
        assert "first" in {each.rid for each in record.of(messages.HistoryQuery, part)}, f"{part} was not asked"


def test_recalled(record: Record) -> None:
    told = [each for each in record.of(messages.HistoryReply, CONTROLLER) if each.events]
    assert len(told) >= 2, "ranks said nothing of what they remember"


def test_record(record: Record) -> None:
    for part in RANKS:
        assert record.of(messages.RecordQuery, part), f"{part} was not asked to record"


def test_recorded(record: Record) -> None:
    assert any(each.work for each in record.of(messages.RecordReply, CONTROLLER)), "no rank said what it did"


def test_recorded_to_a_client(record: Record) -> None:
    assert any(each.work for each in record.of(messages.RecordReply, CLIENT)), "the viewer did not get it"


def test_refused_to_a_node(record: Record) -> None:
    assert _refused(record, b"refused to a node"), "what makes no sense was not refused"


def test_refused_to_a_client(record: Record) -> None:
    assert _refused(record, b"refused to a client"), "what makes no sense was not refused"


def test_refused_by_a_broker(record: Record) -> None:
    assert _refused(record, b"refused by the broker"), "what makes no sense was not refused"


def _refused(record: Record, first: bytes) -> bool:
    return any(type(each.message) is messages.Refused and each.first == first for each in record.seen)


def test_sent(record: Record) -> None:
    heard = record.of(messages.Sent)
    dispatched = {each.instance: each.dispatches for sent in heard for each in sent.counters}
    assert dispatched.keys() >= {"prefill-0", "decode-0"}, "the controller did not say what it sent"


# --- streams and KV caches --------------------------------------------------------------------------------------------


def test_attach(record: Record) -> None:
    assert "first" in {each.rid for each in record.of(messages.Attach, DECODE)}, "nobody attached"


def test_detach(record: Record) -> None:
    assert record.of(messages.Detach, DECODE), "nobody detached"


def test_tokens(record: Record) -> None:
    heard = [tokens for tokens in record.of(messages.Tokens, CLIENT) if tokens.rid == "first"]
    ids = {tokens.start + at: id for tokens in heard for at, id in enumerate(tokens.ids)}
    assert [ids.get(at) for at in range(4)] == record.facts.get("result", {}).get("ids"), "the tokens did not come"


def test_kv_pull(record: Record) -> None:
    assert {pull.room for pull in record.of(messages.KvPull, PREFILL)} >= {*SEPARATE}, "nobody pulled"


def test_kv_meta(record: Record) -> None:
    ready = [meta for meta in record.of(messages.KvMeta, DECODE) if meta.ready]
    assert len(record.prompt) in {meta.prompt_tokens for meta in ready}, "no KV cache was announced"


def test_kv_block(record: Record) -> None:
    heard = [block for block in record.of(messages.KvBlock, DECODE) if block.room == SEPARATE[0]]
    assert heard, "no block came"
    assert sum({block.index: block.tokens for block in heard}.values()) >= len(record.prompt)


def test_kv_done(record: Record) -> None:
    assert {done.room for done in record.of(messages.KvDone, PREFILL)} >= {*SEPARATE}, "prefill was not told of the end"


def test_kv_fail(record: Record) -> None:
    assert any(fail.code == "prefill_failed" for fail in record.of(messages.KvFail, CLIENT)), (
        "a late pull has no answer"
    )


# --- keys -------------------------------------------------------------------------------------------------------------


def _after(record: Record, fact: str) -> list[Seen]:
    """What came while whoever was revoked should be heard no more."""
    at = record.facts[f"revoked {fact}"]["at"]
    return [each for each in record.seen if at < each.seconds < at + HEARD_S]


def test_revoked_node(record: Record) -> None:
    """The broker cuts off who connects to it with a key that is not listed any more."""
    heard = {each.message.instance for each in _after(record, "decode-1") if isinstance(each.message, messages.Member)}
    assert "decode-0" in heard
    assert "decode-1" not in heard, "a revoked node is still heard"


def test_revoked_controller(record: Record) -> None:
    """A node leaves a port whose key is not listed any more."""
    pinged = [each.at for each in _after(record, "decode-1") if isinstance(each.message, messages.Ping)]
    assert DECODE in pinged
    pinged = [each.at for each in _after(record, "controller-0") if isinstance(each.message, messages.Ping)]
    assert DECODE not in pinged, "a revoked controller is still obeyed"


# --- broker -----------------------------------------------------------------------------------------------------------


def test_beacon(record: Record) -> None:
    for part in (CONTROLLER, *RANKS):
        assert record.of(messages.Beacon, part), f"no beacon came to {part}"


def test_resync(record: Record) -> None:
    assert b"to/ghost-2/0/" in record.topics(messages.Resync), "nobody was asked to state its rooms again"


def test_conflict(record: Record) -> None:
    heard = [each for each in record.of(messages.Conflict) if each.room == SHARED]
    assert {(each.instance, each.kept) for each in heard} >= {("ghost-0", True), ("ghost-1", False)}, "no conflict came"


def test_query(record: Record) -> None:
    asked = {room for query in record.of(messages.Query, BROKER) for room in query.rooms}
    assert asked >= {NOWHERE, *SEPARATE}, "nobody asked for the rooms"


def test_unwatch(record: Record) -> None:
    given_up = {room for each in record.of(messages.Unwatch, BROKER) for room in each.rooms}
    assert NOWHERE in given_up, "what was cancelled is still watched"


def test_answer(record: Record) -> None:
    found = {room for each in record.of(messages.Answer, DECODE) for one in each.found for room in one.rooms}
    assert found >= {*SEPARATE}, "the room's place was not told"


def test_topology(record: Record) -> None:
    assert record.of(messages.TopologyQuery, BROKER), "nobody asked who is there"


def test_instances(record: Record) -> None:
    heard = {each.instance for told in record.of(messages.Topology, DECODE) for each in told.instances}
    assert "prefill-0" in heard, "nobody was told who is there"


def test_broker_status(record: Record) -> None:
    assert record.of(messages.BrokerStatusQuery, BROKER), "nobody asked the broker what it counts"


def test_broker_counts(record: Record) -> None:
    assert any(each.counts for each in record.of(messages.BrokerStatus, CLIENT)), "the broker says no counts"


# --- client and controller --------------------------------------------------------------------------------------------


def test_submit(record: Record) -> None:
    assert "first" in {each.rid for each in record.of(messages.Submit, CONTROLLER)}, "nothing was submitted"


def test_cancel(record: Record) -> None:
    assert "cancelled" in {each.rid for each in record.of(messages.Cancel, CONTROLLER)}, "nothing was cancelled"


def test_status(record: Record) -> None:
    assert record.of(messages.StatusQuery, CONTROLLER), "nobody asked for the status"


def test_status_is(record: Record) -> None:
    told = record.of(messages.Status, CLIENT)
    assert any({_of_rank(rank) for rank in status.ranks} >= NAMES for status in told), "the status did not come"


def test_drain_rank(record: Record) -> None:
    assert ("decode-0", 0) in {_of_rank(each) for each in record.of(messages.DrainRank, CONTROLLER)}, "no drain came"


def test_drain_role(record: Record) -> None:
    assert "prefill" in {each.role for each in record.of(messages.DrainRole, CONTROLLER)}, "no role's drain came"


def test_trace(record: Record) -> None:
    assert "first" in {each.rid for each in record.of(messages.TraceQuery, CONTROLLER)}, "nobody asked for the trace"


def test_record_of_a_client(record: Record) -> None:
    assert record.of(messages.RecordQuery, CONTROLLER), "no client asked for a recording"


def test_trace_is(record: Record) -> None:
    assert any(each.parts for each in record.of(messages.TraceReply, CLIENT)), "the trace did not come"


def test_accepted(record: Record) -> None:
    assert "first" in {each.rid for each in record.of(messages.Accepted, CLIENT)}, "nothing was accepted"


def test_failed(record: Record) -> None:
    assert "vain" in {each.rid for each in record.of(messages.Failed, CLIENT)}, "no failure came"


def test_done(record: Record) -> None:
    assert "first" in {each.rid for each in record.of(messages.Done, CLIENT)}, "no request was said to be done"


CHECKS: dict[str, Callable[[Record], None]] = {
    name: globals()[stream.test] for name, stream in STREAMS.items() if stream.test in globals()
}

"""W3C Trace Context, and what is remembered of requests."""

from __future__ import annotations

import gc
from math import inf

import pytest
from msgspec import Struct, msgpack

from bus.history import BESIDE_BYTES, History
from bus.tracecontext import child_of, ids_of, is_sampled, parse, root_of, trace_id_of

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADER = f"00-{TRACE}-{SPAN}-01"


def test_a_header_is_read_as_the_recommendation_says() -> None:
    context = parse(f" {HEADER}", "a=1,b=2")
    assert context is not None
    assert (context.traceparent, context.tracestate) == (HEADER, "a=1,b=2")
    assert ids_of(context) == (int(TRACE, 16), int(SPAN, 16))
    assert trace_id_of(context) == TRACE
    assert is_sampled(context)
    later = parse(f"cc-{TRACE}-{SPAN}-03-what.the.future.brings", "x" * 513)
    assert later is not None
    assert (later.traceparent, later.tracestate) == (HEADER, "")
    silent = parse(f"00-{TRACE}-{SPAN}-00")
    assert silent is not None
    assert not is_sampled(silent)


@pytest.mark.parametrize(
    "header",
    ["", "00", HEADER.upper(), HEADER + "-more", f"ff-{TRACE}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01",
     f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE[1:]}-{SPAN}-01", f"0g-{TRACE}-{SPAN}-01"],
)  # fmt: skip
def test_what_is_no_header_begins_no_trace(header: str) -> None:
    assert parse(header) is None


def test_a_span_has_the_same_id_whenever_it_is_asked_for_and_its_own_trace() -> None:
    parent = parse(HEADER, "a=1")
    assert parent is not None
    child = child_of(parent, "r/1")
    assert child == child_of(parent, "r/1")
    assert (trace_id_of(child), child.tracestate) == (TRACE, "a=1")
    spans = {ids_of(each)[1] for each in (parent, child, child_of(parent, "r/2"), child_of(child, "r/1"))}
    assert len(spans) == 4
    assert is_sampled(root_of(5, "r", sampled=True))
    assert not is_sampled(root_of(5, "r", sampled=False))
    assert trace_id_of(root_of(5, "r", sampled=True)) == f"{5:032x}"


class Kept(Struct, frozen=True, array_like=True):
    rid: str
    why: str = ""
    at: float = inf


def test_a_memory_keeps_the_last_that_fit() -> None:
    size = len(msgpack.encode(Kept("a"))) + BESIDE_BYTES
    memory = History(Kept, 2 * size)
    assert memory.oldest is None
    for name in "abcd":
        memory.add(Kept(name))
    assert (memory.of("b"), memory.of("c"), memory.of("d")) == ([], [Kept("c")], [Kept("d")])
    assert (len(memory), memory.oldest) == (2, Kept("c"))
    memory.add(Kept("e", "x" * 2 * size))
    assert not len(memory), "larger than all there is"
    memory.add(Kept("f"))
    memory.add(Kept("g"))
    memory.limit(size)
    assert memory.oldest == Kept("g")
    memory.limit(0)
    memory.add(Kept("h"))
    assert not len(memory)


def test_a_memory_finds_a_request_by_its_whole_name_alone() -> None:
    memory = History(Kept, 10_000)
    kept = [Kept("r"), Kept("r.prefill"), Kept("other", "because of r"), Kept("r", "again", 1.5)]
    for each in kept:
        memory.add(each)
    assert memory.of("r") == [kept[0], kept[3]]
    assert memory.of("because of r") == []
    assert [memory.of(each.rid)[0].rid for each in kept[1:3]] == ["r.prefill", "other"]


def test_a_memory_finds_requests_by_the_beginning_of_their_names() -> None:
    """Whatever their lengths, of which MessagePack says the length in other ways."""
    names = ["r", "r-1", "r-" + "1" * 40, "ré-1", "r-" + "é" * 126, "or-1", "r-1"]
    memory = History(Kept, 10_000)
    for name in names:
        memory.add(Kept(name))
    assert memory.named("r-", 9) == ["r-1", names[4], names[2]], "the newest first, each once"
    assert memory.named("r-", 2) == ["r-1", names[4]]
    assert memory.named("none", 9) == []
    memory.limit(sum(len(msgpack.encode(Kept(name))) + BESIDE_BYTES for name in names[4:]))
    assert (len(memory), memory.named("r", 9), memory.of("r-1")) == (3, ["r-1", names[4]], [Kept("r-1")])
    assert not any(gc.is_tracked(each) for each in memory._kept), "nothing for the collector to visit"

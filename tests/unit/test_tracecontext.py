"""W3C Trace Context, and what is remembered of requests."""

from __future__ import annotations

import pytest

from bus.memory import Memory
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


def test_a_memory_keeps_the_last_that_fit() -> None:
    memory: Memory[str] = Memory(100)
    for name in "abcd":
        memory.add(name, 40)
    assert (list(memory), len(memory)) == (["c", "d"], 2)
    memory.add("e", 101)
    assert not list(memory)
    memory.add("f", 40)
    memory.add("g", 40)
    memory.limit(50)
    assert list(memory) == ["g"]
    memory.limit(0)
    memory.add("h", 1)
    assert not list(memory)

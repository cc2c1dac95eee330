"""Whatever arrives, `decode` gives a message of the table or RemoteProtocolError with a known reason; nothing else."""

from __future__ import annotations

import math
from typing import Any

import msgpack
import wire_strategies as wire
from hypothesis import given
from hypothesis import strategies as st

from bus.errors import RemoteProtocolError
from bus.wire import codec
from bus.wire.messages import Message, Table

REASONS = {"size", "version", "syntax", "tag", "schema"}


def check(frame: bytes, table: Table) -> Message | None:
    reason = ""
    try:
        message = codec.decode(frame, table)
    except RemoteProtocolError as error:
        reason = error.reason
    if reason:
        assert reason in REASONS
        return None
    assert type(message) in table.values()
    assert codec.decode(codec.encode(message), table) == message  # what was let in is within all bounds
    return message


@wire.cheap_fuzz
@given(st.binary(max_size=200), st.sampled_from(sorted(wire.TABLES)))
def test_random_bytes(noise: bytes, table: str) -> None:
    """M10."""
    check(noise, wire.TABLES[table])


@wire.cheap_fuzz
@given(st.binary(max_size=200))
def test_random_bytes_behind_a_good_version(noise: bytes) -> None:
    """M10."""
    check(b"\x01" + noise, wire.ALL)


@wire.cheap_fuzz
@given(st.sampled_from(sorted(wire.ALL)), st.binary(max_size=120), st.integers(0, 40))
def test_random_fields_behind_a_good_tag(tag: str, noise: bytes, count: int) -> None:
    """M10."""
    head = msgpack.packb([tag, *[None] * count])
    check(b"\x01" + head[: len(head) - count] + noise, wire.ALL)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    frame = bytearray(codec.encode(draw(wire.any_message())))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(frame) - 1)))
        match draw(st.sampled_from(["flip", "cut", "insert", "delete", "double"])):
            case "flip" if frame:
                frame[at] ^= draw(st.integers(1, 255))
            case "cut":
                del frame[at:]
            case "insert":
                frame[at:at] = draw(st.binary(min_size=1, max_size=8))
            case "delete":
                del frame[at : at + draw(st.integers(1, 4))]
            case "double":
                frame += frame[at:]
    return bytes(frame)


@wire.fuzz
@given(damaged())
def test_damaged_frames(frame: bytes) -> None:
    """M10."""
    check(frame, wire.ALL)


_leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=6)
    | st.binary(max_size=6)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=4))
    | st.builds(msgpack.Timestamp, st.integers(0, 2**40), st.integers(0, 999_999_999))
)
_trees = st.recursive(
    _leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@wire.fuzz
@given(wire.any_message(), st.data())
def test_one_field_replaced_by_anything(message: Message, data: st.DataObject) -> None:
    """M6 M10 M11: wrong types are refused, never coerced; what passes has exactly the declared type."""
    array = msgpack.unpackb(codec.encode(message)[1:])
    if len(array) == 1:
        return
    at = data.draw(st.integers(1, len(array) - 1))
    value = data.draw(_trees)
    array[at] = value
    decoded = check(b"\x01" + msgpack.packb(array), wire.ALL)
    if decoded is not None and not isinstance(value, list | dict):
        kept: Any = getattr(decoded, type(decoded).__struct_fields__[at - 1])
        assert kept == value
        assert isinstance(kept, bool) == isinstance(value, bool)
        assert isinstance(kept, str) == isinstance(value, str)
        assert isinstance(kept, bytes) == isinstance(value, bytes)
        assert not isinstance(kept, float) or math.isfinite(kept)

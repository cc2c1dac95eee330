"""Whatever arrives, `decode` gives a message of the table or RemoteProtocolError with a known reason; nothing else."""

from __future__ import annotations

import math
import sys
from typing import Any

import msgpack
import wire_cases as wire
from cases import Case, cases

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


CHEAP = 5 * wire.EXAMPLES  # of inputs that cost little to make
CHANGES = ["flip", "cut", "insert", "delete", "double"]


def test_random_bytes() -> None:
    """M10."""
    for case in cases(CHEAP):
        with case:
            check(case.note(case.bytes_of(200)), wire.TABLES[case.one(sorted(wire.TABLES))])


def test_random_bytes_behind_a_good_version() -> None:
    """M10."""
    for case in cases(CHEAP):
        with case:
            check(b"\x01" + case.note(case.bytes_of(200)), wire.ALL)


def test_random_fields_behind_a_good_tag() -> None:
    """M10."""
    for case in cases(CHEAP):
        with case:
            tag, noise, count = case.one(wire.TAGS), case.note(case.bytes_of(120)), case.note(case.randint(0, 40))
            head = msgpack.packb([tag, *[None] * count])
            check(b"\x01" + head[: len(head) - count] + noise, wire.ALL)


def damaged(case: Case) -> bytes:
    frame = bytearray(codec.encode(wire.any_message(case)))
    for _ in range(case.randint(1, 4)):
        at = case.note(case.randint(0, max(0, len(frame) - 1)))
        match case.one(CHANGES):
            case "flip" if frame:
                frame[at] ^= case.randint(1, 255)
            case "cut":
                del frame[at:]
            case "insert":
                frame[at:at] = case.randbytes(case.randint(1, 8))
            case "delete":
                del frame[at : at + case.randint(1, 4)]
            case "double":
                frame += frame[at:]
    return bytes(frame)


def test_damaged_frames() -> None:
    """M10."""
    for case in cases(wire.EXAMPLES):
        with case:
            check(case.note(damaged(case)), wire.ALL)


def leaf(case: Case) -> Any:
    """Whatever MessagePack has that holds nothing else."""
    match case.randrange(8):
        case 0:
            return None
        case 1:
            return case.random() < 0.5
        case 2:
            return case.number(-(2**63), 2**64 - 1)
        case 3:
            ends = (math.inf, -math.inf, math.nan)
            return case.choice(ends) if case.randrange(2) else case.float_of(-sys.float_info.max, sys.float_info.max)
        case 4:
            return case.text(0, 6)
        case 5:
            return case.bytes_of(6)
        case 6:
            return msgpack.ExtType(case.randint(0, 127), case.bytes_of(4))
    return msgpack.Timestamp(case.number(0, 2**40), case.number(0, 999_999_999))


def anything(case: Case) -> Any:
    return case.tree(leaf, lambda case: case.text(0, 3), 3, 4)


def test_one_field_replaced_by_anything() -> None:
    """M6 M10 M11: wrong types are refused, never coerced; what passes has exactly the declared type."""
    for case in cases(wire.EXAMPLES):
        with case:
            message = wire.any_message(case)
            array = msgpack.unpackb(codec.encode(message)[1:])
            if len(array) == 1:
                continue
            at, value = case.note(case.randint(1, len(array) - 1)), case.note(anything(case))
            array[at] = value
            decoded = check(b"\x01" + msgpack.packb(array), wire.ALL)
            if decoded is not None and not isinstance(value, list | dict):
                kept: Any = getattr(decoded, type(decoded).__struct_fields__[at - 1])
                assert kept == value
                assert isinstance(kept, bool) == isinstance(value, bool)
                assert isinstance(kept, str) == isinstance(value, str)
                assert isinstance(kept, bytes) == isinstance(value, bytes)
                assert not isinstance(kept, float) or math.isfinite(kept)

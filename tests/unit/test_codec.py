"""The codec at its edges: sizes, versions, syntax, types, and frames made to hurt."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
import tracemalloc
from typing import Any

import fuzz_messages
import msgpack
import msgspec
import pytest
from msgspec import inspect

from bus.errors import LocalProtocolError, RemoteProtocolError
from bus.wire import codec, messages
from bus.wire.messages import (
    CLIENT_TO_CONTROLLER,
    CONTROLLER_TO_NODE,
    FROM_NODE_DATA,
    NODE_TO_CONTROLLER,
    PARAMS,
    PUBLICATIONS,
    TO_BROKER,
    Answer,
    Beacon,
    Params,
    Ping,
    Submit,
    Table,
    Tokens,
    Who,
)


def frame(*fields: Any, version: int = 1) -> bytes:
    return bytes([version]) + msgpack.packb(list(fields))


def refused(data: bytes, table: Any = CONTROLLER_TO_NODE) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        codec.decode(data, table)
    assert str(caught.value).startswith(caught.value.reason)
    return caught.value.reason


def test_a_frame_is_a_version_byte_and_an_array() -> None:
    """M2."""
    assert codec.encode(Ping(7)) == b"\x01\x93\xa4ping\x07\xc2"
    assert codec.encode(Who()) == b"\x01\x91\xa3who"
    assert codec.decode(b"\x01\x92\xa4ping\x07", CONTROLLER_TO_NODE) == Ping(7)


@pytest.mark.parametrize("data", [b"", b"\x01", b"\x01\x91"])
def test_too_short(data: bytes) -> None:
    """M4."""
    assert refused(data) == "size"


def test_too_long_is_refused_before_it_is_parsed() -> None:
    """M4."""
    longest = codec.MAX_HEADER_BYTES
    padding = longest - len(frame("ping", 1, False, b"")) - 4  # bin32 takes four more bytes than bin8
    assert codec.decode(frame("ping", 1, False, b"x" * padding)[:longest], CONTROLLER_TO_NODE) == Ping(1)
    assert refused(b"\x01" + b"\xc1" * longest) == "size"


def test_what_a_peer_would_not_take_is_not_sent() -> None:
    """M4."""
    with pytest.raises(LocalProtocolError) as caught:
        codec.encode(Submit("r", "pair", 1, 1, block_hashes=b"x" * (1 << 20)))
    assert caught.value.reason == "size"


@pytest.mark.parametrize("version", [0, 2, 0x91, 255])
def test_other_versions(version: int) -> None:
    assert refused(frame("ping", 1, version=version)) == "version"


@pytest.mark.parametrize(
    "body",
    [
        b"\xc0\xc0",  # nil twice
        b"\x81\xa4ping\x01",  # a map
        b"\xa4ping",  # a bare tag
        b"\x90\xc0",  # an empty array and more
        b"\x91\x01",  # a number for a tag
        b"\x91\xc4\x04ping",  # bytes for a tag
        b"\x92\xa4ping",  # cut short
        b"\x92\xa4ping\x01\x00",  # something after the array
        b"\x92\xa4ping\xc1",  # a byte that MessagePack never uses
        b"\x92\xa4\xff\xfe\xfd\xfc\x01",  # a tag that is not UTF-8
        b"\x92\xa4ping\x81\x01\x01",  # a map with a number for a key
    ],
)
def test_not_a_tagged_array(body: bytes) -> None:
    """M2 M10."""
    assert refused(b"\x01" + body) == "syntax"


@pytest.mark.parametrize("value", [msgpack.ExtType(5, b"x"), msgpack.ExtType(5, b"x" * 300), msgpack.Timestamp(5)])
def test_an_extension_is_no_value_of_ours(value: object) -> None:
    """M5: no field takes one; in one that is not known it is refused or ignored."""
    assert refused(frame("ping", value)) == "syntax"
    assert refused(frame("bye", "p", [value], 1), NODE_TO_CONTROLLER) == "syntax"
    with contextlib.suppress(RemoteProtocolError):
        assert codec.decode(frame("ping", 1, False, value), CONTROLLER_TO_NODE) == Ping(1)


@pytest.mark.parametrize("tag", ["", "hello", "Ping", "ping ", "p" * 10_000])
def test_tags_of_other_sockets_and_of_none(tag: str) -> None:
    """M7."""
    assert refused(frame(tag, 1)) == "tag"


@pytest.mark.parametrize("value", [True, False, 1.0, "1", b"1", None, [1], {"n": 1}, -1, 2**63])
def test_an_int_is_an_int(value: object) -> None:
    """M6."""
    assert refused(frame("ping", value)) == "schema"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -1.0, 1e10, True, "1.0", None])
def test_seconds_are_finite_and_in_bounds(value: object) -> None:
    """M6 M11."""
    assert refused(frame("beacon", 1, 1, value), PUBLICATIONS) == "schema"


def test_an_int_stands_for_a_float() -> None:
    """M6."""
    beacon = codec.decode(frame("beacon", 1, 1, 2), PUBLICATIONS)
    assert isinstance(beacon, Beacon)
    assert isinstance(beacon.interval_s, float)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, 1.5])
def test_top_p_is_a_share(value: float) -> None:
    """M11."""
    assert refused(frame("params", 0.0, 0, value), PARAMS) == "schema"


@pytest.mark.parametrize("name", ["", "a/b", "a b", "a\n", "é", "a" * 65, b"abc"])
def test_names_stay_inside_their_topic(name: object) -> None:
    """M6: also a last newline, which `$` would let pass."""
    assert refused(frame("drain_rank", 1, name, 0), CLIENT_TO_CONTROLLER) == "schema"


@pytest.mark.parametrize("endpoint", ["tcp://a b:1", "tcp://host:1\n", "x" * 151, "tcp://hôte:1"])
def test_endpoints_are_printable_ascii(endpoint: str) -> None:
    """M6."""
    member = ["member", "a", 0, 1, 1, None, "prefill", "m", 1, "ready", endpoint, False, 0, 1.0]
    assert refused(frame(*member), PUBLICATIONS) == "schema"


def test_text_is_not_taken_for_bytes() -> None:
    """M6: neither as it is nor as base64."""
    submit = ["submit", "r", "pair", 1, 1, None, None, None, "", "", "", 1, 0, 0.0, 0, 0]
    assert codec.decode(frame(*submit, b"12345678"), CLIENT_TO_CONTROLLER)
    assert refused(frame(*submit, "MTIzNDU2Nzg="), CLIENT_TO_CONTROLLER) == "schema"


def test_lists_have_their_bounds() -> None:
    """M6."""
    assert codec.decode(frame("query", 1, list(range(4096))), TO_BROKER)
    assert refused(frame("query", 1, list(range(4097))), TO_BROKER) == "schema"
    assert refused(frame("query", 1, []), TO_BROKER) == "schema"
    assert codec.decode(frame("tokens", "r", 1, 0, [7] * 16384), FROM_NODE_DATA)
    assert refused(frame("tokens", "r", 1, 0, [7] * 16385), FROM_NODE_DATA) == "schema"


def test_messages_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Tokens("r", 1, 0, (1,)).start = 5  # type: ignore[misc]


def test_what_a_newer_peer_appends_is_ignored() -> None:
    """M8."""
    taken = None
    with contextlib.suppress(RemoteProtocolError):
        taken = codec.decode(frame("ping", 7, False, "new", [1]), CONTROLLER_TO_NODE)
    assert taken == Ping(7)


def test_a_field_without_a_default_may_not_lack() -> None:
    """M9."""
    assert refused(frame("ping")) == "schema"


def test_defaults_are_those_of_the_wire() -> None:
    """M9."""
    assert codec.decode(frame("params"), PARAMS) == Params()
    assert codec.decode(frame("answer", 3), codec.readable(Table(answer=Answer))) == Answer(3)


ARRAY32 = b"\xdd"


@pytest.mark.parametrize(
    "body",
    [
        b"\x91" * 1_000_000,  # deeper than any stack
        b"\x92\xa4ping" + b"\x91" * 900 + b"\x01",
        ARRAY32 + b"\xff\xff\xff\xff",  # claims four thousand million elements
        b"\x92\xa4ping" + ARRAY32 + b"\xff\xff\xff\xff",
        (ARRAY32 + (1_000_000).to_bytes(4, "big")) * 500 + b"\x00" * 1_000_000,  # claims within claims
        (ARRAY32 + (60_000).to_bytes(4, "big")) * 500 + b"\x00" * 1_000_000,
        b"\xdf\xff\xff\xff\xff",  # a map as large
        b"\x92\xa4ping\xdb\xff\xff\xff\xff",  # a string as long
        b"\x92\xa4ping\xc6\xff\xff\xff\xff",
        ARRAY32 + (1_000_000).to_bytes(4, "big") + b"\x90" * 1_000_000,
    ],
)
def test_frames_made_to_take_memory_or_time(body: bytes) -> None:
    """M4 M10: refused without much of either."""
    tracemalloc.start()
    started = time.process_time()
    try:
        assert refused(b"\x01" + body[: codec.MAX_HEADER_BYTES - 1]) in ("syntax", "schema")
        assert tracemalloc.get_traced_memory()[1] < 300 << 20
    finally:
        tracemalloc.stop()
    assert time.process_time() - started < 5.0


NAMED = [
    (kind, field.name)
    for kind in vars(messages).values()
    if isinstance(kind, type) and issubclass(kind, messages.Message) and kind.__struct_fields__
    for field in inspect.type_info(kind).fields  # type: ignore[attr-defined]
    if isinstance(field.type, inspect.Metadata) and "alphabet" in (field.type.extra or {})
]


@pytest.mark.parametrize(("kind", "field"), NAMED)
@pytest.mark.parametrize("bad", ["no name", "line\n", "é", "x" * 151, "a/b\x00"])
def test_every_name_and_endpoint_is_checked_wherever_it_travels(
    kind: type[messages.Message], field: str, bad: str
) -> None:
    """The types alone do not say so: each message that carries one has to be of the right base."""
    good = fuzz_messages.of(kind)(random.Random(7))
    fields = msgspec.to_builtins(good, builtin_types=(bytes,))
    at = kind.__struct_fields__.index(field) + (kind.__struct_config__.tag is not None)
    assert msgspec.convert(fields, kind, builtin_types=(bytes,)) == good
    fields[at] = bad
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(fields, kind, builtin_types=(bytes,))


@pytest.mark.parametrize("kind", [messages.Load, messages.Hello])
def test_what_users_make_of_many_numbers_is_made_by_name(kind: type[messages.Message]) -> None:
    good = fuzz_messages.of(kind)(random.Random(7))
    with pytest.raises(TypeError):
        kind(*msgspec.structs.astuple(good))


def test_no_two_threads_meet_a_type_for_the_first_time() -> None:
    """msgspec would crash: all that it must know of our messages it knows before any thread can be started."""
    tables = "[each for each in vars(messages).values() if isinstance(each, messages.Table)]"
    code = f"from bus.wire import codec, messages; print(all(hasattr(each, 'read') for each in {tables}))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "True\n", done.stderr

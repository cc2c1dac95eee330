"""What is encoded is decoded to the same message, by us and by a peer that is older or newer within the version."""

from __future__ import annotations

import msgpack
import pytest
import wire_strategies as wire
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.errors import RemoteProtocolError
from bus.wire import codec, topics
from bus.wire.messages import PUBLICATIONS, Message


def _tag(message: Message) -> str:
    return str(type(message).__struct_config__.tag)


@pytest.mark.parametrize("tag", sorted(wire.ALL))
@settings(wire.fuzz, max_examples=max(10, wire.EXAMPLES // 30))
@given(st.data())
def test_every_kind_survives_the_wire(tag: str, data: st.DataObject) -> None:
    """M2 M3 M5: a version byte, a MessagePack array that starts with the tag, fields in order, no extensions."""
    message = data.draw(wire.of(wire.ALL[tag]))
    frame = codec.encode(message)
    assert codec.decode(frame, wire.ALL) == message
    assert frame[:1] == b"\x01"
    array = msgpack.unpackb(frame[1:], max_ext_len=0)
    assert array[0] == tag
    assert len(array) == 1 + len(type(message).__struct_fields__)


@wire.fuzz
@given(wire.any_message(), st.lists(st.none() | st.integers(0, 9) | st.text(max_size=3) | st.just([1]), max_size=3))
def test_unknown_trailing_fields_are_ignored(message: Message, extra: list[object]) -> None:
    """M8: a newer peer's appended fields don't disturb an older one."""
    array = msgpack.unpackb(codec.encode(message)[1:])
    assert codec.decode(b"\x01" + msgpack.packb(array + extra), wire.ALL) == message


@wire.fuzz
@given(wire.any_message())
def test_absent_trailing_defaults_are_filled_in(message: Message) -> None:
    """M9: an older peer leaves out the fields it doesn't know; each takes its default. A required one may not lack."""
    kind = type(message)
    array = msgpack.unpackb(codec.encode(message)[1:])
    defaults = kind.__struct_defaults__
    fields = kind.__struct_fields__
    required = len(fields) - len(defaults)
    for kept in range(len(fields)):
        frame = b"\x01" + msgpack.packb(array[: 1 + kept])
        if kept < required:
            with pytest.raises(RemoteProtocolError) as caught:
                codec.decode(frame, wire.ALL)
            assert caught.value.reason == "schema"
        else:
            decoded = codec.decode(frame, wire.ALL)
            assert [getattr(decoded, name) for name in fields[kept:]] == list(defaults[kept - required :])


@wire.fuzz
@given(wire.any_message(), st.sampled_from(sorted(wire.TABLES)))
def test_a_socket_takes_only_its_own_kinds(message: Message, table: str) -> None:
    """M7: each socket has a table of tags; all others are refused there, however well formed."""
    frame = codec.encode(message)
    if _tag(message) in wire.TABLES[table]:
        assert codec.decode(frame, wire.TABLES[table]) == message
    else:
        with pytest.raises(RemoteProtocolError) as caught:
            codec.decode(frame, wire.TABLES[table])
        assert caught.value.reason == "tag"


@pytest.mark.parametrize("tag", sorted(PUBLICATIONS))
@settings(wire.fuzz, max_examples=50)
@given(st.data())
def test_every_publication_has_a_topic_that_names_its_subject(tag: str, data: st.DataObject) -> None:
    """M13: the topic follows from the message, ends in a slash and is plain ASCII."""
    message = data.draw(wire.of(PUBLICATIONS[tag]))
    topic = topics.of(message)
    assert topic.endswith(b"/")
    assert topic.isascii()
    if hasattr(message, "instance"):
        assert topic.split(b"/")[1:] == [message.instance.encode(), str(message.dp_rank).encode(), b""]

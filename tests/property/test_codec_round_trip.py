"""What is encoded is decoded to the same message, by us and by a peer that is older or newer within the version."""

from __future__ import annotations

import msgpack
import pytest
import wire_cases as wire
from cases import cases

from bus.errors import RemoteProtocolError
from bus.wire import codec, topics
from bus.wire.messages import PUBLICATIONS, Message


def _tag(message: Message) -> str:
    return str(type(message).__struct_config__.tag)


@pytest.mark.parametrize("tag", wire.TAGS)
def test_every_kind_survives_the_wire(tag: str) -> None:
    """M2 M3 M5: a version byte, a MessagePack array that starts with the tag, fields in order, no extensions."""
    for case in cases(max(10, wire.EXAMPLES // 30)):
        with case:
            message = wire.message(case, wire.ALL[tag])
            frame = codec.encode(message)
            assert codec.decode(frame, wire.ALL) == message
            assert frame[:1] == b"\x01"
            array = msgpack.unpackb(frame[1:], max_ext_len=0)
            assert array[0] == tag
            assert len(array) == 1 + len(type(message).__struct_fields__)


def test_unknown_trailing_fields_are_ignored() -> None:
    """M8: a newer peer's appended fields don't disturb an older one."""
    for case in cases(wire.EXAMPLES):
        with case:
            message = wire.any_message(case)
            extra = [case.one([None, case.randint(0, 9), case.text(0, 3), [1]]) for _ in range(case.randint(0, 3))]
            array = msgpack.unpackb(codec.encode(message)[1:])
            assert codec.decode(b"\x01" + msgpack.packb(array + extra), wire.ALL) == message


def test_absent_trailing_defaults_are_filled_in() -> None:
    """M9: an older peer leaves out the fields it doesn't know; each takes its default. A required one may not lack."""
    for case in cases(wire.EXAMPLES):
        with case:
            message = wire.any_message(case)
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


def test_a_socket_takes_only_its_own_kinds() -> None:
    """M7: each socket has a table of tags; all others are refused there, however well formed."""
    for case in cases(wire.EXAMPLES):
        with case:
            message, table = wire.any_message(case), case.one(sorted(wire.TABLES))
            frame = codec.encode(message)
            if _tag(message) in wire.TABLES[table]:
                assert codec.decode(frame, wire.TABLES[table]) == message
            else:
                with pytest.raises(RemoteProtocolError) as caught:
                    codec.decode(frame, wire.TABLES[table])
                assert caught.value.reason == "tag"


@pytest.mark.parametrize("tag", sorted(PUBLICATIONS))
def test_every_publication_has_a_topic_that_names_its_subject(tag: str) -> None:
    """M13: the topic follows from the message, ends in a slash and is plain ASCII."""
    for case in cases(50):
        with case:
            message = wire.message(case, PUBLICATIONS[tag])
            topic = topics.of(message)
            assert topic.endswith(b"/")
            assert topic.isascii()
            if hasattr(message, "instance"):
                assert topic.split(b"/")[1:] == [message.instance.encode(), str(message.dp_rank).encode(), b""]

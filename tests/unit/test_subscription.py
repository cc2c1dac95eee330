"""A publication is two frames, and its topic is the one its message must travel under."""

from __future__ import annotations

import pytest

from bus.errors import RemoteProtocolError
from bus.wire import topics
from bus.wire.codec import encode
from bus.wire.messages import Beacon, Message, Resync, Sent
from bus.wire.topics import read

MESSAGES = [Beacon(5, 1, 0.25), Resync("prefill-0", 1, 7), Sent("controller-0", 9, 1, ())]


@pytest.mark.parametrize("message", MESSAGES)
def test_what_travels_under_its_own_topic_is_read(message: Message) -> None:
    assert read([topics.of(message), encode(message)]) == message


@pytest.mark.parametrize("message", MESSAGES)
@pytest.mark.parametrize("topic", [b"", b"to/prefill-0/10/", b"beacon", b"sent/controller-1/"])
def test_what_travels_under_another_topic_is_refused(message: Message, topic: bytes) -> None:
    """M13."""
    with pytest.raises(RemoteProtocolError) as caught:
        read([topic, encode(message)])
    assert caught.value.reason == "topic"


def test_other_than_two_frames_are_refused() -> None:
    """M12."""
    message = MESSAGES[0]
    for frames in ([], [encode(message)], [topics.of(message), encode(message), b""]):
        with pytest.raises(RemoteProtocolError) as caught:
            read(frames)
        assert caught.value.reason == "frames"
    with pytest.raises(RemoteProtocolError) as caught:
        read([topics.of(message), b"\x01garbage"])
    assert caught.value.reason == "syntax"

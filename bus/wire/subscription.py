"""What a subscriber reads: two frames, the message and the topic that it must travel under.

Must not count, log or act; a reader does that with the RemoteProtocolError.
"""

from __future__ import annotations

from collections.abc import Sequence

from bus.errors import RemoteProtocolError
from bus.wire import topics
from bus.wire.codec import decode
from bus.wire.messages import PUBLICATIONS, Message


def read(frames: Sequence[bytes]) -> Message:
    """The message of a publication. RemoteProtocolError as of `decode`, or `frames` or `topic`."""
    if len(frames) != 2:
        raise RemoteProtocolError("frames", f"{len(frames)} frames")
    message = decode(frames[1], PUBLICATIONS)
    if topics.of(message) != frames[0]:
        raise RemoteProtocolError("topic", repr(frames[0][:80]))
    return message

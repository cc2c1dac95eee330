"""Topics of the PUB/SUB bus: `kind/instance/dp_rank/`, so that a prefix subscribes to a kind, an instance or a rank.

The closing slash keeps rank 1 from matching rank 10. A publication is two frames: its topic and its message. This
module must not count, log or act.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from bus.errors import RemoteProtocolError
from bus.wire.codec import decode
from bus.wire.messages import (
    MAX_DP_SIZE,
    PUBLICATIONS,
    Beacon,
    Conflict,
    LoadReport,
    Member,
    Message,
    Resync,
    Rooms,
    Sent,
)

LOAD = b"load/"
ROOMS = b"rooms/"
MEMBER = b"member/"
SENT = b"sent/"
BEACON = b"beacon/"
TO = b"to/"  # broker to one publisher
KV = b"kv/"  # KV-cache events, in the format of SGLang and vLLM
ALL = (LOAD, ROOMS, MEMBER, SENT, BEACON, TO, KV)

_PREFIX: dict[type[Message], bytes] = {LoadReport: LOAD, Rooms: ROOMS, Member: MEMBER, Resync: TO, Conflict: TO}


@lru_cache(4 * MAX_DP_SIZE)
def for_rank(prefix: bytes, instance: str, dp_rank: int) -> bytes:
    """Return the topic of a rank: `prefix` (one of the kinds below, such as LOAD), then `instance/dp_rank/`."""
    return b"%s%s/%d/" % (prefix, instance.encode(), dp_rank)


def of(message: Message) -> bytes:
    """Return the topic under which `message` must be published."""
    prefix = _PREFIX.get(type(message))
    if prefix is not None:
        return for_rank(prefix, message.instance, message.dp_rank)  # type: ignore[attr-defined]
    if isinstance(message, Sent):
        return SENT + message.controller.encode() + b"/"
    assert isinstance(message, Beacon), message
    return BEACON


def read(frames: Sequence[bytes]) -> Message:
    """Return the message in the two frames of a publication. RemoteProtocolError if they are not valid, or the message
    does not belong under its topic."""
    if len(frames) != 2:
        raise RemoteProtocolError("frames", f"{len(frames)} frames")
    message = decode(frames[1], PUBLICATIONS)
    if of(message) != frames[0]:
        raise RemoteProtocolError("topic", repr(frames[0][:80]))
    return message

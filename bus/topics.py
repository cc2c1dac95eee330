"""Topics of the PUB/SUB bus: `kind/instance/dp_rank/`, so that a prefix subscribes to a kind, an instance or a rank.

The closing slash keeps rank 1 from matching rank 10. Must not decode payloads.
"""

from __future__ import annotations

from bus.messages import Beacon, Conflict, LoadReport, Member, Message, Resync, Rooms, Sent

LOAD = b"load/"
ROOMS = b"rooms/"
MEMBER = b"member/"
SENT = b"sent/"
BEACON = b"beacon/"
TO = b"to/"  # broker to one publisher
KV = b"kv/"  # KV-cache events, in the format of SGLang and vLLM

_PREFIX = {LoadReport: LOAD, Rooms: ROOMS, Member: MEMBER, Resync: TO, Conflict: TO}


def for_rank(prefix: bytes, instance: str, dp_rank: int) -> bytes:
    return b"%s%s/%d/" % (prefix, instance.encode(), dp_rank)


def of(message: Message) -> bytes:
    """The topic `message` must travel under."""
    if isinstance(message, Sent):
        return SENT + message.controller.encode() + b"/"
    if isinstance(message, Beacon):
        return BEACON
    assert isinstance(message, LoadReport | Rooms | Member | Resync | Conflict), message
    return for_rank(_PREFIX[type(message)], message.instance, message.dp_rank)

"""KV events of our own nodes, as they come over the bus (`kv/<instance>/<dp_rank>/`). Pure; bounded by the ranks known.

Our nodes offer no replay: after a hole what was known of the rank is void and grows anew from what follows.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from bus import topics
from bus.errors import RemoteProtocolError
from bus.messages import MemberKey
from controller.feeds.changes import Changes
from controller.feeds.follower import Follower


class NodeCaches:
    """`known`: the ranks there are; others' events are dropped."""

    def __init__(self, known: Container[MemberKey]) -> None:
        self._known = known
        self._followers: dict[MemberKey, Follower] = {}

    def received(self, frames: Sequence[bytes]) -> tuple[MemberKey, Changes]:
        """What a publication says of which rank. RemoteProtocolError when it is not of the format."""
        if len(frames) != 3:
            raise RemoteProtocolError("frames", f"{len(frames)} frames")
        key = _key_of(frames[0])
        if key not in self._known:
            self._followers.pop(key, None)
            return key, ()
        follower = self._followers.get(key)
        if follower is None:
            follower = self._followers[key] = Follower(key[1], replay=False, ours=True)
        return key, follower.live(frames).changes


def _key_of(topic: bytes) -> MemberKey:
    instance, _, rank = topic[len(topics.KV) : -1].decode("ascii", "replace").rpartition("/")
    if not rank.isdecimal() or len(rank) > 5 or topics.for_rank(topics.KV, instance, int(rank)) != topic:
        raise RemoteProtocolError("topic", repr(topic[:80]))
    return instance, int(rank)

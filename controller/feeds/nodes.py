"""KV events of our own nodes (changes of their ranks' prefix caches), as they come over the bus
(`kv/<instance>/<dp_rank>/`). Pure.

What is remembered of a rank's stream belongs to its record and goes with it. Our nodes offer no replay: after a hole,
what was known of the rank is void, and its next ping asks it to name again what it has cached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from bus.errors import RemoteProtocolError
from bus.wire import topics
from bus.wire.kv_names import Changes
from bus.wire.messages import MemberKey
from controller.feeds.follower import Follower
from controller.rank import Rank


class NodeCaches:
    """The streams of our nodes. `known` returns the rank with this key, or None: its events are dropped then. `counts`:
    as for `Follower`."""

    def __init__(self, known: Callable[[MemberKey], Rank | None], counts: Counter[str]) -> None:
        self._known = known
        self._counts = counts

    def received(self, frames: Sequence[bytes]) -> tuple[MemberKey, Changes]:
        """Take a publication; return its rank and the changes for the prefix index, none for an unknown rank. Raises
        RemoteProtocolError when it is not of the format."""
        if len(frames) != 3:
            raise RemoteProtocolError("frames", f"{len(frames)} frames")
        key = _key_of(frames[0])
        rank = self._known(key)
        if rank is None:
            return key, ()
        if rank.follower is None:
            rank.follower = Follower(key[1], self._counts, replay=False, ours=True)
        return key, rank.follower.live(frames).changes


def _key_of(topic: bytes) -> MemberKey:
    instance, _, rank = topic[len(topics.KV) : -1].decode("ascii", "replace").rpartition("/")
    if not rank.isdecimal() or len(rank) > 5 or topics.for_rank(topics.KV, instance, int(rank)) != topic:
        raise RemoteProtocolError("topic", repr(topic[:80]))
    return instance, int(rank)

"""KV events of our own nodes: followed while their rank is known, and no longer."""

from __future__ import annotations

import weakref
from collections import Counter

import pytest
from controller_world import World, hello

from bus.errors import RemoteProtocolError
from bus.wire.codec import pack
from bus.wire.kv_names import Cleared, Stored
from bus.wire.messages import MemberKey
from controller.feeds.nodes import NodeCaches


def frames(instance: str, seq: int, *hashes: int, dp_rank: int = 0) -> list[bytes]:
    """A publication that says: these blocks are cached."""
    event = {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": None,
        "token_ids": [],
        "block_size": 1,
    }
    return [b"kv/%b/%d/" % (instance.encode(), dp_rank), seq.to_bytes(8, "big"), pack([0.0, [event], dp_rank])]


def test_a_follower_goes_with_its_rank() -> None:
    world, counts = World(forget_s=1.0), Counter[str]()
    caches = NodeCaches(world.core.members.known, counts)
    followers = []
    for number in range(100):
        node = hello(f"n{number}", 0)
        world.join(node)
        rank = world.known(node)
        assert caches.received(frames(f"n{number}", 0, 7)) == (rank.key, (Stored((7,)),))
        followers.append(weakref.ref(rank.follower))
    del rank
    world.pass_time(10.0)
    assert not any(follower() for follower in followers)
    assert caches.received(frames("n1", 1, 8)) == (("n1", 0), ())  # and it gets none again
    assert world.core.members.ranks == {}


def test_holes_and_restarts_void_what_is_known_and_are_counted() -> None:
    world, counts = World(), Counter[str]()
    caches = NodeCaches(world.core.members.known, counts)
    key: MemberKey = ("n", 0)
    world.join(hello("n", 0))
    assert caches.received(frames("n", 4, 1)) == (key, (Stored((1,)),))
    assert caches.received(frames("n", 6, 2)) == (key, (Cleared(), Stored((2,))))
    assert caches.received(frames("n", 0, 3)) == (key, (Cleared(), Stored((3,))))
    topic, seq, _ = frames("n", 1)
    assert caches.received([topic, seq, b"\xc1"]) == (key, (Cleared(),))
    assert counts == {"kv_gaps": 1, "kv_restarts": 1, "rejected_syntax": 1}
    assert caches.received(frames("n", 2, -1)) == (key, (Cleared(),))  # none of our hashes
    assert counts["rejected_schema"] == 1
    with pytest.raises(RemoteProtocolError, match="topic"):
        caches.received([b"kv/n/0x/", seq, b""])

"""KV-cache events of vLLM's engines, published like those of our own ranks: with our names of blocks and our
numbers.

An engine publishes them on a port of this machine. This module knows one rank's blocks and reads its stream; the
socket is on the link's loop. After a lost or unreadable message, everything published before is withdrawn. What is
left out is counted, and the counts are published with the next message.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bus.errors import RemoteProtocolError
from bus.wire import codec, topics
from bus.wire.hashing import ROOT, hash_block, root_of, token_bytes
from bus.wire.kv_events import BlockStored, Hash, KvEvent, parse_batch, split_frames
from bus.wire.kv_names import MAX_BLOCKS as MAX_NAMES
from bus.wire.kv_names import Cleared, Removed, Stored, Translator

MAX_BLOCKS = 512  # in a message
MAX_RESTATED = 65_536  # blocks: as many as a controller keeps of a rank

Frames = tuple[bytes, bytes, bytes]


class EventRelay:
    """The relay of one rank, on the link's thread. Call `received` for each message of the engine's stream, and `tick`
    20 times a second; it calls `publish` with the frames. `counts` has what was left out, by the names of
    `bus.wire.kv_events.LEFT_OUT`."""

    def __init__(self, instance: str, dp_rank: int, publish: Callable[[Sequence[Frames]], None]) -> None:
        self.counts: Counter[str] = Counter()
        self._published_counts: Counter[str] = Counter()
        self._topic = topics.for_rank(topics.KV, instance, dp_rank)
        self._dp_rank = dp_rank
        self._publish_frames = publish
        self._names = Translator(self.counts)
        self._cached: set[int] = set()  # our names of what is cached
        self._expected = 0
        self._next_number = 0
        self._block_tokens = 1
        self._restating: deque[Hash] = deque()  # the engine's hashes of blocks that had names when `restate` was called

    def received(self, frames: Sequence[bytes]) -> None:
        """Take in one message of the engine, and publish its events in our form at once."""
        maps: list[dict[str, Any]] = []
        try:
            number, payload = split_frames(frames)
            if number != self._expected:
                maps.append(self._forget("kv_gaps"))
            self._expected = number + 1
            for event in parse_batch(payload).events:
                maps += self._maps(event)
        except RemoteProtocolError:
            maps.append(self._forget("kv_unreadable"))
        left_out = dict(self.counts - self._published_counts)
        self._published_counts = self.counts.copy()
        for part in _parts(maps) if maps or not left_out else ([],):
            self._publish(part, *([left_out] if left_out else []))
            left_out = {}

    def restate(self) -> None:
        """Begin to publish again what is cached, MAX_BLOCKS blocks with each tick: a controller does not know it."""
        self._restating = deque(self._names.known()[-MAX_RESTATED:])

    def cached_tokens(self, prompt: Sequence[int], salt: str = "") -> int:
        """Return how many tokens of a prompt are cached, in whole blocks; the last token never counts, since it is
        computed in any case."""
        packed, size = token_bytes(prompt), 4 * self._block_tokens
        at, name = 0, root_of(salt)
        while at + size < len(packed) and (name := hash_block(name, packed[at : at + size])) in self._cached:
            at += size
        return at // 4

    def tick(self) -> None:
        """Publish the next part of what `restate` began, if there is any."""
        some = [self._restating.popleft() for _ in range(min(MAX_BLOCKS, len(self._restating)))]
        names = [name for theirs in some if (name := self._names.name(theirs)) is not None]
        if names:
            self._publish([_event(names, None, (), self._block_tokens)])

    def _publish(self, maps: Sequence[dict[str, Any]], *more: dict[str, int]) -> None:
        number, self._next_number = self._next_number, self._next_number + 1
        payload = codec.pack([time.time(), maps, self._dp_rank, *more])
        self._publish_frames([(self._topic, number.to_bytes(8, "big"), payload)])

    def _forget(self, why: str) -> dict[str, Any]:
        self.counts[why] += 1
        self._names.clear()
        self._cached.clear()
        return {"type": "AllBlocksCleared"}

    def _maps(self, event: KvEvent) -> list[dict[str, Any]]:
        parent = self._names.name(event.parent) if isinstance(event, BlockStored) else None
        maps: list[dict[str, Any]] = []
        for change in self._names.changes((event,)):
            match change:
                case Stored(hashes):
                    assert isinstance(event, BlockStored)
                    maps += _stored(event, hashes, parent)
                    self._block_tokens = event.block_tokens
                    self._cached.update(hashes)
                    if len(self._cached) > MAX_NAMES:  # the translator has forgotten some, and does not say which
                        known = map(self._names.name, self._names.known())
                        self._cached = {name for name in known if name is not None}
                case Removed(hashes):
                    self._cached.difference_update(hashes)
                    maps.append({"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"})
                case Cleared():
                    self._cached.clear()
                    maps.append({"type": "AllBlocksCleared"})
        return maps


def _stored(event: BlockStored, names: Sequence[int], parent: int | None) -> list[dict[str, Any]]:
    maps = []
    for at in range(0, len(names), MAX_BLOCKS):
        part = names[at : at + MAX_BLOCKS]
        size = event.block_tokens
        maps.append(_event(part, parent, event.tokens[at * size : (at + len(part)) * size], size))
        parent = part[-1]
    return maps


def _event(names: Sequence[int], parent: int | None, tokens: Sequence[int], size: int) -> dict[str, Any]:
    return {
        "type": "BlockStored", "block_hashes": list(names), "parent_block_hash": None if parent == ROOT else parent,
        "token_ids": list(tokens), "block_size": size, "lora_id": None, "medium": "GPU",
    }  # fmt: skip


def _parts(maps: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Return `maps` in lists of at most MAX_BLOCKS blocks."""
    part: list[dict[str, Any]] = []
    blocks = 0
    for each in maps:
        count = len(each.get("block_hashes", ()))
        if part and blocks + count > MAX_BLOCKS:
            yield part
            part, blocks = [], 0
        part.append(each)
        blocks += count
    if part:
        yield part

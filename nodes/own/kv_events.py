"""KV-cache events of one rank, in the format of SGLang and vLLM, so that any prefix-aware router can follow our
caches.

This module owns the format and the sequence numbers; the shell publishes. Frames: topic `kv/<instance>/<dp_rank>/`,
sequence number (8 bytes big-endian, from 0 with each start), MessagePack `[ts, [event ...], dp_rank]` with events as
maps. Block hashes are those of `bus.wire.hashing`, unsigned 64-bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bus.wire import codec, topics
from bus.wire.hashing import ROOT
from nodes.own.blocks import BlockStored, KvEvent

MAX_BLOCKS = 512  # in a message

Frames = tuple[bytes, bytes, bytes]


class KvEventLog:
    """The event stream of one rank: it makes the messages and numbers them. The rank's runner owns it and gives the
    messages to the link."""

    def __init__(self, instance: str, dp_rank: int, block_tokens: int) -> None:
        self._topic = topics.for_rank(topics.KV, instance, dp_rank)
        self._dp_rank = dp_rank
        self._block_tokens = block_tokens
        self._seq = 0

    def messages(self, events: Sequence[KvEvent], ts: float) -> list[Frames]:
        """Return the messages that publish `events` (from `BlockPool.take_events`), made at `ts` seconds since 1970."""
        found = []
        for at in range(0, len(events), MAX_BLOCKS):
            maps = self._merged(events[at : at + MAX_BLOCKS])
            found.append((self._topic, self._seq.to_bytes(8, "big"), codec.pack([ts, maps, self._dp_rank])))
            self._seq += 1
        return found

    def restated(self, names: Sequence[int], ts: float) -> Frames:
        """Return one message that publishes again that these blocks (MAX_BLOCKS at most) are cached: their hashes,
        without tokens. `ts` is as in `messages`."""
        event = {
            "type": "BlockStored", "block_hashes": list(names), "parent_block_hash": None, "token_ids": [],
            "block_size": self._block_tokens, "lora_id": None, "medium": "GPU",
        }  # fmt: skip
        frames = (self._topic, self._seq.to_bytes(8, "big"), codec.pack([ts, [event], self._dp_rank]))
        self._seq += 1
        return frames

    def _merged(self, events: Sequence[KvEvent]) -> list[dict[str, Any]]:
        """Return the events with runs of consecutive stored blocks, and of removed blocks, joined into one event
        each."""
        maps: list[dict[str, Any]] = []
        for event in events:
            last = maps[-1] if maps else {}
            if isinstance(event, BlockStored):
                if last.get("type") == "BlockStored" and last["block_hashes"][-1] == event.parent:
                    last["block_hashes"].append(event.block_hash)
                    last["token_ids"].extend(event.tokens)
                else:
                    maps.append(self._stored(event))
            elif last.get("type") == "BlockRemoved":
                last["block_hashes"].append(event.block_hash)
            else:
                maps.append({"type": "BlockRemoved", "block_hashes": [event.block_hash], "medium": "GPU"})
        return maps

    def _stored(self, event: BlockStored) -> dict[str, Any]:
        return {
            "type": "BlockStored",
            "block_hashes": [event.block_hash],
            "parent_block_hash": None if event.parent == ROOT else event.parent,
            "token_ids": list(event.tokens),
            "block_size": self._block_tokens,
            "lora_id": None,
            "medium": "GPU",
        }

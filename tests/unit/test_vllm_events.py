"""KV events of vLLM told on as those of our own ranks: our names of blocks, our numbers, nothing after a hole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import zmq

from bus.runtime.sockets import Sockets
from bus.wire import codec
from bus.wire.hashing import block_hashes
from bus.wire.kv_names import Changes, Cleared, Removed, Stored, Translator
from controller.feeds.follower import Follower
from nodes.vllm import events
from nodes.vllm.events import MAX_BLOCKS, EventRelay, Frames
from nodes.vllm.main import event_sockets

SIZE = 4
TOKENS = list(range(10, 30))
THEIRS = [bytes([number]) * 32 for number in range(5)]
OURS = block_hashes(TOKENS, SIZE)


class Relay:
    """The relay, and a controller that follows what it publishes."""

    def __init__(self) -> None:
        self.relay = EventRelay("p-0", 1, self._told)
        self.messages: list[Frames] = []
        self.changes: Changes = ()
        self.counts: Counter[str] = Counter()
        self._follower = Follower(1, self.counts, replay=False, ours=True)
        self._number = 0

    def _told(self, messages: Sequence[Frames]) -> None:
        for frames in messages:
            self.messages.append(frames)
            self.changes += self._follower.live(frames).changes

    def say(self, *events: dict[str, Any], number: int | None = None) -> Changes:
        self._number = self._number if number is None else number
        payload = codec.pack([1.0, list(events), 0])
        self.changes = ()
        self.relay.received([b"", self._number.to_bytes(8, "big"), payload])
        self._number += 1
        return self.changes


def stored(first: int, count: int, **changes: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored", "block_hashes": THEIRS[first : first + count],
        "parent_block_hash": THEIRS[first - 1] if first else None,
        "token_ids": TOKENS[first * SIZE : (first + count) * SIZE], "block_size": SIZE, "lora_id": None,
        "medium": "GPU",
    } | changes  # fmt: skip


def test_what_is_cached_of_a_prompt_is_known_here_too() -> None:
    relay = Relay()

    def cached(tokens: Sequence[int] = TOKENS, salt: str = "") -> int:
        return relay.relay.cached_tokens(tokens, salt)

    assert cached() == 0
    relay.say(stored(0, 3))
    assert cached() == cached([*TOKENS[: 3 * SIZE], 1, 2, 3, 4, 5]) == 3 * SIZE
    assert cached(TOKENS[: 3 * SIZE]) == 2 * SIZE, "the last token is computed"
    assert cached(TOKENS[: 3 * SIZE + 1]) == 3 * SIZE
    assert cached([9, *TOKENS]) == cached([]) == cached(salt="s") == 0
    relay.say({"type": "BlockRemoved", "block_hashes": [THEIRS[1]], "medium": "GPU"})
    assert cached() == SIZE
    relay.say(stored(1, 1))
    assert cached() == 3 * SIZE
    relay.say({"type": "AllBlocksCleared"})
    assert cached() == 0
    relay.say(stored(0, 3))
    relay.say(stored(3, 1), number=9)
    assert cached() == 0, "a message was lost: nothing is known"


def test_what_has_no_name_any_more_is_not_expected_to_be_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or it would stay known for ever, as its removal is not understood."""
    monkeypatch.setattr(events, "MAX_NAMES", 3)
    relay = Relay()
    relay.relay._names = Translator(Counter(), 3)
    relay.say(stored(0, 3))
    other = block_hashes([1, 2, 3, 4], SIZE)
    relay.say(stored(0, 1, block_hashes=[b"x"], token_ids=[1, 2, 3, 4]))
    assert relay.relay._cached == {*OURS[1:3], *other}
    assert relay.relay.cached_tokens(TOKENS) == 0


def test_blocks_come_and_go_by_our_names() -> None:
    relay = Relay()
    assert relay.say(stored(0, 2)) == (Stored(tuple(OURS[:2])),)
    assert relay.say(stored(2, 3)) == (Stored(tuple(OURS[2:])),)
    assert relay.say({"type": "BlockRemoved", "block_hashes": [THEIRS[1], b"never heard of"]}) == (Removed((OURS[1],)),)
    assert relay.say({"type": "AllBlocksCleared"}) == (Cleared(),)
    assert [frames[0] for frames in relay.messages] == [b"kv/p-0/1/"] * 4
    assert [int.from_bytes(frames[1], "big") for frames in relay.messages] == [0, 1, 2, 3]
    first, second = (codec.unpack(frames[2])[1][0] for frames in relay.messages[:2])
    assert (first["parent_block_hash"], first["token_ids"]) == (None, TOKENS[:8])
    assert second["parent_block_hash"] == OURS[1]


def test_after_a_hole_nothing_is_known() -> None:
    relay = Relay()
    relay.say(stored(0, 2))
    assert relay.say(stored(2, 1), number=7) == (Cleared(),), "its parent's name is no longer certain"
    assert relay.relay.counts["kv_gaps"] == 1
    assert relay.say(stored(0, 1)) == (Stored((OURS[0],)),)
    relay.relay.received([b"", b"short"])
    assert relay.relay.counts["kv_unreadable"] == 1
    assert relay.changes == (Stored((OURS[0],)), Cleared())
    assert not relay.counts["kv_restarts"], "our own numbers go on"
    assert relay.counts == {"kv_gaps": 1, "kv_unreadable": 1, "kv_blocks_unnamed": 1}, "the controller says how often"


def test_what_more_than_tokens_made_is_counted_at_the_controller() -> None:
    relay = Relay()
    assert relay.say(stored(0, 1, lora_id=3)) == ()
    assert [codec.unpack(frames[2])[1] for frames in relay.messages] == [[]]
    assert relay.counts == {"kv_blocks_unnamed": 1}
    assert relay.say(stored(0, 2, extra_keys=[None, [["image", 3]]])) == (Stored((OURS[0],)),)
    assert relay.counts == {"kv_blocks_unnamed": 2}
    assert relay.say(stored(2, 1, medium="CPU")) == ()
    assert relay.counts == {"kv_blocks_unnamed": 2, "kv_blocks_elsewhere": 1}
    relay.say(stored(0, 1))
    assert len(codec.unpack(relay.messages[-1][2])) == 3, "what was said once is not said again"


def test_vllms_publisher_connects_where_the_node_listens() -> None:
    """It binds a wildcard alone, so one of the two has to be bound here."""
    with Sockets() as sockets, zmq.Context() as context:
        port, streams = event_sockets(sockets, 2)
        assert event_sockets(sockets, 0) == (0, [])
        for index, stream in enumerate(streams):
            with context.socket(zmq.XPUB) as publisher:
                publisher.connect(f"tcp://127.0.0.1:{port + index}")
                ready = zmq.Poller()
                ready.register(publisher, zmq.POLLIN)
                ready.register(stream, zmq.POLLIN)  # which sends its subscription as it is looked at
                assert ready.poll(10_000)
                assert publisher.recv(zmq.NOBLOCK) == b"\1"
                publisher.send_multipart([b"", b"\0" * 8, b"events"])
                assert stream.poll(10_000)
                assert stream.recv_multipart() == [b"", b"\0" * 8, b"events"]


def test_a_long_prompt_is_told_in_messages_of_some_size() -> None:
    tokens = list(range(SIZE * (MAX_BLOCKS + 10)))
    names = block_hashes(tokens, SIZE)
    event = stored(0, 0, token_ids=tokens, block_hashes=[number.to_bytes(8, "big") for number in range(len(names))])
    relay = Relay()
    assert relay.say(event) == (Stored(tuple(names[:MAX_BLOCKS])), Stored(tuple(names[MAX_BLOCKS:])))
    assert len(relay.messages) == 2
    assert codec.unpack(relay.messages[1][2])[1][0]["parent_block_hash"] == names[MAX_BLOCKS - 1]


def test_to_a_new_controller_what_is_cached_is_told_again_a_message_a_tick() -> None:
    relay = Relay()
    count = 2 * MAX_BLOCKS
    names = block_hashes(list(range(SIZE * count)), SIZE)
    theirs = [number.to_bytes(8, "big") for number in range(count)]
    relay.say(stored(0, 0, token_ids=list(range(SIZE * count)), block_hashes=theirs))
    relay.say({"type": "BlockRemoved", "block_hashes": theirs[:1]})
    relay.relay.restate()
    gone = relay.say({"type": "BlockRemoved", "block_hashes": theirs[1:2]})
    assert gone == (Removed((names[1],)),)
    late = Follower(1, relay.counts, replay=False, ours=True)
    told = len(relay.messages)
    for _ in range(3):
        relay.relay.tick()
    changes = [change for frames in relay.messages[told:] for change in late.live(frames).changes]
    assert changes == [Stored(tuple(names[2 : MAX_BLOCKS + 1])), Stored(tuple(names[MAX_BLOCKS + 1 :]))]
    assert not relay.counts


def test_what_is_told_again_ends_at_a_hole() -> None:
    relay = Relay()
    relay.say(stored(0, 2))
    relay.relay.restate()
    assert relay.say(stored(2, 1), number=7) == (Cleared(),)
    relay.relay.tick()
    assert relay.changes == (Cleared(),)

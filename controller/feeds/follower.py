"""Following one rank's KV events (changes of its prefix cache): sequence, parsing and translation together. Pure; the
shells move the bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

from bus.errors import RemoteProtocolError
from bus.wire.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Hash,
    KvEvent,
    parse_batch,
    split_frames,
)
from bus.wire.kv_names import Changes, Cleared, Removed, Stored, Translator
from controller.feeds.sequence import Deliver, Replay, Sequencer, Step


class Learned(Struct, frozen=True, gc=False):
    """The result of a message: changes for the prefix index, and the sequence number to ask a replay from (None: no
    replay)."""

    changes: Changes
    replay_from: int | None = None


class Follower:
    """The follower of one rank. `missed`: the index was cleared and may lack blocks that the rank still has. The caller
    then asks a node of ours for all its blocks with the next ping, and sets it to False. `replay`: the publisher can
    send old messages again. `ours`: the publisher is a node of ours, whose hashes need no translation. A message that
    cannot be read clears the index, since its content is unknown.

    `counts` gets `kv_gaps`, `kv_restarts`, the counts of blocks that the translation left out (the names in
    `kv_events.LEFT_OUT`; a node of ours translates by itself and reports them), and `rejected_<reason>` for a message
    that cannot be read.
    """

    def __init__(self, dp_rank: int, counts: Counter[str], *, replay: bool, ours: bool = False) -> None:
        self.sequence = Sequencer(counts, replay=replay)
        self.translator = Translator(counts)
        self._counts = counts
        self._dp_rank = dp_rank
        self._ours = ours
        self.missed = False

    def live(self, frames: Sequence[bytes]) -> Learned:
        """Take a message of the stream; return the changes and the replay to ask for. Raises RemoteProtocolError
        without a valid sequence number (0 or more)."""
        seq, payload = split_frames(frames)
        if seq < 0:
            raise RemoteProtocolError("frames", "an end of replay in the stream")
        return self._learned(self.sequence.live(seq, payload))

    def replayed(self, frames: Sequence[bytes]) -> Learned:
        """Take an answer to a replay, or the message that ends it, and return as `live` does; without a running replay
        nothing happens. Afterwards this object's `sequence.replaying` is true while more answers are awaited. Raises
        RemoteProtocolError for a message without a sequence number."""
        return self._learned(self.sequence.replayed(*split_frames(frames)))

    def unanswered(self) -> Learned:
        """End the running replay, because the caller has waited too long for its answers; without one nothing happens.
        The result may ask for another replay, or clear the index after `sequence.ATTEMPTS` without progress."""
        return self._learned(self.sequence.unanswered())

    def _learned(self, steps: Sequence[Step]) -> Learned:
        changes: list[Stored | Removed | Cleared] = []
        replay_from = None
        for step in steps:
            if isinstance(step, Replay):
                replay_from = step.start
            elif isinstance(step, Deliver):
                try:
                    batch = parse_batch(step.payload)
                    if batch.dp_rank not in (None, self._dp_rank):
                        raise RemoteProtocolError("rank", f"events of rank {batch.dp_rank}")
                    changes += self._changes(batch.events)
                    if self._ours:
                        for name, count in batch.left_out:
                            self._counts[name] += count
                except RemoteProtocolError as error:
                    self._counts[f"rejected_{error.reason}"] += 1
                    changes.append(self._void())
            else:
                changes.append(self._void())
        return Learned(tuple(changes), replay_from)

    def _void(self) -> Cleared:
        self.missed = True
        self.translator.clear()
        return Cleared()

    def _changes(self, events: Sequence[KvEvent]) -> Changes:
        if not self._ours:
            return self.translator.changes(events)
        found: list[Stored | Removed | Cleared] = []
        for event in events:
            if isinstance(event, AllBlocksCleared):
                found.append(Cleared())
            elif isinstance(event, BlockStored):
                found.append(Stored(_integers(event.hashes)))
            else:
                assert isinstance(event, BlockRemoved)
                found.append(Removed(_integers(event.hashes)))
        return tuple(found)


def _integers(hashes: Sequence[Hash]) -> tuple[int, ...]:
    found = tuple(each for each in hashes if isinstance(each, int) and each >= 0)
    if len(found) < len(hashes):
        raise RemoteProtocolError("schema", "our hashes are unsigned integers")
    return found

"""Read back: before a prefill rank computes a prompt, it reads what the decode rank of the same request caches of it
and it lacks itself. Pure.

The pull is the same as a decode rank's, the other way round: the prefill rank's side (`KvReader`) asks under the room,
the decode rank's side (`KvLender`) answers for its leg that waits for the prompt. Nothing fails for it: where the
decode rank does not answer in time, or has nothing, the prefill rank computes the prompt itself. Blocks that are lent
stay until they are read, for LEND_S without a sign of life at most. The reader has its own memory by then, so no rank
waits for another's. Where an engine's own connector reads, the answer has a handle, and says for how long it is good:
the lender's engine keeps the blocks for that time, whatever becomes of the legs.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from bus.actions import Send
from bus.wire.messages import KvBlock, KvDone, KvFail, KvMeta, KvPull
from nodes.link.actions import Action, Lend, Readable, Reclaim, SendBlock
from nodes.link.facts import FOR_EVER, OVER_THE_BUS, KvHandle, RankFacts
from nodes.link.leg import Leg, LegState
from nodes.link.puller import MAX_HANDLE_BYTES, sent_at, take_block
from nodes.link.rooms import ByRoom

READ_WAIT_S = 1.0  # for the decode rank's first answer
ASK_S = 0.25  # until it is asked again for that
LEND_S = 5.0
MAX_PARKED = 4096


class KvReader:
    """The prefill rank's side; its core calls it, and carries the returned actions out in order. `counts` belongs to
    the rank; `now` is seconds on the process's clock."""

    def __init__(self, facts: RankFacts, counts: Counter[str]) -> None:
        self._facts = facts
        self._counts = counts
        self._legs: ByRoom[Leg] = ByRoom()

    def begin(self, leg: Leg, now: float) -> list[Action]:
        """Ask the decode rank for what it caches of the leg's prompt, because the leg's runner has memory for it."""
        assert leg.location is not None
        self._legs.put(leg.room, leg.client, leg)
        leg.kv_wanted, leg.read_until = True, now + READ_WAIT_S
        return [self._ask(leg, now)]

    def received(self, message: KvMeta | KvBlock | KvFail, data: bytes | memoryview, now: float) -> list[Action]:
        """Handle what the decode rank sent; `data` is the frame after it: a block, or the engine's handle."""
        leg = self._legs.find(message.room, message.client)
        if leg is None or not leg.kv_wanted or message.attempt != leg.attempt:
            return []
        if isinstance(message, KvBlock):
            return take_block(leg, leg.attempt, message, data, self._counts) if leg.reads else []
        if isinstance(message, KvFail):
            return [Readable(leg, 0)]
        if leg.reads or not message.ready:
            return []
        ours = (self._facts.kv_layout, self._facts.block_tokens, leg.prompt_tokens)
        if (message.layout, message.block_tokens, message.prompt_tokens) != ours:
            return [Readable(leg, 0)]
        own = bool(message.blocks) and self._facts.kv_transfer != OVER_THE_BUS
        if own != bool(data) or len(data) > MAX_HANDLE_BYTES:
            return [Readable(leg, 0)]
        if own:
            assert leg.location is not None
            valid_until = sent_at(leg, message) + message.valid_s if message.valid_s else FOR_EVER
            leg.handle = KvHandle(leg.location, leg.attempt, 0, message.blocks, bytes(data), valid_until)
        leg.reads = True
        return [Readable(leg, message.blocks)]

    def pull(self, leg: Leg, first: int, count: int) -> list[Action]:
        """Ask for blocks `first` .. `first`+`count`-1, because the leg's runner wants them."""
        return [self._pull(leg, first, count)]

    def done(self, leg: Leg) -> list[Action]:
        """Tell the decode rank that nothing more is read: all is there, or the leg is over. Idempotent."""
        if not leg.kv_wanted:
            return []
        leg.kv_wanted = False
        self._legs.pop(leg.room, leg.client)
        assert leg.location is not None
        return [Send(leg.location.endpoint, KvDone(leg.room, leg.attempt, "ok", leg.client))]

    def tick(self, leg: Leg, now: float) -> list[Action]:
        """Let the runner compute the prompt of a leg whose decode rank did not answer in time; else ask it again."""
        if not leg.kv_wanted or leg.reads:
            return []
        if now >= leg.read_until:
            return [Readable(leg, 0)]
        if now - leg.asked_at < ASK_S:
            return []
        return [self._ask(leg, now)]

    def _ask(self, leg: Leg, now: float) -> Send:
        leg.asked_at = now
        leg.asks.append(now)
        return self._pull(leg, 0, 0, len(leg.asks))

    def _pull(self, leg: Leg, first: int, count: int, asked: int = 0) -> Send:
        assert leg.location is not None
        pull = KvPull(leg.room, leg.attempt, leg.location.epoch, first, count, asked, leg.client)
        return Send(leg.location.endpoint, pull)


class _Parked(NamedTuple):
    """A question that came before the dispatch of its leg."""

    peer: bytes
    pull: KvPull
    since: float


class KvLender:
    """The decode rank's side; its core calls it, and carries the returned actions out in order."""

    def __init__(self, facts: RankFacts) -> None:
        self._facts = facts
        self._legs: ByRoom[Leg] = ByRoom()  # that wait for their prompt
        self._parked: ByRoom[_Parked] = ByRoom()

    def open(self, leg: Leg, now: float) -> list[Action]:
        """Add a new decode leg, whose prefill rank may have asked already."""
        self._legs.put(leg.room, leg.client, leg)
        parked = self._parked.find(leg.room, leg.client)
        if parked is None:
            return []
        self._parked.pop(leg.room, parked.pull.client)
        return self._lend(leg, parked.peer, parked.pull, now) if parked.pull.attempt == leg.attempt else []

    def pull(self, peer: bytes, pull: KvPull, now: float) -> list[Action]:
        """Answer a prefill rank: with how many blocks it can read, with blocks, or with the reason why it can read
        none."""
        leg = self._legs.find(pull.room, pull.client)
        if leg is None or leg.attempt < pull.attempt:
            if len(self._parked) >= MAX_PARKED:
                self._parked.pop_oldest()
            self._parked.put(pull.room, pull.client, _Parked(peer, pull, now))
            return [Send(peer, self._not_ready(pull))]
        if leg.attempt > pull.attempt or leg.state not in (LegState.LOCATING, LegState.ASKING):
            return [
                Send(peer, KvFail(pull.room, pull.attempt, "kv_failed", "the decode leg does not wait", pull.client))
            ]
        if leg.borrower != peer:
            return [*self.close(leg), *self._lend(leg, peer, pull, now)]
        leg.borrowed_at = now
        if not pull.count:
            leg.borrower_asked = pull.asked
            return [self._meta(leg, now)]
        size = self._facts.block_tokens
        blocks = range(pull.first, min(pull.first + pull.count, leg.lent))
        return [SendBlock(peer, leg, index, size) for index in blocks]

    def lent(self, leg: Leg, blocks: int, handle: bytes, valid_s: float, now: float) -> list[Action]:
        """Tell the prefill rank that it can read the first `blocks` blocks, which the runner keeps for it: by `handle`,
        for `valid_s` seconds, where the engine's own connector reads."""
        leg.lent, leg.handle_data, leg.valid_until = blocks, handle, now + valid_s
        return [self._meta(leg, now)]

    def done(self, peer: bytes, done: KvDone) -> list[Action]:
        """Take in that the prefill rank reads no more."""
        parked = self._parked.find(done.room, done.client)
        if parked is not None and (parked.peer, parked.pull.attempt) == (peer, done.attempt):
            self._parked.pop(done.room, parked.pull.client)
        leg = self._legs.find(done.room, done.client)
        if leg is None or leg.attempt != done.attempt or leg.borrower != peer:
            return []
        return self._reclaim(leg)

    def tick(self, now: float) -> list[Action]:
        """Take back what is read no longer, and forget questions whose leg never came."""
        while self._parked and now - next(iter(self._parked)).since >= LEND_S:
            self._parked.pop_oldest()
        silent = [
            leg
            for leg in self._legs
            if leg.borrower is not None and not leg.handle_data and now - leg.borrowed_at >= LEND_S
        ]  # with a handle it need not ask again
        return [action for leg in silent for action in self.close(leg)]

    def close(self, leg: Leg) -> list[Action]:
        """Take back what the leg lends, and tell its reader."""
        peer = leg.borrower
        if peer is None:
            return []
        fail = KvFail(leg.room, leg.attempt, "kv_failed", "the decode rank lends its KV cache no longer", leg.client)
        return [*self._reclaim(leg), Send(peer, fail)]

    def ended(self, leg: Leg) -> list[Action]:
        """Remove a leg that is over."""
        out = self.close(leg)
        self._legs.pop(leg.room, leg.client)
        return out

    def _lend(self, leg: Leg, peer: bytes, pull: KvPull, now: float) -> list[Action]:
        leg.borrower, leg.borrowed_at, leg.borrower_asked = peer, now, pull.asked
        return [Lend(leg)]

    def _reclaim(self, leg: Leg) -> list[Action]:
        leg.borrower, leg.lent, leg.handle_data = None, 0, b""
        return [Reclaim(leg)]

    def _meta(self, leg: Leg, now: float) -> Send:
        facts = self._facts
        assert leg.borrower is not None
        meta = KvMeta(
            leg.room, leg.attempt, leg.prompt_tokens, 0, leg.lent, facts.block_tokens, facts.kv_layout,
            valid_s=max(0.001, leg.valid_until - now) if leg.handle_data else 0.0, asked=leg.borrower_asked,
            client=leg.client,
        )  # fmt: skip
        return Send(leg.borrower, meta, (leg.handle_data,) if leg.handle_data else ())

    def _not_ready(self, pull: KvPull) -> KvMeta:
        facts = self._facts
        return KvMeta(pull.room, pull.attempt, 0, 0, 0, facts.block_tokens, facts.kv_layout, False, client=pull.client)

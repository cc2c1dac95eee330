"""The puller's side of KV transfer: a decode leg's way from its dispatch to its KV cache, which the prefill rank of the
same request computes. Pure.

This module decides which rank a leg asks and under which attempt, how it handles the answers, and the signs of life
that it sends until its runner has the KV cache. The runner decides which blocks to pull, and when again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeAlias

from bus.actions import Note, Send
from bus.wire.codes import Code, end_of_other
from bus.wire.hashing import block_crc32
from bus.wire.messages import Dispatch, FoundBy, KvBlock, KvDone, KvFail, KvMeta, KvPull, Location
from nodes.link.actions import Action, Locate, Start, TakeBlock, Unlocate
from nodes.link.facts import FOR_EVER, OVER_THE_BUS, KvHandle, RankFacts
from nodes.link.leg import Leg, LegState
from nodes.link.rooms import ByRoom
from nodes.link.sender import blocks_of

LOCATE_S = 30.0  # for the broker to learn where a room is prefilled
ASK_S = 1.0  # a decode leg that waits or fetches shows its prefill rank that it lives
PREFILL_SILENT_S = 5.0
MAX_HANDLE_BYTES = 1 << 20

End: TypeAlias = Callable[[Leg, Code, str, float], list[Action]]


class KvPuller:
    """The puller of one rank; its core calls it, and carries the returned actions out in order. `end` ends a leg that
    cannot go on, and calls `close`; `counts` belongs to the rank. `now` is seconds on the process's clock."""

    def __init__(self, facts: RankFacts, counts: Counter[str], end: End) -> None:
        self.waiting = 0  # legs whose KV cache is not ready: the runner does not know them yet
        self.waiting_tokens = 0  # of their prompts, without what the rank caches
        self._facts = facts
        self._counts = counts
        self._end = end
        self._legs: ByRoom[Leg] = ByRoom()

    def holds(self, leg: Leg) -> bool:
        """Return true if a leg of this room is here that belongs to the leg's client, or to no client."""
        return self._legs.find(leg.room, leg.client) is not None

    def open(self, leg: Leg, dispatch: Dispatch, now: float) -> list[Action]:
        """Begin the pull of a new leg: ask the prefill rank in the dispatch, or look up the one that registered the
        room."""
        self._legs.put(leg.room, leg.client, leg)
        # where there is a cache, its controller has left out what is in it
        leg.waits_tokens = min(dispatch.charge, leg.prompt_tokens) if self._facts.prefills else leg.prompt_tokens
        self.waiting += 1
        self.waiting_tokens += leg.waits_tokens
        if dispatch.prefill is not None:
            leg.found_by, leg.paired = "told", True
            return self._found(leg, dispatch.prefill, leg.attempt, now)
        until = now + LOCATE_S if leg.deadline is None else min(now + LOCATE_S, leg.deadline)
        instance, dp_rank = dispatch.prefill_instance, dispatch.disagg_prefill_dp_rank
        return [Locate(leg.room, instance, dp_rank, until, leg.client, dispatch.pair_attempt)]

    def located(
        self, room: int, location: Location | None, attempt: int, code: Code, found_by: FoundBy, now: float, client: str
    ) -> list[Action]:
        """Take in the answer to `client`'s Locate: ask the rank at `location` for the KV cache. None: there is none,
        because of `code`, and the leg ends. An answer for no waiting leg is ignored."""
        leg = self._legs.find(room, client)
        if leg is None or leg.state is not LegState.LOCATING:
            return []
        leg.found_by = found_by
        if location is None:
            why = "no rank registered the room in time" if code == "unknown_room" else "the prefill leg ended first"
            return self._end(leg, end_of_other("decode", code), why, now)
        return self._found(leg, location, attempt, now)

    def received(self, message: KvMeta | KvBlock | KvFail, data: bytes | memoryview, now: float) -> list[Action]:
        """Handle a message of a prefill rank that was asked; `data` is the frame after the message: a block, or the
        engine's handle. The leg is given to the runner when its KV cache is ready, and ends if the prefill rank failed.
        """
        leg = self._legs.find(message.room, message.client)
        if leg is None or not leg.kv_wanted:
            return []
        if leg.client and not message.client:
            self._counts["kv_client_unsaid"] += 1
        if leg.kv_attempt != message.attempt:
            return self._other_attempt(leg, message, now)
        leg.last_seen_at = now
        if isinstance(message, KvFail):
            code = end_of_other("decode", message.code) if leg.state is LegState.ASKING else "kv_failed"
            return self._end(leg, code, message.message or f"the prefill rank says {message.code}", now)
        if isinstance(message, KvMeta):
            if leg.state is LegState.ASKING and message.ready:
                return self._handed(leg, message, bytes(data), now)
            return []
        if leg.state is not LegState.RUNNING:
            return []
        return take_block(leg, leg.kv_attempt, message, data, self._counts)

    def pull(self, leg: Leg, first: int, count: int, now: float) -> list[Action]:
        """Ask the prefill rank for blocks `first` .. `first`+`count`-1, because the leg's runner wants them."""
        assert leg.location is not None
        leg.asked_at = now
        pull = KvPull(leg.room, leg.kv_attempt, leg.location.epoch, first, count, client=leg.client)
        return [Send(leg.location.endpoint, pull)]

    def done(self, leg: Leg, code: Code = "ok") -> list[Action]:
        """Tell the prefill rank that this leg needs its KV cache no longer: it is fetched (`ok`), or the leg ended with
        `code`."""
        assert leg.location is not None
        leg.kv_wanted = False
        return [Send(leg.location.endpoint, KvDone(leg.room, leg.kv_attempt, code, leg.client))]

    def tick(self, leg: Leg, now: float) -> list[Action]:
        """Send the sign of life that is due each ASK_S, and end the leg when the prefill rank was silent for
        PREFILL_SILENT_S."""
        if not leg.kv_wanted:
            return []
        if now - leg.last_seen_at >= PREFILL_SILENT_S:
            return self._end(leg, "prefill_failed", "the prefill rank does not answer", now)
        return self._ask(leg, now) if now - leg.asked_at >= ASK_S else []

    def close(self, leg: Leg, was: LegState) -> list[Action]:
        """Clean up after a leg that has ended in the state `was`; the core calls it once for each decode leg."""
        self._legs.pop(leg.room, leg.client)
        if was is not LegState.RUNNING:
            self._waits_no_more(leg)
        if was is LegState.LOCATING:
            return [Unlocate(leg.room, leg.client)]
        return self.done(leg, leg.code) if leg.kv_wanted else []

    # --- inside -------------------------------------------------------------------------------------------------

    def _found(self, leg: Leg, location: Location, attempt: int, now: float) -> list[Action]:
        leg.step("located")
        leg.location, leg.kv_attempt, leg.kv_wanted = location, attempt, True
        if leg.found_by != "told":
            leg.add_event("located", now, leg.found_by)
        leg.last_seen_at = now
        return self._ask(leg, now)

    def _ask(self, leg: Leg, now: float) -> list[Action]:
        """Ask for no block: for the meta when it is ready, and for a sign of life."""
        assert leg.location is not None
        leg.asked_at = now
        leg.asks.append(now)
        pull = KvPull(leg.room, leg.kv_attempt, leg.location.epoch, 0, 0, len(leg.asks), leg.client)
        return [Send(leg.location.endpoint, pull)]

    def _other_attempt(self, leg: Leg, message: KvMeta | KvBlock | KvFail, now: float) -> list[Action]:
        """Handle a prefill rank that has the room under another attempt. Where one controller dispatched both legs,
        the attempts must agree. Where each leg has its own controller, these count attempts separately, and the
        attempt at the prefill rank is taken."""
        if not isinstance(message, KvMeta) or leg.state is not LegState.ASKING:
            return []
        if not leg.paired:
            leg.kv_attempt = message.attempt
            return self._ask(leg, now)
        if message.attempt > leg.kv_attempt:
            return self._end(leg, "prefill_failed", "a newer attempt prefills the room", now)
        leg.last_seen_at = now  # its dispatch is on the way there
        return []

    def _handed(self, leg: Leg, meta: KvMeta, data: bytes, now: float) -> list[Action]:
        """Give the leg to its runner, because the prompt is computed; fail it if the hand-over is not usable."""
        facts = self._facts
        ours = (facts.kv_layout, facts.block_tokens, leg.prompt_tokens, blocks_of(leg, facts))
        theirs = (meta.layout, meta.block_tokens, meta.prompt_tokens, meta.blocks)
        if theirs != ours or (facts.vocab_size and meta.first_token >= facts.vocab_size):
            return self._end(leg, "kv_failed", f"the prefill rank's KV cache {theirs} is not ours {ours}", now)
        if (facts.kv_transfer == OVER_THE_BUS) == bool(data) or len(data) > MAX_HANDLE_BYTES:
            return self._end(leg, "kv_failed", f"a handle of {len(data)} bytes for {facts.kv_transfer!r}", now)
        valid_until = sent_at(leg, meta) + meta.valid_s if meta.valid_s else FOR_EVER
        if valid_until - now < facts.handle_margin_s:
            left_s = max(0.0, valid_until - now)
            why = f"the KV cache lapses in {left_s:.3g} s; fetching it may take {facts.handle_margin_s:g} s"
            return self._end(leg, "kv_failed", why, now)
        assert leg.location is not None
        leg.handle = KvHandle(
            leg.location, leg.kv_attempt, meta.first_token, meta.blocks, data, valid_until, meta.first_logprobs
        )
        leg.cached_at_prefill, leg.written_at_prefill = meta.cached_tokens, meta.written_tokens
        self._waits_no_more(leg)
        leg.step("handed")
        leg.add_event("handed", now)
        return [Start(leg)]

    def _waits_no_more(self, leg: Leg) -> None:
        self.waiting -= 1
        self.waiting_tokens -= leg.waits_tokens


def take_block(leg: Leg, attempt: int, block: KvBlock, data: bytes | memoryview, counts: Counter[str]) -> list[Action]:
    """Give a block of a leg's prompt to its runner. One that is damaged is counted, and the runner pulls it again."""
    intact = block_crc32(leg.room, attempt, block.index, data) == block.crc32
    take = TakeBlock(leg, block.index, data, intact)
    if intact:
        return [take]
    counts["kv_block_damaged"] += 1
    fields = leg.about | {"index": block.index, "bytes": len(data)}
    return [Note("kv_block.damaged", "warning", fields=fields), take]


def sent_at(leg: Leg, meta: KvMeta) -> float:
    """Return the earliest time at which `meta` was sent: after the pull that it names, or after the first one where
    it names none. It may have been long on its way, or waited here while this process stood still."""
    return leg.asks[meta.asked - 1] if 0 < meta.asked <= len(leg.asks) else leg.asks[0]


def unfetched(leg: Leg) -> bool:
    """Return true if a decode leg still needs its prefill rank: its KV cache is not fetched yet."""
    return leg.kv_wanted or leg.state is LegState.LOCATING

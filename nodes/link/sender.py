"""The sender's side of KV transfer: the caches that a prefill rank holds for decode ranks. Pure.

Owns who asked for what, what they are told, and for how long a cache is kept. A pull may come before the prompt is
computed, or before the room is even known here; it is then answered with a sign of life and remembered. A room that
failed is remembered for a while, so that a late pull learns why.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from bus.actions import Send
from bus.wire.messages import Code, KvDone, KvFail, KvMeta, KvPull
from nodes.link.actions import SendBlock
from nodes.link.leg import Leg
from nodes.link.runner import FOR_EVER, OVER_THE_BUS, RankFacts

HOLD_S = 60.0  # for a decode rank that never asked
PULLER_SILENT_S = 10.0  # for one that asked, and asks again each second while it lives
PARK_S = 10.0
MAX_PARKED = 4096
MAX_REMEMBERED = 16_384
MAX_PULLERS = 4


@dataclass(slots=True, eq=False)
class _Held:
    leg: Leg
    heard_at: float
    pullers: dict[bytes, None] = field(default_factory=dict)
    ready: bool = False
    first_token: int = 0
    data: bytes = b""  # the runner's handle
    valid_until: float = FOR_EVER


@dataclass(slots=True, eq=False)
class _Parked:
    attempt: int
    since: float
    pullers: dict[bytes, None] = field(default_factory=dict)


class KvSender:
    """Of one rank. A room has at most one cache: that of its highest attempt."""

    def __init__(self, facts: RankFacts, *, hold_s: float = HOLD_S) -> None:
        self.hold_s = hold_s
        self._facts = facts
        self._held: dict[int, _Held] = {}
        self._parked: OrderedDict[int, _Parked] = OrderedDict()
        self._ended: OrderedDict[int, tuple[int, Code]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, room: int) -> bool:
        return room in self._held

    def open(self, leg: Leg, now: float) -> None:
        """The room's prompt will be computed here. The caller has closed a lower attempt's."""
        assert leg.room not in self._held
        held = self._held[leg.room] = _Held(leg, now)
        parked = self._parked.get(leg.room)
        if parked is not None and parked.attempt <= leg.attempt:
            del self._parked[leg.room]
            if parked.attempt == leg.attempt:
                held.pullers.update(parked.pullers)

    def ready(self, leg: Leg, first_token: int, data: bytes, valid_s: float, now: float) -> list[Send]:
        """The prompt is computed; whoever asked is told."""
        held = self._held[leg.room]
        held.ready, held.first_token, held.data, held.valid_until = True, first_token, data, now + valid_s
        held.heard_at = now
        return [self._meta(peer, held, now) for peer in held.pullers]

    def close(self, room: int, code: Code, message: str = "") -> list[Send]:
        """The leg ends; pullers that still wait are told, unless all went well."""
        held = self._held.pop(room)
        self._ended.pop(room, None)
        if code == "ok":  # not remembered: the room may be used again
            return []
        self._ended[room] = (held.leg.attempt, code)
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)
        return [Send(peer, KvFail(room, held.leg.attempt, code, message[:1024])) for peer in held.pullers]

    def pull(self, peer: bytes, pull: KvPull, now: float) -> list[Send | SendBlock]:
        """Answer a pull addressed to this rank's epoch."""
        held = self._held.get(pull.room)
        if held is None or held.leg.attempt < pull.attempt:
            ended = self._ended.get(pull.room)
            if ended is not None and ended[0] >= pull.attempt:
                return [Send(peer, KvFail(pull.room, pull.attempt, ended[1], "the prefill leg has ended"))]
            return self._park(peer, pull, held, now)
        if held.leg.attempt > pull.attempt:  # `kv_meta` tells which one: who located the room itself adopts it
            return [Send(peer, self._not_ready(pull.room, held.leg.attempt))]
        if peer not in held.pullers:
            if held.ready and now >= held.valid_until:
                return [Send(peer, KvFail(pull.room, pull.attempt, "kv_failed", "the KV cache is kept no longer"))]
            if len(held.pullers) >= MAX_PULLERS:
                held.pullers.pop(next(iter(held.pullers)))
        held.heard_at = now
        held.pullers[peer] = None
        if not held.ready:
            return [Send(peer, self._not_ready(pull.room, pull.attempt))]
        answers: list[Send | SendBlock] = [self._meta(peer, held, now)] if pull.first == 0 else []
        size = self._facts.block_tokens
        for index in range(pull.first, min(pull.first + pull.count, self._blocks(held.leg))):
            answers.append(SendBlock(peer, held.leg, index, min(size, held.leg.prompt_tokens - index * size)))
        return answers

    def done(self, peer: bytes, done: KvDone) -> bool:
        """Whether `peer`, who pulled it, is done with the cache; the caller then closes it."""
        held = self._held.get(done.room)
        if held is not None and held.leg.attempt == done.attempt and peer in held.pullers:
            if done.code == "ok":
                return held.ready
            del held.pullers[peer]  # it knows
            return True
        parked = self._parked.get(done.room)
        if parked is not None and parked.attempt == done.attempt:
            parked.pullers.pop(peer, None)
        return False

    def tick(self, now: float) -> tuple[list[int], list[Send]]:
        """(rooms whose decode rank has gone or never came, answers to pulls of rooms that never came)."""
        lost = [
            room
            for room, held in self._held.items()
            if held.ready
            and (
                now - held.heard_at >= PULLER_SILENT_S  # while a puller lives, it says so, and may renew the handle
                if held.pullers
                else now >= min(held.heard_at + self.hold_s, held.valid_until)
            )
        ]
        answers: list[Send] = []
        while self._parked:
            room, parked = next(iter(self._parked.items()))
            if now - parked.since < PARK_S:
                break
            del self._parked[room]
            fail = KvFail(room, parked.attempt, "unknown_room", "this rank was never asked to prefill the room")
            answers += [Send(peer, fail) for peer in parked.pullers]
        return lost, answers

    def _park(self, peer: bytes, pull: KvPull, held: _Held | None, now: float) -> list[Send | SendBlock]:
        parked = self._parked.get(pull.room)
        if parked is None or parked.attempt != pull.attempt:
            self._parked.pop(pull.room, None)
            if len(self._parked) >= MAX_PARKED:
                self._parked.popitem(last=False)
            parked = self._parked[pull.room] = _Parked(pull.attempt, now)
        if len(parked.pullers) < MAX_PULLERS:
            parked.pullers[peer] = None
        return [Send(peer, self._not_ready(pull.room, held.leg.attempt if held else pull.attempt))]

    def _blocks(self, leg: Leg) -> int:
        """How many travel over the bus."""
        return blocks_of(leg, self._facts)

    def _meta(self, peer: bytes, held: _Held, now: float) -> Send:
        facts, leg = self._facts, held.leg
        meta = KvMeta(
            leg.room, leg.attempt, leg.prompt_tokens, held.first_token, self._blocks(leg), facts.block_tokens,
            facts.kv_layout, valid_s=0.0 if held.valid_until == FOR_EVER else max(0.001, held.valid_until - now),
            cached_tokens=leg.cached_tokens,
        )  # fmt: skip
        return Send(peer, meta, (held.data,) if held.data else ())

    def _not_ready(self, room: int, attempt: int) -> KvMeta:
        return KvMeta(room, attempt, 0, 0, 0, self._facts.block_tokens, self._facts.kv_layout, ready=False)


def blocks_of(leg: Leg, facts: RankFacts) -> int:
    """Blocks of the leg's prompt that travel over the bus."""
    return -(-leg.prompt_tokens // facts.block_tokens) if facts.kv_transfer == OVER_THE_BUS else 0

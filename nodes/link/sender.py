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
from nodes.link.leg import Leg, LegState
from nodes.link.runner import FOR_EVER, OVER_THE_BUS, RankFacts

HOLD_S = 60.0  # for a decode rank that never asked
PULLER_SILENT_S = 10.0  # for one that asked, and asks again each second while it lives
PARK_S = 10.0
MAX_PARKED = 4096
MAX_REMEMBERED = 16_384
MAX_PULLERS = 4


@dataclass(slots=True, eq=False)
class _Parked:
    attempt: int
    since: float
    pullers: dict[bytes, int] = field(default_factory=dict)  # with the number of their last pull


class KvSender:
    """Of one rank. A room has at most one cache: that of its highest attempt."""

    def __init__(self, facts: RankFacts, *, hold_s: float = HOLD_S) -> None:
        self.hold_s = hold_s
        self._facts = facts
        self._legs: dict[int, Leg] = {}  # by room
        self._parked: OrderedDict[int, _Parked] = OrderedDict()
        self._ended: OrderedDict[int, tuple[int, Code]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._legs)

    def __contains__(self, room: int) -> bool:
        return room in self._legs

    def open(self, leg: Leg, now: float) -> None:
        """The room's prompt will be computed here. The caller has closed a lower attempt's."""
        assert leg.room not in self._legs
        self._legs[leg.room] = leg
        leg.heard_at = now
        parked = self._parked.get(leg.room)
        if parked is not None and parked.attempt <= leg.attempt:
            del self._parked[leg.room]
            if parked.attempt == leg.attempt:
                leg.pullers.update(parked.pullers)

    def held(self, leg: Leg, first_token: int, data: bytes, valid_s: float, now: float) -> list[Send]:
        """The prompt is computed; whoever asked is told."""
        leg.first_token, leg.handle_data, leg.valid_until, leg.heard_at = first_token, data, now + valid_s, now
        late = list(leg.pullers)[1:] if data else []
        for peer in late:
            del leg.pullers[peer]
        return [self._meta(peer, leg, now) for peer in leg.pullers] + [self._given_away(peer, leg) for peer in late]

    def close(self, leg: Leg) -> list[Send]:
        """It has ended; pullers that still wait are told, unless all went well."""
        del self._legs[leg.room]
        self._ended.pop(leg.room, None)
        if leg.code == "ok":  # not remembered: the room may be used again
            return []
        self._ended[leg.room] = (leg.attempt, leg.code)
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)
        return [Send(peer, KvFail(leg.room, leg.attempt, leg.code, leg.message)) for peer in leg.pullers]

    def pull(self, peer: bytes, pull: KvPull, now: float) -> list[Send | SendBlock]:
        """Answer a pull addressed to this rank's epoch."""
        leg = self._legs.get(pull.room)
        if leg is None or leg.attempt < pull.attempt:
            ended = self._ended.get(pull.room)
            if ended is not None and ended[0] >= pull.attempt:
                return [Send(peer, KvFail(pull.room, pull.attempt, ended[1], "the prefill leg has ended"))]
            return self._park(peer, pull, leg, now)
        if leg.attempt > pull.attempt:  # `kv_meta` tells which one: who located the room itself adopts it
            return [Send(peer, self._not_ready(pull.room, leg.attempt))]
        ready = leg.state is LegState.HOLDING
        if peer not in leg.pullers:
            if ready and now >= leg.valid_until:
                return [Send(peer, KvFail(pull.room, pull.attempt, "kv_failed", "the KV cache is kept no longer"))]
            if leg.handle_data and leg.given:
                return [self._given_away(peer, leg)]
            if len(leg.pullers) >= MAX_PULLERS:
                leg.pullers.pop(next(iter(leg.pullers)))
        leg.heard_at = now
        leg.pullers[peer] = pull.asked or leg.pullers.get(peer, 0)
        if not ready:
            return [Send(peer, self._not_ready(pull.room, pull.attempt))]
        answers: list[Send | SendBlock] = [self._meta(peer, leg, now)] if pull.first == 0 else []
        size = self._facts.block_tokens
        for index in range(pull.first, min(pull.first + pull.count, blocks_of(leg, self._facts))):
            answers.append(SendBlock(peer, leg, index, min(size, leg.prompt_tokens - index * size)))
        return answers

    def done(self, peer: bytes, done: KvDone) -> Leg | None:
        """The leg with whose cache `peer`, who pulled it, is done; the caller then ends it."""
        leg = self._legs.get(done.room)
        if leg is not None and leg.attempt == done.attempt and peer in leg.pullers:
            if done.code == "ok":
                return leg if leg.state is LegState.HOLDING else None
            del leg.pullers[peer]  # it knows
            return leg
        parked = self._parked.get(done.room)
        if parked is not None and parked.attempt == done.attempt:
            parked.pullers.pop(peer, None)
        return None

    def tick(self, now: float) -> tuple[list[Leg], list[Send]]:
        """(legs whose decode rank has gone or never came, answers to pulls of rooms that never came)."""
        lost = [
            leg
            for leg in self._legs.values()
            if leg.state is LegState.HOLDING
            and (
                now - leg.heard_at >= PULLER_SILENT_S  # while a puller lives, it says so, and may renew the handle
                if leg.pullers
                else now >= min(leg.heard_at + self.hold_s, leg.valid_until)
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

    def _park(self, peer: bytes, pull: KvPull, leg: Leg | None, now: float) -> list[Send | SendBlock]:
        parked = self._parked.get(pull.room)
        if parked is None or parked.attempt != pull.attempt:
            self._parked.pop(pull.room, None)
            if len(self._parked) >= MAX_PARKED:
                self._parked.popitem(last=False)
            parked = self._parked[pull.room] = _Parked(pull.attempt, now)
        if len(parked.pullers) < MAX_PULLERS:
            parked.pullers[peer] = pull.asked
        return [Send(peer, self._not_ready(pull.room, leg.attempt if leg else pull.attempt))]

    def _meta(self, peer: bytes, leg: Leg, now: float) -> Send:
        facts = self._facts
        leg.given = True
        meta = KvMeta(
            leg.room, leg.attempt, leg.prompt_tokens, leg.first_token, blocks_of(leg, facts), facts.block_tokens,
            facts.kv_layout, valid_s=0.0 if leg.valid_until == FOR_EVER else max(0.001, leg.valid_until - now),
            asked=leg.pullers.get(peer, 0),
            cached_tokens=leg.cached_tokens,
            first_logprobs=leg.first_logprobs,
        )  # fmt: skip
        return Send(peer, meta, (leg.handle_data,) if leg.handle_data else ())

    def _given_away(self, peer: bytes, leg: Leg) -> Send:
        why = "the KV cache was given to another decode rank, and is gone when that has fetched it"
        return Send(peer, KvFail(leg.room, leg.attempt, "kv_failed", why))

    def _not_ready(self, room: int, attempt: int) -> KvMeta:
        return KvMeta(room, attempt, 0, 0, 0, self._facts.block_tokens, self._facts.kv_layout, ready=False)


def blocks_of(leg: Leg, facts: RankFacts) -> int:
    """Blocks of the leg's prompt that travel over the bus."""
    return -(-leg.prompt_tokens // facts.block_tokens) if facts.kv_transfer == OVER_THE_BUS else 0

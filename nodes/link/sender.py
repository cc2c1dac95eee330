"""The sender's side of KV transfer: the caches that a prefill rank holds for the decode ranks of the same requests.
Pure.

This module decides which pulls are answered, with what, and for how long a cache is kept. A pull may come before the
prompt is computed, or before the room is known here; then it is answered with a sign of life and remembered. A room
that failed is remembered for a while, so that a late pull gets the reason.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from bus.actions import Send
from bus.wire.codes import Code
from bus.wire.messages import KvDone, KvFail, KvMeta, KvPull
from nodes.link.actions import SendBlock
from nodes.link.leg import Leg, LegState
from nodes.link.rooms import ByRoom
from nodes.link.runner import FOR_EVER, OVER_THE_BUS, RankFacts

HOLD_S = 60.0  # for a decode rank that never asked
PULLER_SILENT_S = 10.0  # for one that asked, and asks again each second while it lives
PARK_S = 10.0
MAX_PARKED = 4096
MAX_REMEMBERED = 16_384
MAX_PULLERS = 4


@dataclass(slots=True, eq=False)
class _Parked:
    room: int
    client: str
    attempt: int
    since: float
    pullers: dict[bytes, int] = field(default_factory=dict)  # with the number of their last pull


class KvSender:
    """The sender of one rank; its core calls it, and carries the returned actions out in order. `counts` belongs to the
    rank; `hold_s` is how long a cache that is not pulled is kept. A room of a client has at most one cache: that of its
    highest attempt."""

    def __init__(self, facts: RankFacts, counts: Counter[str], *, hold_s: float = HOLD_S) -> None:
        self.hold_s = hold_s
        self._facts = facts
        self._counts = counts
        self._legs: ByRoom[Leg] = ByRoom()
        self._parked: ByRoom[_Parked] = ByRoom()
        self._ended: ByRoom[tuple[int, Code]] = ByRoom()

    def __len__(self) -> int:
        return len(self._legs)

    def holds(self, leg: Leg) -> bool:
        """Return true if a leg of this room is here that belongs to the leg's client, or to no client."""
        return self._legs.find(leg.room, leg.client) is not None

    def others(self, leg: Leg) -> list[Leg]:
        """Return other clients' legs of the same room."""
        return [other for other in self._legs.all(leg.room) if other is not leg]

    def open(self, leg: Leg, now: float) -> None:
        """Add a new prefill leg: pulls of its room are answered from now on. The caller has closed a lower
        attempt's."""
        assert not self.holds(leg)
        self._legs.put(leg.room, leg.client, leg)
        leg.last_seen_at = now
        parked = self._parked.find(leg.room, leg.client)
        if parked is not None and parked.attempt <= leg.attempt:
            self._parked.pop(leg.room, parked.client)
            if parked.attempt == leg.attempt:
                leg.pullers.update(parked.pullers)

    def held(self, leg: Leg, first_token: int, data: bytes, valid_s: float, now: float) -> list[Send]:
        """Record that the leg's prompt is computed, and answer the pulls that wait. `data` is the engine's handle
        (empty: blocks travel), which only one decode rank gets; after `valid_s` seconds the cache may be gone."""
        leg.first_token, leg.handle_data, leg.valid_until, leg.last_seen_at = first_token, data, now + valid_s, now
        late = list(leg.pullers)[1:] if data else []
        for peer in late:
            del leg.pullers[peer]
        return [self._meta(peer, leg, now) for peer in leg.pullers] + [self._given_away(peer, leg) for peer in late]

    def close(self, leg: Leg) -> list[Send]:
        """Remove an ended leg; pulls that wait get the reason, unless all went well."""
        self._legs.pop(leg.room, leg.client)
        self._ended.pop(leg.room, leg.client)
        if leg.code == "ok":  # not remembered: the room may be used again
            return []
        self._ended.put(leg.room, leg.client, (leg.attempt, leg.code))
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.pop_oldest()
        fail = KvFail(leg.room, leg.attempt, leg.code, leg.message, leg.client)
        return [Send(peer, fail) for peer in leg.pullers]

    def pull(self, peer: bytes, pull: KvPull, now: float) -> list[Send | SendBlock]:
        """Answer a pull of `peer` that is addressed to this rank's epoch: with the meta and the blocks, with a sign of
        life while the prompt is not computed, or with the reason why there is no cache."""
        leg = self._legs.find(pull.room, pull.client)
        if leg is not None and leg.client and not pull.client:
            self._counts["kv_client_unsaid"] += 1
        if leg is None or leg.attempt < pull.attempt:
            ended = self._ended.find(pull.room, pull.client)
            if ended is not None and ended[0] >= pull.attempt:
                return [_fail(peer, pull, ended[1], "the prefill leg has ended")]
            return self._park(peer, pull, leg, now)
        if (
            leg.attempt > pull.attempt
        ):  # `kv_meta` has the right attempt: a rank that located the room itself takes it over
            return [Send(peer, self._not_ready(pull, leg.attempt))]
        ready = leg.state is LegState.HOLDING
        if peer not in leg.pullers:
            if ready and now >= leg.valid_until:
                return [_fail(peer, pull, "kv_failed", "the KV cache is kept no longer")]
            if leg.handle_data and leg.given:
                return [self._given_away(peer, leg)]
            if len(leg.pullers) >= MAX_PULLERS:
                leg.pullers.pop(next(iter(leg.pullers)))
        leg.last_seen_at = now
        leg.pullers[peer] = pull.asked or leg.pullers.get(peer, 0)
        if not ready:
            return [Send(peer, self._not_ready(pull, pull.attempt))]
        answers: list[Send | SendBlock] = [self._meta(peer, leg, now)] if pull.first == 0 else []
        size = self._facts.block_tokens
        for index in range(pull.first, min(pull.first + pull.count, blocks_of(leg, self._facts))):
            answers.append(SendBlock(peer, leg, index, min(size, leg.prompt_tokens - index * size)))
        return answers

    def done(self, peer: bytes, done: KvDone) -> Leg | None:
        """Take in that `peer` needs the cache no longer. Return the leg, which the caller then ends; None: there is
        nothing to end."""
        leg = self._legs.find(done.room, done.client)
        if leg is not None and leg.attempt == done.attempt and peer in leg.pullers:
            if done.code == "ok":
                return leg if leg.state is LegState.HOLDING else None
            del leg.pullers[peer]  # it knows
            return leg
        parked = self._parked.find(done.room, done.client)
        if parked is not None and parked.attempt == done.attempt:
            parked.pullers.pop(peer, None)
        return None

    def tick(self, now: float) -> tuple[list[Leg], list[Send]]:
        """Return (legs whose decode rank has gone or never came, which the caller ends; answers to pulls of rooms that
        never came)."""
        lost = [
            leg
            for leg in self._legs
            if leg.state is LegState.HOLDING
            and (
                now - leg.last_seen_at >= PULLER_SILENT_S  # while a puller lives, it says so, and may renew the handle
                if leg.pullers
                else now >= min(leg.last_seen_at + self.hold_s, leg.valid_until)
            )
        ]
        answers: list[Send] = []
        while self._parked:
            parked = next(iter(self._parked))
            if now - parked.since < PARK_S:
                break
            self._parked.pop_oldest()
            why = "this rank was never asked to prefill the room"
            fail = KvFail(parked.room, parked.attempt, "unknown_room", why, parked.client)
            answers += [Send(peer, fail) for peer in parked.pullers]
        return lost, answers

    def _park(self, peer: bytes, pull: KvPull, leg: Leg | None, now: float) -> list[Send | SendBlock]:
        parked = self._parked.find(pull.room, pull.client)
        if parked is None or parked.client != pull.client or parked.attempt != pull.attempt:
            if len(self._parked) >= MAX_PARKED:
                self._parked.pop_oldest()
            parked = _Parked(pull.room, pull.client, pull.attempt, now)
            self._parked.put(pull.room, pull.client, parked)
        if len(parked.pullers) < MAX_PULLERS:
            parked.pullers[peer] = pull.asked
        return [Send(peer, self._not_ready(pull, leg.attempt if leg else pull.attempt))]

    def _meta(self, peer: bytes, leg: Leg, now: float) -> Send:
        facts = self._facts
        leg.given = True
        meta = KvMeta(
            leg.room, leg.attempt, leg.prompt_tokens, leg.first_token, blocks_of(leg, facts), facts.block_tokens,
            facts.kv_layout, valid_s=0.0 if leg.valid_until == FOR_EVER else max(0.001, leg.valid_until - now),
            asked=leg.pullers.get(peer, 0),
            cached_tokens=leg.cached_tokens,
            written_tokens=leg.written_tokens,
            first_logprobs=leg.first_logprobs,
            client=leg.client,
        )  # fmt: skip
        return Send(peer, meta, (leg.handle_data,) if leg.handle_data else ())

    def _given_away(self, peer: bytes, leg: Leg) -> Send:
        why = "the KV cache was given to another decode rank, and is gone when that has fetched it"
        return Send(peer, KvFail(leg.room, leg.attempt, "kv_failed", why, leg.client))

    def _not_ready(self, pull: KvPull, attempt: int) -> KvMeta:
        facts = self._facts
        return KvMeta(pull.room, attempt, 0, 0, 0, facts.block_tokens, facts.kv_layout, ready=False, client=pull.client)


def _fail(peer: bytes, pull: KvPull, code: Code, why: str) -> Send:
    return Send(peer, KvFail(pull.room, pull.attempt, code, why, pull.client))


def blocks_of(leg: Leg, facts: RankFacts) -> int:
    """Return the number of blocks of the leg's prompt that travel over the bus; 0 where the engine's own connector
    moves them."""
    return -(-leg.prompt_tokens // facts.block_tokens) if facts.kv_transfer == OVER_THE_BUS else 0

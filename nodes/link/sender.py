"""The KV caches a prefill rank holds for decode ranks. Owns who asked for what and for how long it is kept; pure.

A pull may come before the prompt is computed, or before the room is even known here; it is then answered with a sign
of life and remembered. A room that failed is remembered for a while, so that a late pull learns why.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from bus.actions import Send
from bus.wire.messages import Code, KvDone, KvFail, KvMeta, KvPull
from nodes.own.engines.base import EngineSpec

HOLD_S = 60.0  # for a decode rank that never asked
PULLER_SILENT_S = 10.0  # for one that asked, and asks again each second while it lives
PARK_S = 10.0
MAX_PARKED = 4096
MAX_REMEMBERED = 16_384
MAX_PULLERS = 4


@dataclass(frozen=True, slots=True)
class SendBlock:
    """Send block `index` of the room, which lies in the engine's block `block`, to `peer`."""

    peer: bytes
    room: int
    attempt: int
    index: int
    tokens: int
    block: int


@dataclass(slots=True, eq=False)
class _Offer:
    room: int
    attempt: int
    prompt_tokens: int
    heard_at: float
    pullers: dict[bytes, None] = field(default_factory=dict)
    ready: bool = False
    first_token: int = 0
    table: Sequence[int] = ()


@dataclass(slots=True, eq=False)
class _Parked:
    attempt: int
    since: float
    pullers: dict[bytes, None] = field(default_factory=dict)


class Offers:
    """Of one rank. A room has at most one offer: its highest attempt."""

    def __init__(self, spec: EngineSpec, epoch: int, *, hold_s: float = HOLD_S) -> None:
        self.spec = spec
        self.epoch = epoch
        self.hold_s = hold_s
        self._offers: dict[int, _Offer] = {}
        self._parked: OrderedDict[int, _Parked] = OrderedDict()
        self._ended: OrderedDict[int, tuple[int, Code]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._offers)

    def open(self, room: int, attempt: int, prompt_tokens: int, now: float) -> None:
        """The room's prompt will be computed here. The caller has closed a lower attempt's offer."""
        assert room not in self._offers
        offer = self._offers[room] = _Offer(room, attempt, prompt_tokens, now)
        parked = self._parked.get(room)
        if parked is not None and parked.attempt <= attempt:
            del self._parked[room]
            if parked.attempt == attempt:
                offer.pullers.update(parked.pullers)

    def ready(self, room: int, table: Sequence[int], first_token: int, now: float) -> list[Send]:
        """The prompt is computed; whoever asked is told."""
        offer = self._offers[room]
        offer.ready, offer.table, offer.first_token = True, table, first_token
        offer.heard_at = now
        return [Send(peer, self._meta(offer), cause="prompt.computed") for peer in offer.pullers]

    def close(self, room: int, code: Code, message: str = "") -> list[Send]:
        """The offer ends; pullers that still wait are told, unless all went well."""
        offer = self._offers.pop(room)
        self._ended.pop(room, None)
        if code == "ok":  # not remembered: the room may be used again
            return []
        self._ended[room] = (offer.attempt, code)
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)
        return [Send(peer, KvFail(room, offer.attempt, code, message[:1024])) for peer in offer.pullers]

    def pull(self, peer: bytes, pull: KvPull, now: float) -> list[Send | SendBlock]:
        """Answer a pull addressed to this rank's epoch."""
        offer = self._offers.get(pull.room)
        if offer is None or offer.attempt < pull.attempt:
            ended = self._ended.get(pull.room)
            if ended is not None and ended[0] >= pull.attempt:
                return [Send(peer, KvFail(pull.room, pull.attempt, ended[1], "the prefill leg has ended"))]
            return self._park(peer, pull, offer, now)
        if offer.attempt > pull.attempt:  # `kv_meta` tells which one: who located the room itself adopts it
            return [Send(peer, self._not_ready(pull.room, offer.attempt))]
        offer.heard_at = now
        if peer not in offer.pullers and len(offer.pullers) >= MAX_PULLERS:
            offer.pullers.pop(next(iter(offer.pullers)))
        offer.pullers[peer] = None
        if not offer.ready:
            return [Send(peer, self._not_ready(pull.room, pull.attempt))]
        answers: list[Send | SendBlock] = [Send(peer, self._meta(offer))] if pull.first == 0 else []
        size = self.spec.block_tokens
        for index in range(pull.first, min(pull.first + pull.count, self._blocks(offer))):
            tokens = min(size, offer.prompt_tokens - index * size)
            answers.append(SendBlock(peer, offer.room, offer.attempt, index, tokens, offer.table[index]))
        return answers

    def done(self, peer: bytes, done: KvDone) -> bool:
        """Whether `peer`, who pulled it, is done with the offer; the caller then closes it."""
        offer = self._offers.get(done.room)
        if offer is not None and offer.attempt == done.attempt and peer in offer.pullers:
            if done.code == "ok":
                return offer.ready
            del offer.pullers[peer]  # it knows
            return True
        parked = self._parked.get(done.room)
        if parked is not None and parked.attempt == done.attempt:
            parked.pullers.pop(peer, None)
        return False

    def tick(self, now: float) -> tuple[list[int], list[Send]]:
        """(rooms whose decode rank has gone or never came, answers to pulls of rooms that never came)."""
        lost = [
            offer.room
            for offer in self._offers.values()
            if offer.ready and now - offer.heard_at >= (PULLER_SILENT_S if offer.pullers else self.hold_s)
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

    def _park(self, peer: bytes, pull: KvPull, offer: _Offer | None, now: float) -> list[Send | SendBlock]:
        parked = self._parked.get(pull.room)
        if parked is None or parked.attempt != pull.attempt:
            self._parked.pop(pull.room, None)
            if len(self._parked) >= MAX_PARKED:
                self._parked.popitem(last=False)
            parked = self._parked[pull.room] = _Parked(pull.attempt, now)
        if len(parked.pullers) < MAX_PULLERS:
            parked.pullers[peer] = None
        return [Send(peer, self._not_ready(pull.room, offer.attempt if offer else pull.attempt))]

    def _blocks(self, offer: _Offer) -> int:
        return -(-offer.prompt_tokens // self.spec.block_tokens)

    def _meta(self, offer: _Offer) -> KvMeta:
        return KvMeta(
            offer.room,
            offer.attempt,
            offer.prompt_tokens,
            offer.first_token,
            self._blocks(offer),
            self.spec.block_tokens,
            self.spec.layout,
        )

    def _not_ready(self, room: int, attempt: int) -> KvMeta:
        return KvMeta(room, attempt, 0, 0, 0, self.spec.block_tokens, self.spec.layout, ready=False)

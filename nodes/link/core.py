"""All legs of one rank: what it takes in, what it turns down, how each leg ends. Pure; the shell does the actions.

Every leg ends exactly once and is reported to the controller that owns it, again where that may have missed it
(`ledger`). Everything that was dispatched is acknowledged, in order, taken or not, which is what the controller's load
invariant rests on. A decode leg learns its prefill rank before it holds any memory, and asks for memory only when the
KV cache is ready to be fetched, so prefill and decode ranks cannot wait for each other's memory in a circle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from bus.actions import Note, Send
from bus.wire.messages import (
    CancelLeg,
    Code,
    Dispatch,
    Ended,
    FinishReason,
    FoundBy,
    KvBlock,
    KvDone,
    KvFail,
    KvMeta,
    KvPull,
    Load,
    Location,
    Role,
)
from nodes.link.actions import Action, ImportBlock, Locate, Register, Unlocate, Unregister
from nodes.link.ingest import Rejected, check
from nodes.link.ledger import Ledger
from nodes.link.leg import Leg, LegState
from nodes.link.sender import Offers
from nodes.link.streams import Streams
from nodes.own.engines.base import EngineSpec, StepPlan, StepResult
from nodes.own.fetch import Fetch, block_crc32, window_for
from nodes.own.scheduler import Output, Scheduler, Sequence

LOCATE_S = 30.0  # for the broker to learn where a room is prefilled
ASK_S = 1.0  # a waiting decode leg shows its prefill rank that it lives
PREFILL_SILENT_S = 5.0
MAX_LIVE = 65_535  # legs, and bytes of their names, that one hello can list
MAX_NAMES_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of what may wait here."""

    max_waiting: int = 1024
    max_waiting_bytes: int = 64 << 20
    hold_s: float = 60.0


class Legs:
    """The core of one rank. `owner` is any number that names the connection a dispatch came over."""

    def __init__(
        self, role: Role, dp_rank: int, epoch: int, spec: EngineSpec, scheduler: Scheduler, streams: Streams,
        limits: Limits | None = None,
    ) -> None:  # fmt: skip
        self.role: Role = role
        self.dp_rank = dp_rank
        self.spec = spec
        self.scheduler = scheduler
        self.streams = streams
        self.limits = limits or Limits()
        self.offers = Offers(spec, epoch, hold_s=self.limits.hold_s)
        self.ledger = Ledger()
        self.draining = False
        self.counts: dict[str, int] = {}  # ended legs by code, damaged blocks, gaps
        self.first_token_s: deque[float] = deque(maxlen=4096)  # of legs that began, until the owner takes them
        self.fetch_s: deque[float] = deque(maxlen=4096)  # of KV caches fetched, likewise
        self._legs: dict[str, Leg] = {}
        self._by_seq: dict[int, Leg] = {}
        self._by_room: dict[int, Leg] = {}
        self._prompt_bytes = 0
        self._names_bytes = 0
        self._next_seq = 0
        self._load_seq = 0

    def __len__(self) -> int:
        return len(self._legs)

    # --- from the controller ------------------------------------------------------------------------------------

    def ingest(self, owner: int, dispatch: Dispatch, frames: Seq[bytes], now: float) -> list[Action]:
        """Take in one dispatch, or turn it down; either way it is acknowledged."""
        actions: list[Action] = []
        counted = self.ledger.acknowledge(dispatch)
        if counted != "counted":
            self._count(f"dispatch_{counted}")
            actions.append(Note(f"dispatch.{counted}", "warning", fields={"number": dispatch.number}))
        if counted == "repeated":
            return actions
        current = self._legs.get(dispatch.rid)
        known = self.ledger.last_end(dispatch.rid)
        if current is not None and current.attempt == dispatch.attempt:
            current.owner = owner  # a controller that came back takes its request over
            if current.started:
                self.ledger.started(current)
            return actions
        if known is not None and known.attempt == dispatch.attempt:
            self.ledger.ended(owner, known)
            return actions
        if max(current.attempt if current else 0, known.attempt if known else 0) > dispatch.attempt:
            return actions + self._reject(owner, dispatch, Rejected("fenced", "a newer attempt was here"))
        if current is not None:
            actions += self._end(current, "fenced", "a newer attempt came", now, "dispatch")
        try:
            if self.draining:
                raise Rejected("draining", "this rank is draining")
            leg = check(dispatch, frames, role=self.role, dp_rank=self.dp_rank, spec=self.spec, now=now)
            if leg.room in self._by_room:
                raise Rejected("duplicate_room", "the room belongs to another request here")
            waiting_bytes = self._prompt_bytes + 4 * len(leg.prompt)
            if self.scheduler.waiting >= self.limits.max_waiting or waiting_bytes > self.limits.max_waiting_bytes:
                raise Rejected("overloaded", f"{self.scheduler.waiting} requests are waiting at this rank")
            if len(self._legs) >= MAX_LIVE or self._names_bytes + _name_bytes(leg.rid) > MAX_NAMES_BYTES:
                raise Rejected("overloaded", f"{len(self._legs)} requests are at this rank")
        except Rejected as refusal:
            return actions + self._reject(owner, dispatch, refusal)
        leg.owner = owner
        return actions + self._begin(leg, dispatch, now)

    def cancel(self, owner: int, cancel: CancelLeg, now: float) -> list[Action]:
        """End `attempt` and older ones; what is not here is remembered as cancelled, in case it comes late."""
        leg = self._legs.get(cancel.rid)
        if cancel.if_unfetched and (leg is None or leg.kind != "decode" or leg.state is LegState.SCHEDULED):
            return []
        if leg is not None:
            return self._end(leg, cancel.code, "", now, "cancel_leg") if leg.attempt <= cancel.attempt else []
        known = self.ledger.last_end(cancel.rid)
        if known is not None and known.attempt >= cancel.attempt:
            self.ledger.ended(owner, known)
        else:
            self.ledger.remember(owner, Ended(cancel.rid, cancel.attempt, self.role, cancel.code))
        return []

    def drain(self) -> None:
        """Take nothing new from now on."""
        self.draining = True

    def restate(self, owner: int) -> None:
        """`owner`'s controller may have missed reports: repeat what began and how the remembered ones ended."""
        self.ledger.restate(owner, self._legs.values())

    # --- decode: location and KV cache --------------------------------------------------------------------------

    def located(
        self, room: int, location: Location | None, attempt: int, code: Code, found_by: FoundBy, now: float
    ) -> list[Action]:
        """The answer to `Locate`; `location` None: there is none, because of `code`."""
        leg = self._by_room.get(room)
        if leg is None or leg.state is not LegState.LOCATING:
            return []
        leg.found_by = found_by
        if location is None:
            why = "no rank registered the room in time" if code == "unknown_room" else "the prefill leg ended first"
            return self._end(leg, _end_code(code), why, now, "located")
        return self._ask(leg, location, attempt, now)

    def kv_message(self, message: KvMeta | KvBlock | KvFail, data: bytes | memoryview, now: float) -> list[Action]:
        """From a prefill rank that was asked."""
        leg = self._by_room.get(message.room)
        if leg is None or not leg.kv_open:
            return []
        if leg.kv_attempt != message.attempt:
            return self._other_attempt(leg, message, now)
        leg.heard_at = now
        if isinstance(message, KvFail):
            code = _end_code(message.code) if leg.fetch is None else "kv_failed"
            return self._end(leg, code, message.message or f"the prefill rank says {message.code}", now, "kv_fail")
        if isinstance(message, KvMeta):
            return self._meta(leg, message, now) if leg.state is LegState.LOCATED and message.ready else []
        return self._block(leg, message, data, now) if leg.state is LegState.FETCHING else []

    # --- prefill: serving the KV cache --------------------------------------------------------------------------

    def pulled(self, peer: bytes, message: KvPull | KvDone, now: float) -> list[Action]:
        if isinstance(message, KvPull):
            return list(self.offers.pull(peer, message, now))
        leg = self._by_room.get(message.room)
        if leg is None or not self.offers.done(peer, message):
            return []
        if message.code == "ok":
            return self._end(leg, "ok", "", now, "kv_done")
        code: Code = message.code if message.code in ("cancelled", "deadline", "fenced") else "decode_failed"
        return self._end(leg, code, f"the decode leg ended: {message.code}", now, "kv_done")

    # --- computing ----------------------------------------------------------------------------------------------

    def advance(self, now: float) -> list[Action]:
        """After each turn: let what was admitted begin to fetch."""
        actions: list[Action] = []
        for sequence in self.scheduler.take_admitted():
            leg = self._by_seq[sequence.id]
            assert leg.location is not None
            leg.move(LegState.FETCHING, "admitted")
            leg.asked_at = now
            blocks = self.scheduler.pool.blocks_for(leg.prompt_tokens)
            leg.fetch = Fetch(
                leg.room, leg.kv_attempt, leg.location.epoch, blocks, window=window_for(self.spec.block_bytes)
            )
            actions += self._to_prefill(leg, leg.fetch.begin(now))
        return actions

    def plan(self) -> StepPlan | None:
        return self.scheduler.plan()

    def stepped(self, result: StepResult, now: float) -> list[Action]:
        """A forward step is done: tokens to the streams, ends, KV caches offered."""
        actions: list[Action] = []
        for output in self.scheduler.complete(result):
            leg = self._by_seq[output.seq]
            if output.error:
                actions += self._end(leg, "engine_failed", output.error, now, "step")
            elif leg.kind == "prefill":
                actions += self._computed(leg, output, now)
            else:
                self._token(leg, output.token, now)
                if output.finish:
                    actions += self._end(leg, "ok", output.finish, now, "step")
        return actions

    def tick(self, now: float) -> list[Action]:
        """A few times a second: deadlines, signs of life, stalls."""
        actions: list[Action] = []
        for leg in list(self._legs.values()):
            if leg.deadline is not None and now >= leg.deadline:
                actions += self._end(leg, "deadline", "the deadline passed", now, "tick")
            elif leg.state in (LegState.LOCATED, LegState.ADMITTING):
                if now - leg.heard_at >= PREFILL_SILENT_S:
                    actions += self._end(leg, "prefill_failed", "the prefill rank does not answer", now, "tick")
                elif now - leg.asked_at >= ASK_S:
                    actions += self._poke(leg, now)
            elif leg.state is LegState.FETCHING:
                assert leg.fetch is not None
                actions += self._to_prefill(leg, leg.fetch.tick(now))
                actions += self._check_fetch(leg, now)
        lost, answers = self.offers.tick(now)
        for room in lost:
            why = "no decode rank fetched the KV cache in time"
            actions += self._end(self._by_room[room], "decode_failed", why, now, "tick")
        return actions + answers

    # --- what the controller and the bus are told ---------------------------------------------------------------

    @property
    def live(self) -> tuple[tuple[str, int], ...]:
        return tuple((leg.rid, leg.attempt) for leg in self._legs.values())

    def load(self) -> Load:
        """Read it after the inbox was ingested: load and acknowledgements are then of one moment."""
        self._load_seq += 1
        s = self.scheduler
        return Load(
            seq=self._load_seq,
            step=s.step,
            running=s.running,
            waiting=s.waiting,
            waiting_tokens=s.waiting_tokens,
            kv_tokens=s.kv_tokens,
            kv_capacity=self.spec.kv_capacity,
            max_running=s.max_running,
            acks=self.ledger.acks,
            prompt_tokens_total=s.prompt_tokens_total,
            cached_tokens_total=s.cached_tokens_total,
            busy_us_total=s.busy_us_total,
        )

    # --- inside: a leg's beginning ------------------------------------------------------------------------------

    def _begin(self, leg: Leg, dispatch: Dispatch, now: float) -> list[Action]:
        self._next_seq += 1
        leg.seq = self._next_seq
        self._legs[leg.rid] = self._by_seq[leg.seq] = leg
        self._prompt_bytes += 4 * len(leg.prompt)
        self._names_bytes += _name_bytes(leg.rid)
        imported = leg.kind == "decode"
        self.scheduler.add(
            Sequence(
                leg.seq,
                range(leg.prompt_tokens) if imported else leg.prompt,
                leg.max_tokens,
                leg.params,
                leg.stop_ids,
                leg.priority,
                imported=imported,
                hold=leg.kind == "prefill",
                offset=leg.offset,
            ),
            parked=imported,
        )
        if leg.kind != "prefill":
            self.streams.open(leg.rid, leg.attempt, leg.offset, now)
        if leg.kind == "unified":
            leg.found_by = "local"
            return []
        self._by_room[leg.room] = leg
        if leg.kind == "prefill":
            self.offers.open(leg.room, leg.attempt, leg.prompt_tokens, now)
            return [Register(leg.room, leg.attempt)]
        if dispatch.prefill is not None:
            leg.found_by, leg.told = "told", True
            return self._ask(leg, dispatch.prefill, leg.attempt, now)
        until = now + LOCATE_S if leg.deadline is None else min(now + LOCATE_S, leg.deadline)
        return [Locate(leg.room, leg.prefill_instance, dispatch.disagg_prefill_dp_rank, until)]

    def _reject(self, owner: int, dispatch: Dispatch, refusal: Rejected) -> list[Action]:
        end = Ended(dispatch.rid, dispatch.attempt, self.role, refusal.code, refusal.sentence)
        self.ledger.ended(owner, end)
        self._count(refusal.code)
        fields = {"rid": dispatch.rid, "attempt": dispatch.attempt, "code": refusal.code, "why": refusal.sentence}
        return [Note("leg.rejected", "info", "dispatch", fields)]

    # --- inside: the decode leg's way to its KV cache -----------------------------------------------------------

    def _ask(self, leg: Leg, location: Location, attempt: int, now: float) -> list[Action]:
        leg.move(LegState.LOCATED, f"found by {leg.found_by}")
        leg.location, leg.kv_attempt, leg.kv_open = location, attempt, True
        leg.heard_at = now
        return self._poke(leg, now)

    def _other_attempt(self, leg: Leg, message: KvMeta | KvBlock | KvFail, now: float) -> list[Action]:
        """The prefill rank has the room under another attempt. Where one controller dispatched both legs they must
        agree; where each has its own, they count attempts apart, and the one at the prefill rank is right."""
        if not isinstance(message, KvMeta) or leg.state is not LegState.LOCATED:
            return []
        if not leg.told:
            leg.kv_attempt = message.attempt
            return self._poke(leg, now)
        if message.attempt > leg.kv_attempt:
            return self._end(leg, "prefill_failed", "a newer attempt prefills the room", now, "kv_meta")
        leg.heard_at = now  # its dispatch is on the way there
        return []

    def _poke(self, leg: Leg, now: float) -> list[Action]:
        """Ask for no block: the meta when it is ready, and a sign of life until then."""
        assert leg.location is not None
        leg.asked_at = now
        return self._to_prefill(leg, [KvPull(leg.room, leg.kv_attempt, leg.location.epoch, 0, 0)])

    def _to_prefill(self, leg: Leg, messages: Seq[KvPull | KvDone]) -> list[Action]:
        assert leg.location is not None
        return [Send(leg.location.endpoint, message, cause=leg.rid) for message in messages]

    def _meta(self, leg: Leg, meta: KvMeta, now: float) -> list[Action]:
        ours = (self.spec.layout, self.spec.block_tokens, leg.prompt_tokens)
        theirs = (meta.layout, meta.block_tokens, meta.prompt_tokens)
        blocks = self.scheduler.pool.blocks_for(leg.prompt_tokens)
        if theirs != ours or meta.blocks != blocks or meta.first_token >= self.spec.vocab_size:
            why = f"the prefill rank's KV cache {theirs} is not ours {ours}"
            return self._end(leg, "kv_failed", why, now, "kv_meta")
        leg.first_token = meta.first_token
        self._token(leg, meta.first_token, now)
        if meta.first_token in leg.stop_ids or leg.max_tokens == 1:
            leg.kv_open = False
            done = self._to_prefill(leg, [KvDone(leg.room, leg.kv_attempt)])
            reason = "stop" if meta.first_token in leg.stop_ids else "length"
            return done + self._end(leg, "ok", reason, now, "kv_meta")
        leg.move(LegState.ADMITTING, "kv_meta")
        self.scheduler.unpark(leg.seq)
        return []

    def _block(self, leg: Leg, block: KvBlock, data: bytes | memoryview, now: float) -> list[Action]:
        fetch = leg.fetch
        assert fetch is not None
        if not fetch.wants(block.index):
            return []
        intact = (
            len(data) == self.spec.block_bytes
            and block_crc32(leg.room, leg.kv_attempt, block.index, data) == block.crc32
        )
        actions: list[Action] = []
        if intact:
            actions.append(ImportBlock(self.scheduler.sequence(leg.seq).table[block.index], data))
        else:
            self._count("kv_block_damaged")
            fields = {"rid": leg.rid, "room": leg.room, "index": block.index, "bytes": len(data)}
            actions.append(Note("kv_block.damaged", "warning", "kv_block", fields))
        actions += self._to_prefill(leg, fetch.received(block.index, intact, now))
        return actions + self._check_fetch(leg, now)

    def _check_fetch(self, leg: Leg, now: float) -> list[Action]:
        assert leg.fetch is not None
        if leg.fetch.failure:
            return self._end(leg, "kv_failed", leg.fetch.failure, now, "fetch")
        if not leg.fetch.complete:
            return []
        leg.move(LegState.SCHEDULED, "fetched")
        self.fetch_s.append(now - leg.asked_at)
        leg.kv_open = False
        self.scheduler.start(leg.seq, leg.first_token)
        return self._to_prefill(leg, [KvDone(leg.room, leg.kv_attempt)])

    # --- inside: output and end ---------------------------------------------------------------------------------

    def _computed(self, leg: Leg, output: Output, now: float) -> list[Action]:
        leg.move(LegState.HOLDING, "step")
        self._first(leg, now)
        table = self.scheduler.sequence(leg.seq).table
        return list(self.offers.ready(leg.room, table, output.token, now))

    def _token(self, leg: Leg, token: int, now: float) -> None:
        if not leg.started:
            self._first(leg, now)
        leg.output_tokens += 1
        self.streams.push(leg.rid, leg.attempt, [token], leg.found_by)

    def _first(self, leg: Leg, now: float) -> None:
        leg.started = True
        leg.first_token_s = max(0.0, now - leg.began)
        leg.cached_tokens = self.scheduler.sequence(leg.seq).cached_tokens if leg.seq in self.scheduler else 0
        self.first_token_s.append(leg.first_token_s)
        self.ledger.started(leg)

    def _end(self, leg: Leg, code: Code, message: str, now: float, cause: str) -> list[Action]:
        """The only way out. With `ok`, `message` is the finish reason."""
        before = leg.state
        leg.move(LegState.ENDED, cause)
        actions: list[Action] = []
        del self._legs[leg.rid], self._by_seq[leg.seq]
        self._prompt_bytes -= 4 * len(leg.prompt)
        self._names_bytes -= _name_bytes(leg.rid)
        self.scheduler.cancel(leg.seq)
        self._by_room.pop(leg.room, None)
        if leg.kind == "prefill":
            actions += self.offers.close(leg.room, code, message)
            actions.append(Unregister(leg.room, leg.attempt, code))
        elif leg.kind == "decode":
            if before is LegState.LOCATING:
                actions.append(Unlocate(leg.room))
            if leg.kv_open:
                leg.kv_open = False
                actions += self._to_prefill(leg, [KvDone(leg.room, leg.kv_attempt, code)])
        if leg.kind != "prefill":
            if code == "ok":
                self.streams.finish(leg.rid, leg.attempt, "stop" if message == "stop" else "length", now)
            else:
                reason: FinishReason = "cancelled" if code == "cancelled" else "failed"
                self.streams.finish(leg.rid, leg.attempt, reason, now, code, message)
        self.ledger.remember(leg.owner, leg.ended(code, "" if code == "ok" else message))
        self._count(code)
        if code != "ok":
            fields = {"rid": leg.rid, "attempt": leg.attempt, "code": code, "why": message, "state": before.value}
            actions.append(Note("leg.ended", "info", cause, fields))
        return actions

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1


def _name_bytes(rid: str) -> int:
    """What `(rid, attempt)` takes in a hello, at most."""
    return len(rid.encode()) + 9


def _end_code(code: Code) -> Code:
    """How a decode leg ends when its prefill leg ended with `code`."""
    return code if code in ("cancelled", "deadline", "unknown_room", "kv_failed") else "prefill_failed"

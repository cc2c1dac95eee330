"""All legs of one rank: what it takes in, what it turns down, how each leg ends. Pure; the shell does the actions.

Every leg ends exactly once and is reported once to the controller that owns it (`reports`). Everything that was
dispatched is acknowledged, in order, taken or not, which is what the controller's load invariant rests on.
A decode leg goes to its runner only when its KV cache is ready to be fetched: before, it holds no memory, so prefill
and decode ranks cannot wait for each other's memory in a circle; and a handle that lapses never waits in a queue here.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

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
    Refusal,
    Role,
)
from nodes.link.actions import (
    Action,
    Cancel,
    Leave,
    Locate,
    PublishFrames,
    Register,
    Release,
    Start,
    TakeBlock,
    Unlocate,
    Unregister,
)
from nodes.link.checksum import block_crc32
from nodes.link.leg import Leg, LegState, leg_of
from nodes.link.reports import Reports
from nodes.link.runner import (
    FOR_EVER,
    OVER_THE_BUS,
    Began,
    CacheChanged,
    Dead,
    Event,
    Fetched,
    Finished,
    Held,
    KvHandle,
    LegFailed,
    Output,
    Pull,
    RankFacts,
    RunnerLoad,
    Stepped,
)
from nodes.link.sender import KvSender, blocks_of
from nodes.link.streams import Streams

LOCATE_S = 30.0  # for the broker to learn where a room is prefilled
ASK_S = 1.0  # a decode leg that waits or fetches shows its prefill rank that it lives
PREFILL_SILENT_S = 5.0
MAX_LIVE = 65_535  # legs, and bytes of their names, that one hello can list
MAX_NAMES_BYTES = 1_000_000
MAX_HANDLE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of what may wait here."""

    max_waiting: int = 1024
    max_waiting_bytes: int = 64 << 20
    hold_s: float = 60.0


class RankCore:
    """The core of one rank. `owner` is any number that names the connection a dispatch came over; `runner_load` reads
    the runner's load as it is now."""

    def __init__(
        self, role: Role, dp_rank: int, facts: RankFacts, streams: Streams, runner_load: Callable[[], RunnerLoad],
        limits: Limits | None = None,
    ) -> None:  # fmt: skip
        self.role: Role = role
        self.dp_rank = dp_rank
        self.facts = facts
        self.streams = streams
        self.limits = limits or Limits()
        self.sender = KvSender(facts, hold_s=self.limits.hold_s)
        self.reports = Reports()
        self.draining = False
        self.counts: Counter[str] = Counter()  # ended legs by code, damaged blocks, gaps
        self.first_token_s: deque[float] = deque(maxlen=4096)  # of legs that began, until the owner takes them
        self.fetch_s: deque[float] = deque(maxlen=4096)  # of KV caches fetched, likewise
        self.step_s: deque[float] = deque(maxlen=4096)  # of forward steps, likewise
        self._runner_load = runner_load
        self._legs: dict[str, Leg] = {}
        self._by_room: dict[int, Leg] = {}
        self._waiting = 0  # decode legs whose KV cache is not ready, which the runner does not know yet
        self._waiting_tokens = 0  # their prompts' tokens
        self._prompt_bytes = 0
        self._names_bytes = 0
        self._seq = 0
        self._load_seq = 0

    def __len__(self) -> int:
        return len(self._legs)

    # --- from the controller ------------------------------------------------------------------------------------

    def ingest(self, owner: int, dispatch: Dispatch, frames: Sequence[bytes], now: float) -> list[Action]:
        """Take in one dispatch, or turn it down; either way it is acknowledged."""
        actions: list[Action] = []
        counted = self.reports.acknowledge(dispatch)
        if counted != "counted":
            self.counts[f"dispatch_{counted}"] += 1
            actions.append(Note(f"dispatch.{counted}", "warning", fields={"number": dispatch.number}))
        if counted == "repeated" or self._told_again(owner, dispatch):
            return actions
        try:
            self._check_newest(dispatch)
            current = self._legs.get(dispatch.rid)
            if current is not None:
                actions += self._end(current, "fenced", "a newer attempt came", now)
            leg = self._take(dispatch, frames, now)
        except Refusal as refusal:
            end = Ended(dispatch.rid, dispatch.attempt, self.role, refusal.code, refusal.sentence)
            self.reports.ended(owner, end)
            self.counts[refusal.code] += 1
            fields = {"rid": dispatch.rid, "attempt": dispatch.attempt, "code": refusal.code, "why": refusal.sentence}
            return [*actions, Note("leg.rejected", "info", fields=fields)]
        leg.owner = owner
        return actions + self._begin(leg, dispatch, now)

    def cancel(self, owner: int, cancel: CancelLeg, now: float) -> list[Action]:
        """End `attempt` and older ones; what is not here is remembered as cancelled, in case it comes late."""
        leg = self._legs.get(cancel.rid)
        if cancel.if_unfetched and (leg is None or leg.role != "decode" or not _unfetched(leg)):
            return []
        if leg is not None:
            return self._end(leg, cancel.code, "", now) if leg.attempt <= cancel.attempt else []
        known = self.reports.last_end(cancel.rid)
        if known is not None and known.attempt >= cancel.attempt:
            self.reports.ended(owner, known)
        else:
            self.reports.remember(owner, Ended(cancel.rid, cancel.attempt, self.role, cancel.code))
        return []

    def drain(self) -> None:
        """Take nothing new from now on."""
        self.draining = True

    def end_all(self, code: Code, message: str, now: float) -> list[Action]:
        """Whatever lives here ends now."""
        return [action for leg in list(self._legs.values()) for action in self._end(leg, code, message, now)]

    def restate(self, owner: int) -> None:
        """`owner`'s controller may have missed reports: repeat what began and how the remembered ones ended."""
        self.reports.restate(owner, self._legs.values())

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
            return self._end(leg, _end_code(code), why, now)
        return self._ask(leg, location, attempt, now)

    def kv_message(self, message: KvMeta | KvBlock | KvFail, data: bytes | memoryview, now: float) -> list[Action]:
        """From a prefill rank that was asked; `data` is the frame after the header."""
        leg = self._by_room.get(message.room)
        if leg is None or not leg.kv_open:
            return []
        if leg.kv_attempt != message.attempt:
            return self._other_attempt(leg, message, now)
        leg.heard_at = now
        if isinstance(message, KvFail):
            code = _end_code(message.code) if leg.state is LegState.ASKING else "kv_failed"
            return self._end(leg, code, message.message or f"the prefill rank says {message.code}", now)
        if isinstance(message, KvMeta):
            return (
                self._handed(leg, message, bytes(data), now) if leg.state is LegState.ASKING and message.ready else []
            )
        if leg.state is not LegState.RUNNING:
            return []
        if block_crc32(leg.room, leg.kv_attempt, message.index, data) == message.crc32:
            return [TakeBlock(leg, message.index, data, intact=True)]
        self.counts["kv_block_damaged"] += 1
        fields = {"rid": leg.rid, "room": leg.room, "index": message.index, "bytes": len(data)}
        return [
            Note("kv_block.damaged", "warning", fields=fields), TakeBlock(leg, message.index, data, intact=False)
        ]  # fmt: skip

    # --- prefill: serving the KV cache --------------------------------------------------------------------------

    def pulled(self, peer: bytes, message: KvPull | KvDone, now: float) -> list[Action]:
        if isinstance(message, KvPull):
            return list(self.sender.pull(peer, message, now))
        leg = self._by_room.get(message.room)
        if leg is None or not self.sender.done(peer, message):
            return []
        if message.code == "ok":
            return self._end(leg, "ok", "", now)
        code: Code = message.code if message.code in ("cancelled", "deadline", "fenced") else "decode_failed"
        return self._end(leg, code, f"the decode leg ended: {message.code}", now)

    # --- what the runner says -----------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Action]:
        """What is said of a leg that is over counts for nothing."""
        if type(event) is Output:  # one for each token, hence the short way
            leg = event.leg
            if leg.state is not LegState.ENDED:
                if not leg.started:
                    self._started(leg, now)
                leg.output_tokens += len(event.tokens)
                self.streams.push(leg.rid, leg.attempt, event.tokens, leg.found_by)
            return []
        match event:
            case Stepped():
                if event.seconds:
                    self.step_s.append(event.seconds)
                return []
            case CacheChanged():
                return [PublishFrames(event.messages)]
            case Dead():
                why = f"the engine died: {event.reason}"
                return [*self.end_all("peer_lost", why, now), Leave(event.reason)]
        leg = event.leg
        if not leg.live:
            return []
        match event:
            case Began():
                leg.cached_tokens = event.cached_tokens
            case Held():
                leg.step("held")
                self._started(leg, now)
                return list(self.sender.ready(leg, event.first_token, event.handle, event.valid_s, now))
            case Pull():
                assert leg.location is not None
                leg.asked_at = now
                return self._to_prefill(
                    leg, KvPull(leg.room, leg.kv_attempt, leg.location.epoch, event.first, event.count)
                )
            case Fetched():
                self.fetch_s.append(event.seconds)
                leg.kv_open = False
                return self._to_prefill(leg, KvDone(leg.room, leg.kv_attempt))
            case Finished():
                return self._end(leg, "ok", event.reason, now, told=False)
            case LegFailed():
                return self._end(leg, event.code, event.message, now, told=False)
        return []

    def tick(self, now: float) -> list[Action]:
        """A few times a second: deadlines, signs of life, silence."""
        actions: list[Action] = []
        for leg in list(self._legs.values()):
            if leg.deadline is not None and now >= leg.deadline:
                actions += self._end(leg, "deadline", "the deadline passed", now)
            elif leg.kv_open:
                if now - leg.heard_at >= PREFILL_SILENT_S:
                    actions += self._end(leg, "prefill_failed", "the prefill rank does not answer", now)
                elif now - leg.asked_at >= ASK_S:
                    actions += self._poke(leg, now)
        lost, answers = self.sender.tick(now)
        for room in lost:
            why = "no decode rank fetched the KV cache in time"
            actions += self._end(self._by_room[room], "decode_failed", why, now)
        return actions + answers

    # --- what the controller and the bus are told ---------------------------------------------------------------

    @property
    def live(self) -> tuple[tuple[str, int], ...]:
        return tuple((leg.rid, leg.attempt) for leg in self._legs.values())

    def figures(self) -> RunnerLoad:
        """The runner's load and what waits here."""
        load = self._runner_load()
        return replace(
            load, waiting=load.waiting + self._waiting, waiting_tokens=load.waiting_tokens + self._waiting_tokens
        )

    def load(self) -> Load:
        """Read it after the inbox was ingested: load and acknowledgements are then of one moment."""
        self._load_seq += 1
        runner = self._runner_load()
        return Load(
            seq=self._load_seq,
            step=runner.step,
            running=runner.running,
            waiting=runner.waiting + self._waiting,
            waiting_tokens=runner.waiting_tokens + self._waiting_tokens,
            kv_tokens=runner.kv_tokens,
            kv_capacity=self.facts.kv_capacity,
            max_running=self.facts.max_running,
            acks=self.reports.acks,
            prompt_tokens_total=runner.prompt_tokens_total,
            cached_tokens_total=runner.cached_tokens_total,
            busy_us_total=runner.busy_us_total,
        )

    # --- inside: a leg's beginning ------------------------------------------------------------------------------

    def _told_again(self, owner: int, dispatch: Dispatch) -> bool:
        """The attempt is here, or was: `owner` is told what is known of it."""
        current = self._legs.get(dispatch.rid)
        if current is not None and current.attempt == dispatch.attempt:
            current.owner = owner  # a controller that came back takes its request over
            if current.started:
                self.reports.started(current)
            return True
        known = self.reports.last_end(dispatch.rid)
        if known is not None and known.attempt == dispatch.attempt:
            self.reports.ended(owner, known)
            return True
        return False

    def _check_newest(self, dispatch: Dispatch) -> None:
        current, known = self._legs.get(dispatch.rid), self.reports.last_end(dispatch.rid)
        if max(current.attempt if current else 0, known.attempt if known else 0) > dispatch.attempt:
            raise Refusal("fenced", "a newer attempt was here")

    def _take(self, dispatch: Dispatch, frames: Sequence[bytes], now: float) -> Leg:
        """The leg, if there is room for it; Refusal otherwise."""
        if self.draining:
            raise Refusal("draining", "this rank is draining")
        leg = leg_of(dispatch, frames, role=self.role, dp_rank=self.dp_rank, facts=self.facts, now=now)
        if leg.room in self._by_room:
            raise Refusal("duplicate_room", "the room belongs to another request here")
        waiting = self._waiting + self._runner_load().waiting
        waiting_bytes = self._prompt_bytes + 4 * len(leg.prompt)
        if waiting >= self.limits.max_waiting or waiting_bytes > self.limits.max_waiting_bytes:
            raise Refusal("overloaded", f"{waiting} requests are waiting at this rank")
        if len(self._legs) >= MAX_LIVE or self._names_bytes + _name_bytes(leg.rid) > MAX_NAMES_BYTES:
            raise Refusal("overloaded", f"{len(self._legs)} requests are at this rank")
        return leg

    def _begin(self, leg: Leg, dispatch: Dispatch, now: float) -> list[Action]:
        self._seq += 1
        leg.seq = self._seq
        self._legs[leg.rid] = leg
        self._prompt_bytes += 4 * len(leg.prompt)
        self._names_bytes += _name_bytes(leg.rid)
        if leg.role != "prefill":
            self.streams.open(leg.rid, leg.attempt, leg.offset, now)
        if leg.role == "unified":
            leg.found_by = "local"
            return [Start(leg)]
        self._by_room[leg.room] = leg
        if leg.role == "prefill":
            self.sender.open(leg, now)
            return [Register(leg.room, leg.attempt), Start(leg)]
        self._waiting += 1
        self._waiting_tokens += leg.prompt_tokens
        if dispatch.prefill is not None:
            leg.found_by, leg.told = "told", True
            return self._ask(leg, dispatch.prefill, leg.attempt, now)
        until = now + LOCATE_S if leg.deadline is None else min(now + LOCATE_S, leg.deadline)
        return [Locate(leg.room, leg.prefill_instance, dispatch.disagg_prefill_dp_rank, until)]

    # --- inside: the decode leg's way to its KV cache -----------------------------------------------------------

    def _ask(self, leg: Leg, location: Location, attempt: int, now: float) -> list[Action]:
        leg.step("located")
        leg.location, leg.kv_attempt, leg.kv_open = location, attempt, True
        leg.heard_at = now
        return self._poke(leg, now)

    def _other_attempt(self, leg: Leg, message: KvMeta | KvBlock | KvFail, now: float) -> list[Action]:
        """The prefill rank has the room under another attempt. Where one controller dispatched both legs they must
        agree; where each has its own, they count attempts apart, and the one at the prefill rank is right."""
        if not isinstance(message, KvMeta) or leg.state is not LegState.ASKING:
            return []
        if not leg.told:
            leg.kv_attempt = message.attempt
            return self._poke(leg, now)
        if message.attempt > leg.kv_attempt:
            return self._end(leg, "prefill_failed", "a newer attempt prefills the room", now)
        leg.heard_at = now  # its dispatch is on the way there
        return []

    def _poke(self, leg: Leg, now: float) -> list[Action]:
        """Ask for no block: the meta when it is ready, and a sign of life."""
        assert leg.location is not None
        leg.asked_at = now
        return self._to_prefill(leg, KvPull(leg.room, leg.kv_attempt, leg.location.epoch, 0, 0))

    def _to_prefill(self, leg: Leg, message: KvPull | KvDone) -> list[Action]:
        assert leg.location is not None
        return [Send(leg.location.endpoint, message)]

    def _handed(self, leg: Leg, meta: KvMeta, data: bytes, now: float) -> list[Action]:
        """The prompt is computed: the runner gets the leg, if what was handed over is of use to it."""
        facts = self.facts
        ours = (facts.kv_layout, facts.block_tokens, leg.prompt_tokens, blocks_of(leg, facts))
        theirs = (meta.layout, meta.block_tokens, meta.prompt_tokens, meta.blocks)
        if theirs != ours or (facts.vocab_size and meta.first_token >= facts.vocab_size):
            return self._end(leg, "kv_failed", f"the prefill rank's KV cache {theirs} is not ours {ours}", now)
        if (facts.kv_transfer == OVER_THE_BUS) == bool(data) or len(data) > MAX_HANDLE_BYTES:
            return self._end(leg, "kv_failed", f"a handle of {len(data)} bytes for {facts.kv_transfer!r}", now)
        if 0 < meta.valid_s < facts.handle_margin_s:
            why = f"the KV cache lapses in {meta.valid_s:.3g} s; fetching it may take {facts.handle_margin_s:g} s"
            return self._end(leg, "kv_failed", why, now)
        assert leg.location is not None
        valid_until = now + meta.valid_s if meta.valid_s else FOR_EVER
        leg.handle = KvHandle(leg.location, leg.kv_attempt, meta.first_token, meta.blocks, data, valid_until)
        leg.cached_at_prefill = meta.cached_tokens
        self._waits_no_more(leg)
        leg.step("handed")
        return [Start(leg)]

    def _waits_no_more(self, leg: Leg) -> None:
        if leg.state in (LegState.LOCATING, LegState.ASKING):
            self._waiting -= 1
            self._waiting_tokens -= leg.prompt_tokens

    # --- inside: output and end ---------------------------------------------------------------------------------

    def _started(self, leg: Leg, now: float) -> None:
        if leg.started:
            return
        leg.started = True
        leg.first_token_s = max(0.0, now - leg.began)
        self.first_token_s.append(leg.first_token_s)
        self.reports.started(leg)

    def _end(self, leg: Leg, code: Code, message: str, now: float, *, told: bool = True) -> list[Action]:
        """The only way out. With `ok`, `message` is the finish reason; `told`: the runner must hear of it."""
        before = leg.state
        self._waits_no_more(leg)
        leg.step("over")
        actions: list[Action] = []
        del self._legs[leg.rid]
        self._prompt_bytes -= 4 * len(leg.prompt)
        self._names_bytes -= _name_bytes(leg.rid)
        self._by_room.pop(leg.room, None)
        if before is LegState.HOLDING:
            actions.append(Release(leg))
        elif before is LegState.RUNNING and told:
            actions.append(Cancel(leg))
        if leg.role == "prefill":
            actions += self.sender.close(leg.room, code, message)
            actions.append(Unregister(leg.room, leg.attempt, code))
        elif leg.role == "decode":
            if before is LegState.LOCATING:
                actions.append(Unlocate(leg.room))
            if leg.kv_open:
                leg.kv_open = False
                actions += self._to_prefill(leg, KvDone(leg.room, leg.kv_attempt, code))
        if leg.role != "prefill":
            reason: FinishReason
            if code == "ok":
                cached = leg.cached_at_prefill if leg.role == "decode" else leg.cached_tokens
                reason = "stop" if message == "stop" else "length"
                self.streams.finish(leg.rid, leg.attempt, reason, now, cached_tokens=cached)
            else:
                reason = "cancelled" if code == "cancelled" else "failed"
                self.streams.finish(leg.rid, leg.attempt, reason, now, code, message)
        self.reports.remember(leg.owner, leg.end(code, "" if code == "ok" else message))
        self.counts[code] += 1
        if code != "ok":
            fields = {"rid": leg.rid, "attempt": leg.attempt, "code": code, "why": message, "state": before.value}
            actions.append(Note("leg.ended", "info", fields=fields))
        return actions


def _unfetched(leg: Leg) -> bool:
    """A decode leg that still needs its prefill rank."""
    return leg.kv_open or leg.state is LegState.LOCATING


def _name_bytes(rid: str) -> int:
    """What `(rid, attempt)` takes in a hello, at most."""
    return len(rid.encode()) + 9


def _end_code(code: Code) -> Code:
    """How a decode leg ends when its prefill leg ended with `code`."""
    return code if code in ("cancelled", "deadline", "unknown_room", "kv_failed") else "prefill_failed"

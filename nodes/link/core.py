"""All legs of one rank (a leg is what it runs of a request: prefill, decode or both): which dispatches it takes and
refuses, and how each leg ends. Pure; the shell does the actions.

Every leg ends exactly once and is reported once to the controller that owns it (`reports`). Every dispatch is
acknowledged, in order, whether it was taken or not; the controller's load invariant relies on that. A decode leg goes
to its runner only when its KV cache is ready to be fetched: before, it holds no memory, so prefill and decode ranks
cannot wait for each other's memory in a circle, and a handle that expires never waits in a queue here.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from bus.actions import Note
from bus.history import History
from bus.tracecontext import trace_id_of
from bus.wire.codes import Code, Refusal, end_of_other
from bus.wire.messages import (
    MAX_TRACE_EVENTS,
    CancelLeg,
    Dispatch,
    Ended,
    FoundBy,
    KvBlock,
    KvDone,
    KvFail,
    KvMeta,
    KvPull,
    Load,
    Location,
    Role,
    TraceEvent,
)
from nodes.link.actions import Action, Cancel, Leave, Over, PublishFrames, Register, Release, Start, Unregister
from nodes.link.config import Limits
from nodes.link.facts import OVER_THE_BUS
from nodes.link.leg import Identity, Leg, Legs, LegState, identity_of, leg_of
from nodes.link.puller import KvPuller, unfetched
from nodes.link.read_back import KvLender, KvReader
from nodes.link.record import LegRecord, record_of, trace_events_of
from nodes.link.recorder import Recorder
from nodes.link.reports import Reports
from nodes.link.runner import (
    Began,
    CacheChanged,
    Dead,
    Event,
    Fetched,
    Finished,
    HasRead,
    Held,
    LegFailed,
    Lent,
    Output,
    PromptLogprobs,
    Pull,
    RankFacts,
    Reads,
    Stepped,
)
from nodes.link.sender import KvSender
from nodes.link.streams import ATTACH_GRACE_S, Streams

UNCLAIMED = 16  # legs of a key that may wait for their reader for ATTACH_GRACE_S each; more of them less long
UNCLAIMED_MIN_S = 0.25
MAX_CLIENTS = 256  # that a hello names


class RankCore:
    """The core of one rank. Each method returns the actions to carry out, in order; `now` is seconds on the process's
    monotonic clock. `owner` is any number that names the connection over which a dispatch came; `runner_load` returns
    the runner's load as it is now. `len` gives the number of live legs."""

    def __init__(
        self, role: Role, dp_rank: int, facts: RankFacts, streams: Streams, runner_load: Callable[[], Load],
        limits: Limits | None = None,
    ) -> None:  # fmt: skip
        self.role: Role = role
        self.dp_rank = dp_rank
        self.facts = facts
        self.streams = streams
        limits = limits or Limits()
        self.legs = Legs(limits)
        self.counts: Counter[str] = Counter()  # dispatches by how they ended, and what was odd
        self.sender = KvSender(facts, self.counts, hold_s=limits.hold_s)
        self.reports = Reports()
        self.draining = False
        self.history: History[LegRecord] = History(LegRecord, limits.trace_bytes)
        self.recorder = Recorder()
        self.spans = False  # whether legs that are traced have a span, which the shell exports
        self.puller = KvPuller(facts, self.counts, self._end)
        self.reader = KvReader(facts, self.counts)
        self.lender = KvLender(facts)
        self.first_token_s: deque[float] = deque(maxlen=4096)  # of legs that began, until the owner takes them
        self.fetch_s: deque[float] = deque(maxlen=4096)  # seconds of each KV fetch since the last snapshot
        self.step_s: deque[float] = deque(maxlen=4096)  # seconds of each forward step since the last snapshot
        self._runner_load = runner_load
        self._load_seq = 0
        self._fetches = self._fetched_tokens = self._fetch_us = 0
        self._kv_sent_bytes = self._kv_received_bytes = 0

    def __len__(self) -> int:
        return len(self.legs)

    # --- from the controller ------------------------------------------------------------------------------------

    def ingest(self, owner: int, dispatch: Dispatch, frames: Sequence[bytes], now: float) -> list[Action]:
        """Take in one dispatch of a controller with its payload `frames`: begin its leg, or report the leg as ended
        with the code of the refusal. It is acknowledged in both cases."""
        actions: list[Action] = []
        counted = self.reports.acknowledge(dispatch)
        if counted != "counted":
            self.counts[f"dispatch_{counted}"] += 1
            actions.append(Note(f"dispatch.{counted}", "warning", _about(dispatch) | {"number": dispatch.number}))
        current = self.legs.get(dispatch.rid)
        identity = identity_of(dispatch)
        mine = current if current is not None and current.identity.agrees(identity) else None
        if counted == "repeated":
            return actions
        elsewhere = self.streams.at_another(dispatch.rid, identity, self.dp_rank)
        if self.reports.answered(owner, dispatch, mine, now) or self._answered(owner, dispatch, elsewhere):
            self.counts["dispatch_known"] += 1
            return actions
        try:
            self.reports.check_newest(dispatch, mine, now)
            if elsewhere is not None and elsewhere.attempt >= dispatch.attempt:
                raise Refusal("fenced", f"attempt {elsewhere.attempt} is at dp_rank {elsewhere.dp_rank}, or was")
            if current is not None and current.client != dispatch.client:
                raise Refusal("duplicate_rid", "the rid belongs to a live request of another client")
            self.streams.check(dispatch.rid, identity)
            if current is not None:
                why = "a newer attempt came" if mine is not None else "another request came under its rid"
                actions += self._end(current, "fenced", why, now)
            leg = self._take(dispatch, frames, now)
        except Refusal as refusal:
            room = dispatch.bootstrap_room
            end = Ended(dispatch.rid, dispatch.attempt, dispatch.leg, refusal.code, refusal.sentence, room=room)
            self.reports.ended(owner, end)
            self.counts[refusal.code] += 1
            fields = _about(dispatch) | {"code": refusal.code, "why": refusal.sentence}
            return [*actions, Note("leg.rejected", "info", fields=fields)]
        leg.owner = owner
        return actions + self._begin(leg, dispatch, now)

    def cancel(self, owner: int, cancel: CancelLeg, now: float) -> list[Action]:
        """End the leg of this attempt or an older one. An attempt that is not here is remembered as cancelled, in case
        its dispatch comes late."""
        leg = self.legs.get(cancel.rid)
        if leg is not None and leg.client and cancel.client not in ("", leg.client):
            return []
        identity = Identity(cancel.client or None, cancel.room, None)
        if leg is not None and not leg.identity.agrees(identity._replace(client=None)):
            leg = None
        if cancel.if_unfetched and (leg is None or leg.role != "decode" or not unfetched(leg)):
            return []
        if leg is not None:
            return self._end(leg, cancel.code, "", now) if leg.attempt <= cancel.attempt else []
        known = self.reports.last_end(cancel.rid, identity, now)
        if known is not None and known.attempt >= cancel.attempt:
            self.reports.ended(owner, known)
        else:
            end = Ended(cancel.rid, cancel.attempt, self.role, cancel.code, room=cancel.room)
            self.reports.remember(owner, end, identity, now)
        return []

    def unread(self, leg: Leg, now: float) -> list[Action]:
        """End a leg without a reader, as `Streams.unread` found, which would hold memory for no use. Its client may
        have been away, and then tries again: hence `fenced`."""
        return self._end(leg, "fenced", "its output was not read", now)

    def reconfigure(self, limits: Limits) -> None:
        """Apply new limits. Legs that are here stay."""
        self.legs.limits = limits
        self.sender.hold_s = limits.hold_s
        self.history.limit(limits.trace_bytes)

    def drain(self) -> None:
        """Refuse every new dispatch from now on. The legs that are here go on."""
        self.draining = True

    def end_all(self, code: Code, message: str, now: float) -> list[Action]:
        """End all legs that live here, with `code` and a sentence."""
        return [action for leg in self.legs for action in self._end(leg, code, message, now)]

    def restate(self, owner: int) -> None:
        """Report again to `owner`, with the next report, which legs began and how the remembered ones ended: its
        controller may have missed reports."""
        self.reports.restate(owner, self.legs)

    # --- KV caches: decode pulls, prefill sends -----------------------------------------------------------------

    def located(
        self, room: int, location: Location | None, attempt: int, code: Code, found_by: FoundBy, now: float,
        client: str = "",
    ) -> list[Action]:  # fmt: skip
        """Take in the result of a Locate: where `room` is prefilled, or None and the code that says why it is not
        known."""
        return self.puller.located(room, location, attempt, code, found_by, now, client)

    def kv_message(self, message: KvMeta | KvBlock | KvFail, data: bytes | memoryview, now: float) -> list[Action]:
        """Take in what a prefill rank sent for a decode leg, or a decode rank for a prefill leg that reads back; `data`
        is the frame after the message (empty: none)."""
        if isinstance(message, KvBlock):
            self._kv_received_bytes += len(data)
        if self.role == "prefill":
            return self.reader.received(message, data, now)
        return self.puller.received(message, data, now)

    def pulled(self, peer: bytes, message: KvPull | KvDone, now: float) -> list[Action]:
        """Take in what the decode rank behind `peer` asks of a prefill leg: its KV cache, or the end of the leg. At a
        decode rank: what the prefill rank behind `peer` asks, which reads back."""
        if self.role == "decode" and self.facts.reads_back:
            lender = self.lender
            return lender.pull(peer, message, now) if isinstance(message, KvPull) else lender.done(peer, message)
        if isinstance(message, KvPull):
            return list(self.sender.pull(peer, message, now))
        leg = self.sender.done(peer, message)
        if leg is None:
            return []
        if message.code == "ok":
            return self._end(leg, "ok", "", now)
        code = end_of_other("prefill", message.code)
        return self._end(leg, code, f"the decode leg ended: {message.code}", now)

    def kv_sent(self, count: int) -> None:
        """Count the bytes of a KV block that the shell has sent."""
        self._kv_sent_bytes += count

    # --- what the runner says -----------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Action]:
        """Handle an event of the runner. An event of a leg that is over has no effect."""
        if type(event) is Output:  # one for each token, hence the short way
            leg = event.leg
            if leg.state is not LegState.ENDED:
                if not leg.started:
                    self._started(leg, now)
                self.streams.push(leg, event.tokens, event.logprobs)
            return []
        match event:
            case Stepped():
                if event.seconds:
                    self.step_s.append(event.seconds)
                return []
            case CacheChanged():
                return [PublishFrames(event.messages)]
            case Dead():
                why = _sendable(f"the engine died: {event.reason}")
                return [*self.end_all("peer_lost", why, now), Leave(event.reason)]
        leg = event.leg
        if not leg.live:
            return []
        match event:
            case Began():
                leg.cached_tokens, leg.written_tokens = event.cached_tokens, event.written_tokens
                leg.add_event("began", now, f"{event.cached_tokens} tokens cached" if event.cached_tokens else "")
            case PromptLogprobs():
                leg.prompt_logprobs = event.logprobs
            case Held():
                leg.step("held")
                leg.add_event("held", now)
                if self.recorder.on:
                    self.recorder.computed(leg, now)
                self._started(leg, now)
                leg.first_logprobs = event.first_logprobs
                return list(self.sender.held(leg, event.first_token, event.handle, event.valid_s, now))
            case Pull():
                if leg.role == "prefill":
                    return self.reader.pull(leg, event.first, event.count)
                return self.puller.pull(leg, event.first, event.count, now)
            case Reads():
                return self.reader.begin(leg, now)
            case HasRead():
                leg.add_event("read", now, f"{event.tokens} tokens of the decode rank" if event.tokens else "nothing")
                if event.tokens and event.seconds:
                    self._count_fetch(event.tokens, event.seconds)
                    if self.recorder.on:
                        self.recorder.read(leg, now, event.seconds, event.tokens)
                return self.reader.done(leg)
            case Lent():
                if self.recorder.on and event.blocks:
                    self.recorder.lent(leg, now, event.blocks * self.facts.block_tokens)
                return self.lender.lent(leg, event.blocks, event.handle, event.valid_s, now)
            case Fetched():
                tokens = leg.prompt_tokens - event.cached_tokens
                self._count_fetch(tokens, event.seconds, known=not event.to_first_token)
                if self.recorder.on:
                    self.recorder.fetched(leg, now, event.seconds, tokens)
                leg.cached_tokens = event.cached_tokens
                leg.add_event("fetched", now, f"{event.cached_tokens} tokens were here" if event.cached_tokens else "")
                return self.puller.done(leg)
            case Finished():
                return self._end(leg, "ok", event.reason, now, by_runner=True)
            case LegFailed():
                return self._end(leg, event.code, _sendable(event.message), now, by_runner=True)
        return []

    def tick(self, now: float) -> list[Action]:
        """Handle deadlines, signs of life of ranks at the other end, and legs whose output is not read. Call it a few
        times a second."""
        if self.recorder.on:
            self.recorder.tick(now)
        actions = self._make_room(now)
        for leg in self.legs:
            if leg.deadline is not None and now >= leg.deadline:
                actions += self._end(leg, "deadline", "the deadline passed", now)
            elif leg.role == "decode":
                actions += self.puller.tick(leg, now)
            elif leg.role == "prefill":
                actions += self.reader.tick(leg, now)
        actions += self.lender.tick(now)
        lost, answers = self.sender.tick(now)
        for leg in lost:
            actions += self._end(leg, "decode_failed", "no decode rank fetched the KV cache in time", now)
        return actions + answers

    def _make_room(self, now: float) -> list[Action]:
        """End legs whose output is not read, while other legs wait for a place or other clients have legs here;
        first those of a key with many of them. Their code lets a client that is merely late try again."""
        unclaimed = {leg: since_s for leg in self.legs if (since_s := self.streams.unclaimed_s(leg, now))}
        if not unclaimed:
            return []
        several = len({leg.client for leg in self.legs}) > 1
        if not several and not self._runner_load().waiting:
            return []
        count = Counter(leg.client for leg in unclaimed if leg.client and several)
        why = "its output was not read, and other legs need its place"
        return [
            action
            for leg, since_s in unclaimed.items()
            if since_s >= max(UNCLAIMED_MIN_S, ATTACH_GRACE_S * min(1.0, UNCLAIMED / (count[leg.client] or 1)))
            for action in self._end(leg, "overloaded", why, now)
        ]

    # --- what the controller and the bus are told ---------------------------------------------------------------

    def running(self) -> tuple[tuple[tuple[str, int], ...], tuple[tuple[str, int], ...]]:
        """Return `(rid, attempt)` of the legs, key by key, and how many legs each key has (for the keys with most)."""
        count = Counter(leg.client for leg in self.legs)
        clients = count.most_common()
        place = {client: at for at, (client, _) in enumerate(clients)}
        legs = sorted(self.legs, key=lambda leg: place[leg.client])
        return tuple([(leg.rid, leg.attempt) for leg in legs]), tuple(clients[:MAX_CLIENTS])

    def figures(self) -> Load:
        """Return the runner's load plus the legs that wait here for their KV cache."""
        load, puller = self._runner_load(), self.puller
        if not puller.waiting:
            return load
        waiting, tokens = load.waiting + puller.waiting, load.waiting_tokens + puller.waiting_tokens
        return replace(load, waiting=waiting, waiting_tokens=tokens)

    def load(self) -> Load:
        """Return the load to publish, with acknowledgements and a new `seq`. Call it after the inbox was ingested: then
        load and acknowledgements are of one moment."""
        self._load_seq += 1
        facts = self.facts
        moves_blocks = facts.kv_transfer == OVER_THE_BUS
        return replace(
            self.figures(), seq=self._load_seq, acks=self.reports.acks, kv_capacity=facts.kv_capacity,
            max_running=facts.max_running, fetches_total=self._fetches, fetched_tokens_total=self._fetched_tokens,
            fetch_us_total=self._fetch_us,
            kv_sent_bytes_total=self._kv_sent_bytes if moves_blocks else None,
            kv_received_bytes_total=self._kv_received_bytes if moves_blocks else None,
        )  # fmt: skip

    def recall(self, rid: str, wall_s: float) -> tuple[TraceEvent, ...]:
        """Return the events of the legs of the request `rid` here, past ones too; empty: none is known. `wall_s` is
        added to this process's clock to get seconds since 1970."""
        leg = self.legs.get(rid)
        records = [*self.history.of(rid), *([record_of(leg)] if leg is not None else [])]
        return tuple([event for record in records for event in trace_events_of(record, wall_s)][-MAX_TRACE_EVENTS:])

    def _count_fetch(self, tokens: int, seconds: float, known: bool = True) -> None:
        self.fetch_s.append(seconds)
        if seconds and known:
            self._fetches += 1
            self._fetched_tokens += tokens
            self._fetch_us += round(seconds * 1e6)

    # --- inside: a leg's beginning ------------------------------------------------------------------------------

    def _answered(self, owner: int, dispatch: Dispatch, elsewhere: Leg | None) -> bool:
        """Return true if another rank of this process had the attempt: a reader finds that one's stream here, so
        `owner` gets its end."""
        if elsewhere is None or elsewhere.attempt != dispatch.attempt or elsewhere.live:
            return False
        self.reports.ended(owner, elsewhere.report)
        return True

    def _take(self, dispatch: Dispatch, frames: Sequence[bytes], now: float) -> Leg:
        """Return the leg, if there is space for it; else raise Refusal."""
        if self.draining:
            raise Refusal("draining", "this rank is draining")
        leg = leg_of(dispatch, frames, role=self.role, dp_rank=self.dp_rank, facts=self.facts, now=now)
        if self.sender.holds(leg) or self.puller.holds(leg):
            raise Refusal("duplicate_room", "the room belongs to another request here")
        self.legs.check_space(leg, self.puller.waiting + self._runner_load().waiting)
        return leg

    def _begin(self, leg: Leg, dispatch: Dispatch, now: float) -> list[Action]:
        self.legs.add(leg)
        if leg.role != "prefill":
            self.streams.open(leg, now)
        if leg.role == "unified":
            leg.found_by = "local"
            return [Start(leg)]
        if leg.role == "prefill":
            self.sender.open(leg, now)
            leg.registered = leg.attempt
            return [Register(leg.room, leg.attempt), Start(leg)]
        opened = self.puller.open(leg, dispatch, now)
        return opened + self.lender.open(leg, now) if self.facts.reads_back else opened

    # --- inside: output and end ---------------------------------------------------------------------------------

    def _started(self, leg: Leg, now: float) -> None:
        if leg.started:
            return
        leg.started = True
        leg.first_token_s = max(0.0, now - leg.ingested_at)
        self.first_token_s.append(leg.first_token_s)
        self.reports.started(leg)

    def _end(self, leg: Leg, code: Code, message: str, now: float, *, by_runner: bool = False) -> list[Action]:
        """End a leg; there is no other way out. With `ok`, `message` is the finish reason. `by_runner`: the runner
        ended it itself."""
        was = leg.state
        end = leg.end(code, message, now)
        self.legs.remove(leg)
        actions: list[Action] = []
        if was is LegState.HOLDING:
            actions.append(Release(leg))
        elif was is LegState.RUNNING and not by_runner:
            actions.append(Cancel(leg))
        if leg.role == "prefill":
            actions += self.reader.done(leg)
            actions += self.sender.close(leg)
            others = self.sender.others(leg)
            for other in others:
                other.registered = max(other.registered, leg.registered)
            if not others:
                actions.append(Unregister(leg.room, leg.registered, code))
        elif leg.role == "decode":
            actions += self.lender.ended(leg) + self.puller.close(leg, was)
        if leg.role != "prefill":
            self.streams.finish(leg)
        self.reports.remember(leg.owner, end, leg.identity, now)
        record = record_of(leg)
        self.history.add(record)
        if self.spans and leg.trace is not None:
            actions.append(Over(record))
        self.counts[code] += 1
        if code != "ok":
            fields = leg.about | {"code": code, "why": message, "state": was.value}
            actions.append(Note("leg.ended", "info", fields=fields))
        return actions


def _sendable(text: str) -> str:
    """Return an engine's text without halves of surrogate pairs, which no message can hold."""
    return text.encode(errors="replace").decode()


def _about(dispatch: Dispatch) -> dict[str, object]:
    """Return the log fields of a dispatch, the same as those of the leg that it becomes (`Leg.about`)."""
    about: dict[str, object] = {"rid": dispatch.rid, "attempt": dispatch.attempt, "leg": dispatch.leg}
    about["room"] = dispatch.bootstrap_room
    return about if dispatch.trace is None else about | {"trace_id": trace_id_of(dispatch.trace)}

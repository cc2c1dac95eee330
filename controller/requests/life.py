"""The life of requests: accepted, placed, retried, ended exactly once.

This module decides what happens to a request and when, and what is sent to its client. `controller.requests.attempts`
gives its legs (a rank's shares of it) to ranks, `controller.requests.table` keeps what is alive. Pure: messages to send
are appended to `out`, `now` is in seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from msgspec.structs import replace

from bus.actions import Note
from bus.rights import key_of, may
from bus.tracecontext import child_of
from bus.wire.codes import LEG_FAILED, MEANINGS, Code, Refusal, is_retryable
from bus.wire.messages import (
    Cancel,
    CancelLeg,
    Done,
    Ended,
    Failed,
    Progress,
    Rid,
    Submit,
)
from controller.balancer import Balancer
from controller.config import ControllerConfig
from controller.events import Action, Over, ToClient
from controller.load.rank import RankLoad
from controller.rank import Rank
from controller.requests.attempts import Attempts
from controller.requests.listed import Listed
from controller.requests.losses import Losses
from controller.requests.record import record_of
from controller.requests.request import (
    ROLES,
    LegRun,
    LegState,
    Request,
    State,
    about_of,
    is_spare,
    request_of,
    same_request,
    verdict,
)
from controller.requests.slos import SloClasses
from controller.requests.table import RequestTable
from controller.trips import Trip

# Failures are logged with their rid at the severity of their code. Lines at `info`, those of retries among them, are at
# most LOGGED_MAX between two calls of `measure`, since clients can cause any number; `debug` is for `trace` alone.
LOGGED_MAX = 10
WISH_S = 5.0
TOO_LATE = "its first token can no longer come in time"


class RequestLifecycle:
    """The live requests of one controller by rid, at the `ranks` of `balancer`. `epoch` is the number of the
    controller's start, `wall_s` plus its clock is seconds since 1970; `spans`: traced requests give an `Over`
    at their end. The controller's core calls the methods."""

    def __init__(
        self,
        config: ControllerConfig,
        epoch: int,
        balancer: Balancer,
        ranks: Mapping[RankLoad, Rank],
        counts: Counter[str],
        now: float,
        wall_s: float = 0.0,
        *,
        spans: bool = False,
    ) -> None:
        self._config = config
        self._slo_classes = SloClasses(config.slo_classes) if config.queue_order == "slo" else None
        self._counts = counts
        self._ends_s = 0.0  # recent ends a second
        self._ends = 0
        self._logged = self._not_logged = 0  # log lines since the last measure
        self.table = RequestTable(config, now, balancer.orders)
        self._balancer = balancer
        self._attempts = Attempts(epoch, self.table, balancer, ranks, counts)
        self.losses = Losses(config, self.table, balancer, self._attempts, counts, self._leg_failed, self._try_again)
        self._unclear = self.losses.unclear
        self.requests = self.table.requests
        self.queue = self.table.queue
        self.listed = Listed(self.requests, self.queue, now, wall_s)
        self._wishing: dict[str, float] = {}  # clients that wait, or waited, for a TPOT of their own, since when
        if self._slo_classes is not None:  # a series that is born with a count has no increase of it
            counts.update(dict.fromkeys(("ttft_slo", "ttft_slo_kept", "ttft_slo_missed", "ttft_slo_exempt"), 0))
        self._spans = spans

    def reconfigure(self, config: ControllerConfig) -> None:
        """Apply new settings from now on."""
        self._config = config
        self.table.reconfigure(config)
        self.losses.reconfigure(config)

    @property
    def by_tick(self) -> bool:
        """True if waiting requests are dispatched with ticks only: then no request overtakes them between ticks
        either."""
        return self._attempts.by_tick

    @by_tick.setter
    def by_tick(self, value: bool) -> None:
        self._attempts.by_tick = value

    @property
    def trace(self) -> bool:
        """True if each request has log lines."""
        return self._attempts.trace

    @trace.setter
    def trace(self, value: bool) -> None:
        self._attempts.trace = value

    # --- from clients -----------------------------------------------------------------------------------------

    def submit(self, peer: Any, submit: Submit, frames: Sequence[Any], now: float, out: list[Action]) -> None:
        """Take a client's submit, with its payload `frames`. The answer is Accepted (now, or when it leaves the queue)
        or Failed. A repeated submit of a live request is answered as that is; a higher attempt takes its place."""
        live = self.requests.get(submit.rid)
        mine = live is None or live.client == key_of(peer)
        if live is not None and mine and submit.attempt <= live.attempt and same_request(live.submit, submit):
            self._attempts.reattach(live, peer, out)
            return
        self._counts["submitted"] += 1
        promised = self._slo_classes is not None and submit.leg != "decode" and not submit.offset
        if promised:
            self._counts["ttft_slo"] += 1
        try:
            if live is not None and (not mine or submit.attempt <= live.attempt):
                raise Refusal("duplicate_rid", "the rid belongs to another live request")
            if self._slo_classes is not None:
                submit = self._slo_classes.settle(submit, key_of(peer))
            request = request_of(peer, submit, frames, now)
            self.table.check(request, live)
        except Refusal as refusal:
            about = {"rid": submit.rid, "attempt": submit.attempt, "room": submit.bootstrap_room}
            self._answer_failed(peer, submit.rid, submit.attempt, about, refusal.code, refusal.sentence, out)
            if promised:
                self._no_first_token(refusal.code)
            return
        if live is not None:
            self._supersede(live, peer, now, out)
        if submit.trace is not None and self._spans:
            request.trace = child_of(submit.trace, f"{submit.rid}/{submit.attempt}")
        if promised:
            request.first_due = now + (submit.ttft_slo_s or self._config.ttft_slo_s)
        if submit.avoid:
            request.avoid = self._attempts.known(submit.avoid)
        self.table.add(request)
        try:
            if request.losses or self._unclear.at or self._unclear.attempts:
                self.losses.check(request)
            if not self._attempts.place(request, now, out):
                self._enqueue(request, now, out)
        except Refusal as refusal:
            self._fail(request, refusal.code, refusal.sentence, now, out)

    def cancel(self, peer: Any, cancel: Cancel, now: float, out: list[Action]) -> None:
        """End a request at once. Its client may do so, an admin, or without keys everyone that knows the rid. The
        end goes to its owner and to `peer`, which may be the owner over a new connection. Unknown requests are over
        already, and one of another room is not meant: no answer."""
        rid, room = cancel.rid, cancel.room
        client = "" if may(peer, "admins") else key_of(peer)
        for leg in self.table.orphans.claim(rid, client or None):
            out.append(leg.rank.cancels(CancelLeg(rid, leg.attempt, client=client, room=room)))
            self.table.gave_up(rid, leg.attempt)
        request = self.requests.get(rid)
        if request is not None and (room is None or request.submit.bootstrap_room in (None, room)):
            if client not in ("", request.client):
                self._counts["rejected_not_yours"] += 1
                return
            sentence = "cancelled by the client" if peer == request.peer else "cancelled over another connection"
            self._fail(request, "cancelled", sentence, now, out)
            if peer != request.peer:
                failed = Failed(rid, request.attempt, "cancelled", sentence, retryable=False)
                out.append(ToClient(peer, failed))

    def client_gone(self, peer: Any, rid: Rid, now: float, out: list[Action]) -> None:
        """End a request whose client is gone before it got `Accepted` of this attempt, since its output will not be
        read. (One that streams may be read over another connection: its rank handles that.) Its ranks answer the same
        attempt with this end; a client whose link was cut, and whose submit came late, sends it again."""
        request = self.requests.get(rid)
        if (
            request is not None
            and request.peer == peer
            and request.state is State.RUNNING
            and not request.submit.continue_on_disconnect
        ):
            self._counts["abandoned"] += 1
            self._fail(request, "cancelled", "its client is gone", now, out, withdraw="overloaded")

    # --- from nodes -------------------------------------------------------------------------------------------

    def progress(self, rank: Rank, progress: Progress, now: float, out: list[Action]) -> None:
        """Handle a rank's report of legs that started or ended: requests end, or are tried again. Reports of an older
        attempt, or of another request that had the rid, are ignored."""
        work = rank.work
        for rid, attempt in progress.started:
            if rid in work:
                request, leg = work[rid]
                if leg.answers and request.attempt == attempt:
                    self._output(request, leg, rank, now)
        for ended in progress.ended:
            if ended.rid in work:
                request, leg = work[ended.rid]
                room = request.submit.bootstrap_room
                mine = ended.room == room or None in (ended.room, room)
                if mine and request.attempt == ended.attempt:  # a rank has one leg of an attempt, whatever it calls it
                    self._ended(request, leg, rank, ended, now, out)
                    continue
            rank.given_up.pop((ended.rid, ended.attempt), None)

    # --- time and credit --------------------------------------------------------------------------------------

    def expire(self, now: float, out: list[Action]) -> None:
        """Fail the requests past their deadline, and forget old wishes for a time per token."""
        for client in [client for client, since in self._wishing.items() if now - since >= 2 * WISH_S]:
            del self._wishing[client]
        for request in self.table.overdue(now):
            sentence = "its deadline passed" + (" while it waited for a rank" if request.lane is not None else "")
            self._fail(request, "deadline", sentence, now, out)

    def drain(self, now: float, out: list[Action]) -> None:
        """Dispatch waiting requests in order, as far as ranks have credit."""
        for request in self.queue.turns(lambda request: self._in_time(request, now)):
            try:
                if not self._attempts.place(request, now, out) and self._balancer.held_by_wish:
                    if self._gives_up_wish(request, now):
                        self._attempts.place(request, now, out)
                    else:
                        request.aside = True
            except Refusal as refusal:
                self._fail(request, refusal.code, refusal.sentence, now, out)

    def _gives_up_wish(self, request: Request, now: float) -> bool:
        """Return true if a wish for a time per token has blocked its client's other requests for WISH_S; for the
        same time after that, the client's wishes do not count."""
        since = self._wishing.setdefault(request.client, now)
        if now - since < WISH_S:
            return False
        request.submit = replace(request.submit, tpot_slo_s=0.0)
        self._counts["tpot_slo_given_up"] += 1
        return True

    def shed(self, now: float, out: list[Action]) -> None:
        """Fail waiting requests that cannot have their first token in time any more, with the code `overloaded`."""
        for request in [request for request in self.queue if not self._in_time(request, now)]:
            self._fail(request, "overloaded", TOO_LATE, now, out)

    def shutdown(self, now: float, out: list[Action]) -> None:
        """Fail everything that lives, with the code `shutting_down`."""
        for request in list(self.requests.values()):
            self._fail(request, "shutting_down", "the controller leaves", now, out)

    def measure(self, interval_s: float, out: list[Action]) -> None:
        """Measure how fast requests end, for retry hints, and log how many lines were left out; call it every so often,
        with the seconds since the last call."""
        if self._not_logged:
            out.append(Note("request.lines_left_out", fields={"count": self._not_logged}))
        self._logged = self._not_logged = 0
        self._ends_s += 0.3 * (self._ends / interval_s - self._ends_s)
        self._ends = 0

    def alive(self) -> dict[str, int]:
        """Return what there is now, by name."""
        return {
            "requests": len(self.requests),
            "queue_requests": self.queue.requests,
            "queue_bytes": self.queue.bytes,
            "payload_bytes": self.table.payload_bytes,
            "adoptable": len(self.table.orphans),
        }

    def retry_after_s(self, code: Code) -> float:
        """Return the seconds after which a new try may be worth it; 0: no hint."""
        if code == "overloaded":
            return round(min(5.0, max(0.05, (len(self.queue) + 1) / max(self._ends_s, 0.2))), 3)
        return MEANINGS[code].hint_s

    def validate(self) -> None:
        """Check that every sum and map follows its definition (tests call this after each event)."""
        self.table.validate()
        live = self.requests.values()
        self._attempts.validate(live)
        for request in live:
            assert request.state is not State.ENDED
            running = any(leg.state is LegState.RUNNING for leg in request.legs)
            assert running == (request.state is not State.QUEUED)

    # --- inside: begin ----------------------------------------------------------------------------------------

    def _supersede(self, live: Request, peer: Any, now: float, out: list[Action]) -> None:
        self._counts["superseded"] += 1
        self._attempts.withdraw(live, "fenced", out)
        if live.peer != peer:
            failed = Failed(live.rid, live.attempt, "fenced", "a newer attempt was submitted", retryable=False)
            out.append(ToClient(live.peer, failed))
        self.losses.over(live)
        self._forget(live, now, "fenced", "a newer attempt was submitted", out)

    def _enqueue(self, request: Request, now: float, out: list[Action]) -> None:
        own = self._balancer.orders(ROLES[request.submit.leg][0])
        if own or self._config.queue_order == "slo":
            request.work = self._balancer.work(request.submit)
            if self._config.shed == "hopeless" and not self._in_time(request, now):
                raise Refusal("overloaded", TOO_LATE)
        while not self.queue.has_room(request.frames_bytes):
            other = self.queue.in_the_way(request)
            sentence = f"all ranks are busy and {len(self.queue)} requests wait already"
            if other is None:
                raise Refusal("overloaded", sentence)
            self._fail(other, "overloaded", f"{sentence}, most of them this client's", now, out)
        if own:
            request.order = self._balancer.order(request.submit, request.work, now)
        request.past += ((now, "queued", request.attempt, None, f"behind {len(self.queue)}"),)
        self.queue.add(self._attempts.lane(request), request)
        self._counts["queued"] += 1

    def _in_time(self, request: Request, now: float) -> bool:
        """Return true if the request's first token would come in time if it went to a rank now."""
        due = request.first_due
        return due == inf or now + self._balancer.first_token_s(request.submit, request.model, request.work) <= due

    # --- inside: end ------------------------------------------------------------------------------------------

    def _output(self, request: Request, leg: LegRun, rank: Rank, now: float) -> None:
        request.step("output")
        if leg.first_at == inf:
            leg.first_at = now
            if request.came_at != inf and not request.submit.offset and leg.role != "prefill":
                took_s = now - request.came_at
                rank.latencies.ttft.observe(took_s)
                if took_s > self.listed.least_s:
                    self.listed.slow(request, took_s, now)
        if request.first_due != inf:
            kept = now <= request.first_due
            self._counts["ttft_slo_kept" if kept else "ttft_slo_missed"] += 1
            request.first_due = inf
            if kept and request.past:
                self._balancer.decisions.forget(request)
        if request.frames:
            self.table.release_payload(request)

    def _ended(self, request: Request, leg: LegRun, rank: Rank, ended: Ended, now: float, out: list[Action]) -> None:
        if self._attempts.ended(leg, request, ended, now):
            leg.ended = ended
            if leg.answers and request.state is State.RUNNING:
                self._output(request, leg, rank, now)
            if leg.role == "prefill":
                rank.latencies.ttft.observe(ended.first_token_s)
            elif ended.output_tokens > 1 and leg.first_at < now and request.came_at != inf:
                # where its beginning and its end were reported together, there is no time between tokens
                rank.latencies.tpot.observe((now - leg.first_at) / (ended.output_tokens - 1))
            self._finish(request, now, out)
            return
        if is_spare(leg, request):
            self._finish(request, now, out)
        else:
            sentence = ended.message or f"the {leg.role} leg ended with {ended.code}"
            self._leg_failed(request, leg, ended.code, sentence, now, out)

    def _finish(self, request: Request, now: float, out: list[Action]) -> None:
        """End a request well, once every leg is over."""
        done: tuple[Ended, ...] = ()
        for leg in request.legs:
            if leg.ended is not None:
                done += (leg.ended,)
            elif leg.state is LegState.RUNNING:
                return
        self._counts["done"] += 1
        if request.legs[-1].rank.info.prefills and request.submit.leg == "pair" and done:
            self._count_trip(request, done[-1])
        self._ends += 1
        out.append(ToClient(request.peer, Done(request.rid, request.attempt, done)))
        if self._attempts.trace:
            out.append(Note("request.done", "debug", about_of(request)))
        self._forget(request, now, "ok", "", out)

    def _count_trip(self, request: Request, end: Ended) -> None:
        """Count a pair's trip (`controller.trips`), which its legs and the `end` of the last one show, and the
        microseconds to its first token, where they were predicted."""
        trip: Trip
        if end.leg == "unified":
            trip = "at_decode"
            self._counts["trip_at_decode"] += 1
        elif request.legs[0].read:
            trip = "read_back"
            self._counts["trip_read_back"] += 1
        elif end.leg == "decode" and end.cached_tokens:
            trip = "delta"
            self._counts["trip_delta"] += 1
        else:
            trip = "whole"
            self._counts["trip_whole"] += 1
        last = request.legs[-1]
        if request.predicted_s and last.first_at != inf:
            self._counts[f"first_token_us_{trip}_predicted"] += round(request.predicted_s * 1e6)
            self._counts[f"first_token_us_{trip}_taken"] += round((last.first_at - last.began) * 1e6)

    def _leg_failed(
        self, request: Request, leg: LegRun, code: Code, sentence: str, now: float, out: list[Action]
    ) -> None:
        """Handle a failed leg of `request`: decode may go on without it, or another attempt may succeed."""
        if is_spare(leg, request):
            self._attempts.cancel(request, "prefill_failed", out, if_unfetched=True)
            self._finish(request, now, out)
            return
        unclear = self.losses.of(request) - request.losses
        what = verdict(request, code, self._config.attempts, unclear)
        if what == "again":
            self._try_again(request, leg, code, sentence, now, out)
            return
        if what == "poison":
            code, sentence = "poison", f"{request.losses} ranks were lost with it; the last: {sentence}"
        self._fail(request, code, sentence, now, out, withdraw=LEG_FAILED[leg.role])

    def _try_again(
        self, request: Request, failed: LegRun, code: Code, sentence: str, now: float, out: list[Action]
    ) -> None:
        """Run the next attempt, at other ranks if there are any. If no rank can take it, or its other leg, which is
        given up, may be the death of one rank too many, the request fails as its leg did."""
        rank = f"{failed.rank.key[0]}/{failed.rank.key[1]}"
        self._attempts.withdraw(request, "fenced", out)
        if self.losses.of(request) >= self._config.attempts:
            self._fail(request, code, f"{sentence}; whether its ranks died of it is not known yet", now, out)
            return
        self._log("request.retried", "info", about_of(request) | {"rank": rank, "code": code, "why": sentence}, out)
        retried = (now, "retried", request.attempt, failed.role, f"{rank}: {code}: {sentence}")
        request.past = (*record_of(request).events, retried)
        request.avoid += (failed.rank,)
        request.attempt += 1
        request.step("again")
        request.legs = ()
        request.apart = self.losses.is_apart(request)
        try:
            if not self._attempts.place(request, now, out):
                self._enqueue(request, now, out)
        except Refusal as refusal:
            self._fail(request, code, f"{sentence}; then: {refusal.sentence}", now, out)

    def _fail(
        self, request: Request, code: Code, sentence: str, now: float, out: list[Action], *,
        withdraw: Code | None = None,
    ) -> None:  # fmt: skip
        self._attempts.withdraw(request, withdraw or code, out)
        self._answer_failed(request.peer, request.rid, request.attempt, about_of(request), code, sentence, out)
        self._ends += 1
        if self._unclear.at:
            self.losses.over(request)
        self._forget(request, now, code, sentence, out, failed=True)

    def _forget(
        self, request: Request, now: float, code: Code, why: str, out: list[Action], *, failed: bool = False
    ) -> None:
        """Remove a request that is over: only its record stays."""
        if request.first_due != inf:
            self._no_first_token(code)
        record = self.table.remove(request, now, code, why, failed=failed)
        if self._spans and request.trace is not None:
            out.append(Over(record))

    def _no_first_token(self, code: Code) -> None:
        """Count a request that ended with `code` before its first token, although it should have had one in time."""
        self._counts["ttft_slo_exempt" if MEANINGS[code].severity == "debug" else "ttft_slo_missed"] += 1

    def _answer_failed(
        self, peer: Any, rid: Rid, attempt: int, about: dict[str, Any], code: Code, sentence: str, out: list[Action]
    ) -> None:
        self._counts["failed"] += 1
        self._counts[f"failed_{code}"] += 1
        failed = Failed(rid, attempt, code, sentence[:1024], is_retryable(code), self.retry_after_s(code))
        out.append(ToClient(peer, failed))
        level = MEANINGS[code].severity
        self._log("request.failed", level, about | {"code": code, "why": sentence}, out)

    def _log(self, event: str, level: str, fields: dict[str, Any], out: list[Action]) -> None:
        if level == "info" and not self._attempts.trace:
            if self._logged >= LOGGED_MAX:
                self._not_logged += 1
                return
            self._logged += 1
        if level != "debug" or self._attempts.trace:
            out.append(Note(event, level, fields))

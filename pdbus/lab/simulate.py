"""Runs one method on one trace in virtual time. Owns the steps of requests and messages between controllers and ranks.

A request arrives at one of the controllers, which picks a prefill and a decode rank; both legs travel there; the
prefill rank computes; its first token goes through the decode rank to the client (unless the decode rank makes it
itself); the decode rank gets memory, fetches the KV cache (or what it lacks of it) and decodes. Or it picks a unified
rank, or a decode rank that can compute prompts, which does all of it and sends its tokens to the client. Reports travel
back with the configured delay and loss. The same arguments give the same outcome.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial

from bus.errors import ConfigError
from bus.wire.messages import Ended, Role, Sent, Submit
from controller.costs import Costs
from controller.policies.registry import find
from controller.requests.order import ArrivalOrder, PolicyOrder, SloOrder
from nodes.own.sequence import Sequence
from pdbus.lab.arrivals import Arrivals
from pdbus.lab.capacity import stretch
from pdbus.lab.choosers import LATE, METHODS, build_chooser, check_method, method_of
from pdbus.lab.clock import VirtualLoop
from pdbus.lab.config import LabConfig
from pdbus.lab.links import Links
from pdbus.lab.outcome import Outcome, RequestOutcome
from pdbus.lab.pool import packed
from pdbus.lab.rank import VirtualRank
from pdbus.lab.reports import Listener, Reports
from pdbus.lab.traces import Trace
from pdbus.lab.truth import TrueState

RESTATE_S = 1.0
TICK_S = 0.05  # of a controller
SHARE_STEP = 0.02


def simulate(
    trace: Trace, method: str, config: LabConfig, on_share: Callable[[float], None] = lambda share: None
) -> Outcome:
    """Replay `trace` with `method` for prefill and unified ranks in virtual time, stretched as `config` says, and
    return the outcome once all requests that count have ended. It computes in this thread (seconds to minutes). Raises
    ConfigError for an unknown method, when a request exceeds the memory of a rank, and when no request counts.

    `on_share` is called regularly with an estimate of the share of the run that is done.
    """
    check_method(method)
    check_method(config.decode_method)
    if config.decode_prefills and not (config.ranks and config.decode_ranks):
        raise ConfigError("--decode-prefills is for decode ranks beside prefill ranks")
    if config.decode_prefills and not (config.trip or method_of(config.decode_method).prefills_here):
        raise ConfigError(f"--decode-prefills is for a --decode-method that says when, not {config.decode_method}")
    if config.trip == "read_back" and not method_of(config.decode_method).kv_events:
        raise ConfigError(f"--trip read_back is for a --decode-method that knows caches, not {config.decode_method}")
    if find(LATE.get(method, method)) is None:
        for option, given in (("--queue-order slo", config.queue_order == "slo"),
                              ("--trip read_back", config.trip == "read_back")):  # fmt: skip
            if given:
                raise ConfigError(f"{option} is for methods that a controller can run, which {method} is not")
    longest = max(request.prompt_tokens for request in trace.requests)
    blocks = config.blocks(trace.block_tokens)
    if config.ranks and longest > blocks * trace.block_tokens:
        memory = f"--cache-blocks {blocks} of {trace.block_tokens} tokens"
        raise ConfigError(f"{memory} cannot hold a prompt of {longest} tokens")
    most = max(request.prompt_tokens + request.output_tokens for request in trace.requests)
    for role, ranks, tokens in (
        ("decode", config.decode_ranks, config.decode_kv_tokens),
        ("unified", config.unified_ranks, config.unified_kv_tokens),
    ):
        if ranks and most > tokens // trace.block_tokens * trace.block_tokens:  # whole blocks
            raise ConfigError(f"--{role}-kv-tokens {tokens} cannot hold the trace's longest request")
    return _Run(stretch(trace, config), method, config, on_share).run()


def rooms_of(trace: Trace, config: LabConfig) -> list[int]:
    """Return a number for each request of the trace, its bootstrap room (SGLang's name of a request, which a method may
    use to choose). By `config.seed` alone, so virtual and live runs have the same ones."""
    rng = random.Random(f"rooms {config.seed}")
    return [rng.getrandbits(62) for _ in trace.requests]


def unified_of(trace: Trace, config: LabConfig, method: str = "") -> list[bool]:
    """Return for each request of the trace whether a unified rank runs it. Where there are pairs too, it is drawn for
    each session with `config.unified_share`, by `config.seed` alone, so virtual and live runs have the same ones; none,
    if the policy of `method` says itself which pairs unified ranks run."""
    if not config.ranks or not config.unified_ranks or (method and method_of(method).prefills_here):
        return [not config.ranks] * len(trace)
    share = config.unified_share or config.unified_ranks / (config.prompt_ranks + config.decode_ranks)
    rng = random.Random(f"unified {config.seed}")
    drawn = {session: rng.random() < share for session in trace.starts_s}
    return [drawn[trace.session_of(place)] for place in range(len(trace))]


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that waits at a controller."""

    number: int
    work: int
    first_due: float
    order: int

    @property
    def arrived(self) -> int:
        """The number that the order of arrival uses."""
        return self.number


@dataclass(slots=True, eq=False)
class _Line:
    """The requests that wait at one controller: for a unified rank, or for a prefill rank and a decode rank."""

    owner: int  # the controller
    chooser: Listener
    decode: Listener | None
    waiting: ArrivalOrder[_Waiting]
    unified: bool
    wake_s: float = math.inf  # when the controller tries it again


class _Run:
    def __init__(self, trace: Trace, method: str, config: LabConfig, on_share: Callable[[float], None]) -> None:
        self.trace, self.method, self.config = trace, method, config
        self.on_share = on_share
        self.shown = 0.0  # the share last shown
        self.kind = method_of(method)
        self.late = self.kind.late or config.queue_order == "slo"
        second = method_of(config.decode_method)
        self.admits = self.kind.admits or second.admits
        self.queues = self.late or self.admits or self.kind.orders
        self.from_outside = not METHODS.keys() >= {method, config.decode_method}  # it may look at all loads
        self.loop = VirtualLoop()
        self.delay_s = config.hop_s + config.report_delay_s
        self.rng = random.Random(config.seed)
        self.courses = [RequestOutcome(request) for request in trace.requests]
        self.arrivals = Arrivals(trace, config, self._begin)
        self.busy_before = (0, 0, 0)  # us, of prefill, decode and unified ranks, when requests began to count
        self.owner = [self.rng.randrange(config.controllers) for _ in self.courses]
        self.rooms = rooms_of(trace, config)
        self.is_unified = unified_of(trace, config, method)
        self.at_decode = [False] * len(self.courses)  # pairs of which a decode rank does all
        self.may_prefill_here = config.decode_prefills and config.trip in ("", "at_decode")
        self.may_read_back = config.decode_cache and (
            config.trip == "read_back" or (not config.trip and second.reads_back)
        )
        self.may_be_unified = self.kind.prefills_here and bool(config.ranks and config.unified_ranks)
        keeps_outputs = config.outputs_cached and (config.unified_ranks or config.decode_cache)
        self.hashes = [array("Q", request.hashes) for request in trace.requests]  # one copies and compares them in C
        self.kept_hashes = [array("Q", each) for each in trace.kept_hashes()] if keeps_outputs else self.hashes
        self.decode_hashes = self.kept_hashes if config.decode_cache else [array("Q")] * len(self.courses)
        self.links = Links(self.loop, config.link_s_per_token) if config.link_s_per_token else None
        size = trace.block_tokens
        self.prefill = TrueState(
            [self._rank("prefill", n, config.blocks(size), config.prefill_running) for n in range(config.ranks)]
        )
        self.decode = TrueState(
            [
                self._rank("decode", n, config.decode_kv_tokens // size, config.decode_running)
                for n in range(config.decode_ranks)
            ]
        )
        self.unified = TrueState(
            [
                self._rank("unified", n, config.unified_kv_tokens // size, config.unified_running)
                for n in range(config.unified_ranks)
            ]
        )
        self.costs = [Costs(config.token_link_s) for _ in range(config.controllers)]
        self.choosers = self._listeners("prefill", method, self.prefill)
        self.decode_choosers = self._listeners("decode", config.decode_method, self.decode)
        self.unified_choosers = self._listeners("unified", method, self.unified)
        self.by_tick = self.late and config.controllers > 1
        decode: Seq[Listener | None] = self.decode_choosers or [None] * config.controllers
        self.lines: dict[Role, list[_Line]] = {
            "prefill": [_Line(n, each, decode[n], self._order(), False) for n, each in enumerate(self.choosers)],
            "unified": [_Line(n, each, None, self._order(), True) for n, each in enumerate(self.unified_choosers)],
        }
        self.sharing = config.controllers > 1 and config.shared_counters
        self.share_due: dict[tuple[int, int], float] = {}
        self.outcome = Outcome(method, [], config.sample_s)

    def run(self) -> Outcome:
        self.arrivals.start()
        self.loop.call_at(self.arrivals.began_s, self._begin_to_count)
        if self.sharing:
            for choosers in (self.choosers, self.decode_choosers, self.unified_choosers):
                for number in range(len(choosers)):
                    self.loop.call_later(self.rng.random() * RESTATE_S, self._restate, choosers, number)
        self._sample()
        arrivals, loop = self.arrivals, self.loop
        loop.run(lambda: arrivals.done(loop.now))
        assert arrivals.done(loop.now), "some requests never ended"
        outcome = self.outcome
        outcome.count(self.courses, arrivals, loop.now)
        elapsed_s = loop.now - outcome.began_s
        outcome.prefill_busy = _busy(self.prefill.ranks, self.busy_before[0], elapsed_s)
        outcome.decode_busy = _busy(self.decode.ranks, self.busy_before[1], elapsed_s)
        outcome.unified_busy = _busy(self.unified.ranks, self.busy_before[2], elapsed_s)
        return outcome

    def _begin_to_count(self) -> None:
        self.busy_before = (_busy_us(self.prefill.ranks), _busy_us(self.decode.ranks), _busy_us(self.unified.ranks))

    # --- the steps of a request -----------------------------------------------------------------------------------

    def _begin(self, number: int, at_s: float) -> None:
        self.loop.call_at(at_s, self._come, number)

    def _come(self, number: int) -> None:
        self.courses[number].arrived_s = self.loop.now
        self.arrivals.arrived(number, self.loop.now)
        self.loop.call_later(self.config.hop_s, self._queue if self.queues else self._submit, number)

    def _queue(self, number: int) -> None:
        line = self.lines[self._first_role(number)][self.owner[number]]
        line.chooser.read()
        submit = self._header(number)
        work = line.chooser.work(submit)
        order = line.chooser.chooser.order(submit, work, self.loop.now) if self.kind.orders else 0
        due = self.courses[number].arrived_s + self.config.slo_ttft_s
        line.waiting.add(_Waiting(number, work, due, order))
        if not self.by_tick or len(line.waiting) == 1:
            self._bind(line)

    def _order(self) -> ArrivalOrder[_Waiting]:
        if self.kind.orders:
            return PolicyOrder(self.config.overtake_tokens)
        return SloOrder(self.config.overtake_tokens) if self.config.queue_order == "slo" else ArrivalOrder()

    def _bind(self, line: _Line) -> None:
        """Dispatch waiting requests while a prefill rank (under late binding one that is nearly idle) and a decode rank
        can take the next, or a unified rank can."""
        waiting, chooser = line.waiting, line.chooser
        second = chooser if line.unified else line.decode  # which must be able to take it, too
        next_s = chooser.next_s
        while waiting:
            open_now = line.unified or not self.late or chooser.least_tokens() < self.config.late_tokens
            if not open_now and not self.may_be_unified:
                break
            _, head = waiting.head(lambda item: self.loop.now + chooser.first_token_s(item.work) <= item.first_due)
            submit = self._header(head.number)
            if not (self.may_be_unified and self._goes_unified(head.number, submit)):
                if not open_now or (self.admits and not line.unified and not chooser.takes(submit)):
                    break
                if second is not None and not second.takes(submit):
                    next_s = second.next_s
                    break
            waiting.remove(head)
            self._dispatch(head.number)
        if waiting:  # until a report comes
            self._wake_at(line, next_s())

    def _goes_unified(self, number: int, submit: Submit) -> bool:
        """Return true if a pair goes to a unified rank instead, by its policy's wish."""
        chooser = self.unified_choosers[self.owner[number]]
        self.is_unified[number] = chooser.takes(submit) and chooser.prefills_here(submit)
        return self.is_unified[number]

    def _wake_at(self, line: _Line, at_s: float) -> None:
        if self.by_tick:  # otherwise all controllers would fill the same rank after the same report
            phase = TICK_S * line.owner / self.config.controllers
            at_s = phase + TICK_S * math.ceil((at_s - phase) / TICK_S)
            at_s += TICK_S * (at_s <= self.loop.now)
        if self.loop.now <= at_s < line.wake_s:
            line.wake_s = at_s
            self.loop.call_at(at_s, self._wake, line, at_s)

    def _wake(self, line: _Line, at_s: float) -> None:
        if at_s == line.wake_s:  # otherwise an earlier wake-up has replaced it
            line.wake_s = math.inf
            self._bind(line)

    def _first_role(self, number: int) -> Role:
        """Return the role of the rank that computes the prompt of a request."""
        return "unified" if self.is_unified[number] else "prefill"

    def _submit(self, number: int) -> None:
        if self.may_be_unified:
            self._goes_unified(number, self._header(number))
        self._dispatch(number)

    def _dispatch(self, number: int) -> None:
        course, now, owner = self.courses[number], self.loop.now, self.owner[number]
        request, submit = course.request, self._header(number)
        if self.is_unified[number]:
            rank, charge = self.unified_choosers[owner].pick(submit, now)
            course.unified_rank = rank
            course.regret_tokens = self._regret(self.unified, rank, number)
            self.unified.depart(rank, request.prompt_tokens)
            if self.sharing:
                self._share_soon(self.unified_choosers, owner)
            self.loop.call_later(self.config.hop_s, self._arrive_unified, number, charge)
            return
        if self.may_prefill_here and (self.config.trip or self.decode_choosers[owner].prefills_here(submit)):
            self.at_decode[number] = True
            course.decode_rank, charge = self.decode_choosers[owner].pick(submit, now)
            self.decode.depart(course.decode_rank, request.prompt_tokens)
            if self.sharing:
                self._share_soon(self.decode_choosers, owner)
            self.loop.call_later(self.config.hop_s, self._arrive_at_decode, number, charge)
            return
        chooser, decode_charge, read = self.choosers[owner], 0, 0
        if self.may_read_back:
            read = self.decode_choosers[owner].reads_back(submit, chooser, now)
        rank, charge = chooser.pick(submit, now, read)
        course.prefill_rank = rank
        course.regret_tokens = self._regret(self.prefill, rank, number)
        self.prefill.depart(rank, request.prompt_tokens)
        if self.decode_choosers:
            course.decode_rank, decode_charge = self.decode_choosers[owner].pick(submit, now)
            self.decode.depart(course.decode_rank, request.prompt_tokens)
        if self.sharing:
            for choosers in (self.choosers, self.decode_choosers):
                if choosers:
                    self._share_soon(choosers, owner)
        self.loop.call_later(self.config.hop_s, self._arrive, number, charge, decode_charge, read)

    def _header(self, number: int) -> Submit:
        request = self.courses[number].request
        return Submit(
            rid=str(number),
            leg="unified" if self.is_unified[number] else "pair",
            prompt_tokens=request.prompt_tokens,
            max_tokens=max(1, request.output_tokens),
            bootstrap_room=self.rooms[number],
            block_tokens=self.trace.block_tokens if request.hashes else 0,
            block_hashes=packed(self.hashes[number]),
        )

    def _arrive(self, number: int, charge: int, decode_charge: int, read: int) -> None:
        course = self.courses[number]
        request, epoch = course.request, self.owner[number] + 1
        tokens = request.prompt_tokens
        if course.decode_rank >= 0:
            self.decode.arrive(course.decode_rank, tokens)
            count = max(1, request.output_tokens) + self.config.first_at_decode  # prefill's token is dropped
            leg = Sequence(number, range(tokens), count, imported=True, hashes=self.decode_hashes[number])
            self.decode.ranks[course.decode_rank].ingest(leg, epoch, decode_charge)
        self.prefill.arrive(course.prefill_rank, tokens)
        leg = Sequence(number, range(tokens), 1, hold=True, hashes=self.hashes[number])
        self.prefill.ranks[course.prefill_rank].ingest(leg, epoch, charge, read)

    def _arrive_unified(self, number: int, charge: int) -> None:
        course = self.courses[number]
        request, tokens = course.request, course.request.prompt_tokens
        self.unified.arrive(course.unified_rank, tokens)
        leg = Sequence(number, range(tokens), max(1, request.output_tokens), hashes=self.kept_hashes[number])
        self.unified.ranks[course.unified_rank].ingest(leg, self.owner[number] + 1, charge)

    def _arrive_at_decode(self, number: int, charge: int) -> None:
        course = self.courses[number]
        request, tokens = course.request, course.request.prompt_tokens
        self.decode.arrive(course.decode_rank, tokens)
        leg = Sequence(number, range(tokens), max(1, request.output_tokens), hashes=self.decode_hashes[number])
        self.decode.ranks[course.decode_rank].ingest(leg, self.owner[number] + 1, charge)

    def _unified_first(self, sequence: Sequence) -> None:
        course = self.courses[sequence.id]
        course.cached_tokens = sequence.cached_tokens
        course.first_token_s = self.loop.now + self.config.hop_s

    def _unified_done(self, number: int) -> None:
        self.courses[number].finished_s = self.loop.now + self.config.hop_s
        self.loop.call_later(self.config.hop_s, self._unified_ended, number)

    def _unified_ended(self, number: int) -> None:
        course = self.courses[number]
        ended = Ended(str(number), 1, "unified", "ok", output_tokens=max(1, course.request.output_tokens),
                      cached_tokens=course.cached_tokens)  # fmt: skip
        self.unified_choosers[self.owner[number]].chooser.ended(course.unified_rank, ended, self.loop.now)
        self.arrivals.ended(number, course.finished_s)

    def _prefilled(self, number: int) -> None:
        course, hop_s = self.courses[number], self.config.hop_s
        rank = self.prefill.ranks[course.prefill_rank]
        course.cached_tokens = rank.scheduler.sequence(number).cached_tokens + course.read_tokens
        course.prefilled_s = self.loop.now
        if course.decode_rank < 0 or not self.config.first_at_decode:
            course.first_token_s = self.loop.now + (2 * hop_s if course.decode_rank >= 0 else hop_s)
        self.loop.call_later(hop_s, self._prefill_ended, number)
        if course.decode_rank < 0:
            self._finish(number, course.first_token_s)
        elif self.config.fetch_by_layer and course.moved_tokens:  # only its last layer was missing
            self.loop.call_later(hop_s, self._fetched, number)

    def _decodes(self, course: RequestOutcome) -> bool:
        return course.request.output_tokens > 1 or self.config.first_at_decode

    def _begun(self, sequence: Sequence) -> None:
        course = self.courses[sequence.id]
        if self._decodes(course):
            self.loop.call_later(self.config.hop_s, self.decode.ranks[course.decode_rank].kv_ready, sequence.id)

    def _first(self, sequence: Sequence) -> None:
        course = self.courses[sequence.id]
        if self.at_decode[sequence.id]:
            course.cached_tokens = sequence.cached_tokens
        elif not self.config.first_at_decode:
            return
        course.first_token_s = self.loop.now + self.config.hop_s

    def _reads(self, sequence: Sequence) -> None:
        """Have the prefill rank ask the decode rank for what it lacks of a prompt."""
        self.loop.call_later(self.config.hop_s, self._send_back, sequence.id)

    def _send_back(self, number: int) -> None:
        course = self.courses[number]
        source, target = self.decode.ranks[course.decode_rank], self.prefill.ranks[course.prefill_rank]
        kept, table = source.pin(self._reusable(number))
        tokens = max(0, kept - target.scheduler.sequence(number).cached_tokens)
        if self.links is None or not tokens:
            self.loop.call_later(self.config.kv_fetch_token_s * tokens, self._sent_back, number, tokens, table)
        else:
            self.links.send(source.key, target.key, tokens, self._sent_back, number, tokens, table)

    def _sent_back(self, number: int, tokens: int, table: list[int]) -> None:
        course = self.courses[number]
        self.decode.ranks[course.decode_rank].unpin(table)
        course.read_tokens = tokens
        self.loop.call_later(self.config.hop_s, self.prefill.ranks[course.prefill_rank].compute, number, tokens)

    def _admitted(self, sequence: Sequence) -> None:
        tokens, hop_s = len(sequence.prompt), self.config.hop_s
        if self.config.trip != "whole":
            tokens -= sequence.cached_tokens
        if self.links is None:
            fetch_s = 2 * hop_s + self.config.kv_fetch_token_s * tokens
            self.loop.call_later(fetch_s, self._moved, sequence.id, tokens)
        else:
            self.loop.call_later(hop_s, self._send, sequence.id, tokens)

    def _send(self, number: int, tokens: int) -> None:
        assert self.links is not None
        course = self.courses[number]
        source, target = self.prefill.ranks[course.prefill_rank].key, self.decode.ranks[course.decode_rank].key
        self.links.send(source, target, tokens, self.loop.call_later, self.config.hop_s, self._moved, number, tokens)

    def _moved(self, number: int, tokens: int) -> None:
        course = self.courses[number]
        course.moved_tokens = tokens
        if not math.isnan(course.prefilled_s):
            whole_s = course.prefilled_s + self.config.hop_s  # its last layer comes at this time
            if self.loop.now < whole_s:
                self.loop.call_at(whole_s, self._fetched, number)
            else:
                self._fetched(number)

    def _fetched(self, number: int) -> None:
        self.courses[number].fetched_s = self.loop.now
        self.decode.ranks[self.courses[number].decode_rank].fetched(number)
        self.loop.call_later(self.config.hop_s, self._released, number)

    def _never_decoded(self, number: int) -> None:
        self.decode.ranks[self.courses[number].decode_rank].release(number)
        self.loop.call_later(self.config.hop_s, self._released, number)
        self._decoded(number)

    def _decoded(self, number: int) -> None:
        self.courses[number].finished_s = self.loop.now + self.config.hop_s
        self.loop.call_later(self.config.hop_s, self._decode_ended, number)

    def _released(self, number: int) -> None:
        self.prefill.ranks[self.courses[number].prefill_rank].release(number)

    def _prefill_ended(self, number: int) -> None:
        """Have the controller and the decode rank learn that a prompt is computed."""
        course = self.courses[number]
        ended = Ended(str(number), 1, "prefill", "ok", output_tokens=1, cached_tokens=course.cached_tokens)
        self.choosers[self.owner[number]].chooser.ended(course.prefill_rank, ended, self.loop.now)
        if course.decode_rank < 0:
            self._released(number)
        elif not self._decodes(course):
            self._never_decoded(number)
        elif not self.config.fetch_by_layer:
            self.decode.ranks[course.decode_rank].kv_ready(number)

    def _decode_ended(self, number: int) -> None:
        course = self.courses[number]
        cached = course.cached_tokens if self.at_decode[number] else 0
        output = max(1, course.request.output_tokens)
        ended = Ended(str(number), 1, "decode", "ok", output_tokens=output, cached_tokens=cached)
        self.decode_choosers[self.owner[number]].chooser.ended(course.decode_rank, ended, self.loop.now)
        self.arrivals.ended(number, course.finished_s)

    def _finish(self, number: int, at_s: float) -> None:
        self.courses[number].finished_s = at_s
        self.loop.call_at(at_s, self.arrivals.ended, number, at_s)

    def _reusable(self, number: int) -> array[int]:
        """Return the hashes of the prompt's blocks that need not be computed where they are cached."""
        return self.hashes[number][: (self.courses[number].request.prompt_tokens - 1) // self.trace.block_tokens]

    def _regret(self, truth: TrueState, chosen: int, number: int) -> int:
        """Return the tokens that the chosen rank must compute before this request's first token, minus those at the
        best rank of its role."""
        hashes = self._reusable(number)
        whole, queued = len(hashes) * self.trace.block_tokens, truth.queues()
        cost = least = queued[chosen] - truth.cached_tokens(chosen, hashes)
        for rank, tokens in enumerate(queued):
            if tokens - whole < least:  # otherwise no cache makes it the best
                least = min(least, tokens - truth.cached_tokens(rank, hashes))
        return cost - least

    # --- reports ----------------------------------------------------------------------------------------------

    def _listeners(self, role: Role, method: str, truth: TrueState) -> list[Listener]:
        """Return a listener for each controller: its chooser, and the reports of the ranks."""
        config, kind = self.config, method_of(method)
        if not truth.ranks:
            return []
        interval_s = kind.report_interval_s or config.report_interval_s
        if config.controllers > 1:
            for rank in truth.ranks:
                rank.welcomed(range(1, config.controllers + 1))
        reports = []
        watched = kind.watches or self.queues or self.from_outside
        for dp_rank, rank in enumerate(truth.ranks if watched else ()):
            rng = random.Random(f"{config.seed}/reports/{role}/{dp_rank}")
            mine = Reports(self.loop, rank, rng, config.controllers, interval_s=interval_s, delay_s=self.delay_s,
                           loss=config.report_loss, before_ingest=kind.before_ingest)  # fmt: skip
            reports.append(mine)
            if kind.report_interval_s is None:
                rank.steps_taken.append(mine.report_now)
            if self.queues and role != "decode":
                rank.steps_taken.append(partial(self._news, role))
        size = self.trace.block_tokens
        listeners = [
            Listener(build_chooser(method, role, len(truth.ranks), n, config, truth, size, self.costs[n]), n, reports)
            for n in range(config.controllers)
        ]
        if kind.kv_events:
            for dp_rank, rank in enumerate(truth.ranks):
                rank.steps_taken.append(partial(self._kv_events, dp_rank, rank, listeners))
        return listeners

    def _news(self, role: Role) -> None:
        """Schedule the requests that wait for ranks of `role` for the arrival of a report that was sent after a
        step."""
        for line in self.lines[role]:
            if line.waiting:
                self._wake_at(line, self.loop.now + self.delay_s)

    def _kv_events(self, dp_rank: int, rank: VirtualRank, choosers: Seq[Listener]) -> None:
        """Deliver a rank's KV events. Lost events are repeated (by sequence numbers), so they are late but never
        missing."""
        events = rank.take_kv_events()
        if events:
            for chooser in choosers:
                self.loop.call_later(self.delay_s, chooser.chooser.kv_events, dp_rank, events)

    def _share(self, choosers: Seq[Listener], number: int) -> None:
        """Publish the counters of controller `number`: after it has sent something, and every RESTATE_S in any case."""
        sent = choosers[number].chooser.sent()
        if sent is not None:
            for other in range(len(choosers)):
                if other != number and self.rng.random() >= self.config.report_loss:
                    self.loop.call_later(self.config.hop_s, self._deliver_sent, choosers[other], sent)

    def _restate(self, choosers: Seq[Listener], number: int) -> None:
        self._share(choosers, number)
        self.loop.call_later(RESTATE_S, self._restate, choosers, number)

    def _share_soon(self, choosers: Seq[Listener], number: int) -> None:
        """Schedule the publication of counters: now, or `sent_interval_s` after the last one."""
        now, due = self.loop.now, self.share_due.get((id(choosers), number), 0.0)
        if due <= now:
            self.share_due[(id(choosers), number)] = now + self.config.sent_interval_s
            self.loop.call_later(0.0, self._share, choosers, number)
        elif due - now <= self.config.sent_interval_s:
            self.share_due[(id(choosers), number)] = due + self.config.sent_interval_s
            self.loop.call_at(due, self._share, choosers, number)

    def _deliver_sent(self, listener: Listener, sent: Sent) -> None:
        listener.chooser.apply_sent(sent, self.loop.now)

    def _sample(self) -> None:
        if self.loop.now >= self.arrivals.began_s:
            decode, queued = self.decode, self.prefill.queues() + self.unified.queues()
            self.outcome.load.append(array("q", queued))
            self.outcome.decode_load.append(array("q", (decode.requests(n) for n in range(self.config.decode_ranks))))
        share = self.arrivals.share(self.loop.now)
        if share >= self.shown + SHARE_STEP:
            self.shown = share
            self.on_share(share)
        self.loop.call_later(self.config.sample_s, self._sample)

    def _rank(self, role: Role, dp_rank: int, blocks: int, max_running: int) -> VirtualRank:
        on_output = {"prefill": self._prefilled, "decode": self._decoded, "unified": self._unified_done}
        on_first = self._unified_first if role == "unified" else None
        if role == "decode" and (self.config.first_at_decode or self.config.decode_prefills):
            on_first = self._first
        by_layer = role == "prefill" and self.config.fetch_by_layer and self.config.decode_ranks
        kv_events = self.kind.kv_events
        if role == "decode":
            kv_events = self.config.decode_cache and method_of(self.config.decode_method).kv_events
        return VirtualRank(
            self.loop,
            (role, dp_rank),
            blocks=blocks,
            block_tokens=self.trace.block_tokens,
            max_running=max_running,
            chunk_tokens=self.config.chunk_tokens,
            timing=self.config.timing,
            on_output=on_output[role],
            on_admitted=self._reads if role == "prefill" else self._admitted,
            on_first=on_first,
            on_begun=self._begun if by_layer else None,
            kv_events=kv_events,
        )


def _busy(ranks: list[VirtualRank], before_us: int, elapsed_s: float) -> float:
    """Return the share of the time; at most 1, since a step counts wholly on one side of an edge."""
    busy_s = (_busy_us(ranks) - before_us) / 1e6
    return min(1.0, busy_s / (len(ranks) * elapsed_s)) if ranks and elapsed_s else 0.0


def _busy_us(ranks: list[VirtualRank]) -> int:
    return sum(rank.scheduler.busy_us_total for rank in ranks)

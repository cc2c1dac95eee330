"""Runs one method on one trace in virtual time. Owns the steps of requests and the messages that take them from
controllers to ranks and back. The ranks and those who choose among them are `side`'s, what waits at controllers is
`waiting`'s, and KV caches on their way are `transfers`'.

A request arrives at one of the controllers, which picks a prefill and a decode rank; both legs travel there; the
prefill rank computes; its first token goes through the decode rank to the client (unless the decode rank makes it
itself); the decode rank gets memory, fetches the KV cache (or what it lacks of it) and decodes. Or it picks a unified
rank, or a decode rank that can compute prompts, which does all of it and sends its tokens to the client. Reports travel
back with the configured delay and loss. The same arguments give the same outcome.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from bus.errors import ConfigError
from bus.wire.messages import Ended, Role, Submit
from controller.costs import Costs
from controller.policies.registry import find
from nodes.own.sequence import Sequence
from pdbus.lab.arrivals import Arrivals
from pdbus.lab.capacity import stretch
from pdbus.lab.choosers import LATE, METHODS, Method, check_method, method_of
from pdbus.lab.clock import VirtualLoop
from pdbus.lab.config import LabConfig
from pdbus.lab.journal import Journal
from pdbus.lab.outcome import Outcome, RequestOutcome
from pdbus.lab.pool import packed
from pdbus.lab.rank import VirtualRank
from pdbus.lab.side import Side
from pdbus.lab.tape import SAMPLE_S, Tape
from pdbus.lab.traces import Trace
from pdbus.lab.transfers import Transfers
from pdbus.lab.waiting import Lines

SHARE_STEP = 0.02


def simulate(
    trace: Trace, method: str, config: LabConfig, on_share: Callable[[float], None] = lambda share: None,
    tape: Tape | None = None, journaled: bool = False,
) -> Outcome:  # fmt: skip
    """Replay `trace` with `method` for prefill and unified ranks in virtual time, stretched as `config` says, and
    return the outcome once all requests that count have ended. It computes in this thread (seconds to minutes). Raises
    ConfigError for an unknown method, when a request exceeds the memory of a rank, and when no request counts.

    `on_share` is called regularly with an estimate of the share of the run that is done. `tape` records the ranks'
    steps; `journaled` has the outcome keep the decisions (`Outcome.facts`). Neither changes anything of the run.
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
    run = _Run(stretch(trace, config), method, config, on_share)
    if tape is not None:
        run.record(tape)
    if journaled:
        run.keep_journal()
    return run.run()


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


class _Run:
    def __init__(self, trace: Trace, method: str, config: LabConfig, on_share: Callable[[float], None]) -> None:
        self.trace, self.config = trace, config
        self.on_share = on_share
        self.shown = 0.0  # the share last shown
        kind, second = method_of(method), method_of(config.decode_method)
        late, admits = kind.late or config.queue_order == "slo", kind.admits or second.admits
        self.queues = late or admits or kind.orders
        self.loop = VirtualLoop()
        self.courses = [RequestOutcome(request) for request in trace.requests]
        self.arrivals = Arrivals(trace, config, self._begin)
        rng = random.Random(config.seed)
        self.owner = [rng.randrange(config.controllers) for _ in self.courses]
        self.rooms = rooms_of(trace, config)
        self.is_unified = unified_of(trace, config, method)
        self.at_decode = [False] * len(self.courses)  # pairs of which a decode rank does all
        self.may_prefill_here = config.decode_prefills and config.trip in ("", "at_decode")
        self.may_read_back = config.decode_cache and (
            config.trip == "read_back" or (not config.trip and second.reads_back)
        )
        self.may_be_unified = kind.prefills_here and bool(config.ranks and config.unified_ranks)
        keeps_outputs = config.outputs_cached and (config.unified_ranks or config.decode_cache)
        self.hashes = [array("Q", request.hashes) for request in trace.requests]  # one copies and compares them in C
        self.kept_hashes = [array("Q", each) for each in trace.kept_hashes()] if keeps_outputs else self.hashes
        self.decode_hashes = self.kept_hashes if config.decode_cache else [array("Q")] * len(self.courses)

        prefill: list[VirtualRank] = []
        decode: list[VirtualRank] = []
        self.transfers = Transfers(self.loop, config, self.courses, prefill, decode, self._reusable)
        size, kv_events = trace.block_tokens, kind.kv_events
        prefill += self._ranks(
            "prefill", config.ranks, config.blocks(size), config.prefill_running, self._prefilled,
            self.transfers.read_back, kv_events=kv_events,
            on_begun=self._begun if config.fetch_by_layer and config.decode_ranks else None,
        )  # fmt: skip
        decode += self._ranks(
            "decode", config.decode_ranks, config.decode_kv_tokens // size, config.decode_running, self._decoded,
            self.transfers.fetch, kv_events=config.decode_cache and second.kv_events,
            on_first=self._first if config.first_at_decode or config.decode_prefills else None,
        )  # fmt: skip
        unified = self._ranks(
            "unified", config.unified_ranks, config.unified_kv_tokens // size, config.unified_running,
            self._unified_done, self.transfers.fetch, kv_events=kv_events, on_first=self._unified_first,
        )  # fmt: skip

        self.lines = Lines(
            self.loop, config, late=late, admits=admits, orders=kind.orders, submit_of=self._header,
            dispatch=self._dispatch, goes_unified=self._goes_unified if self.may_be_unified else None,
        )  # fmt: skip
        costs = [Costs(config.token_link_s) for _ in range(config.controllers)]
        outside = not METHODS.keys() >= {method, config.decode_method}  # a policy of theirs may look at all loads

        def side(role: Role, ranks: list[VirtualRank], name: str, kind: Method) -> Side:
            news = partial(self.lines.news, role) if self.queues and role != "decode" else None
            watched = kind.watches or self.queues or outside
            return Side(self.loop, config, role, ranks, name, kind, size, costs, watched=watched, on_step=news)

        self.prefill = side("prefill", prefill, method, kind)
        self.decode = side("decode", decode, config.decode_method, second)
        self.unified = side("unified", unified, method, kind)
        self.sides = self.prefill, self.decode, self.unified
        self.lines.open("prefill", self.prefill.choosers, self.decode.choosers)
        self.lines.open("unified", self.unified.choosers, [])
        if config.controllers > 1 and config.shared_counters:
            for each in self.sides:
                each.share(rng)
        self.outcome = Outcome(method, [], config.sample_s)
        self.tape: Tape | None = None
        self.journal: Journal | None = None

    def run(self) -> Outcome:
        arrivals, loop, outcome = self.arrivals, self.loop, self.outcome
        arrivals.start()
        loop.call_at(arrivals.began_s, self._begin_to_count)
        self._sample()
        loop.run(arrivals.done)
        assert arrivals.done(loop.now), "some requests never ended"
        outcome.count(self.courses, arrivals, loop.now)
        elapsed_s = loop.now - outcome.began_s
        outcome.prefill_busy, outcome.decode_busy, outcome.unified_busy = (
            each.truth.busy(elapsed_s) for each in self.sides
        )
        if self.journal is not None:
            self.journal.ends(self.courses, arrivals.counted, outcome)
            outcome.facts = self.journal.facts
        return outcome

    def keep_journal(self) -> None:
        """Keep the decisions of the run, from its beginning on."""
        self.journal = Journal(self.trace, self.rooms, self.config)
        for side in self.sides:
            side.explain()

    def record(self, tape: Tape) -> None:
        """Have `tape` record the run, from its beginning on."""
        self.tape = self.transfers.tape = self.lines.tape = tape
        for side in self.sides:
            for rank in side.ranks:
                rank.tape = tape.rank(rank.key, side.role)
        self.loop.call_at(tape.from_s, self._sample_loads, tape)

    def _sample_loads(self, tape: Tape) -> None:
        for side in self.sides:
            for rank in side.ranks:
                load = rank.load()
                assert rank.tape is not None
                rank.tape.load(self.loop.now, load.running, load.waiting, load.kv_tokens)
        if self.loop.now < tape.until_s:
            self.loop.call_later(SAMPLE_S, self._sample_loads, tape)

    def _begin_to_count(self) -> None:
        for each in self.sides:
            each.truth.begin_to_count()

    def _ranks(
        self, role: Role, count: int, blocks: int, max_running: int, on_output: Callable[[int], None],
        on_admitted: Callable[[Sequence], None], *, kv_events: bool,
        on_first: Callable[[Sequence], None] | None = None, on_begun: Callable[[Sequence], None] | None = None,
    ) -> list[VirtualRank]:  # fmt: skip
        config = self.config
        return [
            VirtualRank(
                self.loop, (role, dp_rank), blocks=blocks, block_tokens=self.trace.block_tokens,
                max_running=max_running, chunk_tokens=config.chunk_tokens, timing=config.timing, on_output=on_output,
                on_admitted=on_admitted, on_first=on_first, on_begun=on_begun, kv_events=kv_events,
            )
            for dp_rank in range(count)
        ]  # fmt: skip

    def _sample(self) -> None:
        prefill, decode, unified = (each.truth for each in self.sides)
        if self.loop.now >= self.arrivals.began_s:
            self.outcome.load.append(array("q", prefill.queues() + unified.queues()))
            self.outcome.decode_load.append(array("q", map(decode.requests, range(self.config.decode_ranks))))
        share = self.arrivals.share(self.loop.now)
        if share >= self.shown + SHARE_STEP:
            self.shown = share
            self.on_share(share)
        self.loop.call_later(self.config.sample_s, self._sample)

    # --- a request comes and goes to ranks ------------------------------------------------------------------------

    def _begin(self, number: int, at_s: float) -> None:
        self.loop.call_at(at_s, self._come, number)

    def _come(self, number: int) -> None:
        self.courses[number].arrived_s = self.loop.now
        self.arrivals.arrived(number, self.loop.now)
        self.loop.call_later(self.config.hop_s, self._queue if self.queues else self._submit, number)

    def _queue(self, number: int) -> None:
        role: Role = "unified" if self.is_unified[number] else "prefill"
        self.lines.add(role, self.owner[number], number, self.courses[number].arrived_s)

    def _submit(self, number: int) -> None:
        if self.may_be_unified:
            self._goes_unified(number, self._header(number))
        self._dispatch(number)

    def _goes_unified(self, number: int, submit: Submit) -> bool:
        """Return true if a pair goes to a unified rank instead, by its policy's wish."""
        chooser = self.unified.choosers[self.owner[number]]
        self._read(self.owner[number])
        self.is_unified[number] = chooser.takes(submit) and chooser.prefills_here(submit)
        return self.is_unified[number]

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

    def _dispatch(self, number: int) -> None:
        course, submit, hop_s = self.courses[number], self._header(number), self.config.hop_s
        decode = self.decode.choosers[self.owner[number]] if self.decode.choosers else None
        if self.journal is not None:
            self.journal.decides(number, self.loop.now)
        if self.is_unified[number]:
            course.unified_rank, charge = self._pick(self.unified, number, submit)
            self.loop.call_later(hop_s, self._arrive_unified, number, charge)
            return
        if self.may_prefill_here and decode and (self.config.trip or self._prefills_here(number, submit)):
            self.at_decode[number] = True
            course.decode_rank, charge = self._pick(self.decode, number, replace(submit, leg="unified"))
            self.loop.call_later(hop_s, self._arrive_at_decode, number, charge)
            return
        decode_charge = read = 0
        if self.may_read_back and decode:
            read = decode.reads_back(submit, self.prefill.choosers[self.owner[number]], self.loop.now)
        course.prefill_rank, charge = self._pick(self.prefill, number, submit, read)
        if decode:
            course.decode_rank, decode_charge = self._pick(self.decode, number, submit)
        self.loop.call_later(hop_s, self._arrive, number, charge, decode_charge, read)

    def _prefills_here(self, number: int, submit: Submit) -> bool:
        """Return true if the decode rank that a pair's controller would pick computes its prompt, by its policy's
        wish."""
        self._read(self.owner[number])
        listener = self.decode.choosers[self.owner[number]]
        here = listener.prefills_here(submit)
        if self.journal is not None:
            self.journal.predicts(number, listener.chooser.predicted)
        return here

    def _read(self, owner: int) -> None:
        """Let a controller read the reports of all ranks: a policy that says where a prompt is computed looks at other
        roles than its own."""
        for side in self.sides:
            if side.choosers:
                side.choosers[owner].read()

    def _pick(self, side: Side, number: int, submit: Submit, read: int = 0) -> tuple[int, int]:
        """Return the rank that a leg goes to, which the request's controller picks, and its charge."""
        owner = self.owner[number]
        rank, charge = side.choosers[owner].pick(submit, self.loop.now, read)
        if side is not self.decode:
            self.courses[number].regret_tokens = side.truth.regret(rank, self._reusable(number))
        if self.journal is not None:
            queued = side.truth.requests(rank) if side is self.decode else side.truth.queued_tokens(rank)
            self.journal.picks(side.role, number, rank, side.choosers[owner].chooser.weighed, queued)
        side.truth.depart(rank, submit.prompt_tokens)
        if side.sharing is not None:
            side.sharing.soon(owner)
        return rank, charge

    def _reusable(self, number: int) -> array[int]:
        """Return the hashes of the prompt's blocks that need not be computed where they are cached."""
        return self.hashes[number][: (self.courses[number].request.prompt_tokens - 1) // self.trace.block_tokens]

    def _arrive(self, number: int, charge: int, decode_charge: int, read: int) -> None:
        course = self.courses[number]
        tokens = range(course.request.prompt_tokens)
        if course.decode_rank >= 0:
            count = max(1, course.request.output_tokens) + self.config.first_at_decode  # prefill's token is dropped
            leg = Sequence(number, tokens, count, imported=True, hashes=self.decode_hashes[number])
            self._ingest(self.decode, course.decode_rank, leg, decode_charge)
        leg = Sequence(number, tokens, 1, hold=True, hashes=self.hashes[number])
        self._ingest(self.prefill, course.prefill_rank, leg, charge, read)

    def _arrive_unified(self, number: int, charge: int) -> None:
        course = self.courses[number]
        self._ingest(self.unified, course.unified_rank, self._both(number, self.kept_hashes), charge)

    def _arrive_at_decode(self, number: int, charge: int) -> None:
        course = self.courses[number]
        self._ingest(self.decode, course.decode_rank, self._both(number, self.decode_hashes), charge)

    def _both(self, number: int, hashes: list[array[int]]) -> Sequence:
        """Return the leg of a rank that computes a prompt and decodes."""
        request = self.courses[number].request
        return Sequence(number, range(request.prompt_tokens), max(1, request.output_tokens), hashes=hashes[number])

    def _ingest(self, side: Side, rank: int, leg: Sequence, charge: int, read: int = 0) -> None:
        side.truth.arrive(rank, len(leg.prompt))
        side.ranks[rank].ingest(leg, self.owner[leg.id] + 1, charge, read)

    # --- a unified rank runs it -----------------------------------------------------------------------------------

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
        self.unified.choosers[self.owner[number]].chooser.ended(course.unified_rank, ended, self.loop.now)
        self.arrivals.ended(number, course.finished_s)

    # --- a pair runs it -------------------------------------------------------------------------------------------

    def _begun(self, sequence: Sequence) -> None:
        """Let the decode rank fetch a prompt by layer, whose computation begins."""
        course = self.courses[sequence.id]
        if self.tape is not None:
            tokens = course.request.prompt_tokens
            self.tape.lends(sequence.id, self.prefill.ranks[course.prefill_rank].key, self.loop.now, tokens)
        if self._decodes(course):
            self.loop.call_later(self.config.hop_s, self.decode.ranks[course.decode_rank].kv_ready, sequence.id)

    def _prefilled(self, number: int) -> None:
        course, hop_s = self.courses[number], self.config.hop_s
        rank = self.prefill.ranks[course.prefill_rank]
        course.cached_tokens = rank.scheduler.sequence(number).cached_tokens
        course.prefilled_s = self.loop.now
        if course.decode_rank < 0 or not self.config.first_at_decode:
            course.first_token_s = self.loop.now + (2 * hop_s if course.decode_rank >= 0 else hop_s)
        self.loop.call_later(hop_s, self._prefill_ended, number)
        if course.decode_rank < 0:
            self._finish(number, course.first_token_s)
        else:
            self.transfers.prefilled(number)

    def _prefill_ended(self, number: int) -> None:
        """Have the controller and the decode rank learn that a prompt is computed."""
        course = self.courses[number]
        ended = Ended(str(number), 1, "prefill", "ok", output_tokens=1, cached_tokens=course.cached_tokens)
        self.prefill.choosers[self.owner[number]].chooser.ended(course.prefill_rank, ended, self.loop.now)
        if course.decode_rank < 0:
            self.transfers.release(number)
        elif not self._decodes(course):
            self._never_decoded(number)
        elif not self.config.fetch_by_layer:
            self.decode.ranks[course.decode_rank].kv_ready(number)

    def _decodes(self, course: RequestOutcome) -> bool:
        return course.request.output_tokens > 1 or self.config.first_at_decode

    def _never_decoded(self, number: int) -> None:
        self.decode.ranks[self.courses[number].decode_rank].release(number)
        self.loop.call_later(self.config.hop_s, self.transfers.release, number)
        self._decoded(number)

    def _first(self, sequence: Sequence) -> None:
        course = self.courses[sequence.id]
        if self.at_decode[sequence.id]:
            course.cached_tokens = sequence.cached_tokens
        elif not self.config.first_at_decode:
            return
        course.first_token_s = self.loop.now + self.config.hop_s

    def _decoded(self, number: int) -> None:
        self.courses[number].finished_s = self.loop.now + self.config.hop_s
        self.loop.call_later(self.config.hop_s, self._decode_ended, number)

    def _decode_ended(self, number: int) -> None:
        course = self.courses[number]
        cached = course.cached_tokens if self.at_decode[number] else 0
        output = max(1, course.request.output_tokens)
        ended = Ended(str(number), 1, "decode", "ok", output_tokens=output, cached_tokens=cached)
        self.decode.choosers[self.owner[number]].chooser.ended(course.decode_rank, ended, self.loop.now)
        self.arrivals.ended(number, course.finished_s)

    def _finish(self, number: int, at_s: float) -> None:
        self.courses[number].finished_s = at_s
        self.loop.call_at(at_s, self.arrivals.ended, number, at_s)

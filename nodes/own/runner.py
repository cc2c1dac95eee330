"""Our own runner: continuous batching over paged KV memory, KV caches fetched over the bus, engines of ours.

This module connects these parts. The scheduler decides which sequences (the legs that this rank runs) take part in a
step, the receiver what to fetch next.
"""

from __future__ import annotations

import time
from collections import deque

from bus.runtime.logs import get_logger
from bus.wire.hashing import block_hashes, root_of
from bus.wire.messages import Load, TokenLogprobs
from nodes.link.leg import Leg
from nodes.link.recorder import Recorder
from nodes.link.runner import (
    Began,
    CacheChanged,
    Emit,
    Fetched,
    Finished,
    HasRead,
    Held,
    LegFailed,
    Lent,
    Output,
    Pull,
    RankFacts,
    Reads,
    Stepped,
)
from nodes.own.engines.base import Engine, EngineSpec, StepResult
from nodes.own.kv_events import MAX_BLOCKS, KvEventLog
from nodes.own.receiver import FetchFailed, KvReceiver, Span, window_for
from nodes.own.scheduler import Scheduler
from nodes.own.sequence import Phase, Sequence

DAMAGED = "the model's answer is no number: its weights, or the KV cache of this request, are damaged"
READ_STALL_S = 0.5  # for blocks that are read back: what does not come is computed
MAX_RESTATED = 65_536  # blocks: as many as a controller keeps of a rank

log = get_logger("node")


def facts_of(spec: EngineSpec, max_running: int, *, decode_cache: bool = False, reads_back: bool = False) -> RankFacts:
    """Return the description of a rank that runs an engine with this `spec`. With `decode_cache` it is a decode rank
    that keeps its KV caches; `reads_back`: it lends them, or is a prefill rank that reads them."""
    return RankFacts(
        model=spec.model,
        max_context=spec.max_context,
        kv_capacity=spec.kv_capacity,
        max_running=max_running,
        block_tokens=spec.block_tokens,
        vocab_size=spec.vocab_size,
        eos_ids=spec.eos_ids,
        kv_layout=spec.layout,
        params=(*spec.params, "cache_salt"),  # the scheduler's, whichever engine it has
        wants_prompt=decode_cache,  # the names of blocks are hashes of their ids
        prefills=decode_cache,
        reads_back=reads_back,
    )


class OwnRunner:
    """The runner of one rank, on the link's thread; its methods are those of `nodes.link.runner.BlockRunner`.
    `kv_events` turns changes of the prefix cache into messages; None: they are not published. `decode_cache`: it is a
    decode rank that keeps the KV caches of what it ran, fetches only what it lacks, and takes unified legs.
    `reads_back`: it lends them to prefill ranks, or is a prefill rank that reads them."""

    def __init__(
        self, engine: Engine, scheduler: Scheduler, kv_events: KvEventLog | None = None, *, decode_cache: bool = False,
        reads_back: bool = False,
    ) -> None:  # fmt: skip
        self.engine = engine
        self.scheduler = scheduler
        self.facts = facts_of(engine.spec, scheduler.max_running, decode_cache=decode_cache, reads_back=reads_back)
        self._kv_events = kv_events
        self._recorder = Recorder()  # one that is never on
        self._step_began = 0.0
        window = window_for(engine.spec.block_bytes)
        self._fetches = KvReceiver(window=window)
        self._reads = KvReceiver(window=window, stall_s=READ_STALL_S)
        self._output_tokens = 0
        self._restating: deque[int] = deque()  # names of blocks that were cached when `restate_cache` was called
        self._fetching: dict[int, Sequence] = {}  # by the leg's `seq`, which names its sequence too; reading ones, too

    def attach(self, emit: Emit) -> None:
        self._emit = emit

    def close(self) -> None:
        self.engine.close()

    # --- from the link ------------------------------------------------------------------------------------------

    def start(self, leg: Leg) -> None:
        """Give the leg to the scheduler. A decode leg's first token, which prefill has sampled, is emitted at once; a
        leg that needs no more ends here."""
        handle = leg.handle
        if handle is not None:  # prefill has made the first token: the client need not wait for our memory
            if leg.wants_logprobs != (handle.first_logprobs is not None):
                self._emit(LegFailed(leg, "kv_failed", "prefill's first token came with other log probabilities"))
                return
            self._emit(Began(leg))
            self._emit(_output(leg, handle.first_token, handle.first_logprobs))
            self._output_tokens += 1
            if handle.first_token in leg.stop_ids or leg.max_tokens == 1:
                self._emit(Finished(leg, "stop" if handle.first_token in leg.stop_ids else "length"))
                return
        self.scheduler.add(
            Sequence(
                leg.seq,
                leg.prompt or range(leg.prompt_tokens),  # a decode leg's ids are known only where it wants them
                leg.max_tokens,
                leg.params,
                leg.stop_ids,
                leg.priority,
                imported=handle is not None,
                hold=leg.role == "prefill",
                offset=leg.offset,
                leg=leg,
                read=leg.read_tokens // self.facts.block_tokens,
            )
        )

    def cancel(self, leg: Leg) -> None:
        """Drop the leg and free its blocks, in whatever state it is."""
        self._fetching.pop(leg.seq, None)
        self.scheduler.cancel(leg.seq)

    release = cancel

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def load(self) -> Load:
        """Return the load as scheduler and output counts have it now."""
        s = self.scheduler
        return Load(
            seq=0,
            step=s.step,
            running=s.running,
            waiting=s.waiting,
            waiting_tokens=s.waiting_tokens,
            kv_tokens=s.kv_tokens,
            kv_capacity=0,
            max_running=0,
            prompt_tokens_total=s.prompt_tokens_total,
            cached_tokens_total=s.cached_tokens_total,
            busy_us_total=s.busy_us_total,
            output_tokens_total=self._output_tokens,
            admitted_tokens_total=s.admitted_tokens_total,
            computed_tokens_total=s.computed_tokens_total,
            kv_cached=s.kv_cached,
            kv_pinned=s.kv_pinned,
            to_compute_tokens=s.to_compute_tokens,
        )

    def turn(self, now: float) -> None:
        """Submit the next step to the engine, if none runs; begin to fetch the KV caches of decode legs that were
        admitted; emit which prompts began and how the cache changed."""
        plan = self.scheduler.plan()
        if plan is not None:
            self._step_began = now
            self.engine.submit(plan, self._stepped)
        for sequence in self.scheduler.take_admitted():
            assert sequence.leg is not None
            if not sequence.imported:
                sequence.fetch_began = now
                self._emit(Reads(sequence.leg))
                continue
            assert sequence.leg.handle is not None
            self._fetch(sequence, sequence.leg.handle.blocks, now)
        begun = self.scheduler.begun
        while begun:
            sequence = begun.popleft()
            assert sequence.leg is not None
            full = len(sequence.prompt) // self.facts.block_tokens * self.facts.block_tokens
            self._emit(Began(sequence.leg, sequence.cached_tokens, full - sequence.cached_tokens))
        if self._kv_events is not None and (events := self.scheduler.pool.take_events()):
            self._emit(CacheChanged(self._kv_events.messages(events, time.time())))

    def record_steps(self, recorder: Recorder) -> None:
        """Record steps, and chunks of prompts, while `recorder` is on. The link calls it once."""
        self._recorder = recorder
        recorder.has_steps = True

    def restate_cache(self) -> None:
        """Publish the whole cache again, MAX_BLOCKS blocks with each tick: a controller does not know it."""
        if self._kv_events is not None:
            self._restating = deque(self.scheduler.pool.names()[:MAX_RESTATED])

    def _restate(self, events: KvEventLog) -> None:
        some = [self._restating.popleft() for _ in range(min(MAX_BLOCKS, len(self._restating)))]
        names = [name for name in some if self.scheduler.pool.is_cached(name)]
        if names:
            self._emit(CacheChanged([events.restated(names, time.time())]))

    def tick(self, now: float) -> None:
        """Ask again for KV blocks that did not come, fail the legs whose fetch gives up, and restate a part of the
        cache if `restate_cache` was called."""
        if self._restating and self._kv_events is not None:
            self._restate(self._kv_events)
        for sequence in list(self._fetching.values()):
            assert sequence.leg is not None
            try:
                self._pull(sequence.leg, self._receiver_of(sequence).tick(sequence, now))
            except FetchFailed as failure:
                self._give_up(sequence, failure, now)

    # --- KV blocks ----------------------------------------------------------------------------------------------

    def export(self, leg: Leg, index: int) -> memoryview:
        """Return the bytes of block `index` of a leg whose KV cache is held, or lent, here."""
        lent = self.scheduler.lent(leg.seq)
        return self.engine.export_block((lent or self.scheduler.sequence(leg.seq).table)[index])

    def received(self, leg: Leg, index: int, data: bytes | memoryview, intact: bool, now: float) -> None:
        """Take in a KV block of a leg's prompt: a damaged one is asked for again. After the last one the leg decodes,
        or computes the rest of its prompt. A block that was not asked for is ignored."""
        sequence = self._fetching.get(leg.seq)
        if sequence is None or index not in sequence.missing:
            return  # a duplicate, or never asked for
        intact = intact and len(data) == self.engine.spec.block_bytes
        if intact:
            self.engine.import_block(sequence.table[index], data)
        try:
            self._pull(leg, self._receiver_of(sequence).received(sequence, index, intact, now))
        except FetchFailed as failure:
            self._give_up(sequence, failure, now)
            return
        if not sequence.missing:
            del self._fetching[leg.seq]
            if not sequence.imported:
                self._has_read(sequence, sequence.read, now)
                return
            assert leg.handle is not None
            self.scheduler.start(leg.seq, leg.handle.first_token)
            self._emit(Fetched(leg, now - sequence.fetch_began, sequence.cached_tokens))

    def _pull(self, leg: Leg, spans: list[Span]) -> None:
        for first, count in spans:
            self._emit(Pull(leg, first, count))

    def _fetch(self, sequence: Sequence, blocks: int, now: float) -> None:
        """Begin to fetch what is not in the prefix cache of the first `blocks` blocks."""
        assert sequence.leg is not None
        self._fetching[sequence.id] = sequence
        missing = range(sequence.committed, blocks)
        self._pull(sequence.leg, self._receiver_of(sequence).begin(sequence, missing, now))

    def _receiver_of(self, sequence: Sequence) -> KvReceiver:
        return self._fetches if sequence.imported else self._reads

    def _give_up(self, sequence: Sequence, failure: FetchFailed, now: float) -> None:
        """End the leg, or compute what could not be read."""
        leg = sequence.leg
        assert leg is not None
        if not sequence.imported:
            self.readable(leg, 0, now)
            return
        self.cancel(leg)
        self._emit(LegFailed(leg, "kv_failed", str(failure)))

    # --- read back ----------------------------------------------------------------------------------------------

    def readable(self, leg: Leg, blocks: int, now: float) -> None:
        """Pull those of the first `blocks` blocks of a prefill leg's prompt that are not here; 0: compute what has not
        come."""
        sequence = self.scheduler.sequence(leg.seq)
        reading = self._fetching.pop(leg.seq, None) is not None
        blocks = min(blocks, (leg.prompt_tokens - 1) // self.facts.block_tokens)  # the last token is always computed
        if blocks > sequence.committed and not reading:
            sequence.read = blocks
            self._fetch(sequence, blocks, now)
        elif reading:
            self._has_read(sequence, min(sequence.missing), now)
        else:
            self._has_read(sequence, sequence.committed, now)

    def _has_read(self, sequence: Sequence, blocks: int, now: float) -> None:
        leg = sequence.leg
        assert leg is not None
        sequence.missing, sequence.unasked = {}, range(0)
        tokens = self.scheduler.has_read(leg.seq, blocks)
        self._emit(HasRead(leg, tokens, now - sequence.fetch_began))

    def lend(self, leg: Leg) -> None:
        """Keep what is cached of a decode leg's prompt, for its prefill rank to read, until `reclaim`."""
        size = self.facts.block_tokens
        blocks = (leg.prompt_tokens - 1) // size
        hashes = block_hashes(leg.prompt[: blocks * size], size, root_of(leg.params.cache_salt))
        self._emit(Lent(leg, self.scheduler.lend(leg.seq, hashes)))

    def reclaim(self, leg: Leg) -> None:
        """Keep it no longer."""
        self.scheduler.reclaim(leg.seq)

    # --- the engine ---------------------------------------------------------------------------------------------

    def _stepped(self, result: StepResult) -> None:
        if self._recorder.on:
            self._record(result)
        if result.error:
            log.error("step.failed", step=result.number, error=result.error)
        if result.damaged:
            log.error("step.damaged", step=result.number, sequences=len(result.damaged))
        emit, made = self._emit, 0
        for sequence in self.scheduler.complete(result):
            leg, output, finish = sequence.leg, sequence.output, sequence.finish
            assert leg is not None
            if finish == "failed":
                emit(LegFailed(leg, "engine_failed", result.error or DAMAGED))
                continue
            if sequence.hold:
                emit(Held(leg, output[-1], first_logprobs=sequence.logprobs))
                continue
            emit(_output(leg, output[-1], sequence.logprobs))
            made += 1
            if finish:
                emit(Finished(leg, "stop" if finish == "stop" else "length"))
        self._output_tokens += made
        emit(Stepped(result.duration_s))

    def _record(self, result: StepResult) -> None:
        """Record a step, before the scheduler accounts for it."""
        scheduler, began, seconds = self.scheduler, self._step_began, result.duration_s
        fed = scheduler.in_step  # those that decode come first
        rows, prompt_tokens = len(fed), 0
        if fed[-1].phase is Phase.PROMPT:
            prompts = [sequence for sequence in fed if sequence.phase is Phase.PROMPT]
            rows -= len(prompts)
            prompt_tokens = sum(sequence.fed for sequence in prompts)
            for sequence in prompts:
                assert sequence.leg is not None
                self._recorder.chunk(sequence.leg, began, seconds, sequence.fed, sequence.computed)
        self._recorder.steps.append((result.number, began, seconds, rows, prompt_tokens, scheduler.kv_tokens))


def _output(leg: Leg, token: int, logprobs: TokenLogprobs | None) -> Output:
    return Output(leg, (token,), (logprobs,) if logprobs is not None else ())

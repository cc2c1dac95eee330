"""Our own runner: continuous batching over paged KV memory, KV caches fetched over the bus, engines of ours.

Owns what connects these; who runs and who waits is the scheduler's, what to fetch next the receiver's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from bus.runtime.logs import get_logger
from nodes.link.leg import Leg
from nodes.link.runner import (
    Began,
    CacheChanged,
    Fetched,
    Finished,
    Held,
    LegFailed,
    Output,
    Pull,
    RankFacts,
    RunnerLoad,
    Stepped,
    Tell,
)
from nodes.own.engines.base import Engine, EngineSpec, StepResult
from nodes.own.kv_events import KvEventLog
from nodes.own.receiver import KvReceiver, Span, window_for
from nodes.own.scheduler import Scheduler
from nodes.own.sequence import Sequence

log = get_logger("node")


def facts_of(spec: EngineSpec, max_running: int) -> RankFacts:
    return RankFacts(
        model=spec.model,
        max_context=spec.max_context,
        kv_capacity=spec.kv_capacity,
        max_running=max_running,
        block_tokens=spec.block_tokens,
        vocab_size=spec.vocab_size,
        eos_ids=spec.eos_ids,
        kv_layout=spec.layout,
    )


@dataclass(slots=True, eq=False)
class _Run:
    """A leg here; `receiver` while its KV cache comes in."""

    leg: Leg
    began: bool = False
    receiver: KvReceiver | None = None
    fetching_since: float = 0.0


class OwnRunner:
    """`kv_events` makes messages of what changes in the prefix cache, where anybody is to hear of it."""

    def __init__(self, engine: Engine, scheduler: Scheduler, kv_events: KvEventLog | None = None) -> None:
        self.engine = engine
        self.scheduler = scheduler
        self.facts = facts_of(engine.spec, scheduler.max_running)
        self._kv_events = kv_events
        self._runs: dict[int, _Run] = {}  # by the leg's `seq`, which names its sequence too
        self._receiving: dict[int, _Run] = {}  # of these, those whose KV cache comes in

    def attach(self, tell: Tell) -> None:
        self._tell = tell

    def close(self) -> None:
        self.engine.close()

    # --- from the link ------------------------------------------------------------------------------------------

    def start(self, leg: Leg) -> None:
        handle = leg.handle
        if handle is not None:  # prefill has made the first token: the client need not wait for our memory
            self._tell(Began(leg))
            self._tell(Output(leg, (handle.first_token,)))
            if handle.first_token in leg.stop_ids or leg.max_tokens == 1:
                self._tell(Finished(leg, "stop" if handle.first_token in leg.stop_ids else "length"))
                return
        self._runs[leg.seq] = _Run(leg, began=handle is not None)
        self.scheduler.add(
            Sequence(
                leg.seq,
                leg.prompt if handle is None else range(leg.prompt_tokens),
                leg.max_tokens,
                leg.params,
                leg.stop_ids,
                leg.priority,
                imported=handle is not None,
                hold=leg.role == "prefill",
                offset=leg.offset,
            )
        )

    def cancel(self, leg: Leg) -> None:
        self._runs.pop(leg.seq, None)
        self._receiving.pop(leg.seq, None)
        self.scheduler.cancel(leg.seq)

    release = cancel

    def load(self) -> RunnerLoad:
        s = self.scheduler
        return RunnerLoad(
            s.running, s.waiting, s.waiting_tokens, s.kv_tokens, s.step, s.busy, s.prompt_tokens_total,
            s.cached_tokens_total, s.busy_us_total,
        )  # fmt: skip

    def turn(self, now: float) -> None:
        plan = self.scheduler.plan()
        if plan is not None:
            self.engine.submit(plan, self._stepped)
        for sequence in self.scheduler.take_admitted():
            run = self._receiving[sequence.id] = self._runs[sequence.id]
            assert run.leg.handle is not None
            run.receiver = KvReceiver(run.leg.handle.blocks, window=window_for(self.engine.spec.block_bytes))
            run.fetching_since = now
            self._ask(run, run.receiver.begin(now))
        if self._kv_events is not None and (events := self.scheduler.pool.take_events()):
            self._tell(CacheChanged(self._kv_events.messages(events, time.time())))

    def tick(self, now: float) -> None:
        for run in list(self._receiving.values()):
            assert run.receiver is not None
            self._ask(run, run.receiver.tick(now))
            self._check(run, now)

    # --- KV blocks ----------------------------------------------------------------------------------------------

    def export(self, leg: Leg, index: int) -> memoryview:
        return self.engine.export_block(self.scheduler.sequence(leg.seq).table[index])

    def received(self, leg: Leg, index: int, data: bytes | memoryview, intact: bool, now: float) -> None:
        run = self._receiving.get(leg.seq)
        if run is None or run.receiver is None or not run.receiver.wants(index):
            return
        intact = intact and len(data) == self.engine.spec.block_bytes
        if intact:
            self.engine.import_block(self.scheduler.sequence(leg.seq).table[index], data)
        self._ask(run, run.receiver.received(index, intact, now))
        self._check(run, now)

    def _ask(self, run: _Run, spans: list[Span]) -> None:
        for first, count in spans:
            self._tell(Pull(run.leg, first, count))

    def _check(self, run: _Run, now: float) -> None:
        """Whether its KV cache is all here, or will never be."""
        receiver, leg = run.receiver, run.leg
        assert receiver is not None
        if receiver.failure:
            self.cancel(leg)
            self._tell(LegFailed(leg, "kv_failed", receiver.failure))
        elif receiver.complete:
            del self._receiving[leg.seq]
            run.receiver = None
            assert leg.handle is not None
            self.scheduler.start(leg.seq, leg.handle.first_token)
            self._tell(Fetched(leg, now - run.fetching_since))

    # --- the engine ---------------------------------------------------------------------------------------------

    def _stepped(self, result: StepResult) -> None:
        if result.error:
            log.error("step.failed", step=result.number, error=result.error)
        for output in self.scheduler.complete(result):
            run = self._runs.get(output.seq)
            if run is None:
                continue
            leg = run.leg
            if output.error:
                del self._runs[output.seq]
                self._tell(LegFailed(leg, "engine_failed", output.error))
                continue
            if not run.began:
                run.began = True
                known = leg.seq in self.scheduler
                self._tell(Began(leg, self.scheduler.sequence(leg.seq).cached_tokens if known else 0))
            if leg.role == "prefill":
                self._tell(Held(leg, output.token))
                continue
            self._tell(Output(leg, (output.token,)))
            if output.finish:
                del self._runs[output.seq]
                self._tell(Finished(leg, "stop" if output.finish == "stop" else "length"))
        self._tell(Stepped(result.duration_s))

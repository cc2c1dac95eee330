"""One rank in virtual time: the nodes' scheduler and blocks, stepped by the timing model. Owns its inbox and steps.

Requests are ingested when they arrive, as the live nodes do (their forward step runs off the socket thread). Must not
choose ranks or measure anything; it calls back when a first token or a last one is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from bus.wire.messages import Ack, Load, MemberKey
from nodes.own.blocks import BlockPool, KvEvent
from nodes.own.engines.base import StepResult
from nodes.own.engines.timing import SimTiming
from nodes.own.sequence import Sequence
from pdbus.lab.clock import VirtualLoop
from pdbus.lab.scheduler import NO_TOKEN, DecodeRun, LabScheduler


class VirtualRank:
    """`on_output(sequence id)` is called at the step that gave a prefill's token, or a decode's last one, `on_first`
    likewise at a decode's first step; `on_admitted(sequence)` when a decode leg got its memory (`fetched` is then due).
    """

    def __init__(
        self,
        loop: VirtualLoop,
        key: MemberKey,
        *,
        blocks: int,
        block_tokens: int,
        max_running: int,
        chunk_tokens: int,
        timing: SimTiming,
        on_output: Callable[[int], None],
        on_admitted: Callable[[Sequence], None],
        on_first: Callable[[int], None] | None = None,
        kv_events: bool = False,
    ) -> None:
        self.key = key
        self.pool = BlockPool(blocks, block_tokens, record_events=kv_events)
        self.scheduler = LabScheduler(self.pool, max_running=max_running, chunk_tokens=chunk_tokens)
        self.steps_taken: list[Callable[[], None]] = []  # called after each computed step (not within decode runs)
        self.changed: list[Callable[[], None]] = []  # called after each change of `state`
        self._loop = loop
        self._timing = timing
        self._on_output = on_output
        self._on_admitted = on_admitted
        self._on_first = on_first
        self.scheduler.first_apart = on_first is not None
        self._stepping = False
        self._run: DecodeRun | None = None
        self._run_end = 0  # the event at the end of the run
        self._acks: dict[int, Ack] = {}  # by controller epoch
        self._acks_now: tuple[Ack, ...] = ()
        self._fresh: list[int] = []  # prompt tokens of what arrived since the step under way began

    # --- what reaches it --------------------------------------------------------------------------------------

    def welcomed(self, controllers: Iterable[int]) -> None:
        """By each of these epochs: it names them from now on, also before their first dispatch."""
        self._acks = {epoch: Ack(epoch, 0, 0) for epoch in controllers}
        self._acks_now = tuple(self._acks.values())

    def ingest(self, sequence: Sequence, controller_epoch: int, charge: int) -> None:
        """A dispatch arrives: acknowledge and queue it (a decode leg stays parked until its KV cache is ready)."""
        last = self._acks.get(controller_epoch, Ack(controller_epoch, 0, 0))
        self._acks[controller_epoch] = Ack(controller_epoch, last.dispatches + 1, last.tokens + charge)
        self._acks_now = tuple(self._acks.values())
        if not sequence.imported:
            self._interrupt()
        self.scheduler.add(sequence, parked=sequence.imported)
        self._fresh.append(sequence.expected)
        self._begin()

    def kv_ready(self, seq: int) -> None:
        """The prefill leg of `seq` is computed: ask for memory."""
        self.scheduler.unpark(seq)
        self._begin()

    def fetched(self, seq: int) -> None:
        """The KV cache of `seq` is here: decode on."""
        self._interrupt()
        self.scheduler.start(seq, NO_TOKEN)
        self._begin()

    def release(self, seq: int) -> None:
        """Nobody needs `seq` here any more. It is not decoding."""
        self.scheduler.release(seq)
        self._begin()

    # --- what it says of itself -------------------------------------------------------------------------------

    def load(self, *, before_ingest: bool = False) -> Load:
        """Load and acknowledgements of this moment, not numbered. `before_ingest`: as a scheduler that runs its step
        on the same thread would say it, blind to what arrived since the step began."""
        load, run = self.state(before_ingest)
        return load if run is None else replace(load, kv_tokens=load.kv_tokens + run.rows * run.done(self._loop.now))

    def state(self, before_ingest: bool = False) -> tuple[Load, DecodeRun | None]:
        """What `load` is made of, until something changes: only the KV tokens of the decode run grow meanwhile."""
        s = self.scheduler
        waiting, waiting_tokens = s.waiting, s.waiting_tokens
        if before_ingest:
            waiting, waiting_tokens = max(0, waiting - len(self._fresh)), max(0, waiting_tokens - sum(self._fresh))
        load = Load(
            seq=0,
            step=s.step,
            running=s.running,
            waiting=waiting,
            waiting_tokens=waiting_tokens,
            kv_tokens=s.kv_tokens,
            kv_capacity=self.pool.blocks * self.pool.block_tokens,
            max_running=s.max_running,
            acks=self._acks_now,
            prompt_tokens_total=s.prompt_tokens_total,
            cached_tokens_total=s.cached_tokens_total,
            busy_us_total=s.busy_us_total,
            admitted_tokens_total=s.admitted_tokens_total,
            computed_tokens_total=s.computed_tokens_total,
        )
        return load, self._run

    def take_kv_events(self) -> list[KvEvent]:
        return self.pool.take_events()

    # --- steps ------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Something has changed: admit what there is memory for, and begin the next step, unless one is under way."""
        for sequence in self.scheduler.take_admitted():
            self._on_admitted(sequence)
        if not self._stepping:
            now = self._loop.now
            self._fresh.clear()
            run = self.scheduler.decode_run(self._timing, now)
            if run is not None:
                self._stepping = True
                self._run = run
                self._run_end = self._loop.call_at(run.ends_s(run.steps), self._run_ended)
            else:
                self._step(now)
        for function in self.changed:
            function()

    def _step(self, began_s: float) -> None:
        plan = self.scheduler.plan()
        self._stepping = plan is not None
        if plan is not None:
            duration_s = self._timing.rows_s(plan.rows)
            asked = tuple((row.seq, NO_TOKEN) for row in plan.rows if row.params is not None)
            self._loop.call_at(began_s + duration_s, self._complete, StepResult(plan.number, asked, duration_s))

    def _interrupt(self) -> None:
        """Something will change during a run of decode steps: do those that are over, begin the one under way."""
        run, self._run = self._run, None
        if run is None:
            return
        self._loop.cancel(self._run_end)
        done = run.done(self._loop.now)
        self.scheduler.skip(run, done)
        self._step(run.ends_s(done))

    def _run_ended(self) -> None:
        run, self._run = self._run, None
        assert run is not None
        self.scheduler.skip(run, run.steps - 1)
        plan = self.scheduler.plan()
        assert plan is not None
        tokens = tuple((row.seq, NO_TOKEN) for row in plan.rows)
        self._complete(StepResult(plan.number, tokens, run.ends_s(run.steps) - run.ends_s(run.steps - 1)))

    def _complete(self, result: StepResult) -> None:
        outputs = self.scheduler.complete(result)
        self._stepping = False
        for sequence in outputs:
            if self._on_first is not None and sequence.imported and len(sequence.output) == 2:
                self._on_first(sequence.id)
            if sequence.finish:
                self._on_output(sequence.id)
        self._begin()
        for function in self.steps_taken:
            function()

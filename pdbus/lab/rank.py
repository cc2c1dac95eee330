"""One rank in virtual time: the nodes' scheduler and blocks, with steps that last as long as the timing model says.
Owns its inbox and steps.

Requests are ingested when they arrive, as in the live nodes (their forward step runs off the socket thread). Does not
choose ranks or measure anything; it calls back for a first token and a last one. A sequence is a request at this rank;
its id is the request's number.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable

from msgspec.structs import replace

from bus.wire.kv_names import Removed, Stored
from bus.wire.messages import Ack, Load, MemberKey
from nodes.own.engines.timing import SimTiming
from nodes.own.sequence import Sequence
from pdbus.lab.clock import VirtualLoop
from pdbus.lab.pool import RunPool
from pdbus.lab.scheduler import NO_TOKEN, DecodeRun, LabScheduler, PromptRun
from pdbus.lab.tape import RankTape


def _nothing(at_s: float) -> None:
    pass


class VirtualRank:
    """A prefill, decode or unified rank. `on_output` gets a sequence's id at the step with a prefill's token or the
    last token of another; `on_first` gets the sequence at a decode's first step, or at the step that ends the prompt of
    a unified one. `on_admitted` gets a decode sequence that has its memory; the caller lets the KV cache travel, then
    calls `fetched`. `on_begun` gets a sequence whose prompt this rank begins to compute. `blocks` is the KV memory, in
    blocks of `block_tokens`; `max_running` are run slots, `chunk_tokens` the most prompt tokens in a step.

    A prompt may be read in part from another rank: `on_admitted` gets the sequence then too, and the caller calls
    `compute` when that part is here. Meanwhile the other rank is held to it by `pin`."""

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
        on_first: Callable[[Sequence], None] | None = None,
        on_begun: Callable[[Sequence], None] | None = None,
        kv_events: bool = False,
    ) -> None:
        self.key = key
        self.pool = RunPool(blocks, block_tokens, record_changes=kv_events)
        self.due_s = math.inf  # `catch_up` has nothing to do before this time
        self.scheduler = LabScheduler(self.pool, max_running=max_running, chunk_tokens=chunk_tokens)
        # called after each step, at its time: while there is one, prompts take no runs of steps (decode does)
        self.steps_taken: list[Callable[[], None]] = []
        # called with the time: before each change of `state`, and after each step, not within decode runs. Within a run
        # of prompt steps they may be called later, but before anybody looks
        self.before_change: Callable[[float], None] = _nothing
        self.step_counted: Callable[[float], None] = _nothing
        self._loop = loop
        self._timing = timing
        self._on_output = on_output
        self._on_admitted = on_admitted
        self._on_first = on_first
        self._on_begun = on_begun
        self.scheduler.first_apart = on_first is not None
        self._stepping = False
        self._run: DecodeRun | None = None
        self._run_end = 0  # the event at the end of the run
        self._prompt_run: PromptRun | None = None
        self._acks: dict[int, Ack] = {}  # by controller epoch
        self._acks_now: tuple[Ack, ...] = ()
        self._fresh: list[int] = []  # prompt tokens of requests that came since the present step began
        self.tape: RankTape | None = None  # records the steps

    # --- messages to it --------------------------------------------------------------------------------------

    def welcomed(self, controllers: Iterable[int]) -> None:
        """Note that these controllers (by epoch, the number of a controller's start) have welcomed it: its loads
        acknowledge them from now on, also before a dispatch."""
        self._acks = {epoch: Ack(epoch, 0, 0) for epoch in controllers}
        self._acks_now = tuple(self._acks.values())

    def ingest(self, sequence: Sequence, controller_epoch: int, charge: int, read: int = 0) -> None:
        """Take a request that a controller dispatched here: acknowledge it with its `charge` (tokens) and queue it. A
        decode sequence stays parked until `kv_ready`. `read`: prompt tokens to be read from another rank."""
        self._change()
        last = self._acks.get(controller_epoch, Ack(controller_epoch, 0, 0))
        self._acks[controller_epoch] = Ack(controller_epoch, last.dispatches + 1, last.tokens + charge)
        self._acks_now = tuple(self._acks.values())
        if not sequence.imported and self._run is not None:
            self._interrupt()
        sequence.read = read // self.pool.block_tokens
        self.scheduler.add(sequence, parked=sequence.imported)
        self._fresh.append(sequence.expected)
        self._begin()

    def kv_ready(self, seq: int) -> None:
        """Queue the parked sequence `seq` for memory: its prompt is computed at the prefill rank. `on_admitted` follows
        when it gets it."""
        self._change()
        self.scheduler.unpark(seq)
        self._begin()

    def fetched(self, seq: int) -> None:
        """Start to decode `seq`, whose KV cache has arrived here."""
        self._change()
        self._interrupt()
        self.scheduler.start(seq, NO_TOKEN)
        self._begin()

    def pin(self, hashes: array[int]) -> tuple[int, list[int]]:
        """Hold the longest cached prefix of `hashes` until `unpin`. Return its tokens, and its table."""
        self._change()
        taken = self.pool.take(len(self.pool.match_prefix(hashes)), hashes)
        assert taken is not None, "it needs no more memory"
        return taken[1] * self.pool.block_tokens, taken[0]

    def unpin(self, table: list[int]) -> None:
        """Let what `pin` held go."""
        self._change()
        if self._run is not None:
            self._interrupt()  # it may make room for a prompt
        self.pool.release(table)
        self._begin()

    def compute(self, seq: int, read: int) -> None:
        """Compute the rest of the prompt of `seq`: `read` tokens of it have been read from another rank."""
        self._change()
        self._interrupt()
        computed = self.scheduler.sequence(seq).computed
        self.scheduler.has_read(seq, (computed + read) // self.pool.block_tokens)
        self._begin()

    def release(self, seq: int) -> None:
        """Free the memory of `seq`, which is no longer needed here and is not decoding."""
        self._change()
        self.scheduler.release(seq)
        self._begin()

    # --- its load -------------------------------------------------------------------------------

    def load(self, *, before_ingest: bool = False) -> Load:
        """Return the present load and acknowledgements, not numbered. With `before_ingest`, without requests that came
        since the step began: the view of a scheduler that runs its step on the same thread."""
        if self.due_s <= self._loop.now:
            self.catch_up()
        load, run = self.state(before_ingest)
        return load if run is None else replace(load, kv_tokens=load.kv_tokens + run.rows * run.done(self._loop.now))

    def state(self, before_ingest: bool = False) -> tuple[Load, DecodeRun | None]:
        """Return the parts of `load`: a load, and the running decode run (None: there is none), by which its KV tokens
        grow. Valid until the next change. The caller has called `catch_up`."""
        return self.scheduler.load(self._acks_now, self._fresh if before_ingest else ()), self._run

    def take_kv_events(self) -> list[Stored | Removed]:
        """Return the changes of the prefix cache since the last call; empty without `kv_events`."""
        return self.pool.take_changes()

    def catch_up(self) -> None:
        """Account for the steps of a prompt run that have ended by now, but for the last one, which has an event. It is
        called before anybody looks at the scheduler or the pool."""
        run = self._prompt_run
        if run is None or self.due_s > self._loop.now:
            return
        last = len(run.ends_s) - 1
        end = bisect_right(run.ends_s, self._loop.now, run.done, last)
        if self.tape is not None:
            self.tape.prompt_run(self.scheduler, run, end - run.done)
        self.due_s = run.ends_s[end] if end < last else math.inf
        if self.before_change is _nothing:
            self.scheduler.compute_chunks(run, end - run.done)
            self._fresh.clear()
            return
        for end_s in run.ends_s[run.done : end]:
            self.before_change(end_s)
            self.scheduler.compute_chunks(run, 1)
            self._fresh.clear()
            self.step_counted(end_s)

    # --- steps ------------------------------------------------------------------------------------------------

    def _change(self) -> None:
        """Catch up, and say that a change follows."""
        now = self._loop.now
        if self.due_s <= now:
            self.catch_up()
        self.before_change(now)

    def _begin(self) -> None:
        """Handle a change: admit the sequences that fit into memory, and begin the next step unless one is in
        progress."""
        for sequence in self.scheduler.take_admitted():
            self._on_admitted(sequence)
        if self._prompt_run is not None and self.scheduler.lines:
            self._interrupt()  # each step may make room for what waits
        if not self._stepping:
            now = self._loop.now
            self._fresh.clear()
            run = self.scheduler.decode_run(self._timing, now)
            prompt = None if run is not None or self.steps_taken else self.scheduler.prompt_run(self._timing, now)
            if run is not None:
                self._stepping = True
                self._run = run
                self._run_end = self._loop.call_at(run.ends_s(run.steps), self._run_ended)
            elif prompt is not None:
                self._stepping = True
                self._prompt_run = prompt
                self.due_s = prompt.ends_s[0] if len(prompt.ends_s) > 1 else math.inf
                self._run_end = self._loop.call_at(prompt.ends_s[-1], self._prompt_run_ended)
            else:
                self._step(now)
        if self._on_begun is not None:
            while self.scheduler.begun:
                self._on_begun(self.scheduler.begun.popleft())

    def _step(self, began_s: float) -> None:
        duration_s = self.scheduler.begin_step(self._timing)
        self._stepping = duration_s is not None
        if duration_s is not None:
            self._loop.call_at(began_s + duration_s, self._complete, duration_s)

    def _interrupt(self) -> None:
        """End a run of steps before a change: complete the steps that are over, and begin the present one."""
        run, self._run = self._run, None
        prompt, self._prompt_run = self._prompt_run, None
        if prompt is not None:
            self._loop.cancel(self._run_end)
            self.due_s = math.inf
            self._loop.call_at(prompt.ends_s[prompt.done], self._complete, self.scheduler.leave(prompt))
        if run is None:
            return
        self._loop.cancel(self._run_end)
        done = run.done(self._loop.now)
        self._skip(run, done)
        self._step(run.ends_s(done))

    def _skip(self, run: DecodeRun, steps: int) -> None:
        if self.tape is not None:
            self.tape.decode_run(self.scheduler, run, steps)
        self.scheduler.skip(run, steps)

    def _run_ended(self) -> None:
        self.before_change(self._loop.now)
        run, self._run = self._run, None
        assert run is not None
        self._skip(run, run.steps - 1)
        self.scheduler.begin_step(self._timing)
        self._complete(run.ends_s(run.steps) - run.ends_s(run.steps - 1))

    def _prompt_run_ended(self) -> None:
        self._change()
        run, self._prompt_run = self._prompt_run, None
        assert run is not None
        if self.tape is not None:
            self.tape.prompt_run(self.scheduler, run, 1)
        self.scheduler.compute_chunks(run, 1)
        self._stepping = False
        self._begin()
        self.step_counted(self._loop.now)

    def _complete(self, duration_s: float) -> None:
        self.before_change(self._loop.now)
        if self.tape is not None:
            self.tape.step(self.scheduler, self._loop.now - duration_s, self._loop.now)
        outputs = self.scheduler.end_step(duration_s)
        self._stepping = False
        for sequence in outputs:
            if self._on_first is not None and len(sequence.output) == 1 + sequence.imported:
                self._on_first(sequence)
            if sequence.finish:
                self._on_output(sequence.id)
        self._begin()
        self.step_counted(self._loop.now)
        for function in self.steps_taken:
            function()

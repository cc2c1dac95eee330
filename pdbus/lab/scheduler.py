"""The nodes' scheduler (it plans the steps of one rank) with two shortcuts: it does runs of pure decode steps at once,
and names the blocks of a prompt by runs (`pdbus.lab.pool`). Owns only the shortcuts.

While only decoding sequences run and none finishes, steps differ only in their context, so `skip` does any number of
them exactly as `plan` and `complete` would one by one (a test checks that the two are equal).
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from bus.wire.messages import Ack, Load
from nodes.own.engines.timing import SimTiming
from nodes.own.scheduler import Scheduler
from nodes.own.sequence import Phase, Sequence
from pdbus.lab.pool import RunPool

NO_TOKEN = 0  # the lab's outputs are counted, not read


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """A run of `steps` steps of the same `rows` decoding sequences, from the time `began_s`; the last step ends at
    least one of them.

    The first step takes `first_s` seconds, and each further one `growth_s` more than the one before.
    """

    began_s: float
    rows: int
    steps: int
    first_s: float
    growth_s: float

    def ends_s(self, steps: int) -> float:
        """Return the time when `steps` steps are done."""
        return self.began_s + steps * self.first_s + self.growth_s * steps * (steps - 1) / 2

    def done(self, now: float) -> int:
        """Return the number of steps done at the time `now`, never the last one, which the scheduler itself
        completes."""
        elapsed_s, linear_s = max(0.0, now - self.began_s), self.first_s - self.growth_s / 2
        root = linear_s + math.sqrt(linear_s**2 + 2 * self.growth_s * elapsed_s)
        about = 2 * elapsed_s / root if root else math.inf  # where `ends_s` reaches `now`
        steps = int(min(about, self.steps - 1))
        while steps and self.ends_s(steps) > now:  # `about` is rounded, so correct it
            steps -= 1
        while steps < self.steps - 1 and self.ends_s(steps + 1) <= now:
            steps += 1
        return steps


class LabScheduler(Scheduler):
    """The nodes' `Scheduler` with runs of decode steps."""

    pool: RunPool

    def __init__(self, pool: RunPool, *, max_running: int, chunk_tokens: int) -> None:
        super().__init__(pool, max_running=max_running, chunk_tokens=chunk_tokens)
        self._to_read: dict[int, int] = {}  # by sequence that waits: the prompt tokens that another rank has

    _filled: Sequence | None = None  # its prompt goes on, and took all of the last step
    first_apart = False  # an imported sequence's first decode step is not part of a run: its end is an event

    def load(self, acks: tuple[Ack, ...], fresh: Seq[int] = ()) -> Load:
        """Return the load with these acknowledgements, not numbered; without sequences that wait and expect `fresh`
        tokens each. It does what the properties do, in one call: there are eight for each request."""
        pool = self.pool
        running, capacity = len(self._running), pool.blocks * pool.block_tokens
        return Load(
            seq=0,
            step=self.step,
            running=running,
            waiting=max(0, len(self._sequences) - running - self._held - len(fresh)),
            waiting_tokens=max(0, self._waiting_tokens - sum(fresh)),
            kv_tokens=min(self._kv_tokens, pool.held * pool.block_tokens),
            kv_capacity=capacity,
            max_running=self.max_running,
            acks=acks,
            prompt_tokens_total=self.prompt_tokens_total,
            cached_tokens_total=self.cached_tokens_total,
            busy_us_total=self.busy_us_total,
            admitted_tokens_total=self.admitted_tokens_total,
            computed_tokens_total=self.computed_tokens_total,
        )

    def decode_run(self, timing: SimTiming, now: float) -> DecodeRun | None:
        """Return the run of decode steps that can begin now, timed by `timing`; None if another kind of step must come
        first, or the run would have fewer than two steps."""
        rows = context = 0
        steps = 1 << 60
        for sequence in self._running.values():
            if sequence.phase is Phase.DECODING:
                if self.first_apart and sequence.imported and len(sequence.output) == 1:
                    return None
                rows += 1
                context += sequence.computed
                steps = min(steps, sequence.max_tokens - len(sequence.output))
            elif sequence.phase is Phase.PROMPT:
                return None
        if not rows or steps < 2:
            return None
        first_s = timing.step_s(0, rows, context)
        return DecodeRun(now, rows, steps, first_s, timing.per_context_token_s * rows)

    def begin_step(self, timing: SimTiming) -> float | None:
        """Begin the next step, as `plan` does after `take_admitted`, without rows for an engine. Return its seconds by
        `timing`; None if there is nothing to compute."""
        assert not self._in_step
        sequence, budget = self._filled, max(self.chunk_tokens, self.pool.block_tokens)
        if sequence is not None and len(sequence.prompt) - sequence.computed >= budget:  # takes all of this one, too
            sequence.fed = budget
            self._in_step.append(sequence)
        else:
            self._choose()
        prompt_tokens = decoding = context = 0
        for sequence in self._in_step:
            if sequence.fed == 1:
                decoding += 1
            else:
                prompt_tokens += sequence.fed
            context += sequence.computed
        return timing.step_s(prompt_tokens, decoding, context) if self._in_step else None

    def start(self, seq: int, first_token: int) -> None:
        self._filled = None
        super().start(seq, first_token)

    def add_reader(self, sequence: Sequence, read: int) -> None:
        """Queue a sequence of which another rank has the first `read` prompt tokens. It counts as imported until
        `compute`."""
        sequence.imported = True
        self.add(sequence)
        self._expect(sequence, min(sequence.expected, len(sequence.prompt) - read))
        self._to_read[sequence.id] = read

    def fetches(self, sequence: Sequence) -> bool:
        """Return true if an admitted sequence has to fetch something. One that would read no more than this rank has
        itself begins to compute."""
        read = self._to_read.pop(sequence.id, None)
        if read is None:
            return True
        lacks = max(0, read - sequence.cached_tokens)
        self._expect(sequence, sequence.expected - lacks)
        if not lacks:
            self.compute(sequence.id, 0)
        return lacks > 0

    def compute(self, seq: int, read: int) -> None:
        """Let a sequence that has read `read` tokens compute the rest of its prompt."""
        self._filled = None
        sequence = self._sequences[seq]
        sequence.imported = False
        sequence.phase = Phase.PROMPT
        self._hold(sequence, read)
        self._expect(sequence, len(sequence.prompt) - sequence.computed)
        self._commit(sequence)
        self.begun.append(sequence)

    def end_step(self, duration_s: float) -> list[Sequence]:
        """End the step, as `complete` does, and return the sequences with one more token."""
        stepped, self._in_step = self._in_step, []
        self.step += 1
        self.busy_us_total += round(duration_s * 1e6)
        outputs = []
        for sequence in stepped:
            assert not sequence.doomed, "nothing is cancelled here while it is computed"
            fed, sequence.fed = sequence.fed, 0
            self._advance(sequence, fed)
            if sequence.phase is Phase.DECODING:
                self._append(sequence, NO_TOKEN)
                outputs.append(sequence)
        self._filled = stepped[0] if len(stepped) == 1 and stepped[0].phase is Phase.PROMPT else None
        return outputs

    def skip(self, run: DecodeRun, steps: int) -> None:
        """Do the first `steps` of `run` at once: fewer than all, so that no sequence ends."""
        if not steps:
            return
        assert 0 < steps < run.steps
        assert not self._in_step
        self.step += steps
        self.busy_us_total += round((run.ends_s(steps) - run.began_s) * 1e6)
        tokens = [NO_TOKEN] * steps
        for sequence in self._running.values():
            if sequence.phase is Phase.DECODING:
                sequence.computed += steps
                self._kv_tokens += steps
                sequence.output += tokens
                if sequence.hashes and len(sequence.hashes) > sequence.committed:
                    self._commit(sequence)
        self._admit()  # as `plan` does: a prompt may share the blocks that have names now

    def _commit(self, sequence: Sequence) -> None:
        """Name the blocks that became full, as far as their hashes are known: prompts are ranges here."""
        assert sequence.hashes is not None
        full = min(sequence.computed // self.pool.block_tokens, len(sequence.hashes))
        if full > sequence.committed:
            self.pool.name(sequence.table, sequence.hashes, sequence.committed, full)
            sequence.committed = full

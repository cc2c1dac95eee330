"""The nodes' scheduler (it plans the steps of one rank) with shortcuts: it does runs of like steps at once, and names
the blocks of a prompt by runs (`pdbus.lab.pool`). Owns only the shortcuts.

While only decoding sequences run and none finishes, steps differ only in their context, so `skip` does any number of
them exactly as `plan` and `complete` would one by one; `compute_chunks` does the same for steps that one prompt fills
(tests check that they are equal).
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, islice

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
        last, began_s, first_s, growth_s = self.steps - 1, self.began_s, self.first_s, self.growth_s
        steps = int(about) if about < last else last
        # `about` is rounded, so correct it; this is `ends_s`, without a call
        while steps and began_s + steps * first_s + growth_s * steps * (steps - 1) / 2 > now:
            steps -= 1
        while steps < last and began_s + (steps + 1) * first_s + growth_s * (steps + 1) * steps / 2 <= now:
            steps += 1
        return steps


@dataclass(slots=True)
class PromptRun:
    """A run of steps that each compute `chunk` tokens of one prompt and nothing else; none of them ends the prompt."""

    sequence: Sequence
    chunk: int
    durations_s: list[float]
    ends_s: list[float]
    done: int = 0  # steps that are accounted for


class LabScheduler(Scheduler):
    """The nodes' `Scheduler` with runs of like steps, and its decoding sequences as one batch.

    Every step takes a token of each of them, so that the batch is a count and a sum, and a heap has the next end first:
    a step costs by the sequences that begin, end or name blocks with it. What a sequence has computed is brought up to
    date then. No sequence here has a client, and none is cancelled while it decodes."""

    pool: RunPool

    def __init__(self, pool: RunPool, *, max_running: int, chunk_tokens: int) -> None:
        super().__init__(pool, max_running=max_running, chunk_tokens=chunk_tokens)
        self.first_apart = False  # an imported sequence's first decode step is not part of a run: its end is an event
        self._prompts: dict[int, Sequence] = {}  # in phase PROMPT, in order of admission
        self._since: dict[int, int] = {}  # decoding: the step up to which `Sequence.computed` counts
        self._context = 0  # tokens that these have computed
        self._ends: list[tuple[int, int, Sequence]] = []  # a heap of them by the step that ends each, and its id
        self._naming: dict[int, Sequence] = {}  # those of them with blocks to name
        self._new: list[tuple[int, Sequence]] = []  # imported ones before their first step, if that is apart; the step
        self._rows: int | None = None  # of them in the step under way; None: there is none

    @property
    def under_way(self) -> tuple[int, Seq[Sequence]]:
        """The step under way: how many sequences decode in it, and those whose prompts it computes a part of."""
        return self._rows or 0, self._in_step

    @property
    def lines(self) -> bool:
        """True while a sequence waits for a run slot or memory."""
        return bool(self._queue.lines)

    def load(self, acks: tuple[Ack, ...], fresh: Seq[int] = ()) -> Load:
        """Return the load with these acknowledgements, not numbered; without sequences that wait and expect `fresh`
        tokens each. It does what the properties do, in one call: there are eight for each request."""
        pool = self.pool
        running, capacity = len(self._running), pool.blocks * pool.block_tokens
        waiting_tokens = max(0, self._waiting_tokens - sum(fresh))
        return Load(
            seq=0,
            step=self.step,
            running=running,
            waiting=max(0, len(self._sequences) - running - self._held - len(fresh)),
            waiting_tokens=waiting_tokens,
            kv_tokens=min(self._kv_tokens, pool.held * pool.block_tokens),
            kv_capacity=capacity,
            max_running=self.max_running,
            acks=acks,
            prompt_tokens_total=self.prompt_tokens_total,
            cached_tokens_total=self.cached_tokens_total,
            busy_us_total=self.busy_us_total,
            admitted_tokens_total=self.admitted_tokens_total,
            computed_tokens_total=self.computed_tokens_total,
            to_compute_tokens=min(waiting_tokens, self._waiting_tokens - self._to_fetch),
        )

    def decode_run(self, timing: SimTiming, now: float) -> DecodeRun | None:
        """Return the run of decode steps that can begin now, timed by `timing`; None if another kind of step must come
        first, or the run would have fewer than two steps."""
        if not self._ends or self._prompts or self._new:
            return None
        rows, steps = len(self._ends), self._ends[0][0] - self.step
        if steps < 2:
            return None
        return DecodeRun(now, rows, steps, timing.step_s(0, rows, self._context), timing.per_context_token_s * rows)

    def prompt_run(self, timing: SimTiming, now: float) -> PromptRun | None:
        """Return the run of prompt steps that can begin now, timed by `timing`; None if another kind of step must come
        first, or there is none. Nothing may wait for memory: each step may make room."""
        chunk = max(self.chunk_tokens, self.pool.block_tokens)
        if not self._prompts or self._ends or self._queue.lines or chunk == 1:
            return None
        sequence = self._match(next(iter(self._prompts.values())))
        contexts = range(sequence.computed, len(sequence.prompt) - chunk, chunk)
        if not contexts:
            return None
        self._note_begun(sequence)
        durations_s = [timing.step_s(chunk, 0, context) for context in contexts]
        ends_s = [*accumulate(durations_s, initial=now)][1:]
        return PromptRun(sequence, chunk, durations_s, ends_s)

    def compute_chunks(self, run: PromptRun, steps: int) -> None:
        """Do the next `steps` of `run` at once."""
        first, run.done = run.done, run.done + steps
        self.step += steps
        self.busy_us_total += sum([round(duration_s * 1e6) for duration_s in run.durations_s[first : run.done]])
        sequence, tokens = run.sequence, steps * run.chunk
        sequence.computed += tokens
        sequence.expected -= tokens
        self._kv_tokens += tokens
        self._waiting_tokens -= tokens
        self.computed_tokens_total += tokens
        self._commit(sequence)

    def leave(self, run: PromptRun) -> float:
        """Go on with the present step of `run` as one that is no part of a run, and return its seconds."""
        self._rows = 0
        run.sequence.fed = run.chunk
        self._in_step.append(run.sequence)
        return run.durations_s[run.done]

    def begin_step(self, timing: SimTiming) -> float | None:
        """Begin the next step, as `plan` does after `take_admitted`, without rows for an engine. Return its seconds by
        `timing`; None if there is nothing to compute."""
        assert self._rows is None, "a step is under way"
        decoding, context, prompt_tokens = len(self._ends), self._context, 0
        if not decoding and not self._prompts:
            return None
        self._rows = decoding
        budget = max(self.chunk_tokens - decoding, self.pool.block_tokens)
        for sequence in self._prompts.values():
            self._match(sequence)
            self._note_begun(sequence)
            sequence.fed = fed = min(budget, len(sequence.prompt) - sequence.computed)
            self._in_step.append(sequence)
            if fed == 1:
                decoding += 1
            else:
                prompt_tokens += fed
            context += sequence.computed
            budget -= fed
            if not budget:
                break
        return timing.step_s(prompt_tokens, decoding, context)

    def take_admitted(self) -> list[Sequence]:
        return super().take_admitted() if self._queue.lines or self._admitted else []

    def start(self, seq: int, first_token: int) -> None:
        super().start(seq, first_token)
        self._join(self._sequences[seq])

    def has_read(self, seq: int, blocks: int) -> int:
        tokens = super().has_read(seq, blocks)
        self._prompts = {each.id: each for each in self._running.values() if each.phase is Phase.PROMPT}
        return tokens

    def end_step(self, duration_s: float) -> list[Sequence]:
        """End the step, as `complete` does, and return the sequences with a first or a last token."""
        assert self._rows is not None
        stepped, self._in_step = self._in_step, []
        self.busy_us_total += round(duration_s * 1e6)
        self._decode(self._rows, 1)
        outputs = self._decoded() if self._rows else []
        self._rows = None
        for sequence in stepped:
            assert not sequence.doomed, "nothing is cancelled here while it is computed"
            fed, sequence.fed = sequence.fed, 0
            self._advance(sequence, fed)
            if sequence.phase is Phase.DECODING:
                del self._prompts[sequence.id]
                self._append(sequence, NO_TOKEN)
                outputs.append(sequence)
                if sequence.phase is Phase.DECODING:
                    self._join(sequence)
        return outputs

    def skip(self, run: DecodeRun, steps: int) -> None:
        """Do the first `steps` of `run` at once: fewer than all, so that no sequence ends."""
        if not steps:
            return
        assert 0 < steps < run.steps
        assert self._rows is None
        self.busy_us_total += round((run.ends_s(steps) - run.began_s) * 1e6)
        self._decode(run.rows, steps)
        self._admit()  # as `plan` does: a prompt may share the blocks that have names now

    def validate(self) -> None:
        for _, _, sequence in self._ends:
            self._settle(sequence)
        assert self._context == sum(sequence.computed for _, _, sequence in self._ends)
        assert {sequence.id for _, _, sequence in self._ends} == self._since.keys()
        assert [*self._prompts] == [each.id for each in self._running.values() if each.phase is Phase.PROMPT]
        super().validate()

    # --- inside -----------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        if self._queue.lines:
            before = len(self._running)
            super()._admit()
            for sequence in islice(self._running.values(), before, None):
                if sequence.phase is Phase.PROMPT:
                    self._prompts[sequence.id] = sequence

    def _join(self, sequence: Sequence) -> None:
        """Let a sequence decode from the next step on."""
        since = self._since[sequence.id] = self.step + (self._rows is not None)
        self._context += sequence.computed
        heappush(self._ends, (since + max(1, sequence.max_tokens - len(sequence.output)), sequence.id, sequence))
        if sequence.hashes and len(sequence.hashes) > sequence.committed:
            self._naming[sequence.id] = sequence
        if self.first_apart and sequence.imported:
            self._new.append((since, sequence))

    def _settle(self, sequence: Sequence) -> None:
        """Bring what a decoding sequence has computed up to date."""
        steps = self.step - self._since[sequence.id]
        if steps > 0:
            self._since[sequence.id] = self.step
            sequence.computed += steps
            sequence.output += [NO_TOKEN] * steps

    def _decode(self, rows: int, steps: int) -> None:
        """Let the first `rows` decoding sequences take so many steps, and name the blocks that became full."""
        self.step += steps
        self._context += rows * steps
        self._kv_tokens += rows * steps
        if self._naming:
            for sequence in [each for each in self._running.values() if each.id in self._naming]:
                self._settle(sequence)
                self._commit(sequence)
                if sequence.hashes is None or len(sequence.hashes) <= sequence.committed:
                    del self._naming[sequence.id]

    def _decoded(self) -> list[Sequence]:
        """Return the decoding sequences with a first or a last token at this step, in order of admission; end the
        latter."""
        found = {}
        while self._ends and self._ends[0][0] <= self.step:
            sequence = heappop(self._ends)[2]
            sequence.finish = "length"
            found[sequence.id] = sequence
        if self._new:
            found |= {each.id: each for since, each in self._new if since < self.step}
            self._new = [(since, each) for since, each in self._new if since >= self.step]
        outputs = [*found.values()]
        if len(outputs) > 1:
            place = {seq: number for number, seq in enumerate(self._running)}
            outputs.sort(key=lambda sequence: place[sequence.id])
        for sequence in outputs:
            self._settle(sequence)
            if sequence.finish:
                self._context -= sequence.computed
                del self._since[sequence.id]
                self._naming.pop(sequence.id, None)
                self._remove(sequence)
        return outputs

    def _commit(self, sequence: Sequence) -> None:
        """Name the blocks that became full, as far as their hashes are known: prompts are ranges here."""
        assert sequence.hashes is not None
        full = min(sequence.computed // self.pool.block_tokens, len(sequence.hashes))
        if full > sequence.committed:
            self.pool.name(sequence.table, sequence.hashes, sequence.committed, full)
            sequence.committed = full

"""The scheduler over the sim engine under any order of adds, cancels, steps and fetches.

Every sequence ends exactly once or is cancelled, capacity is never exceeded (`validate`), and what is produced equals
the reference whatever was batched, chunked, shared through the prefix cache or cancelled around it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nodes.own.blocks import BlockPool
from nodes.own.engines.base import StepResult
from nodes.own.engines.sim import SimEngine, feed, sim_generate
from nodes.own.scheduler import Scheduler
from nodes.own.sequence import Phase, Sequence

VOCAB = 64
SIZE = 2
BLOCKS = 24


class Clock:
    """Runs what the engine schedules when told to."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []

    def clock(self) -> float:
        return 0.0

    def call_later(self, delay_s: float, function: Callable[[], None], /) -> Any:
        self.due.append(function)
        return self

    def cancel(self) -> None:
        self.due.clear()


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(slots=st.integers(1, 4), chunk=st.integers(1, 9))
    def begin(self, slots: int, chunk: int) -> None:
        self.clock = Clock()
        self.engine = SimEngine(self.clock, blocks=BLOCKS, block_tokens=SIZE, vocab_size=VOCAB)
        self.scheduler = Scheduler(BlockPool(BLOCKS, SIZE), max_running=slots, chunk_tokens=chunk)
        self.live: dict[int, Sequence] = {}
        self.prompts: dict[int, list[int]] = {}
        self.produced: dict[int, list[int]] = {}
        self.finished: dict[int, str] = {}
        self.cancelled: set[int] = set()
        self.next = 0

    @rule(
        prompt=st.lists(st.integers(3, 5), min_size=1, max_size=14),
        max_tokens=st.integers(1, 6),
        kind=st.sampled_from(["unified", "hold", "imported", "parked"]),
        priority=st.integers(-1, 1),
        client=st.sampled_from(["", "clients/alice", "clients/bob"]),
    )
    def add(self, prompt: list[int], max_tokens: int, kind: str, priority: int, client: str) -> None:
        self.next += 1
        imported = kind in ("imported", "parked")
        sequence = Sequence(
            self.next, range(len(prompt)) if imported else prompt, max_tokens, priority=priority,
            imported=imported, hold=kind == "hold", leg=SimpleNamespace(client=client),  # type: ignore[arg-type]
        )  # fmt: skip
        self.scheduler.add(sequence, parked=kind == "parked")
        self.live[self.next], self.prompts[self.next], self.produced[self.next] = sequence, prompt, []

    @rule()
    def step(self) -> None:
        plan = self.scheduler.plan()
        if plan is None:
            return
        total = sum(len(row.tokens) for row in plan.rows)
        decoding = sum(row.params is not None and row.output_index > 0 for row in plan.rows)
        assert total <= max(self.scheduler.chunk_tokens, decoding + SIZE)
        self.in_step = [row.seq for row in plan.rows]
        self.engine.submit(plan, self.done)

    def done(self, result: StepResult) -> None:
        for sequence in self.scheduler.complete(result):
            seq = sequence.id
            assert seq not in self.cancelled
            assert seq not in self.finished
            assert self.live[seq] is sequence
            self.produced[seq].append(sequence.output[-1])
            if sequence.hold:
                assert sequence.phase is Phase.HELD
            elif sequence.finish:
                self.finished[seq] = sequence.finish
                del self.live[seq]

    @precondition(lambda self: self.clock.due)
    @rule()
    def engine_answers(self) -> None:
        self.clock.due.pop()()

    @precondition(lambda self: self.clock.due)
    @rule()
    def engine_fails(self) -> None:
        self.clock.due.clear()
        self.engine.close()  # the step under way is forgotten
        failed = self.scheduler.complete(StepResult(0, (), 0.0, "broken"))
        assert [sequence.id for sequence in failed] == [seq for seq in self.in_step if seq not in self.cancelled]
        for sequence in failed:
            assert sequence.finish == "failed"
            self.cancelled.add(sequence.id)
            del self.live[sequence.id]

    @precondition(lambda self: any(s.phase is Phase.PARKED for s in self.live.values()))
    @rule(data=st.data())
    def unpark(self, data: st.DataObject) -> None:
        parked = [seq for seq, sequence in self.live.items() if sequence.phase is Phase.PARKED]
        self.scheduler.unpark(data.draw(st.sampled_from(parked)))

    @rule()
    def fetch(self) -> None:
        """What was admitted gets its prompt's KV, as another rank would have computed it."""
        for sequence in self.scheduler.take_admitted():
            prompt = self.prompts[sequence.id]
            states = feed(prompt)
            for index in range(-(-len(prompt) // SIZE)):
                block = bytearray(self.engine.spec.block_bytes)
                for slot, state in enumerate(states[index * SIZE : (index + 1) * SIZE]):
                    block[slot * 4 : slot * 4 + 4] = state.to_bytes(4, "little")
                self.engine.import_block(sequence.table[index], bytes(block))
            first = sim_generate(prompt, 1, VOCAB)[0]
            if sequence.max_tokens == 1:
                self.scheduler.cancel(sequence.id)
                self.cancelled.add(sequence.id)
                del self.live[sequence.id]
                continue
            self.scheduler.start(sequence.id, first)
            self.produced[sequence.id].append(first)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(list(self.live)))
        assert self.scheduler.cancel(seq)
        self.cancelled.add(seq)
        del self.live[seq]

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.validate()
            assert self.scheduler.kv_tokens <= BLOCKS * SIZE

    @invariant()
    def produced_is_the_reference(self) -> None:
        for seq, tokens in getattr(self, "produced", {}).items():
            assert tokens == sim_generate(self.prompts[seq], len(tokens), VOCAB)[: len(tokens)]

    def teardown(self) -> None:
        """From any state, everything left finishes and all memory comes back."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2000):
            if not self.live:
                break
            for seq, sequence in list(self.live.items()):
                if sequence.phase is Phase.PARKED:
                    self.scheduler.unpark(seq)
                elif sequence.phase is Phase.HELD:
                    self.scheduler.release(seq)
                    del self.live[seq]
            self.fetch()
            self.step()
            while self.clock.due:
                self.engine_answers()
        while self.clock.due:
            self.engine_answers()
        assert not self.live
        assert not len(self.scheduler)
        assert self.scheduler.pool.held == self.scheduler.running == self.scheduler.waiting_tokens == 0
        for seq, finish in self.finished.items():
            assert finish == "length"
            assert self.produced[seq]


SchedulerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestScheduler = SchedulerMachine.TestCase

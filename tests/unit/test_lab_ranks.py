"""Virtual ranks: runs of decode or prompt steps done at once equal the same steps done one by one."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable

import pytest

from bus.wire.messages import Load
from nodes.own.engines.base import StepResult
from nodes.own.engines.timing import SimTiming
from nodes.own.scheduler import Scheduler
from nodes.own.sequence import Sequence
from pdbus.lab.clock import VirtualLoop
from pdbus.lab.pool import RunPool
from pdbus.lab.rank import VirtualRank
from pdbus.lab.scheduler import NO_TOKEN, DecodeRun, LabScheduler

TIMING = SimTiming()


class Trial:
    """One rank fed at random times; `stepwise` takes the shortcut away."""

    def __init__(self, seed: int, *, stepwise: bool, mixed: bool) -> None:
        self.loop = VirtualLoop()
        self.ended: dict[int, float] = {}
        self.loads: list[Load] = []
        self.rank = VirtualRank(
            self.loop,
            ("decode", 0),
            blocks=120,
            block_tokens=16,
            max_running=6,
            chunk_tokens=64,
            timing=TIMING,
            on_output=lambda seq: self.ended.__setitem__(seq, self.loop.now),
            on_admitted=lambda sequence: self.loop.call_later(0.0123, self.rank.fetched, sequence.id) and None,
        )
        if stepwise:
            self.rank.scheduler.decode_run = lambda timing, now: None  # type: ignore[method-assign]
        rng = random.Random(seed)
        at = 0.0
        for number in range(60):
            at += rng.expovariate(8.0)
            imported = not mixed or rng.random() < 0.5
            hashes: list[int] = []
            leg = Sequence(number, range(rng.randint(1, 300)), rng.randint(2, 120), imported=imported, hashes=hashes)
            self.loop.call_at(at, self.rank.ingest, leg, 1, len(leg.prompt))
            if imported:
                self.loop.call_at(at + rng.random() / 5, self.rank.kv_ready, number)
            self.loop.call_at(at + 0.037, self._look)
        self.loop.run(lambda now: len(self.ended) == 60)
        self.rank.scheduler.validate()

    def _look(self) -> None:
        self.loads.append(self.rank.load())


@pytest.mark.parametrize("mixed", [False, True], ids=["decode", "unified"])
@pytest.mark.parametrize("seed", range(8))
def test_runs_equal_single_steps(seed: int, mixed: bool) -> None:
    fast, slow = Trial(seed, stepwise=False, mixed=mixed), Trial(seed, stepwise=True, mixed=mixed)
    assert list(fast.ended) == list(slow.ended)
    for number, at_s in slow.ended.items():
        assert fast.ended[number] == pytest.approx(at_s, abs=1e-7)
    assert fast.rank.scheduler.step == slow.rank.scheduler.step
    assert fast.rank.scheduler.busy_us_total == pytest.approx(slow.rank.scheduler.busy_us_total, rel=1e-4)
    for mine, theirs in zip(fast.loads, slow.loads, strict=True):
        assert (mine.running, mine.waiting, mine.waiting_tokens) == (
            theirs.running,
            theirs.waiting,
            theirs.waiting_tokens,
        )
        assert mine.kv_tokens == theirs.kv_tokens
        assert mine.acks == theirs.acks


class Prompts:
    """A prefill rank fed at random times, of which somebody looks at load and cache, and requests free what it holds;
    `stepwise` takes the shortcut away."""

    def __init__(self, seed: int, *, stepwise: bool, blocks: int) -> None:
        self.loop = VirtualLoop()
        self.ended: list[tuple[int, float, int]] = []
        self.seen: list[object] = []
        self.rank = VirtualRank(
            self.loop, ("prefill", 0), blocks=blocks, block_tokens=16, max_running=3, chunk_tokens=64, timing=TIMING,
            on_output=self._ended, on_admitted=self._admitted,
        )  # fmt: skip
        if stepwise:
            self.rank.scheduler.prompt_run = lambda timing, now: None  # type: ignore[method-assign]
        self.lacks: dict[int, int] = {}
        rng, at = random.Random(seed), 0.0
        for number in range(60):
            at += rng.expovariate(9.0)
            family, blocks_of = rng.randrange(6), rng.randint(1, 60)
            hashes = array("Q", [1 + family * 1_000 + n // 3 * (n if n > 40 else 1) for n in range(blocks_of)])
            leg = Sequence(number, range(16 * blocks_of + rng.randint(1, 16)), 1, hold=True, hashes=hashes)
            self.lacks[number] = rng.choice([0, 0, 0, 16 * blocks_of])
            self.loop.call_at(at, self.rank.ingest, leg, 1, len(leg.prompt), self.lacks[number])
            self.loop.call_at(at + rng.random() / 3, self._look, hashes)
        self.loop.run(lambda now: False)
        assert len(self.ended) == 60
        self.rank.scheduler.validate()

    def _look(self, hashes: array[int]) -> None:
        load = self.rank.load()
        self.seen.append((load, self.rank.pool.cached_tokens(hashes)))

    def _admitted(self, sequence: Sequence) -> None:
        self.loop.call_later(0.03, self.rank.compute, sequence.id, self.lacks[sequence.id] - sequence.cached_tokens)

    def _ended(self, seq: int) -> None:
        self.ended.append((seq, self.loop.now, self.rank.scheduler.sequence(seq).cached_tokens))
        self.loop.call_later(0.021, self.rank.release, seq)


@pytest.mark.parametrize("blocks", [90, 2_000], ids=["prompts wait for memory", "enough memory"])
@pytest.mark.parametrize("seed", range(6))
def test_runs_of_prompt_steps_equal_single_steps(seed: int, blocks: int) -> None:
    fast, slow = Prompts(seed, stepwise=False, blocks=blocks), Prompts(seed, stepwise=True, blocks=blocks)
    assert fast.ended == slow.ended
    assert fast.seen == slow.seen
    assert fast.loop._scheduled < slow.loop._scheduled, "there were runs"


class Plain(Scheduler):
    """The nodes' scheduler over the lab's pool."""

    _commit = LabScheduler._commit


def stepped_with_rows(scheduler: Scheduler) -> tuple[float | None, list[Sequence]]:
    """Do a step as a node does. Return the sequences with a first or a last token."""
    plan = scheduler.plan()
    if plan is None:
        return None, []
    duration_s = TIMING.rows_s(plan.rows)
    tokens = tuple((row.seq, NO_TOKEN) for row in plan.rows if row.params is not None)
    outputs = scheduler.complete(StepResult(plan.number, tokens, duration_s))
    return duration_s, [each for each in outputs if each.finish or len(each.output) == 1 + each.imported]


def stepped(scheduler: Scheduler) -> tuple[float | None, list[Sequence]]:
    assert isinstance(scheduler, LabScheduler)
    duration_s = scheduler.begin_step(TIMING)
    return duration_s, [] if duration_s is None else scheduler.end_step(duration_s)


@pytest.mark.parametrize("chunk_tokens", [1, 24, 64])
@pytest.mark.parametrize("seed", range(4))
def test_steps_without_rows_equal_those_with_rows(seed: int, chunk_tokens: int) -> None:
    def trial(
        kind_of: type[Scheduler], step: Callable[[Scheduler], tuple[float | None, list[Sequence]]]
    ) -> list[object]:
        rng = random.Random(seed)
        scheduler = kind_of(RunPool(150, 16), max_running=6, chunk_tokens=chunk_tokens)
        if isinstance(scheduler, LabScheduler):
            scheduler.first_apart = True
        fetching: list[int] = []
        held: list[int] = []
        seen: list[object] = []
        for number in range(60):
            tokens = rng.choice([1, 15, 16, 40, 64, 300])
            kind = rng.choice(["import", "hold", "unified"])
            hashes = [] if kind == "import" else [*range(1, tokens // 16 + 1)]
            scheduler.add(Sequence(number, range(tokens), rng.randint(1, 40), imported=kind == "import",
                                   hold=kind == "hold", hashes=hashes))  # fmt: skip
            for _ in range(rng.choice([0, 1, 2, 12])):
                fetching += [sequence.id for sequence in scheduler.take_admitted()]
                while fetching and rng.random() < 0.3:
                    scheduler.start(fetching.pop(0), NO_TOKEN)
                while held and rng.random() < 0.3:
                    scheduler.release(held.pop(0))
                scheduler.take_admitted()
                duration_s, outputs = step(scheduler)
                held += [sequence.id for sequence in outputs if sequence.hold]
                scheduler.pool.validate()
                seen.append((duration_s, [(each.id, len(each.output), each.finish) for each in outputs],
                             scheduler.step, scheduler.busy_us_total, scheduler.computed_tokens_total,
                             scheduler.waiting_tokens, scheduler.kv_tokens, scheduler.running,
                             scheduler.pool.cached))  # fmt: skip
        return seen

    assert trial(LabScheduler, stepped) == trial(Plain, stepped_with_rows)


def test_steps_of_a_run() -> None:
    run = DecodeRun(began_s=10.0, rows=2, steps=5, first_s=1.0, growth_s=0.5)
    ends, at = [], 10.0
    for step in range(5):
        at += 1.0 + 0.5 * step
        ends.append(at)
    assert [run.ends_s(n + 1) for n in range(5)] == pytest.approx(ends)
    assert [run.done(now) for now in (10.0, 10.99, 11.0, 12.49, 12.5, 99.0)] == [0, 0, 1, 1, 2, 4]


def test_reports_before_ingest_are_blind_to_what_arrived_during_the_step() -> None:
    loop = VirtualLoop()
    rank = VirtualRank(
        loop, ("prefill", 0), blocks=100, block_tokens=16, max_running=4, chunk_tokens=64, timing=TIMING,
        on_output=lambda seq: None, on_admitted=lambda sequence: None,
    )  # fmt: skip
    seen: list[tuple[int, int]] = []

    def look() -> None:
        seen.append((rank.load(before_ingest=True).waiting_tokens, rank.load().waiting_tokens))

    loop.call_at(0.0, rank.ingest, Sequence(1, range(200), 1, hold=True, hashes=[]), 1, 200)
    loop.call_at(0.001, rank.ingest, Sequence(2, range(50), 1, hold=True, hashes=[]), 1, 50)
    loop.call_at(0.002, look)  # during the first step
    loop.call_at(TIMING.step_s(64, 0, 0) + 0.001, look)  # during the second
    loop.run(lambda now: len(seen) == 2)
    assert seen == [(200, 250), (186, 186)]


def test_who_comes_during_a_step_takes_part_in_the_next_one() -> None:
    loop, first = VirtualLoop(), []
    rank = VirtualRank(
        loop, ("decode", 0), blocks=100, block_tokens=16, max_running=4, chunk_tokens=64, timing=TIMING,
        on_output=lambda seq: None, on_admitted=lambda sequence: rank.fetched(sequence.id),
        on_first=lambda sequence: first.append((sequence.id, loop.now)),
    )  # fmt: skip
    for number, at_s in ((1, 0.0), (2, 0.004)):
        leg = Sequence(number, range(160), 50, imported=True, hashes=array("Q", range(10 * number, 10 * number + 13)))
        loop.call_at(at_s, rank.ingest, leg, 1, 160)
        loop.call_at(at_s, rank.kv_ready, number)
    loop.run(lambda now: len(first) == 2)
    one_s = TIMING.step_s(0, 1, 160)
    assert first == [(1, one_s), (2, one_s + TIMING.step_s(0, 2, 321))]

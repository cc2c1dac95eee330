"""Reports made when somebody looks equal reports made each at its time; and how far a decode run is."""

from __future__ import annotations

import dataclasses
import random

import pytest
from msgspec.structs import replace

from bus.wire.messages import Load
from nodes.own.engines.timing import SimTiming
from nodes.own.sequence import Sequence
from pdbus.lab.choosers import METHODS, BaseChooser
from pdbus.lab.clock import VirtualLoop
from pdbus.lab.config import LabConfig
from pdbus.lab.generator import generate
from pdbus.lab.rank import VirtualRank
from pdbus.lab.reports import Listener, Reports
from pdbus.lab.scheduler import DecodeRun
from pdbus.lab.simulate import simulate

INTERVAL_S, DELAY_S, LOSS, READERS = 0.05, 0.12, 0.3, 2


class AtOnce:
    """The plain way: an event for each report, one more for its arrival."""

    def __init__(self, loop: VirtualLoop, rank: VirtualRank, rng: random.Random, *, before_ingest: bool) -> None:
        self._loop, self._rank, self._rng, self._before_ingest = loop, rank, rng, before_ingest
        self.come: list[tuple[float, Load] | None] = [None] * READERS
        loop.call_later(rng.random() * INTERVAL_S, self._each)

    def _each(self) -> None:
        self.report_now()
        self._loop.call_later(INTERVAL_S, self._each)

    def report_now(self) -> None:
        load = self._rank.load(before_ingest=self._before_ingest)
        for reader in range(READERS):
            if self._rng.random() >= LOSS:
                self._loop.call_later(DELAY_S, self._arrive, reader, load)

    def _arrive(self, reader: int, load: Load) -> None:
        self.come[reader] = self._loop.now, load

    def last(self, reader: int) -> tuple[float, Load] | None:
        found, self.come[reader] = self.come[reader], None
        return found


@pytest.mark.parametrize("before_ingest", [False, True])
@pytest.mark.parametrize("imported", [False, True], ids=["prefill", "decode"])
@pytest.mark.parametrize("seed", range(5))
def test_what_a_reader_finds_is_what_events_would_have_brought(seed: int, imported: bool, before_ingest: bool) -> None:
    loop = VirtualLoop()
    ended: list[int] = []
    rank = VirtualRank(
        loop, ("decode", 0), blocks=120, block_tokens=16, max_running=6, chunk_tokens=64, timing=SimTiming(),
        on_output=ended.append,
        on_admitted=lambda sequence: loop.call_later(0.0123, rank.fetched, sequence.id) and None,
    )  # fmt: skip
    lazy = Reports(loop, rank, random.Random(seed), READERS, interval_s=INTERVAL_S, delay_s=DELAY_S, loss=LOSS,
                   before_ingest=before_ingest)  # fmt: skip
    plain = AtOnce(loop, rank, random.Random(seed), before_ingest=before_ingest)
    rank.step_counted = lazy.report
    rank.steps_taken.append(plain.report_now)
    numbers: list[list[int]] = [[] for _ in range(READERS)]
    found = 0

    def look(reader: int) -> None:
        nonlocal found
        mine, theirs = lazy.last(reader), plain.last(reader)
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert mine[0] == pytest.approx(theirs[0], abs=1e-9)
            assert replace(mine[1], seq=0) == theirs[1]
            numbers[reader].append(mine[1].seq)
            found += 1

    rng = random.Random(seed)
    at = 0.0
    for number in range(60):
        at += rng.expovariate(6.0)
        leg = Sequence(number, range(rng.randint(1, 300)), rng.randint(2, 120), imported=imported, hashes=[])
        loop.call_at(at, rank.ingest, leg, 1, len(leg.prompt))
        if imported:
            loop.call_at(at + rng.random() / 5, rank.kv_ready, number)
        for _ in range(3):
            loop.call_at(at + rng.random() * 2, look, rng.randrange(READERS))
    loop.run(lambda now: len(ended) == 60)
    assert found > 60
    assert all(each == sorted(set(each)) for each in numbers), "a later report has a greater number"


@pytest.mark.parametrize("before_ingest", [False, True])
@pytest.mark.parametrize("loss", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(4))
def test_reports_of_a_run_of_prompt_steps_are_those_of_single_steps(
    seed: int, loss: float, before_ingest: bool
) -> None:
    def read(*, stepwise: bool) -> list[tuple[float, Load] | None]:
        loop, ended = VirtualLoop(), 0

        def end(seq: int) -> None:
            nonlocal ended
            ended += 1
            rank.release(seq)

        rank = VirtualRank(
            loop, ("prefill", 0), blocks=900, block_tokens=16, max_running=6, chunk_tokens=64, timing=SimTiming(),
            on_output=end, on_admitted=lambda sequence: None,
        )  # fmt: skip
        if stepwise:
            rank.steps_taken.append(lambda: None)
        reports = Reports(loop, rank, random.Random(seed), READERS, interval_s=INTERVAL_S, delay_s=0.004, loss=loss,
                          before_ingest=before_ingest)  # fmt: skip
        rank.step_counted = reports.report
        found: list[tuple[float, Load] | None] = []
        rng, at = random.Random(seed), 0.0
        for number in range(40):
            at += rng.expovariate(9.0)
            leg = Sequence(number, range(rng.randint(1, 900)), 1, hold=True, hashes=[])
            loop.call_at(at, rank.ingest, leg, 1, len(leg.prompt))
            for _ in range(4):
                loop.call_at(at + rng.random() / 2, lambda: found.append(reports.last(rng.randrange(READERS))))
        loop.run(lambda now: ended == 40)
        return found

    assert read(stepwise=False) == read(stepwise=True)


def test_a_listener_reads_before_it_decides_and_knows_when_to_ask_again() -> None:
    heard: list[tuple[int, float]] = []

    class Chooser(BaseChooser):
        def pick(self, request: object, now: float, read: int = 0) -> int:
            return len(heard)

        def report(self, dp_rank: int, load: Load, now: float) -> None:
            heard.append((dp_rank, now))

    loop = VirtualLoop()
    ranks = [
        VirtualRank(loop, ("prefill", n), blocks=9, block_tokens=16, max_running=4, chunk_tokens=64,
                    timing=SimTiming(), on_output=lambda seq: None, on_admitted=lambda sequence: None)
        for n in range(2)
    ]  # fmt: skip
    reports = [
        Reports(loop, rank, random.Random(n), 1, interval_s=100.0, delay_s=2.0, loss=0.0, before_ingest=False)
        for n, rank in enumerate(ranks)
    ]
    listener = Listener(Chooser(), 0, reports)
    assert listener.next_s() > 2.0
    picked: list[int] = []
    loop.call_at(1.0, reports[1].report, 1.0)
    loop.call_at(1.0, lambda: picked.append(listener.next_s()))
    for at_s in (2.9, 3.0, 3.1):
        loop.call_at(at_s, lambda: picked.append(listener.pick(None, loop.now)))  # type: ignore[arg-type]
    loop.run(lambda now: len(picked) == 4)
    assert picked == [3.0, 0, 1, 1]
    assert heard == [(1, 3.0)]
    assert Listener(Chooser(), 0, []).next_s() == float("inf")


@pytest.mark.parametrize("growth_s", [0.0, 1e-9, 0.003])
def test_steps_done_are_those_that_have_ended(growth_s: float) -> None:
    run = DecodeRun(began_s=5.0, rows=3, steps=200, first_s=0.0101, growth_s=growth_s)
    times = [4.0, 5.0, *(run.ends_s(n) + by for n in range(1, 202, 7) for by in (-1e-6, 0.0, 1e-6)), 1e9]
    for now in times:
        assert run.done(now) == sum(run.ends_s(n) <= now for n in range(1, run.steps))
    assert DecodeRun(5.0, 1, 7, 0.0, 0.0).done(5.0) == 6


@pytest.mark.parametrize("method", ["round_robin", "follow_bootstrap_room", "oracle"])
def test_a_method_that_looks_at_no_load_chooses_the_same_without_reports(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, config = generate(60, seed=1), LabConfig(ranks=3, decode_ranks=3, controllers=2, report_loss=0.1)
    without = simulate(trace, method, config)
    monkeypatch.setitem(METHODS, method, dataclasses.replace(METHODS[method], watches=True))
    assert repr(simulate(trace, method, config)) == repr(without), "NaN is not equal to itself"

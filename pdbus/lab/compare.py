"""Runs several replays (simulations of a trace), several at a time in processes of their own. Owns the division of
work, nothing of a run."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from bus.errors import BusError
from pdbus.explore.facts import RunFacts
from pdbus.lab.config import LabConfig
from pdbus.lab.metrics import Summary, summarise, ttfts
from pdbus.lab.outcome import Outcome
from pdbus.lab.simulate import simulate
from pdbus.lab.tape import Tape
from pdbus.lab.traces import Trace


@dataclass(frozen=True, slots=True)
class Run:
    """One replay to make: one method on one trace; its seed is the config's. A `tape` records a run that is made
    alone. `journaled`: its result has its decisions."""

    trace: Trace
    method: str
    config: LabConfig
    tape: Tape | None = None
    journaled: bool = False

    def __str__(self) -> str:
        return f"{row_of(self.method, self.config)} seed {self.config.seed}"


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one run, for tables and plots: sorted TTFTs (s), and queued tokens by sample and rank; `facts` for
    a page, where they were wanted."""

    method: str
    seed: int
    summary: Summary
    ttfts: list[float]
    sample_s: float
    load: list[list[int]]
    line: str = ""  # `method` without the number of sessions under way, for plots over that
    concurrency: int = 0  # sessions under way; 0: they started at their times
    facts: RunFacts | None = None


def row_of(method: str, config: LabConfig) -> str:
    """Return the name of a method's row in tables, with the order of the queue unless that is the order of arrival, and
    with the number of sessions under way where that is fixed (`c16`)."""
    order = "" if config.queue_order == "arrival" else f" {config.queue_order}"
    return f"{method}{order}" + (f" c{config.concurrency}" if config.concurrency else "")


def result_of(outcome: Outcome, config: LabConfig, kind: str = "") -> Result:
    """Return the result of a run that gave `outcome`, under its method's row name with `kind` behind it."""
    load = [list(row) for row in outcome.load]
    summary = summarise(outcome, config)
    name, line = (row_of(outcome.method, each) + kind for each in (config, replace(config, concurrency=0)))
    return Result(
        name,
        config.seed,
        summary,
        ttfts(outcome),
        outcome.sample_s,
        load,
        line=line,
        concurrency=config.concurrency,
        facts=outcome.facts,
    )


def compare(
    runs: Sequence[Run], *, jobs: int = 1, on_share: Callable[[int, float], None] = lambda number, share: None
) -> list[Result]:
    """Make all `runs` and return their results in the same order. With `jobs` above 1, so many processes run at a time;
    otherwise this thread does. It blocks until all are done. Raises a run's ConfigError, and BusError if a process
    dies; the others are stopped then.

    `on_share(number, share)` is called in this thread with the progress of each run; 1 is its end.
    """
    if jobs <= 1 or len(runs) == 1:
        results = {}
        for number, run in enumerate(runs):
            results[number] = _replay(run, partial(on_share, number))
            on_share(number, 1.0)
    else:
        results = dict(_side_by_side(runs, jobs, on_share))
    return [results[number] for number in range(len(runs))]


def _replay(run: Run, on_share: Callable[[float], None]) -> Result:
    return result_of(simulate(run.trace, run.method, run.config, on_share, run.tape, run.journaled), run.config)


@dataclass(slots=True)
class _Worker:
    process: SpawnProcess
    number: int = -1  # the run that it works on
    trace: Trace | None = None  # the trace that it has


def _side_by_side(
    runs: Sequence[Run], jobs: int, on_share: Callable[[int, float], None]
) -> Iterator[tuple[int, Result]]:
    """Yield each result as it comes, from `jobs` processes, which end with this generator."""
    context = multiprocessing.get_context("spawn")
    left = iter(enumerate(runs))
    workers: dict[Any, _Worker] = {}  # by the connection to it
    try:
        for _ in range(min(jobs, len(runs))):
            here, there = context.Pipe()
            with _interrupt_kept_from_children():
                process = context.Process(target=_serve, args=(there,))
                process.start()
                workers[here] = _Worker(process)
            there.close()
        for connection, worker in workers.items():  # after all of them have begun their imports
            _give(connection, worker, *next(left))
        while workers:
            ready: Any
            for ready in wait(list(workers)):
                worker = workers[ready]
                answer = _answer(ready, runs[worker.number])
                if isinstance(answer, float):
                    on_share(worker.number, answer)
                    continue
                on_share(worker.number, 1.0)
                yield worker.number, answer
                following = next(left, None)
                if following is not None:
                    _give(ready, worker, *following)
                else:
                    del workers[ready]
                    ready.close()
                    worker.process.join()
    finally:
        for worker in workers.values():
            worker.process.terminate()
        for connection, worker in workers.items():
            worker.process.join()
            connection.close()


def _give(connection: Any, worker: _Worker, number: int, run: Run) -> None:
    worker.number = number
    with suppress(BrokenPipeError, ConnectionResetError):  # it has died; its missing answer raises the error
        connection.send((run.trace if run.trace is not worker.trace else None, run.method, run.config, run.journaled))
    worker.trace = run.trace


def _serve(connection: Connection) -> None:
    """Run what the connection brings until it closes. Sends shares done, then a Result or an error."""
    trace: Any = None
    with suppress(EOFError):
        while True:
            fresh, method, config, journaled = connection.recv()
            trace = fresh or trace
            try:
                connection.send(_replay(Run(trace, method, config, journaled=journaled), connection.send))
            except BusError as error:
                connection.send(error)


def _answer(connection: Any, run: Run) -> float | Result:
    try:
        answer = connection.recv()
    except (EOFError, ConnectionResetError):
        raise BusError(f"the process that replayed {run.method} ended without a result") from None
    if isinstance(answer, BusError):
        raise answer
    assert isinstance(answer, float | Result)
    return answer


@contextmanager
def _interrupt_kept_from_children() -> Iterator[None]:
    """Start processes that never see SIGINT. A terminal sends Ctrl-C to all of them, but only this process acts on it,
    at the end of the block; the others would print tracebacks."""
    resource_tracker.ensure_running()  # it unblocks SIGINT for this thread when it starts
    struck: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, lambda number, frame: struck.append(number)) if main else None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which children inherit
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if main:
            signal.signal(signal.SIGINT, handler)
        if struck:
            signal.raise_signal(signal.SIGINT)

"""Several methods on one trace, side by side in processes of their own. Owns the division of work, nothing of a run."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from bus.errors import BusError
from pdbus.lab.config import LabConfig
from pdbus.lab.metrics import Summary, summarise, ttfts
from pdbus.lab.simulate import Outcome, simulate
from pdbus.lab.traces import Trace


@dataclass(frozen=True, slots=True)
class Result:
    """What tables and plots need of one run: TTFTs sorted (s), tokens queued by sample and rank."""

    method: str
    summary: Summary
    ttfts: list[float]
    sample_s: float
    load: list[list[int]]


def replay(trace: Trace, method: str, config: LabConfig) -> Result:
    """One method, in this process."""
    return result_of(simulate(trace, method, config), config)


def result_of(outcome: Outcome, config: LabConfig, name: str = "") -> Result:
    """`outcome` summed up, under its method's name or another one."""
    load = [list(row) for row in outcome.load]
    return Result(name or outcome.method, summarise(outcome, config), ttfts(outcome), outcome.sample_s, load)


def compare(
    trace: Trace, methods: Sequence[str], config: LabConfig, *, jobs: int = 1, on_done: Callable[[str], None] = print
) -> list[Result]:
    """Each of `methods`, in the order given, up to `jobs` at a time. A run's own ConfigError comes through."""
    results: dict[str, Result] = {}
    if jobs <= 1 or len(methods) == 1:
        for method in methods:
            results[method] = replay(trace, method, config)
            on_done(method)
    else:
        for method, result in _side_by_side(trace, methods, config, jobs):
            results[method] = result
            on_done(method)
    return [results[method] for method in methods]


def _side_by_side(trace: Trace, methods: Sequence[str], config: LabConfig, jobs: int) -> Iterator[tuple[str, Result]]:
    """Each result as it comes, from up to `jobs` processes at a time. Whatever ends this ends them."""
    context = multiprocessing.get_context("spawn")
    left = list(methods)
    running: dict[Any, tuple[str, SpawnProcess]] = {}  # by the connection to it
    try:
        while left or running:
            started = []
            while left and len(running) < jobs:
                here, there = context.Pipe()
                process = context.Process(target=_serve, args=(there, left[0], config))
                with _interrupt_kept_from_children():
                    process.start()
                    running[here] = left.pop(0), process
                there.close()
                started.append(here)
            for here in started:  # when all of them have begun to import what they need
                with suppress(BrokenPipeError, ConnectionResetError):  # it has died, as its missing answer will tell
                    here.send(trace)
            come: list[Any] = wait(list(running))
            for ready in come:
                method, process = running[ready]
                yield method, _answer(ready, method)
                del running[ready]
                ready.close()
                process.join()
    finally:
        for _, process in running.values():
            process.terminate()
        for connection, (_, process) in running.items():
            process.join()
            connection.close()


def _serve(connection: Connection, method: str, config: LabConfig) -> None:
    try:
        connection.send(replay(connection.recv(), method, config))
    except BusError as error:
        connection.send(error)


def _answer(connection: Any, method: str) -> Result:
    try:
        answer = connection.recv()
    except (EOFError, ConnectionResetError):
        raise BusError(f"the process that replayed {method} ended without a result") from None
    if isinstance(answer, BusError):
        raise answer
    assert isinstance(answer, Result)
    return answer


@contextmanager
def _interrupt_kept_from_children() -> Iterator[None]:
    """Processes started meanwhile never see SIGINT: Ctrl-C, which a terminal sends to all of them, is this process's
    to act on (as soon as this ends), and they would only print their tracebacks."""
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

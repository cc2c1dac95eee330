"""Several methods on one trace, side by side in processes of their own. Owns the division of work, nothing of a run."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

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
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(jobs, len(methods)), mp_context=context) as pool:
            futures = {pool.submit(replay, trace, method, config): method for method in methods}
            try:
                for future in as_completed(futures):
                    results[futures[future]] = future.result()
                    on_done(futures[future])
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    return [results[method] for method in methods]

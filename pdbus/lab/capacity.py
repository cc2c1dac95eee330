"""The capacity of prefill ranks, and the stretching of a trace to a share of it. Owns the definition of `--load`.

A load of 1 means: computing every prompt from its first token, without cache hits and in full chunks, keeps all prefill
ranks busy all the time. Cache hits reduce the real work, so a method with hits has capacity left.
"""

from __future__ import annotations

from nodes.own.engines.timing import SimTiming
from pdbus.lab.config import LabConfig
from pdbus.lab.traces import Trace


def prefill_s(prompt_tokens: int, chunk_tokens: int, timing: SimTiming) -> float:
    """Return the seconds that a prompt without cache hits keeps a rank busy. `chunk_tokens` is the maximum of prompt
    tokens in a step; a step that is not full counts by its share."""
    chunks = prompt_tokens / chunk_tokens
    context = chunk_tokens * chunks * max(0.0, chunks - 1) / 2
    return (
        (timing.base_s + timing.batched_s) * chunks
        + timing.per_prefill_token_s * prompt_tokens
        + timing.per_context_token_s * context
    )


def offered_load(trace: Trace, config: LabConfig) -> float:
    """Return the load (1: all busy) of the trace, at its own times, on `config.ranks` prefill ranks."""
    work_s = sum(prefill_s(r.prompt_tokens, config.chunk_tokens, config.timing) for r in trace.requests)
    return work_s / (config.ranks * trace.duration_s)


def stretch(trace: Trace, config: LabConfig) -> Trace:
    """Return `trace` with its first arrival at 0, coarse timestamps spread, and the time between arrivals multiplied so
    that the load is `config.load`; 0 keeps the trace's times."""
    spread = trace.spread(config.seed)
    return spread.scaled(offered_load(spread, config) / config.load if config.load else 1.0)

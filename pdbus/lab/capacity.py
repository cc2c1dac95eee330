"""What ranks can do, and how a trace is stretched to a share of it. Owns the definition of `--load`.

A load of 1 means: computing every prompt from its first token, with no cache hit, in full chunks, keeps all prefill
ranks busy all the time. Cache hits lower the work that is really done, so a method that finds them has room to spare.
"""

from __future__ import annotations

from nodes.own.engines.timing import SimTiming
from pdbus.lab.config import LabConfig
from pdbus.lab.traces import Trace


def prefill_s(prompt_tokens: int, chunk_tokens: int, timing: SimTiming) -> float:
    """Seconds that a prompt keeps a rank busy, its share of the steps' fixed cost included."""
    chunks = prompt_tokens / chunk_tokens
    context = chunk_tokens * chunks * max(0.0, chunks - 1) / 2
    return (
        (timing.base_s + timing.batched_s) * chunks
        + timing.per_prefill_token_s * prompt_tokens
        + timing.per_context_token_s * context
    )


def offered_load(trace: Trace, config: LabConfig) -> float:
    """The trace's own load on `config.ranks` prefill ranks."""
    work_s = sum(prefill_s(r.prompt_tokens, config.chunk_tokens, config.timing) for r in trace.requests)
    return work_s / (config.ranks * trace.duration_s)


def stretch(trace: Trace, config: LabConfig) -> Trace:
    """`trace` from second 0 on, its coarse timestamps spread, its time stretched to `config.load`."""
    spread = trace.spread(config.seed)
    return spread.scaled(offered_load(spread, config) / config.load if config.load else 1.0)

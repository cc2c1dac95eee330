"""The capacity of the ranks that compute prompts (prefill and unified ones), and the stretching of a trace to a share
of it. Owns the definition of `--load`.

A load of 1 means: computing every prompt from its first token, without cache hits and in full chunks, keeps all of
them busy all the time. Cache hits reduce the real work, so a method with hits has capacity left.
"""

from __future__ import annotations

from bus.errors import ConfigError
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
    """Return the trace's own load on the ranks that compute prompts: its work over the time in which sessions
    start."""
    work_s = sum(prefill_s(r.prompt_tokens, config.chunk_tokens, config.timing) for r in trace.requests)
    return work_s / (config.prompt_ranks * _starting_s(trace))


def stretch(trace: Trace, config: LabConfig) -> Trace:
    """Return `trace` from second 0 on, with coarse timestamps spread and its time stretched to `config.load` or
    `config.rate`. With `config.concurrency` no time counts: it is returned as it is, sessions without starts in a
    drawn order. Raises ConfigError for a trace without starts of its own that is given none of the three."""
    if config.concurrency:
        return trace if trace.timed else trace.started(config.seed)
    if not trace.timed:
        if not (config.load or config.rate):
            raise ConfigError(
                f"{trace.name} does not say when its sessions began: give --load, --rate or --concurrency"
            )
        trace = trace.started(config.seed)
    spread = trace.spread(config.seed)
    if config.rate:
        return spread.scaled((len(spread.starts_s) - 1) / config.rate / _starting_s(spread))
    return spread.scaled(offered_load(spread, config) / config.load if config.load else 1.0)


def _starting_s(trace: Trace) -> float:
    """Return the seconds from the first start of a session to the last. Raises ConfigError for a single session."""
    starts = list(trace.starts_s.values())
    if starts[0] == starts[-1]:
        why = f"all sessions of {trace.name} begin at one time, so that nothing can be stretched"
        raise ConfigError(f"{why}: give --concurrency")
    return starts[-1] - starts[0]

"""Compares a live run with its replay: a short generated trace on one prefill and one decode rank of an engine, and the
same trace in virtual time (the simulator of `pdbus.lab`) with the measured timing. Owns the trace and the figures that
are compared."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from statistics import linear_regression, median

from bus.errors import ConfigError
from pdbus.client import Client
from pdbus.lab.capacity import prefill_s
from pdbus.lab.config import LabConfig
from pdbus.lab.live import make_prompt, replay_on
from pdbus.lab.metrics import summarise
from pdbus.lab.simulate import simulate
from pdbus.lab.traces import Trace, TraceRequest
from pdbus.launcher import Cluster, ClusterSpec

Progress = Callable[[str], None]
METHOD = "total_tokens"
LONE = 5  # requests measured one at a time, for each length
LOAD = 0.5  # the load of the busier rank
BLOCK_TOKENS = 16  # block size of the trace; nothing of it is cached
FIELDS = {
    "mean time to first token": "ttft_mean_s",
    "median time to first token": "ttft_p50_s",
    "mean time per output token": "tpot_mean_s",
}


@dataclass(frozen=True, slots=True)
class Agreement:
    """The result: by name of a figure its live and its replayed value in seconds (means and medians over all requests),
    the measured hand-over of a KV cache in seconds per prompt token, and the number of requests."""

    figures: dict[str, tuple[float, float]]
    kv_fetch_token_s: float
    requests: int

    @property
    def worst(self) -> float:
        """The greatest difference of a figure as a share of its live value: 0.1 is 10 %."""
        return max(abs(replayed / live - 1.0) for live, replayed in self.figures.values())


def check(spec: ClusterSpec, config: LabConfig, longest: int, duration_s: float, progress: Progress) -> Agreement:
    """Start a cluster by `spec`, run a generated trace of `duration_s` seconds on it, replay it in virtual time, and
    return the figures of both. `config` has the timing and the ranks' capacities, `longest` is the longest prompt in
    tokens. It blocks all that time; `progress` gets lines to show. Raises StartError from the cluster, ConfigError as
    `made_up` does."""
    config = replace(config, cache_blocks=config.decode_kv_tokens // BLOCK_TOKENS)
    with Cluster(spec, progress) as cluster, cluster.client() as client:
        progress("measuring the hand-over of a KV cache")
        config = replace(config, kv_fetch_token_s=_fetch_token_s(client, config, longest))
        trace = made_up(config, longest, duration_s)
        live = summarise(replay_on(cluster, trace, METHOD, config, progress), config)
    replayed = summarise(simulate(trace, METHOD, config), config)
    figures = {name: (getattr(live, field), getattr(replayed, field)) for name, field in FIELDS.items()}
    return Agreement(figures, config.kv_fetch_token_s, len(trace))


def made_up(config: LabConfig, longest: int, duration_s: float) -> Trace:
    """Return a generated trace of `duration_s` seconds without shared prefixes, with arrivals so far apart that the
    busier rank has a load of LOAD by `config.timing`. Prompts have `longest` tokens at most. Raises ConfigError if it
    would have fewer than 20 requests, because the engine is too slow."""
    rng = Random(config.seed)
    timing, chunk = config.timing, config.chunk_tokens

    def length(mid: float, most: int) -> int:
        return min(most, max(4, round(rng.lognormvariate(math.log(mid), 0.5))))

    lengths = [(length(longest / 4, longest), length(24, 64)) for _ in range(5000)]
    prefill = sum(prefill_s(prompt, chunk, timing) for prompt, _ in lengths) / len(lengths)
    outputs = sum(output for _, output in lengths) / len(lengths)
    together = 4  # requests that decode together share the fixed cost of a step
    decode = outputs * timing.step_s(0, together, together * longest // 4) / together
    gap_s = max(prefill, decode) / LOAD
    requests: list[TraceRequest] = []
    at = 0.0
    for prompt, output in lengths:
        at += rng.expovariate(1 / gap_s)
        if at > duration_s:
            break
        requests.append(TraceRequest(at, prompt, output))
    if len(requests) < 20:
        raise ConfigError(
            f"{duration_s:g} s are {len(requests)} requests of this engine: too few to compare; take more"
        )
    return Trace("made up", tuple(requests), BLOCK_TOKENS)


def _fetch_token_s(client: Client, config: LabConfig, longest: int) -> float:
    """Return the hand-over's seconds per prompt token, from requests that run alone: the time to the first token of
    decode, without the decode step and (where decode makes the first token) without the prompt's time. The growth of
    the rest with the prompt is the hand-over."""
    timing = config.timing
    found: list[tuple[float, float]] = []
    for tokens in (longest // 8, longest // 2, longest):
        left: list[float] = []
        for number in range(LONE):
            prompt = make_prompt(TraceRequest(0.0, tokens, 2), tokens, 1_000_000 + tokens * LONE + number)
            began = time.monotonic()
            stream = client.generate_tokens(prompt, max_tokens=2, ignore_eos=True)
            came = [at - began for piece in stream for at in [time.monotonic()] * len(piece.ids)]
            prompt_s = prefill_s(tokens, min(tokens, config.chunk_tokens), timing)
            before = prompt_s if config.first_at_decode else came[0]
            left.append(came[0 if config.first_at_decode else 1] - before - timing.step_s(0, 1, tokens))
        found.append((float(tokens), median(left)))
    return max(0.0, linear_regression([at for at, _ in found], [left for _, left in found]).slope)

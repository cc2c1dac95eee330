"""The figures of a run (one replay of a trace). Owns their definitions; draws and prints nothing.

TTFT: from a request's arrival to its first token at the client. TPOT: seconds a token after the first. SLO attainment:
the share of requests whose TTFT and TPOT both keep the limits. Imbalance: tokens queued at the fullest rank over those
at the mean rank, each summed over all samples (1 is even, the number of ranks is worst). Regret: tokens to be computed
before the request's first token at the rank chosen, beyond those at the rank that would have been best.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pdbus.lab.config import LabConfig
from pdbus.lab.outcome import Outcome

# for 1, 2, ... degrees of freedom
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of one run, as this module defines them; NaN where nothing was measured."""

    ttft_mean_s: float  # time to first token
    ttft_p50_s: float  # half of the requests are at least as quick
    ttft_p99_s: float  # 99 % are
    ttft_p999_s: float  # 99.9 % are
    tpot_mean_s: float  # time per output token after the first
    tpot_p50_s: float  # half of the requests with two tokens or more are at least as quick
    tpot_p99_s: float  # 99 % are
    slo_attainment: float  # share of requests that kept both limits
    imbalance: float  # tokens queued at the fullest rank over those at the mean rank
    cache_hit_rate: float  # share of prompt tokens that were cached
    regret_mean_tokens: float  # tokens to be computed first at the rank chosen, beyond those at the best
    prefill_busy: float  # share of the time that prefill ranks computed
    decode_busy: float  # share of the time that decode ranks computed
    duration_s: float  # until the last request ended
    requests: int = 0  # that count
    requests_per_s: float = math.nan  # arrivals in a second of the time that counts
    goodput_per_s: float = math.nan  # of those, the ones that kept both limits
    output_tokens_per_s: float = math.nan  # generated for them
    unified_busy: float = math.nan  # share of the time that unified ranks computed
    fetch_mean_s: float = math.nan  # from a prompt's end until its KV cache is at the decode rank
    moved_share: float = math.nan  # share of the prompt tokens of pairs whose KV cache moved
    here_share: float = math.nan  # share of the requests whose prompt was computed where they decode
    delta_share: float = math.nan  # share of those of which decode fetched what it lacked
    back_share: float = math.nan  # of those of which prefill first read what decode had, and it lacked
    whole_share: float = math.nan  # of those of which decode fetched all
    read_share: float = math.nan  # share of the prompt tokens of pairs whose KV cache prefill read so
    kept_rate_per_s: float = math.nan  # the highest rate of starts that keeps a wanted share (`pdbus.lab.keep`)
    kept_ratio: float = math.nan  # that over the first method's, with the same requests


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over runs with different seeds, and half the width of its 95 % confidence interval by Student's t. The
    runs are assumed independent and their means normal. The width of a single run is NaN."""

    mean: float
    half_width: float


def estimate(values: Sequence[float]) -> Estimate:
    """Return mean and interval of `values`, one for each run; NaN when any of them is NaN, or without values."""
    count, mean = len(values), _mean(values)
    if count < 2:
        return Estimate(mean, math.nan)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
    return Estimate(mean, student_t(count - 1) * deviation / math.sqrt(count))


def student_t(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's distribution with `freedom` (1 or more) degrees of freedom."""
    if freedom <= len(_T):
        return _T[freedom - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)  # Abramowitz, 26.7.5


def quantile(values: Sequence[float], share: float) -> float:
    """Return the least value that at least `share` of the sorted `values` do not exceed; NaN for no values."""
    if not values:
        return math.nan
    return values[min(len(values) - 1, max(0, math.ceil(share * len(values)) - 1))]


def ttfts(outcome: Outcome) -> list[float]:
    """Return all times to the first token, sorted, in seconds."""
    return sorted(course.first_token_s - course.arrived_s for course in outcome.courses)


def summarise(outcome: Outcome, config: LabConfig) -> Summary:
    """Return the figures of a run; `config` gives the limits of the SLO and the number of ranks."""
    first = ttfts(outcome)
    per_token: list[float] = []
    kept = 0
    for course in outcome.courses:
        output = course.request.output_tokens
        tpot_s = 0.0
        if output > 1 and max(course.decode_rank, course.unified_rank) >= 0:
            tpot_s = (course.finished_s - course.first_token_s) / (output - 1)
            per_token.append(tpot_s)
        ttft_s = course.first_token_s - course.arrived_s
        kept += ttft_s <= config.slo_ttft_s and tpot_s <= config.slo_tpot_s
    per_token.sort()
    prompt = sum(course.request.prompt_tokens for course in outcome.courses)
    cached = sum(course.cached_tokens for course in outcome.courses)
    pairs = [course for course in outcome.courses if course.decode_rank >= 0]
    fetches = [course.fetched_s - course.prefilled_s for course in pairs if course.moved_tokens]
    moved, paired = [course.moved_tokens for course in pairs], sum(course.request.prompt_tokens for course in pairs)
    here = sum(course.prefill_rank < 0 for course in outcome.courses)
    trips = outcome.trips or Counter(course.trip for course in pairs if course.trip is not None)
    known = outcome.trips is None  # what moved for each request
    trips_differ = config.decode_cache and bool(config.decode_ranks)
    seconds = outcome.until_s - outcome.began_s or math.nan
    queued = sum(map(sum, outcome.load))
    fullest = sum(map(max, outcome.load)) * config.prompt_ranks
    return Summary(
        ttft_mean_s=_mean(first),
        ttft_p50_s=quantile(first, 0.5),
        ttft_p99_s=quantile(first, 0.99),
        ttft_p999_s=quantile(first, 0.999),
        tpot_mean_s=_mean(per_token),
        tpot_p50_s=quantile(per_token, 0.5),
        tpot_p99_s=quantile(per_token, 0.99),
        slo_attainment=kept / len(first),
        imbalance=fullest / queued if queued else 1.0,
        cache_hit_rate=cached / prompt if outcome.cache_hit_rate is None else outcome.cache_hit_rate,
        regret_mean_tokens=_mean([float(c.regret_tokens) for c in outcome.courses if c.regret_tokens is not None]),
        prefill_busy=outcome.prefill_busy if config.ranks else math.nan,
        decode_busy=outcome.decode_busy,
        duration_s=outcome.ended_s,
        requests=len(first),
        requests_per_s=len(first) / seconds,
        goodput_per_s=kept / seconds,
        output_tokens_per_s=sum(course.request.output_tokens for course in outcome.courses) / seconds,
        unified_busy=outcome.unified_busy if config.unified_ranks else math.nan,
        fetch_mean_s=_mean(fetches) if config.transfers_differ else math.nan,
        here_share=here / len(first) if config.decode_prefills else math.nan,
        delta_share=trips["delta"] / len(first) if trips_differ else math.nan,
        back_share=trips["read_back"] / len(first) if trips_differ else math.nan,
        whole_share=trips["whole"] / len(first) if trips_differ else math.nan,
        read_share=sum(course.read_tokens for course in pairs) / paired if trips["read_back"] and known else math.nan,
        moved_share=sum(moved) / paired if config.transfers_differ and paired and known else math.nan,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan

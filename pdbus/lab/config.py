"""Settings of one replay (a simulation of a trace). Owns defaults and checks."""

from __future__ import annotations

from dataclasses import dataclass, field

from bus.errors import ConfigError
from bus.wire.messages import MAX_DP_SIZE
from controller.trips import TRIPS
from nodes.own.engines.timing import SimTiming

CACHE_TOKENS = 2_048_000  # KV memory of a prefill rank where nothing else is said


@dataclass(frozen=True, slots=True)
class LabConfig:
    """The simulated cluster, and the delays and losses of its messages. Times in seconds, sizes in tokens or blocks.
    Raises ConfigError for invalid values.

    The time between the starts of sessions (of requests, where there are none) is stretched until the prompts, without
    cache hits, would keep prefill and unified ranks busy for the share `load` of the time; 0 keeps the trace's own
    times. With `rate` that many start in a second instead, and with `concurrency` the next one starts when another has
    ended.
    """

    ranks: int = 8  # prefill ranks
    decode_ranks: int = 8  # 0: simulate prefill alone
    unified_ranks: int = 0  # ranks that do both
    unified_share: float = 0.0  # of sessions, that unified ranks run beside pairs; 0: the share of ranks that they are
    load: float = 0.9
    rate: float = 0.0  # sessions that start in a second; 0: as `load` says
    concurrency: int = 0  # sessions under way; 0: they start at their times
    warm_up_s: float = 0.0  # requests that arrive before are in no figure
    end_s: float = 0.0  # requests that arrive later are in no figure; the run ends with those that are; 0: no limit
    end_requests: int = 0  # the same for all but the first so many since the warm-up; 0: no limit
    cache_blocks: int = 0  # KV memory of a prefill rank, in blocks of the trace; 0: CACHE_TOKENS
    decode_kv_tokens: int = 400_000  # KV memory of a decode rank, in tokens
    unified_kv_tokens: int = 400_000  # KV memory of a unified rank, in tokens
    decode_method: str = "total_requests"  # method for decode ranks; the compared one is for prefill and unified ranks
    chunk_tokens: int = 2_048  # prompt tokens computed in one step at most
    prefill_running: int = 256  # run slots of a prefill rank
    decode_running: int = 256  # run slots of a decode rank
    unified_running: int = 256  # run slots of a unified rank
    outputs_cached: bool = True  # where a later turn shows the blocks of an output, the rank that made it keeps them
    timing: SimTiming = field(default_factory=SimTiming)  # how long steps take
    first_at_decode: bool = False  # decode ranks make the first token, as in vLLM; ours pass on that of prefill
    kv_fetch_token_s: float = 2.6e-6  # time to fetch the KV cache, per prompt token: 128 KiB at 50 GB/s
    link_s_per_token: float = 0.0  # on a rank's link, which its transfers share; 0: `kv_fetch_token_s` whatever happens
    fetch_by_layer: bool = False  # fetches begin with the computation of the prompt, not after it
    decode_cache: bool = False  # decode ranks keep what they fetched and generated, and fetch only what they lack
    decode_prefills: bool = False  # decode ranks can compute prompts, where their policy says so
    trip: str = ""  # the trip of all pairs (`controller.trips`); "": as the policy of decode ranks says
    hop_s: float = 0.0005  # one message, one way
    report_interval_s: float = 0.1  # between a rank's load reports
    report_delay_s: float = 0.0  # on top of the hop
    report_loss: float = 0.0  # share of reports that never arrives, below 1
    stale_s: float = 5.0  # an older report is not used
    controllers: int = 1  # controllers (at most 64), each with a part of the requests
    shared_counters: bool = True  # controllers publish to each other what they have sent
    sent_interval_s: float = 0.01  # counters are shared when something was sent, at most this often
    cache_weight: float = 1.0  # cache_aware: weight of a token to compute, in queued tokens
    late_tokens: int = 2_048  # late binding: a rank with fewer queued tokens gets the next request
    queue_order: str = "arrival"  # `slo`: requests wait at the controller, those that can keep their TTFT first
    tpot_admission: bool = False  # `slo`: requests wait while no decode rank can take them within slo_tpot_s
    overtake_tokens: int = 3_000_000  # maximum of later prompt tokens that are served before a request
    slo_ttft_s: float = 2.0  # limit of time to first token
    slo_tpot_s: float = 0.05  # limit of time per output token
    sample_s: float = 1.0  # between samples of the true load
    seed: int = 1  # for all random draws

    def __post_init__(self) -> None:
        counts = ("decode_kv_tokens", "unified_kv_tokens", "chunk_tokens", "prefill_running", "decode_running",
                  "unified_running", "controllers", "late_tokens", "overtake_tokens")  # fmt: skip
        for name in counts:
            if getattr(self, name) < 1:
                raise ConfigError(f"{_option(name)} must be at least 1, not {getattr(self, name)}")
        times = ("load", "kv_fetch_token_s", "hop_s", "report_delay_s", "cache_weight", "ranks", "decode_ranks",
                 "unified_ranks", "rate", "concurrency", "warm_up_s", "end_s", "end_requests",
                 "cache_blocks", "link_s_per_token")  # fmt: skip
        for name in times:
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{_option(name)} must not be negative, not {getattr(self, name)}")
        for name in ("report_interval_s", "stale_s", "sent_interval_s", "sample_s"):
            if not 0.001 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{_option(name)} must be at least 0.001 s, not {getattr(self, name)}")
        if not self.ranks and not self.unified_ranks:
            raise ConfigError("--ranks must be at least 1 where there are no --unified-ranks")
        if self.unified_ranks and bool(self.ranks) != bool(self.decode_ranks):
            raise ConfigError("--unified-ranks go with --ranks and --decode-ranks together, or with neither (0)")
        if not 0 <= self.unified_share < 1:
            raise ConfigError(f"--unified-share must lie in 0..1 (1 excluded), not {self.unified_share}")
        if self.rate and self.concurrency:
            raise ConfigError("--rate and --concurrency exclude each other")
        if not 0 <= self.report_loss < 1:
            raise ConfigError(f"--report-loss must lie in 0..1 (1 excluded), not {self.report_loss}")
        if self.queue_order not in ("arrival", "slo"):
            raise ConfigError(f"--queue-order is arrival or slo, not {self.queue_order!r}")
        if self.trip not in ("", *TRIPS):
            raise ConfigError(f"--trip is one of {', '.join(TRIPS)}, not {self.trip!r}")
        if self.trip and not (self.ranks and self.decode_ranks):
            raise ConfigError("--trip is for prefill ranks and decode ranks")
        if self.trip in ("delta", "read_back") and not self.decode_cache:
            raise ConfigError(f"--trip {self.trip} needs --decode-cache")
        if self.trip == "at_decode" and not self.decode_prefills:
            raise ConfigError("--trip at_decode needs --decode-prefills")
        for name in ("ranks", "decode_ranks", "unified_ranks"):
            if getattr(self, name) > MAX_DP_SIZE:
                raise ConfigError(f"{_option(name)} must be at most {MAX_DP_SIZE}, not {getattr(self, name)}")
        if self.controllers > 64:
            raise ConfigError(f"--controllers must be at most 64, not {self.controllers}")

    @property
    def prompt_ranks(self) -> int:
        """The number of ranks that compute prompts: prefill and unified ones."""
        return self.ranks + self.unified_ranks

    @property
    def token_link_s(self) -> float:
        """The seconds that a KV token takes between two ranks with nothing else under way."""
        return self.link_s_per_token or self.kv_fetch_token_s

    @property
    def transfers_differ(self) -> bool:
        """True where KV transfers are other than whole ones, after the prompt, at one speed: a figure for tables."""
        return bool(self.link_s_per_token) or self.fetch_by_layer or self.decode_cache

    def blocks(self, block_tokens: int) -> int:
        """Return the KV memory of a prefill rank in blocks of `block_tokens` tokens."""
        return self.cache_blocks or max(1, CACHE_TOKENS // block_tokens)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")

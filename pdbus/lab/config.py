"""Settings of one replay. Owns defaults and checks."""

from __future__ import annotations

from dataclasses import dataclass, field

from bus.errors import ConfigError
from nodes.own.engines.timing import SimTiming


@dataclass(frozen=True, slots=True)
class LabConfig:
    """What the cluster is and how imperfect its knowledge is. Times in seconds, sizes in tokens or blocks.

    `load`: the trace's time is stretched until the prompts, with no cache hit at all, would keep the prefill ranks busy
    for this share of the time. 0 keeps the trace's own times.
    """

    ranks: int = 8
    decode_ranks: int = 8
    load: float = 0.9
    cache_blocks: int = 4_000  # KV memory of a prefill rank, in blocks of the trace
    decode_kv_tokens: int = 400_000
    decode_method: str = "total_requests"
    chunk_tokens: int = 2_048
    prefill_running: int = 256
    decode_running: int = 256
    timing: SimTiming = field(default_factory=SimTiming)
    kv_fetch_token_s: float = 2.6e-6  # 128 KiB a token at 50 GB/s
    hop_s: float = 0.0005  # one message, one way
    report_interval_s: float = 0.1
    report_delay_s: float = 0.0  # on top of the hop
    report_loss: float = 0.0
    stale_s: float = 5.0
    controllers: int = 1
    shared_counters: bool = True
    sent_interval_s: float = 0.01  # counters are shared when something was sent, at most this often
    cache_weight: float = 1.0
    late_tokens: int = 4_096  # late binding: a rank with less than this queued gets the next request
    slo_ttft_s: float = 2.0
    slo_tpot_s: float = 0.05
    sample_s: float = 1.0
    seed: int = 1

    def __post_init__(self) -> None:
        counts = ("ranks", "cache_blocks", "decode_kv_tokens", "chunk_tokens", "prefill_running", "decode_running",
                  "controllers", "late_tokens")  # fmt: skip
        for name in counts:
            if getattr(self, name) < 1:
                raise ConfigError(f"{_option(name)} must be at least 1, not {getattr(self, name)}")
        times = ("load", "kv_fetch_token_s", "hop_s", "report_delay_s", "cache_weight", "decode_ranks")
        for name in times:
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{_option(name)} must not be negative, not {getattr(self, name)}")
        for name in ("report_interval_s", "stale_s", "sent_interval_s", "sample_s"):
            if not 0.001 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{_option(name)} must be at least 0.001 s, not {getattr(self, name)}")
        if not 0 <= self.report_loss < 1:
            raise ConfigError(f"--report-loss must lie in 0..1 (1 excluded), not {self.report_loss}")
        if self.controllers > 64:
            raise ConfigError(f"--controllers must be at most 64, not {self.controllers}")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")

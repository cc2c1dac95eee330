"""A node process's settings, built once from the command line. This module owns defaults and checks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from bus import defaults
from bus.endpoints import advertised
from bus.errors import ConfigError
from bus.wire.messages import MAX_DP_SIZE
from nodes.link.config import LinkConfig
from nodes.own.engines.factory import EngineConfig


@dataclass(frozen=True)
class NodeConfig(LinkConfig):
    """The settings of the link and of the node; ConfigError for an invalid one. In one step at most `max_running`
    requests are computed, and of their prompts at most `chunk_tokens` tokens together."""

    engine: Any = field(default_factory=EngineConfig)  # what computes: settings of an engine of `nodes.engines`
    max_running: int = 64
    chunk_tokens: int = 512
    decode_cache: bool = False  # a decode rank keeps KV caches, fetches what it lacks, and computes prompts when told
    wait_s: float = defaults.WAIT_S  # for bus and controllers to be heard, at the start
    drain_s: float = 60.0  # for what runs to end, once it is told to leave
    metrics_port: int = 0  # serves Prometheus metrics; 0: nowhere
    metrics_host: str = defaults.METRICS_HOST  # where it serves them

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_running", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{self._called(name)} must be at least 1, not {getattr(self, name)}")
        self._check_duration("wait_s")
        if not math.isfinite(self.drain_s) or self.drain_s < 0:
            raise ConfigError(f"{self._called('drain_s')} must be a number of seconds, not {self.drain_s}")

    @property
    def metrics(self) -> str:
        """The `host:port` of this process's metrics, as others reach it; empty: it has none."""
        return advertised(self.metrics_host, self.metrics_port, self.data)

    def _called(self, name: str) -> str:
        return f"--{name.replace('_', '-')}"


def parse_ranks(values: tuple[str, ...]) -> tuple[int, ...]:
    """Return the ranks in texts like `("0", "2-4")`, in that order: (0, 2, 3, 4). ConfigError for a text that is no
    number or rising range, or reaches `MAX_DP_SIZE`."""
    ranks: list[int] = []
    for value in values:
        first, dash, last = value.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"--dp-rank {value!r}: use a number, or a range like 0-7")
        low, high = int(first), int(last) if dash else int(first)
        if high < low or high >= MAX_DP_SIZE:
            raise ConfigError(f"--dp-rank {value!r}: use a rising range below {MAX_DP_SIZE}")
        ranks.extend(range(low, high + 1))
    return tuple(ranks)

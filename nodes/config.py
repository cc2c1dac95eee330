"""A node process's settings, built once from argv. Owns defaults and checks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from bus import defaults
from bus.endpoints import BusAddress, ControllerAddress
from bus.errors import ConfigError
from bus.wire.messages import MAX_DP_SIZE, Role
from nodes.link.config import LinkConfig
from nodes.link.core import Limits
from nodes.own.engines.factory import EngineConfig

ROLES: tuple[Role, ...] = ("prefill", "decode", "unified")
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
_DATA_PATH_MAX = 80


@dataclass(frozen=True)
class NodeConfig:
    """`data` is where the data socket goes: `ipc:///directory` or `tcp://host`. A step computes up to `chunk_tokens`
    tokens of at most `max_running` requests."""

    role: Role
    instance: str
    dp_size: int
    dp_ranks: tuple[int, ...]
    bus: str
    controllers: tuple[str, ...]
    data: str
    engine: EngineConfig = field(default_factory=EngineConfig)
    max_running: int = 64
    chunk_tokens: int = 512
    report_interval_s: float = defaults.REPORT_INTERVAL_S
    room_ttl_s: float = defaults.ROOM_TTL_S
    wait_s: float = defaults.WAIT_S
    drain_s: float = 60.0
    limits: Limits = field(default_factory=Limits)
    metrics_port: int = 0
    metrics_host: str = defaults.METRICS_HOST
    keys: str = ""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ConfigError(f"unknown role {self.role!r}; choose one of {', '.join(ROLES)}")
        if not 1 <= len(self.instance) <= 64 or not set(self.instance) <= _NAME_CHARACTERS:
            raise ConfigError(f"--instance {self.instance!r}: use 1 to 64 of letters, digits, '.', '_' and '-'")
        if not 1 <= self.dp_size <= MAX_DP_SIZE:
            raise ConfigError(f"--dp-size {self.dp_size}: choose from 1 to {MAX_DP_SIZE}")
        if not self.dp_ranks or len(set(self.dp_ranks)) != len(self.dp_ranks):
            raise ConfigError("--dp-rank: name each rank of this process once")
        for rank in self.dp_ranks:
            if not 0 <= rank < self.dp_size:
                raise ConfigError(f"--dp-rank {rank}: must lie in 0..{self.dp_size - 1} (--dp-size {self.dp_size})")
        BusAddress(self.bus)
        if len(set(self.controllers)) != len(self.controllers):
            raise ConfigError("--controller: the same address twice")
        for address in self.controllers:
            ControllerAddress(address)
        self._check_data()
        for name in ("max_running", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        for name in ("report_interval_s", "room_ttl_s", "wait_s"):
            value = getattr(self, name)
            if not 0.01 <= value <= 86_400:  # also refuses NaN
                raise ConfigError(f"--{name.replace('_', '-')} must lie between 0.01 s and a day, not {value}")
        if not math.isfinite(self.drain_s) or self.drain_s < 0:
            raise ConfigError(f"--drain-s must be a number of seconds, not {self.drain_s}")

    def _check_data(self) -> None:
        scheme, _, rest = self.data.partition("://")
        if scheme == "ipc":
            if not rest.startswith("/") or len(rest.encode()) > _DATA_PATH_MAX:
                raise ConfigError(f"--data {self.data!r}: name a directory by an absolute path of at most 80 bytes")
        elif scheme != "tcp" or not rest or ":" in rest.rpartition("]")[2]:
            raise ConfigError(f"--data {self.data!r}: use ipc:///directory or tcp://host (the port is chosen freely)")
        elif rest in ("*", "0.0.0.0", "[::]", "::"):
            raise ConfigError(f"--data {self.data!r}: name an address that the other machines can reach")

    @property
    def link(self) -> LinkConfig:
        """What the ranks' link must know of it."""
        return LinkConfig(
            role=self.role,
            instance=self.instance,
            dp_size=self.dp_size,
            bus=self.bus,
            controllers=self.controllers,
            data=self.data,
            report_interval_s=self.report_interval_s,
            room_ttl_s=self.room_ttl_s,
            limits=self.limits,
            keys=self.keys,
        )


def parse_ranks(values: tuple[str, ...]) -> tuple[int, ...]:
    """`("0", "2-4")` to (0, 2, 3, 4). ConfigError on anything else."""
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

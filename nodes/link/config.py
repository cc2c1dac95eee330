"""The settings that all ranks of a process share: their identity, and the addresses of the other parts. Only this
module checks them."""

from __future__ import annotations

from dataclasses import dataclass, field

from bus import defaults
from bus.arguments import typed
from bus.endpoints import BusAddress, ControllerAddress, split_port, why_no_data_dir
from bus.errors import ConfigError
from bus.wire.messages import ENDPOINT, MAX_DP_SIZE, NAME, Role

ROLES: tuple[Role, ...] = ("prefill", "decode", "unified")


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits on what may wait at one rank: `max_waiting` requests and `max_waiting_bytes` of prompts, beyond which
    a dispatch is refused as `overloaded`; `hold_s`, how long a KV cache is kept that no decode rank asks for."""

    max_waiting: int = 1024
    max_waiting_bytes: int = 64 << 20
    hold_s: float = 60.0
    trace_bytes: int = defaults.TRACE_BYTES  # for the records of ended legs, which `pdbus trace` asks for


@dataclass(frozen=True)
class LinkConfig:
    """The shared settings. `data` is the address of the data socket: `ipc:///directory`, `tcp://host` (on any free
    port) or `tcp://host:port`. Durations are in seconds. Raises ConfigError for every value that a controller or the
    bus would refuse."""

    role: Role  # of all ranks here: prefill, decode or unified
    instance: str  # the name that they share, 1 to 64 of letters, digits, '.', '_' and '-'
    dp_size: int  # the number of ranks of the instance, with those of other processes
    dp_ranks: tuple[int, ...]  # the ranks of this process
    bus: str  # the broker's base address
    controllers: tuple[str, ...]  # base addresses, one at least
    data: str  # where peers and clients reach this process
    report_interval_s: float = defaults.REPORT_INTERVAL_S  # the longest time between load reports
    room_ttl_s: float = defaults.ROOM_TTL_S  # how long the broker keeps a room that is not refreshed
    limits: Limits = field(default_factory=Limits)  # on what may wait here
    keys: str = ""  # directory of CURVE keys; empty: none

    def __post_init__(self) -> None:
        called = self._called
        typed(self, called=called)
        if self.role not in ROLES:
            raise ConfigError(f"unknown role {self.role!r}; choose one of {', '.join(ROLES)}")
        if NAME.fullmatch(self.instance) is None:
            why = "use 1 to 64 of letters, digits, '.', '_' and '-'"
            raise ConfigError(f"{called('instance')} {self.instance!r}: {why}")
        if not 1 <= self.dp_size <= MAX_DP_SIZE:
            raise ConfigError(f"{called('dp_size')} {self.dp_size}: choose from 1 to {MAX_DP_SIZE}")
        if not self.dp_ranks or len(set(self.dp_ranks)) != len(self.dp_ranks):
            raise ConfigError(f"{called('dp_rank')}: name each rank of this process once")
        for rank in self.dp_ranks:
            if not 0 <= rank < self.dp_size:
                inside = f"must lie in 0..{self.dp_size - 1} ({called('dp_size')} {self.dp_size})"
                raise ConfigError(f"{called('dp_rank')} {rank}: {inside}")
        BusAddress(self.bus)
        if not self.controllers:
            raise ConfigError(f"{called('controller')}: name at least one")
        if len(set(self.controllers)) != len(self.controllers):
            raise ConfigError(f"{called('controller')}: the same address twice")
        for address in self.controllers:
            ControllerAddress(address)
        self._check_data()
        for name in ("report_interval_s", "room_ttl_s"):
            self._check_duration(name)

    @property
    def metrics(self) -> str:
        """The `host:port` of the process's metrics, as others reach it; empty: it has none."""
        return ""

    def _check_data(self) -> None:
        scheme, _, rest = self.data.partition("://")
        at = f"{self._called('data')} {self.data!r}"
        if scheme == "ipc":
            if why := why_no_data_dir(rest):
                raise ConfigError(f"{at}: {why}")
            return
        host, port = split_port(rest)
        if scheme != "tcp" or not host or ":" in host.rpartition("]")[2]:
            raise ConfigError(f"{at}: use ipc:///directory, tcp://host (any free port) or tcp://host:port")
        if port and not (port.isdecimal() and 0 < int(port) < 65536):
            raise ConfigError(f"{at}: {port!r} is no port")
        if ENDPOINT.fullmatch(host) is None:
            raise ConfigError(f"{at}: a host's name has no spaces and no letters beyond ASCII")
        if host in ("*", "0.0.0.0", "[::]"):
            raise ConfigError(f"{at}: name an address that the other machines can reach")

    def _check_duration(self, name: str) -> None:
        value = getattr(self, name)
        if not 0.01 <= value <= 86_400:  # also refuses NaN
            raise ConfigError(f"{self._called(name)} must lie between 0.01 s and a day, not {value}")

    def _called(self, name: str) -> str:
        """Return the name under which users know the setting `name`, for errors."""
        return name

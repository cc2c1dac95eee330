"""The controller's settings: frozen, checked once. An invalid value is one clear line (ConfigError, exit 2)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal

from bus import defaults
from bus.arguments import typed
from bus.endpoints import BusAddress, ControllerAddress, advertised, default_bus, default_controller
from bus.errors import ConfigError
from bus.wire.messages import Role
from controller.feeds.settings import EngineSettings
from controller.policies import resolve
from controller.requests.slos import SloClass
from controller.wanted import expected

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True)
class ControllerConfig:
    """The settings. Durations are in seconds, sizes in bytes, the others are counts.

    `lease_s`: a rank that is silent for this long is lost. `hang_s`: a rank that is busy while its step counter
    stands still for this long is hung. `stale_s`: a load report is used for this long, and longer only for a rank
    that declares to report less often (`bus.defaults`). `settle_s`: after its own start the controller dispatches
    nothing for this long (and until every rank it knows has reported, at most a lease), so that it never decides
    before it knows the ranks.
    """

    name: str = "controller-0"  # among controllers, 1 to 64 of A-Z a-z 0-9 . _ -
    bus: str = field(default_factory=default_bus)
    controller: str = field(default_factory=default_controller)
    with_broker: bool = False  # serve `bus` from this process too
    keys: str = ""  # directory of CURVE keys; empty: none
    metrics_port: int = 0  # serves Prometheus metrics; 0: nowhere
    metrics_host: str = defaults.METRICS_HOST  # where it serves them
    spin_us: int = 0  # how long to poll after a message before sleeping, while messages come as densely
    prefill_method: str = "auto"  # `auto`, a name in `POLICIES`, an entry point or `module:Class`
    decode_method: str = "auto"  # the same for decode legs
    unified_method: str = "auto"  # the same for unified legs
    prefill_at: Literal["auto", "prefill", "decode"] = "auto"  # if decode can too: as its policy says, or always
    instances: tuple[str, ...] = ()  # only these; empty: all
    expect: tuple[str, ...] = ()  # ROLE or ROLE:MODEL: wanted whether or not a rank of it has come
    lease_s: float = defaults.LEASE_S
    hang_s: float = 10.0
    stale_s: float = defaults.STALE_S
    settle_s: float = 0.5
    sent_interval_s: float = 0.05  # at least, between publications of the counters to other controllers
    request_overcommit: float = 2.0  # outstanding requests of a rank, as a multiple of its run slots
    kv_overcommit: float = 1.0  # decode, unified: tokens of a rank, as a multiple of its KV capacity
    prefill_overcommit: float = 4.0  # prefill: tokens queued at a rank, as a multiple of its KV capacity
    queue_order: Literal["arrival", "slo"] = "arrival"  # `slo`: what can still keep its TTFT first
    ttft_slo_s: float = 2.0  # `slo`: of requests that state none
    tpot_slo_s: float = 0.0  # `slo`: the wanted time per further token, on average; 0: no limit
    slo_classes: tuple[SloClass, ...] = ()  # `slo`: both by the name of a class, or of a client's key
    late_tokens: int = 2_048  # `slo`: a prompt goes to ranks when one of them has less than this queued
    overtake_tokens: int = 3_000_000  # `slo`: of prompts that came later and are served before a request, at most
    shed: Literal["never", "hopeless"] = "never"  # `slo`: whether what cannot keep its TTFT any more is refused
    cache_weight: float = 1.0  # cache_aware: worth of a token to compute, in tokens queued
    attempts: int = 3  # for each submit
    queue_requests: int = 1024  # central queue
    queue_bytes: int = 64 << 20  # of its prompts
    payload_bytes: int = 256 << 20  # kept in all, until the legs that need them have started
    max_requests: int = 65_536  # alive at once
    client_requests: int = 4_096  # alive at once of one client
    max_ranks: int = 4_096  # known at once, all instances together
    trace_bytes: int = defaults.TRACE_BYTES  # of requests that are over, for `pdbus trace`; 0: none are remembered
    explain: int = 16  # one request in so many is remembered with the reasons for its ranks; 1: each, 0: none
    engines: tuple[EngineSettings, ...] = ()  # other people's engines whose KV events and loads are followed
    forget_s: float = 600.0  # a rank gone for so long is no longer listed

    def __post_init__(self) -> None:
        typed(self)
        for name in (self.name, *self.instances):
            if not _NAME.fullmatch(name):
                raise ConfigError(f"{name!r} is no name: use 1 to 64 of A-Z a-z 0-9 . _ -")
        if len([expected(each) for each in self.expect]) > 64:
            raise ConfigError("expect at most 64 roles")
        BusAddress(self.bus)
        ControllerAddress(self.controller)
        for label in ("lease_s", "hang_s", "stale_s", "sent_interval_s", "request_overcommit", "kv_overcommit",
                      "prefill_overcommit", "attempts", "queue_requests", "queue_bytes", "payload_bytes",
                      "max_requests", "client_requests", "max_ranks", "forget_s", "ttft_slo_s", "late_tokens",
                      "overtake_tokens"):  # fmt: skip
            if not 0 < getattr(self, label) < math.inf:
                raise ConfigError(f"{label} must be greater than 0 and finite, not {getattr(self, label)}")
        if not 0 <= self.cache_weight < 1e6:
            raise ConfigError(f"cache_weight must lie in 0..1e6, not {self.cache_weight}")
        for label in ("settle_s", "tpot_slo_s", "trace_bytes", "explain"):
            if not 0 <= getattr(self, label) < math.inf:
                raise ConfigError(f"{label} must not be negative, not {getattr(self, label)}")
        if not 0 <= self.spin_us <= defaults.SPIN_US_MAX:
            raise ConfigError(f"spin_us must lie in 0..{defaults.SPIN_US_MAX}, not {self.spin_us}")
        for label, choices in (("queue_order", ("arrival", "slo")), ("shed", ("never", "hopeless")),
                               ("prefill_at", ("auto", "prefill", "decode"))):  # fmt: skip
            if getattr(self, label) not in choices:
                raise ConfigError(f"{label} is one of {', '.join(choices)}, not {getattr(self, label)!r}")
        if self.shed != "never" and self.queue_order != "slo":
            raise ConfigError(f"shed {self.shed} needs the queue order slo")
        if self.slo_classes and self.queue_order != "slo":
            raise ConfigError("slo_classes need the queue order slo")
        for kind, some in ((SloClass, self.slo_classes), (EngineSettings, self.engines)):
            if not all(isinstance(each, kind) for each in some):
                raise ConfigError(f"each of {some!r:.60} must be a {kind.__name__}")
        names = [each.name for each in self.slo_classes]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"slo_classes: {min(twice)} is there twice")
        for role in ("prefill", "decode", "unified"):  # old names become the new ones here, once
            object.__setattr__(self, f"{role}_method", resolve(getattr(self, f"{role}_method"), role))

    @property
    def metrics(self) -> str:
        """The address of this controller's metrics; empty: it has none."""
        return advertised(self.metrics_host, self.metrics_port, self.controller)

    @property
    def methods(self) -> dict[Role, str]:
        """The balancing method of each role, by its present name."""
        return {"prefill": self.prefill_method, "decode": self.decode_method, "unified": self.unified_method}

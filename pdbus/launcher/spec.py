"""What a cluster is made of, and the command line of each part. Pure: starts nothing, opens nothing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from bus.errors import ConfigError
from bus.wire.messages import Role

Kind = Literal["broker", "controller", "node"]


@dataclass(frozen=True, slots=True)
class PartSpec:
    """One child process: `python -m module args`."""

    name: str
    kind: Kind
    module: str
    args: tuple[str, ...]
    metrics_port: int = 0  # already among `args`; 0: it serves no metrics


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a cluster's parts meet: base addresses, and where nodes bind their data sockets."""

    bus: str
    controllers: dict[str, str]  # controller name -> base address
    data: str


@dataclass(frozen=True)
class ClusterSpec:
    """A cluster, declared.

    `prefill`, `decode`, `unified`: ranks of each instance of that role (0: none); `..._instances`: how many instances.
    `ranks_per_process`: how many ranks share a node process. `controllers`: `one` for all, or `per_instance` (none
    knows of another; then requests go to two of them). `embedded`: broker and controller are threads of this process.
    `bus`, `controller`: fixed base addresses (empty: ephemeral). `..._args`: more options for the parts' command lines;
    `engine_args`: those of an engine that has arguments of its own (vllm).
    `log_dir`: where parts append to their logs, which then outlive the cluster. `metrics_port`: the parts serve their
    metrics on this port and the ones after it, in the order of starting (0: nowhere).
    """

    prefill: int = 0
    decode: int = 0
    unified: int = 0
    prefill_instances: int = 1
    decode_instances: int = 1
    unified_instances: int = 1
    ranks_per_process: int = 1
    prefill_method: str = "auto"
    decode_method: str = "auto"
    unified_method: str = "auto"
    engine: str = "torch"
    model: str = "smollm2"
    transport: Literal["ipc", "tcp"] = "ipc"
    host: str = "127.0.0.1"
    controllers: Literal["one", "per_instance"] = "one"
    embedded: bool = False
    bus: str = ""
    controller: str = ""
    keys: str = ""
    log_dir: str = ""
    log_level: str = "info"
    metrics_port: int = 0
    start_timeout_s: float = 120.0
    stop_grace_s: float = 5.0
    node_args: tuple[str, ...] = ()
    prefill_args: tuple[str, ...] = ()
    decode_args: tuple[str, ...] = ()
    unified_args: tuple[str, ...] = ()
    engine_args: tuple[str, ...] = ()
    controller_args: tuple[str, ...] = ()
    broker_args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("prefill", "decode", "unified"):
            if getattr(self, name) < 0 or getattr(self, f"{name}_instances") < 1:
                raise ConfigError(f"{name} ranks must be 0 or more, in 1 or more instances")
        if not (self.prefill and self.decode) and not self.unified:
            raise ConfigError("a cluster needs prefill and decode ranks, or unified ones")
        if self.ranks_per_process < 1:
            raise ConfigError("ranks_per_process must be at least 1")
        if self.transport not in ("ipc", "tcp"):
            raise ConfigError(f"unknown transport {self.transport!r}; choose ipc or tcp")
        if self.keys and not any(at.startswith("tcp:") for at in (f"{self.transport}:", self.bus, self.controller)):
            raise ConfigError("keys are for tcp (--transport tcp): ipc sockets are open to their owner alone as it is")
        if self.embedded and self.controllers != "one":
            raise ConfigError("an embedded cluster has one controller")
        if self.embedded and (self.controller_args or self.broker_args):
            raise ConfigError("an embedded broker and controller take no command line")
        if self.embedded and self.metrics_port:
            raise ConfigError("metrics_port is for parts with a process of their own, not for an embedded cluster")
        if not 0 <= self.metrics_port <= 65535:
            raise ConfigError(f"--metrics-port {self.metrics_port}: a port lies between 1 and 65535 (0: none)")

    def instances(self) -> dict[str, tuple[Role, int]]:
        """Each instance's role and size."""
        sizes: tuple[tuple[Role, int, int], ...] = (
            ("prefill", self.prefill, self.prefill_instances),
            ("decode", self.decode, self.decode_instances),
            ("unified", self.unified, self.unified_instances),
        )
        return {f"{role}-{n}": (role, size) for role, size, count in sizes if size for n in range(count)}

    def controller_names(self) -> tuple[str, ...]:
        if self.controllers == "one":
            return ("controller-0",)
        return tuple(f"controller-{instance}" for instance in self.instances())

    def methods(self) -> dict[Role, str]:
        return {"prefill": self.prefill_method, "decode": self.decode_method, "unified": self.unified_method}

    def parts(self, at: Addresses) -> list[PartSpec]:
        """Every child process, in the order of starting: broker, controllers, nodes."""
        common = ("--watch-parent", "--log-level", self.log_level, *(("--keys", self.keys) if self.keys else ()))
        parts: list[PartSpec] = []
        if not self.embedded:
            parts.append(PartSpec("broker", "broker", "bus", ("--bus", at.bus, *common, *self.broker_args)))
            parts += [self._controller(name, at, common) for name in self.controller_names()]
        for instance, (role, size) in self.instances().items():
            for first in range(0, size, self.ranks_per_process):
                parts.append(self._node(instance, role, size, first, at, common))
        return self._with_metrics(parts) if self.metrics_port else parts

    def _with_metrics(self, parts: list[PartSpec]) -> list[PartSpec]:
        first, last = self.metrics_port, self.metrics_port + len(parts) - 1
        if last > 65535:
            raise ConfigError(f"--metrics-port {first}: {len(parts)} parts need the ports up to {last}, beyond 65535")
        for number, part in enumerate(parts):
            port, end = first + number, part.args.index("--") if "--" in part.args else len(part.args)
            args = (*part.args[:end], "--metrics-port", str(port), *part.args[end:])
            parts[number] = replace(part, args=args, metrics_port=port)
        return parts

    def _controller(self, name: str, at: Addresses, common: tuple[str, ...]) -> PartSpec:
        args = ["--name", name, "--bus", at.bus, "--controller", at.controllers[name]]
        for role, method in self.methods().items():
            args += [f"--{role}-method", method]
        if self.controllers == "per_instance":
            args += ["--instance", name.removeprefix("controller-")]
        return PartSpec(name, "controller", "controller", (*args, *common, *self.controller_args))

    def _node(
        self, instance: str, role: Role, size: int, first: int, at: Addresses, common: tuple[str, ...]
    ) -> PartSpec:
        last = min(first + self.ranks_per_process, size) - 1
        ranks = str(first) if first == last else f"{first}-{last}"
        name = "controller-0" if self.controllers == "one" else f"controller-{instance}"
        args: tuple[str, ...] = ("--bus", at.bus, "--controller", at.controllers[name], "--instance", instance)
        args = (*args, "--dp-size", str(size), "--dp-rank", ranks, "--engine", self.engine, "--model", self.model)
        role_args: tuple[str, ...] = getattr(self, f"{role}_args")
        engine_args = ("--", *self.engine_args) if self.engine_args else ()
        return PartSpec(
            f"{instance}/{ranks}",
            "node",
            f"nodes.{role}",
            (*args, "--data", at.data, *common, *self.node_args, *role_args, *engine_args),
        )

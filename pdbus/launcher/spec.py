"""The description of a cluster, and the command line of each part. Pure: starts nothing, opens nothing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from bus.arguments import typed
from bus.errors import ConfigError
from bus.wire.messages import MAX_DP_SIZE, Role
from nodes.engines import kind_of
from pdbus.vllm_front.launch import model_arguments, served_name

Kind = Literal["broker", "controller", "node", "edge"]


@dataclass(frozen=True, slots=True)
class PartSpec:
    """One process of a cluster: `python -m module args`."""

    name: str
    kind: Kind
    module: str
    args: tuple[str, ...]
    metrics_port: int = 0  # already among `args`; 0: it serves no metrics
    env: dict[str, str] = field(default_factory=dict)  # additional environment of this part
    slow: bool = False  # it takes as long to start as a node

    @property
    def early(self) -> bool:
        """True if it is ready before any node is started: all but nodes, and an edge that takes as long as they do."""
        return self.kind != "node" and not self.slow

    @property
    def duty(self) -> str:
        """The part's duty: a node's role, or the kind of another part."""
        return self.module.rpartition(".")[2] if self.module.startswith("nodes.") else self.kind


@dataclass(frozen=True, slots=True)
class Addresses:
    """The addresses of a cluster's parts: base addresses of the broker and the controllers, and the directory or host
    where nodes bind their data sockets."""

    bus: str
    controllers: dict[str, str]  # controller name -> base address
    data: str


@dataclass(frozen=True)
class ClusterSpec:
    """The description of a cluster. An instance is a group of ranks that serve one copy of the model each;
    `prefill-0/1` is rank 1 of the first prefill instance. Raises ConfigError for invalid values."""

    prefill: int = 0  # ranks of each prefill instance (0: none)
    decode: int = 0  # ranks of each decode instance
    unified: int = 0  # ranks of each unified instance
    prefill_instances: int = 1  # how many
    decode_instances: int = 1  # how many
    unified_instances: int = 1  # how many
    ranks_per_process: int = 1  # how many ranks share a node process
    prefill_method: str = "auto"  # the controllers' method for prefill ranks
    decode_method: str = "auto"  # for decode ranks
    unified_method: str = "auto"  # for unified ranks
    engine: str = "torch"  # the engine of the nodes: torch, numpy, sim or another one
    model: str = ""  # the model that they serve; empty: sim with the engine sim, otherwise smollm2
    transport: Literal["ipc", "tcp"] = "ipc"  # between the parts
    host: str = "127.0.0.1"  # where tcp ports are bound
    controllers: Literal["one", "per_instance"] = "one"  # per_instance: requests go to two
    embedded: bool = False  # broker and controller are threads of this process
    bus: str = ""  # a fixed base address; empty: ephemeral
    controller: str = ""  # a fixed base address of the first controller; empty: ephemeral
    keys: str = ""  # directory made with `pdbus keys new`; keys that the parts need and it lacks are added
    log_dir: str = ""  # directory of the parts' logs, which then outlive the cluster
    log_level: str = "info"  # debug, info, warning or error
    http: str = ""  # where an HTTP edge listens ([host:]port); empty: there is none
    front: Literal["light", "vllm"] = "light"  # which HTTP edge: ours, or vLLM's own server in front of the bus
    front_args: tuple[str, ...] = ()  # more arguments of vLLM's own server
    tokenizers: tuple[str, ...] = ()  # for the edge's text, as [MODEL=]DIR; empty: the models' own files
    metrics_port: int = 0  # the first part's metrics port; the others get the next ones (0: none)
    start_timeout_s: float = 120.0  # how long all parts may take to be ready
    stop_grace_s: float = 5.0  # how long a part may take to leave before it is killed
    node_args: tuple[str, ...] = ()  # more options for the nodes' command lines
    prefill_args: tuple[str, ...] = ()  # for the prefill nodes alone
    decode_args: tuple[str, ...] = ()  # for the decode nodes alone
    unified_args: tuple[str, ...] = ()  # for the unified nodes alone
    engine_args: tuple[str, ...] = ()  # for an engine that takes arguments of its own (vllm)
    controller_args: tuple[str, ...] = ()  # more options for the controllers' command lines
    broker_args: tuple[str, ...] = ()  # more options for the broker's command line
    config: str = ""  # a file of settings for the parts; values of this spec override it
    env: dict[str, str] = field(default_factory=dict)  # additional environment of the parts
    gpus: tuple[str, ...] = ()  # CUDA_VISIBLE_DEVICES of each node process, in order; empty: all

    def __post_init__(self) -> None:
        typed(self)
        if not self.model:
            object.__setattr__(self, "model", "sim" if self.engine == "sim" else "smollm2")
        for name in ("prefill", "decode", "unified"):
            ranks, instances = getattr(self, name), getattr(self, f"{name}_instances")
            if not (0 <= ranks <= MAX_DP_SIZE and 1 <= instances <= MAX_DP_SIZE):
                raise ConfigError(f"{name} ranks must be 0 to {MAX_DP_SIZE}, in 1 to {MAX_DP_SIZE} instances")
        if not (self.prefill and self.decode) and not self.unified:
            raise ConfigError("a cluster needs prefill and decode ranks, or unified ones")
        if self.ranks_per_process < 1:
            raise ConfigError("ranks_per_process must be at least 1")
        if self.transport not in ("ipc", "tcp"):
            raise ConfigError(f"unknown transport {self.transport!r}; choose ipc or tcp")
        if self.embedded and self.controllers != "one":
            raise ConfigError("an embedded cluster has one controller")
        if self.embedded and (self.controller_args or self.broker_args):
            raise ConfigError("an embedded broker and controller take no command line")
        if self.front not in ("light", "vllm"):
            raise ConfigError(f"unknown front {self.front!r}; choose light or vllm")
        if self.front != "light" and self.tokenizers:
            raise ConfigError("--tokenizer is the light edge's; for --front vllm: --front-args '--tokenizer DIR'")
        if self.front_args and self.front == "light":
            raise ConfigError("--front-args are for --front vllm")
        if self.http and self.controllers != "one":
            raise ConfigError("an HTTP edge needs one controller for all requests")
        if self.embedded and self.metrics_port:
            raise ConfigError("metrics_port is for parts with a process of their own, not for an embedded cluster")
        if not 0 <= self.metrics_port <= 65535:
            raise ConfigError(f"--metrics-port {self.metrics_port}: a port lies between 1 and 65535 (0: none)")

    @property
    def served_model(self) -> str:
        """The name by which HTTP clients ask for the model."""
        return served_name(self.model, (*self.engine_args, *self.front_args))

    def instances(self) -> dict[str, tuple[Role, int]]:
        """Return the role and the number of ranks of each instance by name (`prefill-0`); roles without ranks have
        none."""
        sizes: tuple[tuple[Role, int, int], ...] = (
            ("prefill", self.prefill, self.prefill_instances),
            ("decode", self.decode, self.decode_instances),
            ("unified", self.unified, self.unified_instances),
        )
        return {f"{role}-{n}": (role, size) for role, size, count in sizes if size for n in range(count)}

    def controller_names(self) -> tuple[str, ...]:
        """Return the names of all controllers, that of the first one first."""
        if self.controllers == "one":
            return ("controller-0",)
        return tuple(f"controller-{instance}" for instance in self.instances())

    def methods(self) -> dict[Role, str]:
        """Return the balancing method of each role, as given (`auto` too)."""
        return {"prefill": self.prefill_method, "decode": self.decode_method, "unified": self.unified_method}

    def parts(self, at: Addresses) -> list[PartSpec]:
        """Return all child processes in the order of their start: broker, controllers (both unless `embedded`), nodes,
        edge. Starts nothing. Raises ConfigError if `gpus` does not name one entry for each node process, or metrics
        ports would go beyond 65535."""
        if not isinstance(at, Addresses):
            raise TypeError(f"Addresses expected, not {type(at).__name__}")
        common = ("--watch-parent", "--log-level", self.log_level, *(("--keys", self.keys) if self.keys else ()))
        common += ("--config", self.config) if self.config else ()
        parts: list[PartSpec] = []
        if not self.embedded:
            parts.append(PartSpec("broker", "broker", "bus", ("--bus", at.bus, *common, *self.broker_args)))
            parts += [self._controller(name, at, common) for name in self.controller_names()]
        for instance, (role, size) in self.instances().items():
            for first in range(0, size, self.ranks_per_process):
                parts.append(self._node(instance, role, size, first, at, common))
        if self.gpus:
            parts = self._with_gpus(parts)
        if self.metrics_port:
            parts = self._with_metrics(parts)
        if self.http:  # its own port also serves its metrics
            args = ("serve", "--http", self.http, "--controller", next(iter(at.controllers.values())), *common)
            if self.front != "light":
                args += ("--front", self.front, "--model", self.model, "--", *self._of_model(), *self.front_args)
            else:
                args += tuple(word for each in self.tokenizers for word in ("--tokenizer", each))
            parts.append(PartSpec("edge", "edge", "pdbus", args, slow=self.front != "light"))
        return parts

    def _of_model(self) -> tuple[str, ...]:
        """Return those of the engine's arguments that say something of the model and its text."""
        return model_arguments(self.engine_args) if kind_of(self.engine).front == self.front else ()

    def _with_gpus(self, parts: list[PartSpec]) -> list[PartSpec]:
        gpus, nodes = iter(self.gpus), sum(part.kind == "node" for part in parts)
        if nodes != len(self.gpus):
            raise ConfigError(f"--gpus names those of {len(self.gpus)} node processes, and there are {nodes}")
        return [
            replace(part, env={"CUDA_VISIBLE_DEVICES": next(gpus)}) if part.kind == "node" else part for part in parts
        ]

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
        mine = [role for each, (role, _) in self.instances().items() if name in ("controller-0", f"controller-{each}")]
        args += [word for role in dict.fromkeys(mine) for word in ("--expect", role)]
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

"""The calls to Ray: joining its cluster, an actor for each part (a process of ours: broker, controller, node or edge),
and the actor's share of a bundle (Ray's word for resources that are reserved together)."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from typing import Any

import ray

from bus.errors import ConfigError
from pdbus.launcher.spec import PartSpec
from pdbus.ray.host import Host, Task

CONNECT_S = 5.0


class Actor(Host):
    """A `Host` as a Ray actor: it runs one part on the machine where Ray starts it, and asks Ray for that machine's
    address and whether this is a second start."""

    def __init__(self, task: Task) -> None:
        again = ray.get_runtime_context().was_current_actor_reconstructed
        super().__init__(task, ray.util.get_node_ip_address(), again=again)


@dataclass
class Remote:
    """The caller's record of a part's actor: where the part runs, by the events read so far."""

    spec: PartSpec
    actor: Any
    host: str = ""  # the id of its last host, and the number of that host's events seen
    seen: int = 0
    ip: str = ""
    pid: int = 0
    facts: dict[str, str] = field(default_factory=dict)  # of its newest READY line
    renewed: tuple[object, ...] = ()  # the host that got the list of keys last, and that list
    away: bool = False  # its actor is gone; Ray starts it again


def connect(address: str) -> None:
    """Join the Ray cluster at `address` (`auto`: `RAY_ADDRESS`, or one on this machine). It blocks. Raises ConfigError
    when there is none."""
    target = (os.environ.get("RAY_ADDRESS") or address) if address == "auto" else address
    host, _, port = target.rpartition(":")
    try:
        if port.isdecimal() and "://" not in target:  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), CONNECT_S).close()
        ray.init(address=address, logging_level="error", log_to_driver=False)
    except (OSError, ValueError, OverflowError, RuntimeError) as error:
        reason = " ".join(str(error).split()).partition(". ")[0]
        raise ConfigError(f"no Ray cluster at {target!r} ({reason}); start one with: ray start --head") from None


def options(bundle: dict[str, float]) -> dict[str, Any]:
    """Return the options for an actor that uses the whole bundle (amounts by Ray's resource name, as CPU, GPU,
    memory)."""
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    options: dict[str, Any] = {option: bundle[name] for name, option in named.items() if name in bundle}
    return {"num_cpus": 0, **options, "resources": {k: v for k, v in bundle.items() if k not in named}}

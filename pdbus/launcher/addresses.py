"""Fresh addresses for a cluster: sockets in a private directory, or free tcp ports. Owns the choosing alone."""

from __future__ import annotations

import random
import socket
from pathlib import Path

from bus.endpoints import MARK
from bus.errors import StartError
from pdbus.launcher.spec import Addresses, ClusterSpec

_PORTS = range(20_000, 32_000)  # below the usual ephemeral range, so that no outgoing connection takes one meanwhile


def choose(spec: ClusterSpec, directory: Path) -> Addresses:
    """Addresses as `spec` fixes them, the others fresh. A tcp port may be taken by the time it is bound: try again."""
    if spec.transport == "ipc":
        controllers = {name: f"ipc://{directory}/c{index}" for index, name in enumerate(spec.controller_names())}
        bus, data = f"ipc://{directory}/bus", f"ipc://{directory}"
    else:
        count = 3 + 2 * len(spec.controller_names())
        base = free_ports(spec.host, count)
        bus, data = f"tcp://{spec.host}:{base}", f"tcp://{spec.host}"
        controllers = {
            name: f"tcp://{spec.host}:{base + 3 + 2 * index}" for index, name in enumerate(spec.controller_names())
        }
    if spec.controller:
        controllers[next(iter(controllers))] = spec.controller
    if spec.keys and len(controllers) > 1:
        controllers = {name: f"{base}{MARK}{name}" for name, base in controllers.items()}
    return Addresses(spec.bus or bus, controllers, data)


def free_ports(host: str, count: int) -> int:
    """The first of `count` ports in a row that nobody listens on."""
    rng = random.SystemRandom()
    for _ in range(200):
        base = rng.choice(_PORTS[:-count])
        if all(_is_free(host, base + step) for step in range(count)):
            return base
    raise StartError(f"found no {count} free ports in a row on {host}")


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True

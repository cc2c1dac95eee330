"""Chooses the addresses of a cluster's broker, controllers and nodes: sockets in a private directory, or free tcp
ports. Owns only this choice."""

from __future__ import annotations

from pathlib import Path

from bus.endpoints import MARK, why_no_data_dir
from bus.errors import ConfigError
from bus.runtime.ports import free_ports
from pdbus.launcher.spec import Addresses, ClusterSpec


def choose(spec: ClusterSpec, directory: Path) -> Addresses:
    """Return the addresses that `spec` fixes, and fresh ones for the rest: ipc sockets in `directory`, or tcp ports
    that are free now. Nothing is bound: a port may be taken before its part binds it; the caller then tries again.
    Raises ConfigError where `directory` cannot hold sockets."""
    if spec.transport == "ipc":
        if why := why_no_data_dir(str(directory)):
            raise ConfigError(f"$TMPDIR, {str(directory.parent)!r}, is no place for sockets: {why}")
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

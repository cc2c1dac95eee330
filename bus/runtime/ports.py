"""Free tcp ports, for those who must name one before it is bound."""

from __future__ import annotations

import random
import socket

from bus.errors import StartError

_PORTS = range(20_000, 32_000)  # below the usual ephemeral range, so that no outgoing connection takes one meanwhile


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

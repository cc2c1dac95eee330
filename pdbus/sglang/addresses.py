"""Where a server's broker is, from what SGLang is told anyway. Pure.

A prefill server's broker is on the host of its bootstrap server, STEP ports above: whoever knows a request's bootstrap
address knows the bus. Other servers' ranks speak to their own DP controller alone, over a socket file.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable

from bus.endpoints import check_base, runtime_dir
from bus.errors import ConfigError

STEP = 100
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def beside(bootstrap: str) -> str:
    """The bus of the prefill server whose bootstrap address (`host:port`, IPv6 in brackets) a request names."""
    host, _, port = bootstrap.rpartition(":")
    return _at(host.strip("[]"), port)


def near(host: str, port: int) -> str:
    """The same, from the machine itself: a wildcard is where that machine reaches itself."""
    return _at(_ANY.get(host.strip("[]"), host.strip("[]")), str(port))


def to_bind(host: str, port: int, resolve: Callable[[str], str]) -> str:
    """What its broker binds. ZeroMQ binds numbers, not names: `resolve` finds that of a name."""
    host = host.strip("[]") or "0.0.0.0"
    try:
        ipaddress.ip_address(host)
    except ValueError:
        host = resolve(host)
    return _at(host, str(port))


def of_file(nonce: int) -> str:
    """Within one machine, for a server that nobody else asks for rooms."""
    return check_base(f"ipc://{runtime_dir()}/sglang-{nonce:016x}")


def _at(host: str, port: str) -> str:
    if not port.isdecimal():
        raise ConfigError(f"{host}:{port} is no bootstrap address")
    try:
        return check_base(f"tcp://{f'[{host}]' if ':' in host else host}:{int(port) + STEP}")
    except ConfigError as error:
        raise ConfigError(f"{error}; the bus is {STEP} ports above the bootstrap server: name another port") from None

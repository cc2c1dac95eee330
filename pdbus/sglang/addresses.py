"""The address of a server's broker, derived from SGLang's own settings. Pure.

A prefill server's broker is on the host of its bootstrap server, STEP ports above, so a request's bootstrap address
gives the bus. Ranks of other servers talk only to their own DP controller, over a socket file.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable

from bus.endpoints import check_base, runtime_dir
from bus.errors import ConfigError

STEP = 100
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def beside(bootstrap: str) -> str:
    """Return the bus of the prefill server with this bootstrap address (`host:port`, IPv6 in brackets) of a request.
    Raises ConfigError for an invalid address, or a port too high for STEP more."""
    host, _, port = bootstrap.rpartition(":")
    return _at(host.strip("[]"), port)


def near(host: str, port: int) -> str:
    """Return the bus of this machine's own prefill server; `host` and `port` are those of its bootstrap server, where a
    wildcard becomes the loopback address. Raises ConfigError as `beside` does."""
    return _at(_ANY.get(host.strip("[]"), host.strip("[]")), str(port))


def to_bind(host: str, port: int, resolve: Callable[[str], str]) -> str:
    """Return the address that the broker binds; `host` and `port` are those of the bootstrap server. ZeroMQ binds
    numbers, not names: `resolve` gives the number of a name. Raises ConfigError as `beside` does."""
    host = host.strip("[]") or "0.0.0.0"
    try:
        ipaddress.ip_address(host)
    except ValueError:
        host = resolve(host)
    return _at(host, str(port))


def of_file(nonce: int) -> str:
    """Return the address of a socket file on this machine, named by `nonce` (the number of the server's start), for a
    server whose rooms no other server asks for."""
    return check_base(f"ipc://{runtime_dir()}/sglang-{nonce:016x}")


def _at(host: str, port: str) -> str:
    if not port.isdecimal():
        raise ConfigError(f"{host}:{port} is not a bootstrap address")
    try:
        return check_base(f"tcp://{f'[{host}]' if ':' in host else host}:{int(port) + STEP}")
    except ConfigError as error:
        raise ConfigError(f"{error}; the bus is {STEP} ports above the bootstrap server: choose another port") from None

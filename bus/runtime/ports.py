"""Free tcp ports, for a program that must name one before it is bound."""

from __future__ import annotations

import random
import socket

from bus.errors import StartError

_PORTS = range(20_000, 32_000)  # below the usual ephemeral range, so that no outgoing connection takes one meanwhile


def free_ports(host: str, count: int) -> int:
    """Return the first of `count` tcp ports in a row that are free on `host` now; they are not reserved. StartError
    where there are none, or where the address is not this machine's."""
    host = socket_host(host)
    _check(host)
    rng = random.SystemRandom()
    for _ in range(200):
        base = rng.choice(_PORTS[:-count])
        if all(_is_free(host, base + step) for step in range(count)):
            return base
    raise StartError(f"found no {count} free ports in a row on {host}")


def hold(host: str, port: int) -> bool:
    """Reserve a tcp port number for the life of this process, by binding the UDP port of that number. Only programs
    that call this before they listen respect it. Return false if it is reserved or in use. StartError if the address is
    not this machine's."""
    host = socket_host(host)
    _check(host)
    if not _is_free(host, port):
        return False
    with socket.socket(_family(host), socket.SOCK_DGRAM) as claim:
        try:
            claim.bind((host, port))
        except OSError:
            return False
        claim.detach()
        return True


def socket_host(host: str) -> str:
    """Return the host in the form for sockets: an IPv6 address without the brackets that it has in an endpoint."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _check(host: str) -> None:
    """StartError for an invalid address, or that of another machine; a port in use raises nothing."""
    with socket.socket(_family(host), socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise StartError(f"{host} is no address of this machine ({error.strerror}); name one that is") from None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _is_free(host: str, port: int) -> bool:
    with socket.socket(_family(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True

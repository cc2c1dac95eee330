"""Links between processes leave no connection open, however late it came."""

from __future__ import annotations

import gc
import socket
from contextlib import ExitStack

from tcp_links import HOST, Links

from bus.runtime.ports import free_ports


def test_connections_that_are_accepted_as_the_links_end_are_closed() -> None:
    """(What is left open is a ResourceWarning once it is collected, and that an error.)"""
    base = free_ports(HOST, 2)
    links = Links()
    with ExitStack() as held, socket.create_server((HOST, base + 1)):
        links.add(frozenset("ab"), base, base + 1)
        for _ in range(30):
            held.enter_context(socket.create_connection((HOST, base)))
        links.close()
    del links
    gc.collect()

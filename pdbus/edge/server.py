"""The process around an edge: its port, its life, its signals. HTTP is `connection`'s."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable

import uvloop

from bus.endpoints import default_controller, why_silent
from bus.errors import ConfigError, PartFailed, StartError
from bus.runtime.logs import get_logger
from pdbus.client import AsyncClient
from pdbus.edge.app import LOOK_S, Edge
from pdbus.edge.config import EdgeConfig
from pdbus.edge.connection import Connection

BACKLOG = 2048
TELL_S = 2.0

log = get_logger("edge")


def serve(config: EdgeConfig, ready: Callable[[str], None], waiting: Callable[[str], None] = lambda line: None) -> None:
    """Until SIGTERM or SIGINT, which lets requests finish; a second one does not. `ready` gets the URL once the
    controller has answered. StartError when it does not within `wait_s`, or the port is taken; PartFailed when the
    client library breaks, since nothing can be served then."""
    uvloop.run(_serve(config, ready, waiting))


async def _serve(config: EdgeConfig, ready: Callable[[str], None], waiting: Callable[[str], None]) -> None:
    listener = listen(config)
    controller = config.controller or default_controller()
    async with AsyncClient(controller, keys=config.keys, retries=12) as client:
        edge = Edge(config, client)
        server = Server(config, edge)
        running = asyncio.create_task(server.serve(listener))
        looking = asyncio.create_task(_look(edge, server))
        try:
            await _until_seen(edge, server, config, controller, waiting)
            if not server.leaving.is_set():
                scheme = "https" if config.tls_cert else "http"
                host, port = listener.getsockname()[:2]
                if config.exposed and not config.api_keys:
                    log.warning("edge.open_to_all", http=config.http, hint="other machines may use it: pass --api-keys")
                ready(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}")
            await running
            if looking.done():
                looking.result()
        finally:
            looking.cancel()
            server.leaving.set()
            await running


def listen(config: EdgeConfig) -> socket.socket:
    """The bound port. StartError when it is taken, ConfigError when the host is none of ours."""
    host, port = config.address
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except socket.gaierror as error:
        raise ConfigError(f"cannot listen on {config.http}: {error.strerror}") from None
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise StartError(f"cannot listen on {config.http}: {why}; choose another --http") from None


async def _look(edge: Edge, server: Server) -> None:
    loop = asyncio.get_running_loop()
    while True:
        began = loop.time()
        try:
            server.check()
            await edge.look()
        except PartFailed:
            server.leave()
            raise
        except Exception:  # a bug of ours must not blind the edge for good
            log.exception("edge.look_failed")
        await asyncio.sleep(max(0.05 if edge.view.seen is None else LOOK_S, began + LOOK_S - loop.time()))


async def _until_seen(
    edge: Edge, server: Server, config: EdgeConfig, controller: str, waiting: Callable[[str], None]
) -> None:
    loop = asyncio.get_running_loop()
    began = told = loop.time()
    while edge.view.seen is None and not server.leaving.is_set():
        now = loop.time()
        if now - began >= config.wait_s:
            why = await asyncio.to_thread(why_silent, controller, config.keys)
            raise StartError(f"no controller answers at {controller} (waited {config.wait_s:g} s): {why}")
        if now - told >= TELL_S:
            told = now
            waiting(f"waiting for a controller at {controller} ({now - began:.0f} s of {config.wait_s:g} s)")
        await asyncio.sleep(0.02)


class Server:
    """Holds the connections, until `leave` is called: then requests have `drain_s` to finish, or until it is called
    again."""

    def __init__(self, config: EdgeConfig, edge: Edge) -> None:
        self._config = config
        self._edge = edge
        self._tls = _tls(config) if config.tls_cert else None
        self.connections: set[Connection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.leaving = asyncio.Event()
        self._hurried = asyncio.get_running_loop().create_future()

    async def serve(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        listening = await loop.create_server(
            lambda: Connection(self._config, self._edge, time.monotonic, self), sock=listener, ssl=self._tls,
            backlog=BACKLOG,
        )  # fmt: skip
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.leave)
        try:
            await self.leaving.wait()
            listening.close()
            await self._drain()
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def leave(self) -> None:
        if self.leaving.is_set() and not self._hurried.done():
            self._hurried.set_result(None)
        self.leaving.set()

    def check(self) -> None:
        """End what takes clients too long."""
        now = time.monotonic()
        for connection in list(self.connections):
            connection.check(now)

    async def _drain(self) -> None:
        for connection in list(self.connections):
            connection.shutdown()
        over = asyncio.gather(*self.tasks, *(each.closed for each in self.connections), return_exceptions=True)
        await asyncio.wait((over, self._hurried), timeout=self._config.drain_s, return_when=asyncio.FIRST_COMPLETED)
        for connection in list(self.connections):
            connection.abort()
        for task in self.tasks:
            task.cancel()
        await over


def _tls(config: EdgeConfig) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"cannot use {config.tls_cert} and {config.tls_key}: {error}") from None
    return context

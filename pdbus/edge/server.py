"""The process around an edge: its port, its life, its signals. HTTP itself is uvicorn's and httptools'.

What they leave to others stands here: how long and how large the head of a request may be.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import ssl
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from bus.endpoints import default_controller, why_silent
from bus.errors import ConfigError, PartFailed, StartError
from bus.runtime.keys import EDGE, load_keys
from bus.runtime.logs import get_logger
from bus.runtime.reload import Reload
from bus.runtime.spans import Spans
from pdbus.client import AsyncClient
from pdbus.edge.app import LOOK_S, Edge
from pdbus.edge.config import EdgeConfig

BACKLOG = 2048
TELL_S = 2.0
OVERLOADED_S = 1.0  # so long an overloaded cluster is tried again for a request: its client backs off better
NO_RANK_S = 5.0  # for a rank that is started again to come back
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)

log = get_logger("edge")


class EdgeClient(AsyncClient):
    """With a client's key, and never with an admin's that lies beside it."""

    def __init__(self, controller: str, config: EdgeConfig) -> None:
        self._config = config
        super().__init__(controller, retries=12, overloaded_s=OVERLOADED_S, no_rank_s=NO_RANK_S)

    def _start(self, keys: str | Path, seed: int | None) -> None:
        super()._start(keys, seed)
        config = self._config
        if config.keys:
            self._keys = load_keys(config.keys, "clients", name=config.key_name, default=EDGE)


def serve(
    config: EdgeConfig, ready: Callable[[str], None], waiting: Callable[[str], None] = lambda line: None,
    spans: Spans | None = None,
) -> None:  # fmt: skip
    """Until SIGTERM or SIGINT, which lets requests finish; a second one does not. `ready` gets the URL once the
    controller has answered. StartError when it does not within `wait_s`, or the port is taken; PartFailed when the
    client library breaks, since nothing can be served then."""
    uvloop.run(_serve(config, ready, waiting, spans))


async def _serve(
    config: EdgeConfig, ready: Callable[[str], None], waiting: Callable[[str], None], spans: Spans | None
) -> None:
    listener = listen(config)
    controller = config.controller or default_controller()
    async with EdgeClient(controller, config) as client:
        edge = Edge(config, client, spans=spans)
        server = Server(config, edge)
        if click.get_current_context(silent=True) is not None:
            server.reload = Reload(server.reconfigure, server.leave)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        looking = asyncio.create_task(_look(edge, server))
        try:
            await _until_seen(edge, server, config, controller, waiting)
            if not server.should_exit:
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
            server.should_exit = True
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
            await edge.look()
        except PartFailed:
            server.leave()
            raise
        except Exception:  # a bug of ours must not blind the edge for good
            log.exception("edge.look_failed")
        await asyncio.sleep(max(0.05 if edge.view.seen is None else LOOK_S, began + LOOK_S - loop.time()))


async def _until_seen(
    edge: Edge, server: uvicorn.Server, config: EdgeConfig, controller: str, waiting: Callable[[str], None]
) -> None:
    loop = asyncio.get_running_loop()
    began = told = loop.time()
    while edge.view.seen is None and not server.should_exit:
        now = loop.time()
        if now - began >= config.wait_s:
            why = await asyncio.to_thread(why_silent, controller, config.keys)
            raise StartError(f"no controller answers at {controller} (waited {config.wait_s:g} s): {why}")
        if now - told >= TELL_S:
            told = now
            waiting(f"waiting for a controller at {controller} ({now - began:.0f} s of {config.wait_s:g} s)")
        await asyncio.sleep(0.02)


class Server(uvicorn.Server):
    """uvicorn's, with the limits of `config` and signals that every part of ours understands alike."""

    def __init__(self, config: EdgeConfig, edge: Edge) -> None:
        options: dict[str, Any] = {
            "app": edge,
            "http": _limited(config),
            "ws": "none",
            "loop": "none",
            "lifespan": "off",
            "interface": "asgi3",
            "log_config": None,
            "log_level": "critical",  # what matters is logged by the edge
            "access_log": False,
            "server_header": False,
            "date_header": False,
            "proxy_headers": False,
            "timeout_keep_alive": int(config.keep_alive_s),
            "timeout_graceful_shutdown": int(config.drain_s),
        }
        if config.tls_cert:
            options |= {"ssl_certfile": config.tls_cert, "ssl_keyfile": config.tls_key}
        super().__init__(uvicorn.Config(**options))
        self.reload: Callable[[], None] | None = None  # on SIGHUP
        self._edge = edge
        self._config = config
        try:
            self.config.load()
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(f"cannot use {config.tls_cert} and {config.tls_key}: {error}") from None

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """The first lets requests finish, the second does not. SIGHUP reads the settings again."""
        loop = asyncio.get_running_loop()
        handlers = {signal.SIGTERM: self.leave, signal.SIGINT: self.leave}
        if self.reload is not None:
            handlers[signal.SIGHUP] = self.reload
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)

    def reconfigure(self, changed: Mapping[str, Any]) -> None:
        """Settings by name (`RELOADS`). ConfigError for what can't be meant, and nothing is changed."""
        fields = {name: value for name, value in changed.items() if name != "log_level"}
        self._config = replace(self._config, **fields)
        self.config.timeout_graceful_shutdown = int(self._config.drain_s)
        self._edge.reconfigure(self._config)

    def leave(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


def _without_upgrade(data: bytes) -> bytes:
    """`data`, which begins or continues a request's head, with the header Upgrade under another name. A server may
    ignore it, but the parser takes what follows such a head for another protocol's, and the body is lost; Java's
    HttpClient offers h2c with bodies."""
    end = data.find(b"\r\n\r\n")
    if _UPGRADE.search(data, 0, len(data) if end < 0 else end) is None:
        return data
    head, between, rest = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"\r\nx-upgrade:", head) + between + rest


def _limited(config: EdgeConfig) -> type[HttpToolsProtocol]:
    class Limited(HttpToolsProtocol):
        """Closes a connection whose request head is too long, or takes too long."""

        _head_bytes = 0
        _head_timer: asyncio.TimerHandle | None = None
        _in_body = False

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._await_head()

        def data_received(self, data: bytes) -> None:
            self._head_bytes += len(data) if self._head_timer is not None else 0
            super().data_received(data if self._in_body else _without_upgrade(data))
            if self._head_timer is not None and self._head_bytes > config.max_head_bytes:
                self._give_up()

        def on_message_begin(self) -> None:
            if self._head_timer is None:
                self._await_head()
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
            self._head_timer, self._head_bytes, self._in_body = None, 0, True
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._in_body = False
            super().on_message_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
            self._head_timer = None
            super().connection_lost(exc)

        def _await_head(self) -> None:
            self._head_bytes = 0
            self._head_timer = self.loop.call_later(config.receive_s, self._give_up)

        def _give_up(self) -> None:
            if not self.transport.is_closing():
                self.transport.close()

    return Limited

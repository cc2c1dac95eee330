"""The process around an edge: its port, start and end, and signals. uvicorn and httptools speak HTTP.

The limits that they do not enforce are in `connection`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import click
import uvicorn
import uvloop

from bus.endpoints import default_controller, why_silent
from bus.errors import ConfigError, PartFailed, StartError
from bus.runtime.logs import get_logger
from bus.runtime.reload import Reload
from bus.runtime.spans import Spans
from pdbus.edge.app import LOOK_S, Edge
from pdbus.edge.client import EdgeClient
from pdbus.edge.config import EdgeConfig
from pdbus.edge.connection import Connection, connections_of
from pdbus.edge.exchange import Receive, Scope, Send
from pdbus.edge.fleet import Fleet, fleet_of

BACKLOG = 2048
PROGRESS_S = 2.0

log = get_logger("edge")


def serve(
    config: EdgeConfig, ready: Callable[[str], None], waiting: Callable[[str], None] = lambda line: None,
    spans: Spans | None = None,
) -> None:  # fmt: skip
    """Serve until SIGTERM or SIGINT; it blocks. The first signal lets requests finish, a second one does not. `ready`
    gets the URL once the controller has answered, `waiting` a line every PROGRESS_S before.

    Raises StartError when the controller does not answer within `wait_s` or the port is taken, ConfigError for settings
    that cannot be used, and PartFailed when the client library fails, because nothing can be served then.
    """
    uvloop.run(_serve(config, ready, waiting, spans))


async def _serve(
    config: EdgeConfig, ready: Callable[[str], None], waiting: Callable[[str], None], spans: Spans | None
) -> None:
    listener = listen(config)
    controller = config.controller or default_controller()
    async with EdgeClient(controller, config.keys, config.key_name) as client:
        make = fleet_of(config, controller)
        edge = Edge(config, client, spans=spans, fleet=make if isinstance(make, str) else Fleet(make, _log_feed))
        server = Server(config, edge)
        if click.get_current_context(silent=True) is not None:
            server.reload = Reload(server.reconfigure, server.leave)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        looking = asyncio.create_task(_look(edge, server))
        try:
            await _until_seen(edge, server, config, controller, waiting)
            if not server.should_exit:
                if config.exposed and not config.api_keys:
                    log.warning("edge.open_to_all", http=config.http, hint="other machines may use it: pass --api-keys")
                ready(url_of(config, listener))
            await running
            if looking.done():
                looking.result()
        finally:
            looking.cancel()
            server.should_exit = True
            await running
            edge.leave()


def listen(config: EdgeConfig) -> socket.socket:
    """Bind the port and return its socket. Raises StartError when it is taken, ConfigError when the host is not
    ours."""
    host, port = config.address
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except socket.gaierror as error:
        raise ConfigError(f"cannot listen on {config.http}: {error.strerror}") from None
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise StartError(f"cannot listen on {config.http}: {why}; choose another --http") from None


def _log_feed(error: Exception) -> None:
    """Log what has ended the fleet's feed: the next reader begins another."""
    log.error("fleet.feed_ended", error=str(error))


def url_of(config: EdgeConfig, listener: socket.socket) -> str:
    """Return the URL of a server that listens there, without a path."""
    host, port = listener.getsockname()[:2]
    return f"{'https' if config.tls_cert else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


async def _look(edge: Edge, server: Server) -> None:
    loop = asyncio.get_running_loop()
    while True:
        began = loop.time()
        server.cut_off(began)
        try:
            await edge.look()
        except PartFailed:
            server.leave()
            raise
        except Exception:  # a bug of ours must not stop these checks for good
            log.exception("edge.look_failed")
        await asyncio.sleep(max(0.05 if edge.view.seen is None else LOOK_S, began + LOOK_S - loop.time()))


async def _until_seen(
    edge: Edge, server: uvicorn.Server, config: EdgeConfig, controller: str, waiting: Callable[[str], None]
) -> None:
    loop = asyncio.get_running_loop()
    began = shown_at = loop.time()
    while edge.view.seen is None and not server.should_exit:
        now = loop.time()
        if now - began >= config.wait_s:
            why = await asyncio.to_thread(why_silent, controller, config.keys)
            raise StartError(f"no controller answers at {controller} (waited {config.wait_s:g} s): {why}")
        if now - shown_at >= PROGRESS_S:
            shown_at = now
            waiting(f"waiting for a controller at {controller} ({now - began:.0f} s of {config.wait_s:g} s)")
        await asyncio.sleep(0.02)


class App(Protocol):
    """An ASGI application of ours."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request to its end."""

    def reconfigure(self, config: EdgeConfig) -> None:
        """Use `config` from the next request on."""

    def end_streams(self) -> None:
        """End what goes on until its reader leaves."""


class Server(uvicorn.Server):
    """uvicorn's server with the limits of `config` and the signals of all our parts. Raises ConfigError when the
    certificate cannot be used."""

    def __init__(self, config: EdgeConfig, app: App) -> None:
        options: dict[str, Any] = {
            "app": app,
            "http": connections_of(config),
            "ws": "none",
            "loop": "none",
            "lifespan": "off",
            "interface": "asgi3",
            "log_config": None,
            "log_level": "critical",  # the edge logs what matters
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
        self._app = app
        self._config = config
        try:
            self.config.load()
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(f"cannot use {config.tls_cert} and {config.tls_key}: {error}") from None

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handle signals inside the `with` block: the first SIGTERM or SIGINT lets requests finish, the second does
        not. SIGHUP calls `reload`. uvicorn uses it."""
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
        """Change settings by name while it runs, for the next requests. Raises ConfigError for invalid values, and then
        changes nothing."""
        fields = {name: value for name, value in changed.items() if name != "log_level"}
        self._config = replace(self._config, **fields)
        self.config.timeout_graceful_shutdown = int(self._config.drain_s)
        self._app.reconfigure(self._config)

    def cut_off(self, now: float) -> None:
        """Abort the connections of clients that have stopped reading; call it regularly, with the loop's time. A normal
        close would wait for the client to read the rest."""
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection) and connection.stalled(now):
                log.warning("client.stopped_reading", left=connection.unsent)
                connection.transport.abort()

    def leave(self) -> None:
        """Begin to leave: end streams without an end and let requests finish; at the second call, do not wait for
        them."""
        self._app.end_streams()
        self.force_exit = self.should_exit
        self.should_exit = True

"""The page server of `pdbus top --http`: a fleet's page for those who have its token. Owns its port and its process."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable

import uvloop

from bus.runtime.logs import get_logger
from pdbus import pages
from pdbus.edge.config import EdgeConfig
from pdbus.edge.errors import HttpError
from pdbus.edge.exchange import Exchange, Receive, Scope, Send
from pdbus.edge.fleet import PAGE, RANK, REQUEST, STREAM, Fleet, MakeFeed, refuse_other_hosts
from pdbus.edge.server import Server, listen, url_of

LOOK_S = 1.0

log = get_logger("fleet")


class FleetApp:
    """The application (ASGI). The token is not kept, only its hash: a page sends it as a bearer token."""

    def __init__(self, config: EdgeConfig, fleet: Fleet, token: str) -> None:
        self._config = config
        self._fleet = fleet
        self._token = hashlib.sha256(token.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request to its end; errors become HTTP errors."""
        exchange = Exchange(scope, receive, send, self._config, time.monotonic)
        try:
            try:
                refuse_other_hosts(exchange, exposed=self._config.exposed)
                await self._serve(exchange)
            except HttpError as error:
                await exchange.fail(error)
        except Exception:  # a bug of ours
            log.exception("request.crashed", path=exchange.path)
            if not exchange.status:
                await exchange.fail(HttpError(500, "the page server has failed; its log says why"))

    def reconfigure(self, config: EdgeConfig) -> None:
        """Use `config` from the next request on."""
        self._config = config

    def end_streams(self) -> None:
        """End all streams, so that the server can leave."""
        self._fleet.end()

    async def _serve(self, exchange: Exchange) -> None:
        path = exchange.path
        if exchange.method not in ("GET", "HEAD"):
            raise HttpError(405, f"{path[:200]} takes GET", code="method_not_allowed", headers=((b"allow", b"GET"),))
        if path in ("/", PAGE):
            await self._fleet.page(exchange)
        elif path.startswith(pages.PREFIX) and (file := pages.asset(path)) is not None:
            await exchange.answer(200, file.body, file.kind, pages.HEADERS)
        elif path == STREAM or path.startswith((RANK, REQUEST)):
            scheme, _, token = exchange.headers.get(b"authorization", b"").partition(b" ")
            given = hashlib.sha256(token.strip()).digest()
            if scheme.lower() != b"bearer" or not secrets.compare_digest(given, self._token):
                why = "open the URL that pdbus top --http has printed: its token is of that start"
                raise HttpError(401, why, code="invalid_token", headers=((b"www-authenticate", b"Bearer"),))
            if path == STREAM:
                await self._fleet.stream(exchange)
            elif path.startswith(RANK):
                await self._fleet.rank(exchange)
            else:
                await self._fleet.request(exchange)
        else:
            raise HttpError(404, f"there is no {path[:200]}; the fleet's page is at {PAGE}", code="not_found")


def serve(http: str, make: MakeFeed, ready: Callable[[str], None]) -> None:
    """Serve the page at `http` ([host:]port) until SIGTERM or SIGINT; it blocks. `ready` gets the URL, with the token.
    Raises StartError when the port is taken, ConfigError for an address that is not ours, and what ended the feed."""
    uvloop.run(_serve(EdgeConfig(http=http, drain_s=2.0, max_body_bytes=1), make, ready))


async def _serve(config: EdgeConfig, make: MakeFeed, ready: Callable[[str], None]) -> None:
    listener = listen(config)
    token = secrets.token_urlsafe(24)
    errors: list[Exception] = []

    def failed(error: Exception) -> None:
        errors.append(error)
        server.leave()

    fleet = Fleet(make, failed, always=True)
    server = Server(config, FleetApp(config, fleet, token))
    running = asyncio.create_task(server.serve(sockets=[listener]))
    fleet.begin()
    try:
        ready(f"{url_of(config, listener)}{PAGE}#token={token}")
        while not running.done():
            fleet.look()
            server.cut_off(asyncio.get_running_loop().time())
            await asyncio.wait((running,), timeout=LOOK_S)
        await running
    finally:
        server.should_exit = True
        await running
        fleet.end()
    for error in errors:
        raise error

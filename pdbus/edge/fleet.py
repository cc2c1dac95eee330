"""The fleet over HTTP: the page of `pdbus top --http` and of an edge's `/fleet`, and the stream from which it draws.

Owns the readers of the stream and its thread (`pdbus.fleet.feed`). Its owner decides which requests may
look; one that another site's page makes is refused here.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from bus.errors import ConfigError, PeerLost, RequestFailed
from bus.runtime.keys import EDGE, Keys, load_keys
from bus.runtime.logs import get_logger
from pdbus import pages
from pdbus.edge.config import EdgeConfig
from pdbus.edge.errors import HttpError
from pdbus.edge.exchange import Exchange
from pdbus.fleet.feed import Feed
from pdbus.fleet.frames import Frames
from pdbus.fleet.history import SPAN_S, RankRow
from pdbus.fleet.one_request import RID_MAX
from pdbus.fleet.readers import MAX_READERS, Reader, Readers
from pdbus.fleet.source import watching

PAGE, STREAM, RANK = "/fleet", "/fleet/stream", "/fleet/rank/"
REQUEST = "/fleet/request/rid="  # and a rid, which alone could be `..`
ASKED = 8  # requests that are looked up at once
SEND_BUFFER = 64 << 10  # bytes that the kernel keeps for a reader: of more, one that reads nothing would not be noticed
LOCAL_NAMES = frozenset({"localhost", "localhost.localdomain"})

log = get_logger("fleet")
T = TypeVar("T")
MakeFeed = Callable[[Callable[[bytes], None], Callable[[Exception], None]], Feed]


class Fleet:
    """The fleet's page and stream, ranks' series and requests, for the running loop. `make(publish, failed)` returns a
    feed, which begins with the first reader or with `begin`, and ends a quarter of an hour after the last reader has
    left, unless `always`. Call `look` each second or so. `failed` gets what has ended a feed."""

    def __init__(self, make: MakeFeed, failed: Callable[[Exception], None], *, always: bool = False) -> None:
        self._make = make
        self._failed = failed
        self._always = always
        self._loop = asyncio.get_running_loop()
        self._readers = Readers()
        self._streams: dict[Reader, Exchange] = {}
        self._feed: Feed | None = None
        self._asked = 0
        self._read_at = 0.0  # when there was a reader
        self._over = False

    def begin(self) -> Feed:
        """Return the feed, which asks from now on."""
        if self._feed is None:
            self._feed = self._make(self._from_feed(self._publish), self._from_feed(self._ended))
            self._read_at = time.monotonic()
            self._feed.start()
        return self._feed

    def look(self) -> None:
        """Cut off the readers that read nothing, and end a feed that none has read for long."""
        now = time.monotonic()
        for reader in self._readers.too_late(now):
            log.warning("page.cut_off", behind_s=round(reader.behind_s(now), 1))
            self._streams[reader].abort()
        if self._streams:
            self._read_at = now
        elif self._feed is not None and not self._always and now - self._read_at > SPAN_S:
            self._feed.stop()
            self._feed = None

    def end(self) -> None:
        """End all streams, and the feed."""
        self._over = True
        self._readers.end()
        if self._feed is not None:
            self._feed.stop()

    async def page(self, exchange: Exchange) -> None:
        """Answer with the page, which has no data in it."""
        file = pages.page("fleet")
        await exchange.answer(200, file.body, file.kind, pages.HEADERS)

    async def stream(self, exchange: Exchange) -> None:
        """Send a snapshot and then deltas, until the reader leaves. Raises HttpError 503 when MAX_READERS read."""
        refuse_other_sites(exchange)
        ready = asyncio.Event()
        reader = None if self._over else self._readers.enter(ready.set)
        if reader is None:
            why = "this server is leaving" if self._over else f"{MAX_READERS} browsers look at this fleet; close one"
            raise HttpError(503, why, code="overloaded")
        self._streams[reader] = exchange
        feed = self.begin()

        def left() -> None:
            reader.over = True
            ready.set()

        exchange.limit_send_buffer(SEND_BUFFER)
        exchange.watch(left)
        try:
            await exchange.events()
            while not reader.over:
                ready.clear()
                if data := reader.take(feed.snapshot, time.monotonic()):
                    await exchange.event(data)
                else:
                    await ready.wait()
            if not exchange.gone:
                await exchange.event(b"", last=True)
        finally:
            exchange.unwatch()
            del self._streams[reader]
            self._readers.leave(reader)

    async def rank(self, exchange: Exchange) -> None:
        """Answer with the last fifteen minutes of the rank `/fleet/rank/INSTANCE/DP_RANK`: a list for each figure."""
        refuse_other_sites(exchange)
        instance, _, number = exchange.path.removeprefix(RANK).rpartition("/")
        key = instance, int(number) if number.isascii() and number.isdigit() and len(number) < 10 else -1
        rows = await asyncio.to_thread(self.begin().series, key)
        if not rows:
            raise HttpError(404, "nothing is known of such a rank yet", code="not_found")
        series = {name: [row[place] for row in rows] for place, name in enumerate(RankRow._fields)}
        await exchange.answer(200, msgspec.json.encode(series))

    async def request(self, exchange: Exchange) -> None:
        """Answer with what became of the request `/fleet/request/rid=RID`. Raises HttpError 503 when the controller
        does not answer, or ASKED such questions are open."""
        refuse_other_sites(exchange)
        rid = exchange.path.removeprefix(REQUEST)
        if not 0 < len(rid) <= RID_MAX:
            raise HttpError(400, f"a rid has 1 to {RID_MAX} characters", code="bad_request")
        if self._asked >= ASKED:
            raise HttpError(503, f"{ASKED} requests are being looked up; ask again", code="overloaded")
        self._asked += 1
        try:
            answer = await asyncio.to_thread(self.begin().request, rid)
        except RequestFailed as error:
            raise HttpError(503, error.message, code=error.code) from None
        except PeerLost:
            raise HttpError(503, "the controller does not answer", code="no_controller") from None
        finally:
            self._asked -= 1
        await exchange.answer(200, msgspec.json.encode(answer))

    # --- from the feed's thread ---------------------------------------------------------------------------------

    def _from_feed(self, function: Callable[[T], None]) -> Callable[[T], None]:
        def call(argument: T) -> None:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(function, argument)

        return call

    def _publish(self, delta: bytes) -> None:
        self._readers.publish(delta, time.monotonic())

    def _ended(self, error: Exception) -> None:
        self._feed = None
        self._readers.end()
        self._failed(error)


def fleet_of(config: EdgeConfig, controller: str) -> MakeFeed | str:
    """Return what makes the feed of an edge's `/fleet`, or the reason why the edge shows none: it has no viewer's key
    in a cluster with keys, or no API keys although other machines reach it. Raises ConfigError when `viewer_keys` is
    given and has no such key."""
    if config.exposed and not config.api_keys:
        return "the fleet is shown to API keys marked operator, or on a loopback address; this edge has neither"
    key: Keys | None = None
    if config.keys or config.viewer_keys:
        try:
            key = load_keys(config.viewer_keys or config.keys, "viewers", default=EDGE)
        except ConfigError:
            if config.viewer_keys:
                raise
            return f"the fleet takes a viewer's key of the edge's own: pdbus keys add KEYS viewer {EDGE}"
    return lambda publish, failed: Feed(lambda: watching(controller, key), Frames(asks_broker=False), publish, failed)


def refuse_other_sites(exchange: Exchange) -> None:
    """Raise HttpError 403 for a request that a page of another site makes, whatever `--cors-origin` allows there."""
    origin = exchange.headers.get(b"origin", b"").decode("latin-1")
    host = exchange.headers.get(b"host", b"").decode("latin-1")
    if exchange.headers.get(b"sec-fetch-site", b"") == b"cross-site" or (origin and urlsplit(origin).netloc != host):
        raise HttpError(403, "a fleet is shown to its own page alone", code="forbidden")


def refuse_other_hosts(exchange: Exchange, *, exposed: bool) -> None:
    """Raise HttpError 421 unless the header `Host` says this machine: else a stranger's name that has come to mean our
    address could be in it, and the stranger's page would be of the same site (DNS rebinding). With `exposed` addresses
    of any kind and this machine's own names are ours too."""
    host = exchange.headers.get(b"host", b"").decode("latin-1")
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        name = ""
    if name in LOCAL_NAMES:
        return
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        ours = exposed and name in {socket.gethostname().lower(), socket.getfqdn().lower()}
    else:
        ours = exposed or address.is_loopback
    if not ours:
        raise HttpError(421, f"this server is not {name[:100]!r}; use its address", code="misdirected")

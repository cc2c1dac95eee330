"""The edge's HTTP server over real sockets: limits on heads, connections that wait, and noise of all kinds."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import re
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from edge_world import PAIR, ScriptedClient, letters
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.errors import ConfigError, PartFailed
from bus.wire.messages import Status
from pdbus.commands.serve import serve
from pdbus.edge import server
from pdbus.edge.app import Edge
from pdbus.edge.config import EdgeConfig
from pdbus.edge.server import Server, listen


def test_without_its_packages_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else found(name))
    with pytest.raises(ConfigError, match="pdbus serve needs uvicorn: pip install uvicorn"):
        serve.main(["--http", "0"], standalone_mode=False)


POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
ASK = POST + b"Content-Length: 15\r\n\r\n" + b'{"prompt": "x"}'

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def served(*talks: Talk, within_s: float = 60.0, **config: Any) -> Edge:
    """Each of `talks` over a connection of its own, one after the other, with a server that lives as long. Each ends
    within that time."""

    async def run() -> Edge:
        settings = EdgeConfig(http="127.0.0.1:0", **config)
        edge = Edge(settings, ScriptedClient(letters("ok"), PAIR))  # type: ignore[arg-type]
        await edge.look()
        serving = Server(settings, edge)
        listener = listen(settings)
        running = asyncio.create_task(serving.serve(sockets=[listener]))
        port = listener.getsockname()[1]
        try:
            for talk in talks:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                task = asyncio.ensure_future(talk(reader, writer))
                await asyncio.wait([task], timeout=within_s)
                writer.close()
                assert task.done() or not task.cancel(), "the edge leaves it open"
                task.result()
        finally:
            serving.leave()
            await running
        return edge

    return asyncio.run(run())


async def answer(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return head + await reader.readexactly(length)


def test_a_connection_serves_many_requests_also_pipelined() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(3):
            writer.write(ASK)
            assert b'"text":"ok"' in await answer(reader)
        writer.write(ASK * 3)
        for _ in range(3):
            assert b'"text":"ok"' in await answer(reader)

    assert served(talk).counts.requests["/v1/completions", "200"] == 6


def test_a_head_without_end_is_cut_off() -> None:
    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(POST)
        sent = 0
        try:
            while not reader.at_eof() and sent < 100:
                writer.write(b"X-More: " + b"x" * 60_000 + b"\r\n")
                sent += 1
                await writer.drain()
                await asyncio.sleep(0)
        except ConnectionError:
            pass
        assert sent < 100, "it took six megabytes of a head"

    async def second(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(ASK)
        await answer(reader)
        await endless(reader, writer)

    served(endless, second)


def test_a_head_that_does_not_come_is_not_waited_for() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.read() == b""

    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(POST)
        assert await reader.read() == b""

    async def half_of_a_second(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(ASK)
        await answer(reader)
        writer.write(POST[:20])
        assert await reader.read() == b""

    async def half_a_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(ASK[:-3])
        assert (await reader.read()).startswith(b"HTTP/1.1 408")

    served(silent, half, half_of_a_second, half_a_body, within_s=10.0, receive_s=0.1)


CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
EARLY = b"POST /nowhere HTTP/1.1\r\nHost: x\r\n"  # answered by its head
TRAILERS = b"x: y\r\n" * 20_000
ENDLESS: list[tuple[bytes, bytes]] = [  # what begins, and what follows without end
    (b"", b"\r\n" * 20_000),
    (EARLY + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", TRAILERS),
    (EARLY + b"Transfer-Encoding: chunked\r\n\r\n0\r\nx: ", b"y" * 100_000),
    (EARLY + b"Transfer-Encoding: chunked\r\n\r\n1;", b"y" * 100_000),
    (CHUNKED + b"1\r\n{\r\n0\r\n", TRAILERS),
    (EARLY + b"Content-Length: 1000000000\r\n\r\n", b"y" * 100_000),
    (EARLY + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\ny\r\n" * 20_000),
]


@pytest.mark.parametrize(("begin", "more"), ENDLESS)
def test_all_of_a_message_is_counted(begin: bytes, more: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent = 0
        with contextlib.suppress(ConnectionError):
            writer.write(begin)
            while not writer.transport.is_closing() and sent < 30 << 20:
                writer.write(more)
                sent += len(more)
                await writer.drain()
                await asyncio.sleep(0)
        assert sent < 30 << 20, "it took all of it"

    async def after(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(ASK)
        assert b'"text":"ok"' in await answer(reader)

    served(talk, after, max_body_bytes=1 << 20)


def test_trailers_are_no_headers() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            writer.write(CHUNKED + b'f\r\n{"prompt": "x"}\r\n0\r\nx-request-id: \xff\r\n\r\n')
            assert b'"text":"ok"' in await answer(reader)

    served(talk)


@pytest.mark.parametrize("size", [70_000, 200_000])
def test_a_head_that_comes_at_once_is_as_long_as_one_that_does_not(size: int) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(POST + b"X-More: " + b"x" * size + b"\r\nContent-Length: 15\r\n\r\n" + ASK[-15:])
        with contextlib.suppress(ConnectionError):
            assert b"200" not in await reader.read()

    async def just_so(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(POST + b"X-More: " + b"x" * 65_000 + b"\r\nContent-Length: 15\r\n\r\n" + ASK[-15:])
        assert b'"text":"ok"' in await answer(reader)

    served(talk, just_so, within_s=10.0)


def test_what_follows_an_answer_is_timed_however_slowly_it_comes() -> None:
    """The rest of a body whose answer came early, and bytes that belong to no message."""

    def slowly(begin: bytes, more: bytes) -> Talk:
        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(begin)
            reading = asyncio.create_task(reader.read())
            with contextlib.suppress(ConnectionError):
                while not reading.done():
                    writer.write(more)
                    await writer.drain()
                    await asyncio.wait([reading], timeout=0.02)
                await reading

        return talk

    rest = slowly(EARLY + b"Content-Length: 1000000\r\n\r\n", b"x")
    chunks = slowly(EARLY + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n")
    served(rest, chunks, slowly(b"", b"\r\n"), slowly(ASK, b"\r\n"), within_s=10.0, receive_s=0.2)


def test_a_body_that_comes_behind_its_answer_leaves_the_connection_as_it_was() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            writer.write(EARLY + b"Content-Length: 5\r\n\r\n")
            assert (await answer(reader)).startswith(b"HTTP/1.1 404")
            writer.write(b"hello")
        writer.write(ASK)
        assert b'"text":"ok"' in await answer(reader)
        writer.write(EARLY + b"Content-Length: 5\r\n\r\n")
        await answer(reader)
        writer.write(b"hello")
        assert await reader.read() == b"", "and is closed once it is idle"

    served(talk, keep_alive_s=1.0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_stops_reading_is_cut_off(stream: bool) -> None:
    """Whatever it had asked for is over long since, or is still being written."""

    async def run() -> None:
        config = EdgeConfig(http="127.0.0.1:0", send_s=60.0, drain_s=600.0)
        client = ScriptedClient(lambda ids, o: [(100,)] * 20_000 if stream else [(100,)], PAIR)
        edge = Edge(config, client)  # type: ignore[arg-type]
        await edge.look()
        serving = Server(config, edge)
        listener, ours = listen(config), socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # little fits between the two
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        running = asyncio.create_task(serving.serve(sockets=[listener]))
        ours.setblocking(False)
        await asyncio.get_running_loop().sock_connect(ours, listener.getsockname())
        _, writer = await asyncio.open_connection(sock=ours, limit=1024)
        body = msgspec.json.encode({"prompt": "x", "stream": True} if stream else {"prompt": "x" * 400_000})
        path = b"/v1/completions" if stream else b"/tokenize"
        writer.write(POST.replace(b"/v1/completions", path) + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        async with asyncio.timeout(60):
            (connection,) = await until(lambda: serving.server_state.connections)
            now, seen = 1e9, -1
            while connection.unsent != seen or not seen:  # as much as the sockets hold has gone out
                seen = connection.unsent
                serving.cut_off(now)
                await asyncio.sleep(0.05)
            serving.leave()
            serving.cut_off(now + 59.0)
            assert serving.server_state.connections
            serving.cut_off(now + 61.0)
            await running  # nothing waits for that client
        writer.close()

    asyncio.run(run())


def test_an_edge_that_serves_looks_for_such_clients_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        config = EdgeConfig(http="127.0.0.1:0")
        edge = Edge(config, ScriptedClient(letters("ok"), PAIR))  # type: ignore[arg-type]
        serving = Server(config, edge)
        looks: list[float] = []
        monkeypatch.setattr(serving, "cut_off", looks.append)
        monkeypatch.setattr(server, "LOOK_S", 0.01)
        looking = asyncio.create_task(server._look(edge, serving))
        async with asyncio.timeout(60):
            await until(lambda: len(looks) > 1)
        looking.cancel()

    asyncio.run(run())


async def until(look: Callable[[], Any]) -> Any:
    while not (found := look()):
        await asyncio.sleep(0.01)
    return found


def test_an_idle_connection_is_closed_after_a_while() -> None:
    async def idle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(ASK)
        await answer(reader)
        assert await reader.read() == b""

    served(idle, within_s=10.0, keep_alive_s=1.0, receive_s=60.0)


def test_too_long_a_body_is_refused_before_it_is_sent() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(POST + b"Content-Length: 99999999\r\nExpect: 100-continue\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 413")

    served(talk)


def test_what_is_no_http_harms_nobody() -> None:
    async def noise(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x00\x01\x02 what?\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400")

    async def after(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(ASK)
        assert b'"text":"ok"' in await answer(reader)

    served(noise, after)


def test_an_offer_to_upgrade_is_ignored_and_the_body_read() -> None:
    """As Java's HttpClient makes it with each request; what is in a body stays as it is."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for text in (b"x", b"\r\nUpgrade: a\r\n\r\nupgrade: b"):
            body = msgspec.json.encode({"prompt": text.decode()})
            offer = b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAA\r\nUpgrade: h2c\r\n"
            writer.write(POST + offer + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            assert length is not None
            await reader.readexactly(int(length[1]))

    edge = served(talk)
    asked = [bytes(id - 3 for id in ids) for ids, _ in edge._client.asked]  # type: ignore[attr-defined]
    assert asked == [b"x", b"\r\nUpgrade: a\r\n\r\nupgrade: b"]


OFFER = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"


@pytest.mark.parametrize("at", [len(POST) - 30, len(POST) + 26, len(POST) + 30, len(POST) + 40, len(POST) + 70])
def test_an_offer_to_upgrade_is_ignored_wherever_it_is_cut(at: int) -> None:
    """In two segments, and as the second of two requests in one."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        offer = POST + OFFER + b"Content-Length: 15\r\n\r\n" + b'{"prompt": "x"}'
        writer.write(offer[:at])
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.write(offer[at:] + ASK + offer + offer)
        for _ in range(4):
            assert b'"text":"ok"' in await answer(reader)

    served(talk)


def test_an_edge_whose_client_broke_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever supervises it starts it again; else it would answer 503 for ever."""

    class Broken(ScriptedClient):
        def __init__(self, *_: object, **__: object) -> None:
            super().__init__(letters("ok"), PAIR)

        async def __aenter__(self) -> Broken:
            return self

        async def __aexit__(self, *_: object) -> None: ...

        async def status(self, *, timeout_s: float | None = None) -> Status:
            if urls:  # it has begun
                raise PartFailed("the client of this process has failed: a bug")
            return PAIR

    urls: list[str] = []
    monkeypatch.setattr(server, "EdgeClient", Broken)
    monkeypatch.setattr(server, "LOOK_S", 0.01)
    with pytest.raises(PartFailed, match="a bug"):
        server.serve(EdgeConfig(http="127.0.0.1:0"), urls.append)


HEADERS = (b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"Content-Type: application/json\r\n",
           b"X-Request-Id: \xff\r\n", b"Expect: 100-continue\r\n", b"Connection: upgrade\r\nUpgrade: websocket\r\n",
           b"Authorization: Bearer\r\n", b"x-request-priority: 1e400\r\n", b"x-request-deadline-s: -0\r\n")  # fmt: skip
LINES = (b"POST /generate HTTP/1.1\r\n", b"GET /%00%ff?\xff HTTP/1.1\r\n", b"HEAD / HTTP/1.0\r\n",
         b"PUT /v1/models/ HTTP/1.1\r\n", b"GET /v1/models/%2e HTTP/1.1\r\n", b"OPTIONS * HTTP/1.1\r\n")  # fmt: skip
OTHERS = (b"\r\n", b'{"a"', b"5\r\nhello\r\n", b"0\r\n\r\n")
PIECES = st.one_of(st.sampled_from((*LINES, *HEADERS, *OTHERS)), st.binary(max_size=20))


@settings(max_examples=20)
@given(st.lists(st.lists(PIECES, max_size=8).map(b"".join), min_size=5, max_size=5))
def test_no_bytes_break_it(noises: list[bytes]) -> None:
    def said(noise: bytes) -> Talk:
        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(noise)
            writer.write_eof()
            with contextlib.suppress(ConnectionError):  # what comes late meets a closed connection
                await reader.read(1 << 16)

        return talk

    async def after(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(ASK)
        assert b'"text":"ok"' in await answer(reader)

    edge = served(*map(said, noises), after, receive_s=0.2)
    assert edge.counts.errors["internal_error"] == 0
    assert edge.counts.in_flight == 0

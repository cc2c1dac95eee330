"""The page server of a fleet over sockets: who gets in, how many, who is too slow, and how it leaves."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest
from fleet_pages import WAIT_S, PageServer, error_of, next_event

from pdbus import pages
from pdbus.client import Client
from pdbus.edge.config import EdgeConfig
from pdbus.edge.fleet import Fleet
from pdbus.edge.fleet_server import FleetApp
from pdbus.edge.server import Server, listen
from pdbus.fleet import readers
from pdbus.fleet.feed import Feed
from pdbus.fleet.readers import MAX_READERS
from pdbus.launcher import Cluster, ClusterSpec

ROOT = Path(__file__).parents[2]


@contextmanager
def page_server() -> Iterator[PageServer]:
    made = PageServer(str(ROOT / "tests" / "support" / "fleet_world.py"), "well", "2")
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def server() -> Iterator[PageServer]:
    """For tests that leave it as it is."""
    with page_server() as made:
        yield made


def test_figures_need_the_token_and_the_page_holds_none(server: PageServer) -> None:
    assert len(server.token) >= 32
    page = server.ask("/fleet")
    assert (page.status, page.headers["content-security-policy"]) == (200, pages.POLICY)
    assert b"<script" in page.read()
    for path in ("/fleet/stream", "/fleet/rank/decode-0/0", "/fleet/request/rid=req-1"):
        for given in ({}, {"authorization": "Bearer x"}, {"authorization": f"Basic {server.token}"}):
            status, message = error_of(server.ask(path, **given))
            assert (status, "open the URL" in message) == (401, True)
        assert server.ask(f"{path}?token={server.token}").status == 401, "a query is logged by proxies"
    event, body = next_event(server.look())
    assert (event, len(body["facts"]), body["head"]["silent"]) == ("snapshot", 2, "")
    series = json.loads(server.look("/fleet/rank/decode-0/0").read())
    assert len(series["running"]) == len(series["at"]) >= 29
    assert server.look("/fleet/rank/decode-0/1").status == 404
    assert server.look("/fleet/rank/%2e%2e/x").status == 404
    told = json.loads(server.look("/fleet/request/rid=req-1").read())
    assert told["title"] == "req-1: done after 1.311 s, 2 attempts"
    sentence = "no part knows a request 'x/../y': controller-0 remembers the last 30000 requests, of 612 s"
    assert json.loads(server.look("/fleet/request/rid=x%2F..%2Fy").read()) == {"sentence": sentence}
    for wrong in ("", "r" * 129):
        assert error_of(server.look(f"/fleet/request/rid={wrong}")) == (400, "a rid has 1 to 128 characters")


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "8.8.8.8", "[", ""])
def test_another_host_is_refused(server: PageServer, host: str) -> None:
    status, message = error_of(server.ask("/fleet", host=host))
    assert (status, "use its address" in message) == (421, True)
    assert server.ask("/fleet/stream", host=host, authorization=f"Bearer {server.token}").status == 421
    for ours in ("localhost:9", f"127.0.0.1:{server.at.port}", "[::1]:1"):
        assert server.ask("/fleet", host=ours).status == 200


def test_another_sites_page_is_refused_and_other_paths_and_methods_are(server: PageServer) -> None:
    for header in ({"origin": "https://evil.example"}, {"sec_fetch_site": "cross-site"}, {"origin": "null"}):
        status, message = error_of(server.ask("/fleet/stream", authorization=f"Bearer {server.token}", **header))
        assert (status, message) == (403, "a fleet is shown to its own page alone")
    assert server.ask("/fleet/request/rid=x", origin="null", authorization=f"Bearer {server.token}").status == 403
    own = server.ask(
        "/fleet/rank/decode-0/0", origin=f"http://127.0.0.1:{server.at.port}", authorization=f"Bearer {server.token}"
    )
    assert own.status == 200
    assert error_of(server.look("/nothing")) == (404, "there is no /nothing; the fleet's page is at /fleet")
    assert server.ask("/fleet", "POST").status == 405
    assert server.ask("/pages/../fleet.py").status == 404
    assert server.ask("/pages/fleet.js").headers["content-type"] == "text/javascript; charset=utf-8"


def test_there_are_64_streams_and_one_that_leaves_makes_room_and_sigterm_ends_all() -> None:
    with page_server() as server:
        streams_are_bounded_and_end(server)


def streams_are_bounded_and_end(server: PageServer) -> None:
    streams = [server.look() for _ in range(MAX_READERS)]
    assert {stream.status for stream in streams} == {200}
    for stream in streams:
        assert next_event(stream)[0] == "snapshot"
    status, message = error_of(server.look())
    assert (status, message) == (503, f"{MAX_READERS} browsers look at this fleet; close one")
    streams.pop().close()
    server.connections[MAX_READERS - 1].close()
    deadline = time.monotonic() + WAIT_S
    while (late := server.look()).status != 200:
        assert time.monotonic() < deadline
    deltas = [next_event(stream) for stream in streams]
    assert {event for event, _ in deltas} == {"delta"}
    server.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    for stream in (*streams, late):
        stream.read()  # IncompleteRead, if it were cut off within a chunk
    assert server.process.wait(WAIT_S) == 0
    assert time.monotonic() - began < 10.0
    assert server.process.stderr is not None
    assert "Traceback" not in server.process.stderr.read()


# --- late readers, with times that are shorter -----------------------------------------------------------------------


class Numbers:
    """A feed whose messages are long, and come when it is told."""

    def __init__(self, publish: Callable[[bytes], None]) -> None:
        self.publish, self.snapshots = publish, 0

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def snapshot(self) -> bytes:
        self.snapshots += 1
        return b"event: snapshot\ndata: {}\n\n"


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Fleet, list[Numbers], tuple[str, int]]]:
    feeds: list[Numbers] = []

    def make(publish: Callable[[bytes], None], failed: object) -> Feed:
        feeds.append(Numbers(publish))
        return feeds[-1]  # type: ignore[return-value]

    config = EdgeConfig(http="127.0.0.1:0")
    listener = listen(config)
    fleet = Fleet(make, lambda error: None)
    server = Server(config, FleetApp(config, fleet, "t"))
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield fleet, feeds, listener.getsockname()
    finally:
        server.leave()
        server.leave()
        await running


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not true():
            await asyncio.sleep(0.01)


async def reader_of(address: tuple[str, int]) -> socket.socket:
    """A connection that asks for the stream and has read its first bytes."""
    loop, made = asyncio.get_running_loop(), socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.setblocking(False)
    await loop.sock_connect(made, address)
    head = b"GET /fleet/stream HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer t\r\n\r\n"
    await loop.sock_sendall(made, head)
    assert b"200 OK" in await loop.sock_recv(made, 15)
    return made


def test_a_reader_that_stops_gets_a_snapshot_and_then_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "LATE_S", 0.3)

    async def play() -> None:
        async with serving() as (fleet, feeds, address):
            stopped = await reader_of(address)
            await until(lambda: feeds and feeds[0].snapshots == 1)
            (reader,) = fleet._streams
            until_late = time.monotonic() + WAIT_S
            while reader.behind_s(time.monotonic()) < 0.5:
                assert time.monotonic() < until_late
                feeds[0].publish(b"event: delta\ndata: %s\n\n" % bytes(64 << 10))
                await asyncio.sleep(0.01)
            feeds[0].publish(b"event: delta\ndata: {}\n\n")
            await asyncio.sleep(0)
            assert reader.kept == 0
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(WAIT_S):
                while feeds[0].snapshots == 1:
                    await loop.sock_recv(stopped, 1 << 16)
            assert fleet._streams, "it reads again"

            monkeypatch.setattr(readers, "LATE_S", 1e9)
            monkeypatch.setattr(readers, "GONE_S", 0.5)
            while reader.behind_s(time.monotonic()) < 0.5:
                feeds[0].publish(b"event: delta\ndata: %s\n\n" % bytes(64 << 10))
                await asyncio.sleep(0.01)
            fleet.look()
            await until(lambda: not fleet._streams)
            with suppress(ConnectionResetError):
                async with asyncio.timeout(WAIT_S):
                    while await loop.sock_recv(stopped, 1 << 16):
                        pass
            stopped.close()

    asyncio.run(play())


# --- beside a cluster ------------------------------------------------------------------------------------------------


def test_top_http_shows_a_real_cluster_whose_rank_is_killed() -> None:
    spec = ClusterSpec(prefill=1, decode=2, engine="sim", node_args=("--sim-timing", "zero"))
    with Cluster(spec) as cluster:
        server = PageServer(
            "-m", "pdbus", "top", "--http", "0", "--controller", cluster.controller, "--bus", cluster.bus
        )
        try:
            stream = server.look()
            known, (event, body) = 0, next_event(stream)
            assert event == "snapshot"
            while (known := known + len(body.get("facts", ()))) < 3:
                event, body = next_event(stream)
            child = next(name for name in cluster.children if name.startswith("decode"))
            cluster.children[child].process.kill()
            deadline = time.monotonic() + WAIT_S
            while not any(kind == "dead" for _, kind, _, _ in body["head"]["lines"]):
                assert time.monotonic() < deadline
                event, body = next_event(stream)
            (line,) = [line for line in body["head"]["lines"] if line[1] == "dead"]
            assert line[2].startswith("decode")
            assert " has been lost for " in line[2]
            assert server.leave() == 0
        finally:
            server.close()


def listed(stream: HTTPResponse, name: str, wanted: Callable[[Any], object]) -> list[Any]:
    """The rows of a list of requests, once they are as `wanted`."""
    deadline = time.monotonic() + WAIT_S
    while (rows := next_event(stream)[1].get("requests", {}).get(name)) is None or not wanted(rows):
        assert time.monotonic() < deadline
    return rows  # type: ignore[no-any-return]


def test_a_real_request_is_listed_while_it_runs_and_told_with_why() -> None:
    slow = ("--sim-timing", "zero", "--sim-decode-s", "0.05")
    spec = ClusterSpec(prefill=1, decode=2, engine="sim", node_args=slow, controller_args=("--explain", "1"))
    with Cluster(spec) as cluster, Client(cluster.controller) as client:
        where = ("--controller", cluster.controller, "--bus", cluster.bus)
        server = PageServer("-m", "pdbus", "top", "--http", "0", *where)
        try:
            running = client.generate_tokens([1, 2, 3], max_tokens=3_000, ignore_eos=True, rid="the-long-one")
            pieces = iter(running)
            next(pieces)
            stream = server.look()
            (row,) = listed(stream, "running", lambda rows: rows and rows[0][2])
            assert (row[0], row[3:6]) == ("the-long-one", ["sim", 3, 1])
            assert [rank.rpartition("-")[0] for rank in row[6]] == ["prefill", "decode"]
            told = json.loads(server.look("/fleet/request/rid=the-long").read())
            assert told["title"].startswith("the-long-one: still under way after")
            assert {mark["part"] for mark in told["marks"]} >= {"client", *row[6]}
            assert [each["title"] for each in told["why"]] == [
                "why this prefill rank, attempt 1", "why this decode rank, attempt 1",
            ]  # fmt: skip
            running.cancel()
            listed(stream, "running", lambda rows: not rows)
            cluster.stop()
            assert error_of(server.look("/fleet/request/rid=the-long")) == (503, "the controller does not answer")
        finally:
            server.close()


def test_a_port_that_is_taken_is_said_in_a_line() -> None:
    with (
        Cluster(ClusterSpec(prefill=0, decode=0, unified=1, engine="sim")) as cluster,
        socket.create_server(("127.0.0.1", 0)) as taken,
    ):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "pdbus", "top", "--http", str(taken.getsockname()[1]), "--controller",
             cluster.controller, "--bus", cluster.bus],
            capture_output=True, text=True, timeout=WAIT_S, check=False,
        )  # fmt: skip
    assert done.returncode == 3
    assert "choose another --http" in done.stderr
    assert "Traceback" not in done.stderr

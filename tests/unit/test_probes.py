"""The HTTP port of a part: what each path says, who is turned away, and a port that is taken."""

from __future__ import annotations

import http.client
import re
import socket
import time
from collections.abc import Iterator

import pytest

from bus.errors import StartError
from bus.runtime import probes
from bus.runtime.loop import Loop
from bus.runtime.metrics import Metric, counter
from bus.runtime.ports import free_ports
from bus.runtime.probes import HEALTHY_S, MAX_ASKING

HOST = "127.0.0.1"
WAIT_S = 30.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Part:
    """What the loop knows of itself, to be changed by a test."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.loop = Loop(self.clock)
        self.port = free_port()
        self.trouble = ""
        self.count = 1

    def gather(self) -> list[Metric]:
        return [counter("pdbus_test_things_total", "things", self.count)]

    def turn(self, seconds: float = 0.0) -> None:
        self.clock.now += seconds
        self.loop.call_threadsafe(lambda: None)
        self.loop.turn()


def free_port() -> int:
    return free_ports(HOST, 1)


@pytest.fixture
def part() -> Iterator[Part]:
    part = Part()
    stop = probes.serve(part.loop, HOST, part.port, part.gather, lambda: part.trouble)
    yield part
    stop()
    part.loop.close()


def ask(port: int, path: str, method: str = "GET", host: str = HOST) -> tuple[int, str]:
    connection = http.client.HTTPConnection(host, port, timeout=WAIT_S)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_the_figures_say_when_they_were_made(part: Part) -> None:
    def stamp() -> float:
        return float(re.search(r"^pdbus_page_timestamp_seconds (\S+)$", ask(part.port, "/metrics")[1], re.M)[1])  # type: ignore[index]

    first = stamp()
    assert first == stamp() <= time.time()
    later = time.time()
    part.turn(probes.GATHER_S)
    assert later <= stamp() <= time.time()


def test_metrics_are_what_the_loop_left_last(part: Part) -> None:
    for count in (1, 2):
        part.count = count
        part.turn(probes.GATHER_S)
        status, text = ask(part.port, "/metrics?name=any")
        assert status == 200
        assert f"\npdbus_test_things_total {count}.0\n" in text
        part.count = 9  # not left there yet


@pytest.mark.parametrize("path", ["/", "/metric", "/metrics/", "/healthz", "/ready/x", "*", "/../metrics"])
def test_any_other_path_is_not_found(part: Part, path: str) -> None:
    assert ask(part.port, path) == (404, "here are /metrics, /health and /ready\n")


def test_health_is_a_loop_that_turns(part: Part) -> None:
    assert ask(part.port, "/health") == (200, "ok\n")  # it has not begun
    part.turn()
    part.clock.now += HEALTHY_S
    assert ask(part.port, "/health") == (200, "ok\n")
    part.clock.now += 1
    stuck = (503, f"its loop has not turned for {HEALTHY_S + 1:.1f} s\n")
    assert ask(part.port, "/health") == stuck
    assert ask(part.port, "/ready") == stuck
    part.turn()
    assert ask(part.port, "/health") == (200, "ok\n")


def test_ready_says_why_not(part: Part) -> None:
    assert ask(part.port, "/ready") == (200, "ok\n")
    part.trouble = "draining"
    part.turn(probes.GATHER_S)
    assert ask(part.port, "/ready") == (503, "draining\n")
    assert ask(part.port, "/ready", "HEAD") == (503, "")
    assert ask(part.port, "/health") == (200, "ok\n")
    assert ask(part.port, "/health", "POST")[0] == 501


def test_who_says_nothing_keeps_nobody_out_for_long(part: Part) -> None:
    silent = [socket.create_connection((HOST, part.port), timeout=WAIT_S) for _ in range(MAX_ASKING)]
    with socket.create_connection((HOST, part.port), timeout=WAIT_S) as one_more:
        assert one_more.recv(1) == b""
    for each in silent:
        each.close()
    end = time.monotonic() + WAIT_S
    while True:
        try:
            assert ask(part.port, "/health")[0] == 200
            return
        except (ConnectionError, http.client.HTTPException):
            assert time.monotonic() < end


def test_a_taken_port_says_what_to_do_and_a_stopped_one_is_free_again(part: Part) -> None:
    with pytest.raises(StartError, match=f"{HOST}:{part.port}.*choose another --metrics-port"):
        probes.serve(part.loop, HOST, part.port, part.gather)
    port = free_port()
    for _ in range(2):
        probes.serve(part.loop, HOST, port, part.gather)()


def test_the_address_may_be_chosen(part: Part) -> None:
    port = free_port()
    stop = probes.serve(part.loop, "127.0.0.2", port, part.gather)
    try:
        assert ask(port, "/health", host="127.0.0.2")[0] == 200
        with pytest.raises(ConnectionRefusedError):
            ask(port, "/health")
    finally:
        stop()
    with pytest.raises(StartError, match=r"cannot serve metrics on 192\.0\.2\.1"):
        probes.serve(part.loop, "192.0.2.1", port, part.gather)

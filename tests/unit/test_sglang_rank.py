"""A rank under the plugin: what it says it has taken in, when it says it, and how its rooms become known."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

from bus.wire.codes import Code
from bus.wire.messages import MAX_ROOM, Ack, Load
from pdbus.sglang.rank import BROKER_LOST_S, HttpRooms, Rank, charge_of, load_of

NONCE = 77


def snapshot(**fields: int) -> Any:
    names = (
        "num_running_reqs", "num_waiting_reqs", "num_waiting_uncached_tokens", "num_used_tokens", "num_total_tokens",
        "max_total_num_tokens", "max_running_requests", "total_prefill_uncached_tokens", "total_prefill_busy_us",
    )  # fmt: skip
    return SimpleNamespace(**dict.fromkeys(names, 0) | fields)


class FakeBus:
    def __init__(self) -> None:
        self.silent_s = 0.0
        self.said: list[Any] = []

    def register(self, room: int) -> None:
        self.said.append(("register", room))

    def drop(self, room: int, attempt: int = 1, code: Code = "ok") -> None:
        self.said.append(("drop", room, code))

    def report(self, load: Load) -> None:
        self.said.append(load)


@pytest.fixture
def bus() -> FakeBus:
    return FakeBus()


# --- loads ------------------------------------------------------------------------------------------------------------


def test_a_report_acknowledges_what_was_taken_in_before_it(bus: FakeBus) -> None:
    rank = Rank(bus, NONCE)
    rank.ingested(10)
    rank.ingested(0)
    rank.report(snapshot(num_running_reqs=1))
    rank.ingested(5)
    rank.report(snapshot(num_running_reqs=1))
    assert [load.acks for load in bus.said] == [(Ack(NONCE, 2, 10),), (Ack(NONCE, 3, 15),)]
    assert [load.step for load in bus.said] == [1, 2]


def test_an_idle_loop_says_the_same_once(bus: FakeBus) -> None:
    rank = Rank(bus, NONCE)
    for _ in range(1000):
        rank.report(snapshot())
        rank.report(None)  # throttled, or switched off
    assert len(bus.said) == 1


def test_without_a_number_that_is_shared_nothing_is_acknowledged(bus: FakeBus) -> None:
    rank = Rank(bus, 0)
    rank.ingested(10)
    rank.report(snapshot())
    assert bus.said[0].acks == ()


@pytest.mark.parametrize(
    ("fields", "waiting_tokens"),
    [
        ({"num_total_tokens": 900, "num_used_tokens": 100}, 800),
        ({"num_total_tokens": 100, "num_used_tokens": 100, "num_waiting_uncached_tokens": 4000}, 4000),
        ({"num_total_tokens": 90, "num_used_tokens": 100}, 0),
    ],
)
def test_the_tokens_that_wait_are_those_of_queued_prompts_and_of_the_rest_of_a_chunked_one(
    fields: dict[str, int], waiting_tokens: int
) -> None:
    load = load_of(snapshot(**fields), 1, None)
    assert load.waiting_tokens == waiting_tokens
    assert load.kv_tokens == fields["num_used_tokens"]


def test_both_sides_count_a_request_alike() -> None:
    assert charge_of(SimpleNamespace(input_ids=[1, 2, 3])) == 3
    assert charge_of(SimpleNamespace(input_ids=None)) == 0  # embeddings in place of a prompt


# --- rooms ------------------------------------------------------------------------------------------------------------


def test_a_room_goes_to_the_bus_and_not_over_http_while_the_broker_is_heard(bus: FakeBus) -> None:
    posted: list[Any] = []
    rank = Rank(bus, NONCE, http=lambda *room: posted.append(room))
    rank.register(5, "h:1")
    rank.drop(5, failed=False)
    rank.register(6, "h:1")
    rank.drop(6, failed=True)
    assert bus.said == [("register", 5), ("drop", 5, "ok"), ("register", 6), ("drop", 6, "prefill_failed")]
    assert not posted


def test_a_room_that_was_never_registered_is_not_dropped(bus: FakeBus) -> None:
    """Where a router told decode the rank, SGLang registers nothing."""
    rank = Rank(bus, NONCE)
    rank.drop(5, failed=True)
    assert not bus.said


def test_while_no_broker_is_heard_rooms_go_over_http_those_of_before_too(bus: FakeBus) -> None:
    posted: list[Any] = []
    rank = Rank(bus, NONCE, http=lambda *room: posted.append(room))
    rank.register(5, "h:1")
    rank.register(6, "h:1")
    rank.drop(6, failed=False)
    bus.silent_s = BROKER_LOST_S + 1
    rank.register(7, "h:2")
    for _ in range(3):
        rank.report(None)
    assert sorted(posted) == [("h:1", 5), ("h:2", 7)]
    assert ("register", 7) in bus.said, "for a broker that comes back"


def test_in_a_rollout_rooms_go_both_ways(bus: FakeBus) -> None:
    posted: list[Any] = []
    rank = Rank(bus, NONCE, http=lambda *room: posted.append(room), always=True)
    rank.register(5, "h:1")
    assert posted == [("h:1", 5)]
    assert bus.said == [("register", 5)]


@pytest.mark.parametrize("room", [-1, MAX_ROOM + 1])
def test_a_room_that_the_bus_cannot_carry_goes_over_http(bus: FakeBus, room: int) -> None:
    posted: list[Any] = []
    rank = Rank(bus, NONCE, http=lambda *each: posted.append(each))
    rank.register(room, "h:1")
    rank.drop(room, failed=False)
    assert posted == [("h:1", room)]
    assert not bus.said


# --- SGLang's HTTP server ---------------------------------------------------------------------------------------------


@pytest.fixture
def registry() -> Iterator[tuple[str, Queue[Any]]]:
    """A bootstrap server: its address, and what is registered there."""
    asked: Queue[Any] = Queue()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.put((self.path, body, self.client_address[1]))
            self.send_response(500 if body["bootstrap_room"] == 13 else 200)
            self.send_header("Content-Length", "0")
            if body["bootstrap_room"] == 14:
                self.close_connection = True
            self.end_headers()

        def log_message(self, *_args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()
    thread.join()


def test_rooms_are_registered_with_their_rank_over_one_connection(registry: tuple[str, Queue[Any]]) -> None:
    """What refuses one, or hangs up, loses no other."""
    address, asked = registry
    rooms = HttpRooms(dp_rank=3)
    for room in (11, 13, 14, 15, 16):
        rooms(address, room)
    seen = [asked.get(timeout=10) for _ in range(5)]
    assert [(path, body) for path, body, _ in seen] == [
        ("/register_dp_rank", {"bootstrap_room": room, "dp_rank": 3}) for room in (11, 13, 14, 15, 16)
    ]
    assert seen[3][2] == seen[4][2]
    rooms.stop()


def test_a_server_that_is_away_is_one_line_and_the_next_room_is_tried(
    registry: tuple[str, Queue[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    address, asked = registry
    rooms = HttpRooms(dp_rank=0)
    for room in (1, 2, 3):
        rooms("127.0.0.1:9", room)
    rooms(address, 4)
    assert asked.get(timeout=10)[1]["bootstrap_room"] == 4
    assert sum("room.not_registered" in record.getMessage() for record in caplog.records) == 1
    rooms.stop()

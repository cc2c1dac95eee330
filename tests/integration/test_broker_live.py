"""The broker as an embedder and a foreign program meet it: real sockets, real threads, ephemeral endpoints."""

from __future__ import annotations

import gc
import shutil
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from bus import Broker, BrokerConfig, BusAddress, ConfigError, Load, Publisher, Resolver, StartError
from bus.actions import Publish
from bus.embed.publications import PublisherCore
from bus.embed.resolution import ResolverCore
from bus.runtime.keys import new_keys
from bus.runtime.ports import free_ports
from bus.wire import codec
from bus.wire.messages import (
    FROM_BROKER,
    Answer,
    Beacon,
    BrokerStatus,
    BrokerStatusQuery,
    Found,
    Location,
    Message,
    Query,
    Refused,
    Resync,
    Rooms,
    Topology,
    TopologyQuery,
)

DEADLINE_S = 60.0  # of a busy machine; a wait that succeeds ends with its event


def rooms_of(answer: Message) -> set[int]:
    assert isinstance(answer, Answer)
    return {room for found in answer.found for room in found.rooms}


def free_tcp_base() -> str:
    return f"tcp://127.0.0.1:{free_ports('127.0.0.1', 3)}"


@pytest.fixture(params=["ipc", "tcp"])
def base(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "tcp":
        yield free_tcp_base()
        return
    folder = tempfile.mkdtemp(prefix="pd")
    yield f"ipc://{folder}/bus"
    shutil.rmtree(folder)


@pytest.fixture
def ipc_base() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="pd")
    yield f"ipc://{folder}/bus"
    shutil.rmtree(folder)


class Asker:
    """A plain REQ socket, as any program in any language has it."""

    def __init__(self, base: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.REQ)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
        self.socket.connect(BusAddress(base).bootstrap)

    def __enter__(self) -> Asker:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self.context.term()

    def raw(self, *frames: bytes) -> Message:
        self.socket.send_multipart(frames)
        return codec.decode(self.socket.recv(), FROM_BROKER)

    def ask(self, message: Message) -> Message:
        return self.raw(codec.encode(message))

    def until(self, message: Message, good: Callable[[Message], bool]) -> Message:
        """Ask until the answer is `good`: what travels over PUB/SUB arrives when it arrives."""
        end = time.monotonic() + DEADLINE_S
        while not good(answer := self.ask(message)):
            assert time.monotonic() < end, answer
            self.socket.poll(5)
        return answer

    def until_followed(self, instance: str, ranks: int) -> None:
        """Until the broker knows so many ranks of it, which follow rooms: before, a room is asked for, not computed."""

        def known(answer: Message) -> bool:
            assert isinstance(answer, Topology)
            return any(
                each.instance == instance and each.follow_bootstrap_room and len(each.ranks) == ranks
                for each in answer.instances
            )

        self.until(TopologyQuery(1), known)


def publisher(base: str, dp_rank: int = 0, epoch: int = 0, dp_size: int = 2) -> Publisher:
    return Publisher(
        base, instance="prefill-0", dp_rank=dp_rank, dp_size=dp_size, role="prefill", model="tiny",
        endpoint=f"tcp://10.0.0.7:{7000 + dp_rank}", interval_s=0.2, epoch=epoch,
    )  # fmt: skip


def collect(resolver: Resolver, count: int) -> tuple[dict[int, Location], dict[int, str]]:
    found: dict[int, Location] = {}
    lost: dict[int, str] = {}
    end = time.monotonic() + DEADLINE_S
    while len(found) + len(lost) < count:
        assert time.monotonic() < end, (found, lost)
        resolver.wait(0.5)
        found |= resolver.poll()
        lost |= resolver.lost()
    return found, lost


def test_a_plain_req_socket_gets_an_immediate_partial_answer(base: str) -> None:
    with Broker(base), publisher(base) as rank, Asker(base) as asker:
        rank.register(7)
        rank.register(8, attempt=2)
        answer = asker.until(Query(5, (7, 8, 9)), lambda answer: rooms_of(answer) == {7, 8})
        assert isinstance(answer, Answer)
        assert answer.id == 5
        at = Location("prefill-0", 0, rank.epoch, "tcp://10.0.0.7:7000")
        assert answer.found == (Found(at, 1, (7,)), Found(at, 2, (8,)))
        assert (answer.pending, answer.lost) == ((), ())


def test_watches_deadlines_and_failures_reach_a_resolver(base: str) -> None:
    with Broker(base), publisher(base) as rank, Resolver(base) as resolver:
        resolver.want(1, 2, deadline_s=DEADLINE_S)
        resolver.want(3, deadline_s=0.3)
        found, lost = collect(resolver, 1)
        assert (found, lost) == ({}, {3: "unknown_room"})
        rank.register(1)
        rank.drop(2, code="prefill_failed")
        found, lost = collect(resolver, 2)
        assert found == {1: Location("prefill-0", 0, rank.epoch, "tcp://10.0.0.7:7000")}
        assert lost == {2: "prefill_failed"}
        assert {name: resolver.counts[name] for name in ("asked", "lost", "told", "overflows")} == {
            "asked": 1, "lost": 2, "told": 0, "overflows": 0,
        }  # fmt: skip
        assert {name: rank.counts[name] for name in ("registered", "dropped", "invalid", "live_rooms")} == {
            "registered": 1, "dropped": 1, "invalid": 0, "live_rooms": 1,
        }  # fmt: skip


def test_told_and_computed_come_from_the_topology(ipc_base: str) -> None:
    with (
        Broker(ipc_base),
        publisher(ipc_base, 0) as zero,
        publisher(ipc_base, 1) as one,
        Resolver(ipc_base) as resolver,
    ):
        resolver.want(10, dp_rank=1, prefill_instance="prefill-0", deadline_s=DEADLINE_S)
        assert collect(resolver, 1)[0][10].epoch == one.epoch
        zero.set_follow(True)
        one.set_follow(True)
        with Asker(ipc_base) as asker:
            asker.until(TopologyQuery(1), lambda answer: answer.instances[0].follow_bootstrap_room)  # type: ignore[attr-defined]
        with Resolver(ipc_base) as fresh:
            fresh.want(4, 5, deadline_s=DEADLINE_S)
            found, _ = collect(fresh, 2)
            assert [found[room].dp_rank for room in (4, 5)] == [0, 1]


def test_with_keys_listed_peers_work_and_others_get_nowhere(tmp_path: Path) -> None:
    base, keys = free_tcp_base(), str(tmp_path / "keys")
    new_keys(Path(keys), ("prefill-0",))
    with Broker(BrokerConfig(base, keys=keys)) as broker:
        identity: dict[str, Any] = {"instance": "prefill-0", "role": "prefill", "endpoint": "tcp://10.0.0.7:7000"}
        listed = Publisher(base, dp_rank=0, dp_size=2, keys=keys, **identity)
        plain = Publisher(base, dp_rank=1, dp_size=2, **identity)
        with listed, plain, Resolver(base, keys=keys) as resolver:
            plain.register(8)
            listed.register(7)
            resolver.want(7, deadline_s=DEADLINE_S)
            resolver.want(8, deadline_s=1.0)
            found, lost = collect(resolver, 2)
            assert list(found) == [7]
            assert lost == {8: "unknown_room"}
            assert not plain.wait_ready(0.0)
        assert broker.core.tally()["ranks"] == 1


def test_two_ranks_that_claim_one_room_hear_of_it(ipc_base: str) -> None:
    with Broker(ipc_base), publisher(ipc_base, 0) as first, publisher(ipc_base, 1) as second, Asker(ipc_base) as asker:
        assert first.wait_ready(DEADLINE_S)
        assert second.wait_ready(DEADLINE_S)
        first.register(7)
        asker.until(Query(1, (7,)), lambda answer: bool(answer.found))  # type: ignore[attr-defined]
        second.register(7)
        told = {"first": first, "second": second}
        kept: dict[str, bool] = {}
        end = time.monotonic() + DEADLINE_S
        while len(kept) < 2:
            assert time.monotonic() < end, kept
            kept |= {name: conflict.kept for name, rank in told.items() for conflict in rank.take_conflicts()}
            asker.socket.poll(5)
        assert kept == {"first": True, "second": False}


def test_a_restarted_broker_knows_everything_again_within_a_second(base: str) -> None:
    rooms = tuple(range(3000))
    with publisher(base) as rank, Resolver(base) as resolver:
        with Broker(base):
            for room in rooms:
                rank.register(room)
            resolver.want(5000, deadline_s=30.0)
            with Asker(base) as asker:
                asker.until(Query(1, rooms), lambda answer: rooms_of(answer) == set(rooms))
        with Broker(base), Asker(base) as asker:
            started = time.monotonic()
            asker.until(Query(1, rooms), lambda answer: rooms_of(answer) == set(rooms))
            topology = asker.until(TopologyQuery(2), lambda answer: bool(answer.instances))  # type: ignore[attr-defined]
            took_s = time.monotonic() - started
            assert isinstance(topology, Topology)
            assert topology.instances[0].ranks[0].epoch == rank.epoch
            assert took_s < 30.0, "a second on an idle machine; by themselves they are said again after a minute"
            rank.register(5000)  # wanted from the broker before: asked of this one by itself
            assert collect(resolver, 1)[0][5000].dp_rank == 0


def test_publications_lost_on_the_way_are_noticed_and_restated(ipc_base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flush, lost = PublisherCore.flush, list[Publish]()

    def lossy(self: PublisherCore, now: float) -> list[Publish]:
        found = flush(self, now)
        rooms = [each for each in found if isinstance(each.message, Rooms) and not lost]
        lost.extend(rooms)
        return [each for each in found if each not in rooms]

    with Broker(ipc_base) as broker, publisher(ipc_base) as rank, Asker(ipc_base) as asker:
        assert rank.wait_ready(DEADLINE_S)
        monkeypatch.setattr(PublisherCore, "flush", lossy)
        rank.register(7)
        asker.until(Query(1, (7,)), lambda answer: bool(answer.found))  # type: ignore[attr-defined]
        assert broker.core.tally()["resyncs"] >= 1
    assert len(lost) == 1


def test_garbage_is_answered_counted_and_survived(ipc_base: str) -> None:
    with Broker(ipc_base) as broker, Asker(ipc_base) as asker:
        for frames, code in (
            ((b"",), "bad_message"),
            ((b"\x01" + b"\xc1" * 99,), "bad_message"),
            ((b"\xff" * 100,), "bad_version"),
            ((b"\x02\x91\xa5query",), "bad_version"),
            ((codec.encode(Query(1, (1,)))[:-1],), "bad_message"),
            ((codec.encode(Query(1, (1,))), b"more"), "bad_message"),
        ):
            answer = asker.raw(*frames)
            assert isinstance(answer, Refused)
            assert answer.code == code
        before = broker.rejected.copy()
        with zmq.Context() as context, context.socket(zmq.PUB) as pub:
            pub.setsockopt(zmq.LINGER, 0)
            pub.connect(broker.address.publish)
            end = time.monotonic() + DEADLINE_S
            while any(broker.rejected[reason] == before[reason] for reason in ("syntax", "frames")):
                pub.send_multipart([b"rooms/x/0/", b"\x01\xc1\xc1"])
                pub.send_multipart([b"member/"])
                pub.send_multipart([b"rooms/x/0/", b"a", b"b"])
                assert time.monotonic() < end, broker.rejected
                asker.socket.poll(5)
        assert isinstance(asker.ask(BrokerStatusQuery(1)), BrokerStatus)


def test_a_peer_that_leaves_takes_its_watches_with_it(ipc_base: str) -> None:
    with Broker(ipc_base) as broker, publisher(ipc_base) as rank, Asker(ipc_base) as asker:
        with Asker(ipc_base) as leaver:
            leaver.ask(Query(1, (7, 8), 60.0))
        assert asker.ask(BrokerStatusQuery(1)).counts["watches"] == 2  # type: ignore[attr-defined]
        rank.register(7)
        asker.until(BrokerStatusQuery(2), lambda status: status.counts["watches"] == 0)  # type: ignore[attr-defined]
        assert broker.core.tally()["watches_dropped"] == 1


def test_a_taken_endpoint_is_a_start_error_and_leaves_nothing(base: str) -> None:
    with Broker(base), pytest.raises(StartError, match="is taken"):
        Broker(base).start()
    with Broker(base), Asker(base) as asker:
        assert isinstance(asker.ask(BrokerStatusQuery(1)), BrokerStatus)


def test_several_brokers_in_one_process_come_and_go_without_a_trace() -> None:
    folder = Path(tempfile.mkdtemp(prefix="pd"))
    process = psutil.Process()

    def once() -> None:
        with Broker(f"ipc://{folder}/a"), Broker(f"ipc://{folder}/b"):
            for name in "ab":
                with Asker(f"ipc://{folder}/{name}") as asker:
                    asker.ask(BrokerStatusQuery(1))

    once()
    gc.collect()
    threads, files = set(threading.enumerate()), process.num_fds()
    for _ in range(5):
        once()
    gc.collect()
    end = time.monotonic() + DEADLINE_S
    while set(threading.enumerate()) - threads:
        assert time.monotonic() < end, threading.enumerate()
        for thread in set(threading.enumerate()) - threads:
            thread.join(DEADLINE_S)
    assert process.num_fds() <= files
    shutil.rmtree(folder)


def test_stop_is_idempotent_and_quick_with_peers_connected(ipc_base: str) -> None:
    broker = Broker(ipc_base).start()
    with publisher(ipc_base) as rank:
        assert rank.wait_ready(DEADLINE_S)
        started = time.monotonic()
        broker.stop()
        broker.stop()
        assert time.monotonic() - started < 10.0


@pytest.mark.parametrize(
    ("field", "value"),
    [("room_ttl_s", 0.0), ("room_ttl_s", float("nan")), ("beacon_s", 1e6), ("max_rooms", 0), ("address", "http://x")],
)
def test_bad_settings_are_config_errors(field: str, value: object) -> None:
    fields: dict[str, object] = {"address": "ipc:///tmp/pdx/bus", field: value}
    with pytest.raises(ConfigError):
        BrokerConfig(**fields)  # type: ignore[arg-type]


def test_metrics_are_served_beside_the_bus(ipc_base: str) -> None:
    port = free_ports("127.0.0.1", 1)
    with Broker(BrokerConfig(ipc_base, metrics_port=port)), publisher(ipc_base) as rank, Asker(ipc_base) as asker:
        rank.register(7)
        asker.until(Query(1, (7, 8)), lambda answer: bool(answer.found))  # type: ignore[attr-defined]
        asker.raw(b"garbage")
        end = time.monotonic() + DEADLINE_S
        wanted = (
            "pdbus_broker_rooms_alive 1.0",
            'pdbus_broker_rejected_total{reason="version"} 1.0',
            'pdbus_broker_query_batch_rooms_bucket{le="4.0"}',
        )
        while not all(line in (text := scrape(port)) for line in wanted):
            assert time.monotonic() < end, text
            asker.socket.poll(20)
        with pytest.raises(StartError, match="choose another --metrics-port"):
            Broker(BrokerConfig(ipc_base.replace("bus", "other"), metrics_port=port)).start()
    with pytest.raises(urllib.error.URLError):
        scrape(port)


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_S) as page:
        return str(page.read().decode())


def test_nothing_a_scheduler_hands_over_raises_or_blocks(ipc_base: str) -> None:
    """No broker there at all, nonsense as arguments, and far more than the queue takes."""
    rank = Publisher(ipc_base, instance="prefill-0", dp_rank=0, role="prefill", queue_max=1000)
    held, go = threading.Event(), threading.Event()
    with rank, Resolver(ipc_base, wants_max=1000) as resolver:
        rank.loop.call_threadsafe(lambda: (held.set(), go.wait(DEADLINE_S)))  # nobody empties the queue meanwhile
        assert held.wait(DEADLINE_S)
        for room in range(20_000):
            rank.register(room)
        assert rank.counts["overflows"] == rank.overflows == 19_000
        go.set()
        for nonsense in (None, "7", -1, 2**70, 7.5, []):
            rank.register(nonsense)  # type: ignore[arg-type]
            rank.drop(1, code=nonsense)  # type: ignore[arg-type]
            rank.report(nonsense)  # type: ignore[arg-type]
            resolver.want(nonsense)  # type: ignore[arg-type]
            resolver.want(9, deadline_s=nonsense)  # type: ignore[arg-type]
        rank.report(
            Load(seq=0, step=-1, running=0, waiting=0, waiting_tokens=0, kv_tokens=0, kv_capacity=0, max_running=0),
        )
        resolver.want(*range(20_000), deadline_s=0.1)
        assert not rank.wait_ready(0.01)
        assert resolver.wait(DEADLINE_S)
        resolver.want(7, deadline_s=0.05)
        end = time.monotonic() + DEADLINE_S
        while resolver.lost().get(7) != "unknown_room":
            assert time.monotonic() < end
            resolver.wait(0.1)


@pytest.mark.parametrize(
    "fields",
    [{"instance": "a b"}, {"dp_rank": -1}, {"dp_rank": 8, "dp_size": 8}, {"role": "both"}, {"endpoint": "a b"}],
)
def test_a_publisher_with_a_bad_identity_is_a_config_error(fields: dict[str, object]) -> None:
    given: dict[str, object] = {"instance": "prefill-0", "dp_rank": 0, "role": "prefill"}
    with pytest.raises(ConfigError):
        Publisher("ipc:///tmp/pdx/bus", **(given | fields))  # type: ignore[arg-type]


def test_embedded_parts_drop_what_travels_under_another_topic(ipc_base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """M13: a beacon of an unknown broker would make the publisher state everything again."""
    heard: list[Message] = []

    def listening(on_message: Callable[[Any, Message, float], Any]) -> Callable[[Any, Message, float], Any]:
        def on(self: Any, message: Message, now: float) -> Any:
            heard.append(message)
            return on_message(self, message, now)

        return on

    for core in (PublisherCore, ResolverCore):
        monkeypatch.setattr(core, "on_message", listening(core.on_message))
    with Broker(ipc_base), publisher(ipc_base) as rank, Resolver(ipc_base) as resolver, zmq.Context() as context:
        assert rank.wait_ready(DEADLINE_S)
        assert resolver.wait_ready(DEADLINE_S)
        end = time.monotonic() + DEADLINE_S
        with context.socket(zmq.PUB) as pub:
            pub.setsockopt(zmq.LINGER, 0)
            pub.connect(BusAddress(ipc_base).publish)
            while not (rank.rejected["topic"] and resolver.rejected["topic"] and resolver.rejected["frames"]):
                assert time.monotonic() < end, (rank.rejected, resolver.rejected)
                pub.send_multipart([b"beacon/", codec.encode(Resync("prefill-0", 0, rank.epoch))])
                pub.send_multipart([b"to/prefill-0/0/", codec.encode(Beacon(7, 1, 0.25))])
                pub.send_multipart([b"beacon/", codec.encode(Beacon(7, 1, 0.25)), b""])
                pub.poll(20)
    assert heard
    assert not [message for message in heard if isinstance(message, Beacon) and message.epoch == 7]

"""A cluster with keys, over ipc and tcp: who may do what. Listed clients are served; plaintext and unlisted peers get
nowhere and are counted; a listed one may do what its role may, for itself alone; a revoked one is cut off."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import zmq
from fault_rig import TIMING, WAIT_S, Rig, rig
from patience import patience_s

from bus.endpoints import BusAddress, ControllerAddress
from bus.rights import KeyRole
from bus.runtime.keys import add_key, give_key, load_keys, new_keys, revoke_key
from bus.runtime.sockets import Sockets
from bus.wire import codec, topics
from bus.wire.messages import (
    CONTROLLER_TO_CLIENT,
    CONTROLLER_TO_NODE,
    FROM_BROKER,
    FROM_NODE_DATA,
    PUBLICATIONS,
    Attach,
    Beacon,
    BrokerStatusQuery,
    Cancel,
    DrainRank,
    Hello,
    KvPull,
    Load,
    LoadReport,
    Message,
    Progress,
    Refused,
    Sent,
    StatusQuery,
    Submit,
    Table,
    Tokens,
    Who,
)
from nodes.own.engines.sim import sim_generate
from pdbus.client import Client
from pdbus.fleet.source import BrokerStatusClient
from pdbus.launcher import Cluster, ClusterSpec

pytestmark = pytest.mark.fault


def client(directory: Path, name: str) -> None:
    add_key(directory / "cluster", "clients", name)
    give_key(directory / "cluster", "clients", name, directory / name)


@pytest.fixture(scope="module", params=["ipc", "tcp"])
def keys(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    new_keys(directory / "cluster")
    for name in ("alice", "mallory"):
        client(directory, name)
    new_keys(directory / "stranger")
    return directory


@pytest.fixture(scope="module")
def cluster(keys: Path) -> Iterator[Cluster]:
    transport: Any = keys.name.rstrip("0123456789")
    spec = ClusterSpec(
        prefill=1, decode=1, engine="sim", model="sim", transport=transport, keys=str(keys / "cluster"),
        node_args=TIMING,
    )  # fmt: skip
    with Cluster(spec) as running:
        yield running


@pytest.fixture
def live(cluster: Cluster) -> Iterator[Rig]:
    with rig(cluster) as made:
        yield made
        made.ended(made.begin(60))
        made.check()


class Peer:
    """Somebody with a key of the cluster's list (None: with none), who may say anything to anyone."""

    def __init__(self, directory: Path | None, role: KeyRole = "clients", name: str = "") -> None:
        self.sockets = Sockets(keys=load_keys(directory, role, name=name) if directory else None)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.sockets.close()

    def says(self, at: str, to: KeyRole, *frames: bytes, wait_ms: int = 60_000) -> bytes | None:
        """What is answered, if anything."""
        dealer = self.sockets.dealer(at, role=to)
        with suppress(zmq.Again):  # refused before it could say so much
            dealer.send_multipart(frames, zmq.NOBLOCK)
        return dealer.recv_multipart()[-1] if dealer.poll(wait_ms) else None

    def asks(self, at: str, to: KeyRole, message: Message, table: Table, *frames: bytes) -> Message | None:
        envelope = (b"",) if to == "brokers" else ()
        answer = self.says(at, to, *envelope, codec.encode(message), *frames)
        return codec.decode(answer, table) if answer is not None else None

    def publishes(self, bus: BusAddress, messages: list[Message], until: Callable[[], bool]) -> None:
        """Say them again and again, since a PUB drops what comes before its connection is made."""
        pub = self.sockets.pub(bus.publish)
        end = time.monotonic() + patience_s(WAIT_S)
        while not until():
            assert time.monotonic() < end, "nobody minds"
            for message in messages:
                pub.send_multipart((topics.of(message), codec.encode(message)))
            time.sleep(0.01)


@pytest.fixture
def long(live: Rig) -> Iterator[str]:
    """The rid of an operator's request that goes on while the test lasts, and that nothing in it disturbs."""
    with rig(live.cluster) as operator:
        rid = operator.begin(60, 4000)
        operator.got(rid, 2)
        yield rid
        operator.channel.cancel(rid)
        assert operator.ended(rid).attempts == 1
        operator.check(failed={"cancelled": 1})


def test_a_listed_client_is_served(cluster: Cluster, keys: Path) -> None:
    with Client(cluster.controller, keys=keys / "alice") as alice:
        assert alice.generate_tokens([5, 6], max_tokens=8).tokens() == sim_generate([5, 6], 8)


@pytest.mark.parametrize("who", ["plaintext", "unlisted", "a client at the nodes' ports"])
def test_others_get_nowhere_and_are_counted(live: Rig, keys: Path, who: str) -> None:
    cluster = live.cluster
    bus, controller = BusAddress(cluster.bus), ControllerAddress(cluster.controller)
    stranger = keys / "stranger"
    if who == "unlisted":  # knows whose the ports are, and has a key of its own that nobody listed
        for path in (keys / "cluster" / "allow").rglob("*.key"):
            (stranger / path.relative_to(keys / "cluster")).write_bytes(path.read_bytes())
    directory, role = {"plaintext": (None, "clients"), "unlisted": (stranger, "admins")}.get(
        who, (keys / "alice", "clients")
    )
    targets: dict[str, tuple[str, KeyRole]] = {
        controller.nodes: ("controller-0", "controllers"), bus.bootstrap: ("broker", "brokers")
    }  # fmt: skip
    if who != "a client at the nodes' ports":
        targets[controller.clients] = ("controller-0", "controllers")
    with BrokerStatusClient(bus, str(keys / "cluster")) as desk, Peer(directory, role) as peer:  # type: ignore[arg-type]

        def counted() -> tuple[int, int]:
            """At the broker and at the controller. Not by their logs, which leave out what comes too often."""
            told = desk.ask(wait_ms=60_000)
            assert told is not None
            return told.counts["peers_refused"], live.status().counts["peers_refused"]

        before = counted()
        for endpoint, (_, to) in targets.items():
            for frames in ((b"", codec.encode(BrokerStatusQuery(1))), (codec.encode(StatusQuery(1)),)):
                assert peer.says(endpoint, to, *frames, wait_ms=200) is None
        live.ended(live.begin(60))  # while they knock
        live.until(lambda: all(map(int.__lt__, before, counted())), "both count them")


def test_a_revoked_client_is_turned_away_and_cut_off_in_the_midst_of_a_stream(live: Rig, keys: Path) -> None:
    client(keys, "bob")
    with Client(live.cluster.controller, keys=keys / "bob", retries=0, connect_timeout_s=2.0) as bob:
        bob.status(timeout_s=WAIT_S)  # it is connected
        stream = bob.generate_tokens([5, 6], max_tokens=4000)
        pieces = iter(stream)
        assert next(pieces).ids
        revoke_key(keys / "cluster", "clients", "bob")
        assert stream.result.code in ("peer_lost", "no_rank")  # 4,000 tokens would take 20 s
    assert "key.revoked" in (live.cluster.log_dir / "controller-0.log").read_text()
    with Client(live.cluster.controller, keys=keys / "cluster") as operator:
        events = operator.status(timeout_s=WAIT_S, events_from=0).events or ()
    assert ("key_revoked", "clients/bob, connected to clients") in [(each.what, each.phrase) for each in events]


def test_a_client_may_do_nothing_to_anothers_request_and_sees_no_loads(live: Rig, keys: Path, long: str) -> None:
    """Although mallory knows its rid and room."""
    at = ControllerAddress(live.cluster.controller).clients
    decode = next(rank for rank in live.status().ranks if rank.role == "decode")
    with Peer(keys / "mallory") as mallory:
        status = mallory.asks(at, "controllers", StatusQuery(1), CONTROLLER_TO_CLIENT)
        assert {(rank.load, rank.endpoint) for rank in status.ranks} == {(None, "")}  # type: ignore[union-attr]
        assert status.counts == {}  # type: ignore[union-attr]
        drained = mallory.asks(at, "controllers", DrainRank(1, "decode-0", 0), CONTROLLER_TO_CLIENT)
        assert isinstance(drained, Refused)
        assert drained.code == "bad_identity"
        for attempt in (1, 2, 1000):
            submit = Submit(long, "unified", 1, 1, attempt=attempt)
            failed = mallory.asks(at, "controllers", submit, CONTROLLER_TO_CLIENT, b"\1\0\0\0", b"")
            assert getattr(failed, "code", "") == "duplicate_rid"
        assert mallory.says(at, "controllers", codec.encode(Cancel(long)), wait_ms=200) is None
        tokens = mallory.asks(decode.endpoint, "nodes", Attach(long, 1), FROM_NODE_DATA)
        assert isinstance(tokens, Tokens)
        assert (tokens.code, tokens.ids) == ("bad_identity", ())
        pull = KvPull(1, 1, decode.epoch, 0, 0)
        assert mallory.says(decode.endpoint, "nodes", codec.encode(pull), wait_ms=200) is None
    assert live.status().counts["rejected_not_yours"] >= 2


def test_an_admin_may_cancel_any_request(live: Rig, keys: Path) -> None:
    at = ControllerAddress(live.cluster.controller).clients
    with Client(live.cluster.controller, keys=keys / "alice") as alice, Peer(keys / "cluster", "admins") as operator:
        stream = alice.generate_tokens([5, 6], max_tokens=4000)
        pieces = iter(stream)
        assert next(pieces).ids
        operator.asks(at, "controllers", Cancel(stream.rid), CONTROLLER_TO_CLIENT)
        assert stream.result.code == "cancelled"


def test_the_brokers_status_is_for_an_admin(live: Rig, keys: Path) -> None:
    at = BusAddress(live.cluster.bus).bootstrap
    with Peer(keys / "cluster", "nodes", "decode-0") as node, Peer(keys / "cluster", "admins") as operator:
        assert isinstance(node.asks(at, "brokers", BrokerStatusQuery(1), FROM_BROKER), Refused)
        assert not isinstance(operator.asks(at, "brokers", BrokerStatusQuery(1), FROM_BROKER), Refused)


@pytest.mark.usefixtures("long")
def test_a_connection_speaks_for_the_rank_it_claimed_and_no_other(live: Rig, keys: Path) -> None:
    """Even a peer with a node's key: its progress about another's rank, or before any hello, changes nothing."""
    decode = next(rank for rank in live.status().ranks if rank.role == "decode")
    at = ControllerAddress(live.cluster.controller).nodes
    lie = Progress(decode.instance, decode.dp_rank, decode.epoch, (), ())
    claim = Hello(
        instance="decode-0", dp_rank=0, epoch=decode.epoch, role="prefill", model="sim", dp_size=1, state="ready",
        endpoint="tcp://127.0.0.1:1", max_context=1, kv_capacity=1, max_running=1, block_tokens=1,
    )  # fmt: skip
    with Peer(keys / "cluster", "nodes", "decode-0") as node:
        assert isinstance(node.asks(at, "controllers", lie, CONTROLLER_TO_NODE), Who)
        refusal = node.asks(at, "controllers", claim, CONTROLLER_TO_NODE)
        assert isinstance(refusal, Refused)
        assert refusal.code == "bad_identity"
    with Peer(keys / "cluster", "nodes", "prefill-0") as other:  # the key of another instance
        for message in (lie, claim):
            answer = other.asks(at, "controllers", message, CONTROLLER_TO_NODE)
            assert isinstance(answer, Refused)
            assert (answer.code, answer.message.partition(":")[0]) == ("bad_identity", "not_yours")


def test_a_publication_needs_the_key_of_whom_it_speaks_for(live: Rig, keys: Path) -> None:
    """A node's key is one instance's: not another's ranks, no controller's counters, no beacon. Nor a controller's."""
    ranks = {rank.instance: rank for rank in live.status().ranks}
    decode = ranks["decode-0"]
    load = Load(
        seq=2**63 - 1, step=1, running=9, waiting=9, waiting_tokens=9, kv_tokens=9, kv_capacity=9, max_running=9
    )
    forged: list[Message] = [
        LoadReport("decode-0", 0, decode.epoch, 2**63 - 1, load),
        Sent("controller-9", 77, 1, ()),
        Beacon(77, 1, 0.25),
    ]
    log = live.cluster.log_dir / "broker.log"

    def told(who: str) -> Callable[[], bool]:
        return lambda: any("not_yours" in line and who in line for line in log.read_text().splitlines())

    bus = BusAddress(live.cluster.bus)
    with (
        Peer(keys / "cluster", "nodes", "prefill-0") as node, Peer(keys / "cluster", "controllers") as controller,
        Peer(keys / "cluster", "admins") as operator,
    ):  # fmt: skip
        probe = operator.sockets.sub(bus.subscribe, (b"load/decode-0/", b"sent/controller-9/", b"beacon/"))
        node.publishes(bus, forged, told("nodes/prefill-0"))
        controller.publishes(bus, [forged[0], forged[2]], told("controllers/controller-0"))
        live.ended(live.begin(60))
        assert probe.poll(WAIT_S * 1000)
        seen = []
        while probe.poll(100):
            seen.append(codec.decode(probe.recv_multipart()[1], PUBLICATIONS))
        assert not set(forged) & set(seen)

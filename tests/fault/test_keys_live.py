"""A cluster on tcp with keys: listed clients are served; plaintext, unlisted and wrongly listed peers get nowhere and
are counted; rank claims bind to their connection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zmq
from fault_rig import CONTROLLER_ARGS, TIMING, Rig, rig

from bus.endpoints import BusAddress, ControllerAddress
from bus.runtime.security import load_keys, new_client_keys, new_keys
from bus.runtime.sockets import Sockets
from bus.wire import codec
from bus.wire.messages import (
    CONTROLLER_TO_NODE,
    BrokerStatusQuery,
    Hello,
    Progress,
    Refused,
    StatusQuery,
    Who,
)
from nodes.own.engines.sim import sim_generate
from pdbus.client import Client
from pdbus.launcher import Cluster, ClusterSpec

pytestmark = pytest.mark.fault


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("k")
    new_keys(directory / "cluster")
    new_client_keys(directory / "cluster", "alice", directory / "alice")
    new_keys(directory / "stranger")
    return directory


@pytest.fixture(scope="module")
def cluster(keys: Path) -> Iterator[Cluster]:
    spec = ClusterSpec(
        prefill=1, decode=1, engine="sim", model="sim", transport="tcp", keys=str(keys / "cluster"), node_args=TIMING,
        controller_args=CONTROLLER_ARGS,
    )  # fmt: skip
    with Cluster(spec) as running:
        yield running


@pytest.fixture
def live(cluster: Cluster) -> Iterator[Rig]:
    with rig(cluster) as made:
        yield made
        made.ended(made.begin(60))
        made.check()


def refused(cluster: Cluster, part: str) -> int:
    return (cluster.log_dir / f"{part}.log").read_text().count("peer.refused")  # they can be more than its end holds


def test_a_listed_client_is_served(cluster: Cluster, keys: Path) -> None:
    with Client(cluster.controller, keys=keys / "alice") as alice:
        assert alice.generate_tokens([5, 6], max_tokens=8).tokens() == sim_generate([5, 6], 8)


@pytest.mark.parametrize("who", ["plaintext", "unlisted", "a client at the nodes' ports"])
def test_others_get_nowhere_and_are_counted(live: Rig, keys: Path, who: str) -> None:
    cluster = live.cluster
    bus, controller = BusAddress(cluster.bus), ControllerAddress(cluster.controller)
    if who == "unlisted":  # the right server key, a key of its own that nobody listed
        for name in ("server.key",):
            (keys / "stranger" / name).write_bytes((keys / "cluster" / name).read_bytes())
    theirs = {"plaintext": None, "unlisted": keys / "stranger"}.get(who, keys / "alice")
    targets = {controller.nodes: ("controller-0", b""), bus.bootstrap: ("broker", b"")}
    if who != "a client at the nodes' ports":
        targets[controller.clients] = ("controller-0", b"")
    before = {part: refused(cluster, part) for part, _ in targets.values()}
    with Sockets(keys=load_keys(theirs, server=False) if theirs else None) as sockets:
        dealers = [sockets.dealer(endpoint) for endpoint in targets]
        for dealer in dealers:
            for message in (StatusQuery(1), BrokerStatusQuery(1)):
                with suppress(zmq.Again):  # refused before it could say so much
                    dealer.send_multipart([b"", codec.encode(message)], zmq.NOBLOCK)
                    dealer.send(codec.encode(message), zmq.NOBLOCK)
        live.ended(live.begin(60))  # while they knock
        assert not [dealer for dealer in dealers if dealer.poll(300)]
    for part, count in before.items():
        live.until(lambda part=part, count=count: refused(cluster, part) > count, f"{part} counts them")  # type: ignore[misc]


def test_a_key_taken_off_the_list_is_turned_away_without_a_restart(cluster: Cluster, keys: Path) -> None:
    new_client_keys(keys / "cluster", "bob", keys / "bob")
    with Client(cluster.controller, keys=keys / "bob") as bob:
        assert bob.status().ranks
    (keys / "cluster" / "allow" / "clients" / "bob.key").unlink()
    with Sockets(keys=load_keys(keys / "bob", server=False)) as sockets:
        dealer = sockets.dealer(ControllerAddress(cluster.controller).clients)
        with suppress(zmq.Again):
            dealer.send(codec.encode(StatusQuery(1)), zmq.NOBLOCK)
        assert not dealer.poll(700)


def test_a_connection_speaks_for_the_rank_it_claimed_and_no_other(live: Rig, keys: Path) -> None:
    """Even a peer with a node's key: its progress about another's rank, or before any hello, changes nothing."""
    decode = next(rank for rank in live.status().ranks if rank.role == "decode")
    rid = live.begin(60, 200)
    live.got(rid, 2)
    with Sockets(keys=load_keys(keys / "cluster", server=False)) as sockets:
        dealer = sockets.dealer(ControllerAddress(live.cluster.controller).nodes)

        def answer(message: Hello | Progress) -> object:
            dealer.send(codec.encode(message))
            assert dealer.poll(5000, zmq.POLLIN)
            return codec.decode(dealer.recv(), CONTROLLER_TO_NODE)

        lie = Progress(decode.instance, decode.dp_rank, decode.epoch, (), ())
        assert isinstance(answer(lie), Who)
        claim = Hello(
            instance="decode-0", dp_rank=0, epoch=decode.epoch, role="prefill", model="sim", dp_size=1,
            state="ready", endpoint="tcp://127.0.0.1:1", max_context=1, kv_capacity=1, max_running=1, block_tokens=1,
        )  # fmt: skip
        refusal = answer(claim)
        assert isinstance(refusal, Refused)
        assert refusal.code == "bad_identity"
    live.ended(rid)
    assert live.results[rid].attempts == 1

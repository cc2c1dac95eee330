"""A port that no longer proves a listed key is let go of, and met again where its name has another key (M89)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import zmq

from bus.rights import KeyRole
from bus.runtime.keys import add_key, load_keys, new_keys, revoke_key
from bus.runtime.peer_keys import PeerKeys
from bus.runtime.sockets import Sockets

HERE = "ipc:///d/here"


class Recorded:
    """A socket that notes what is done with it."""

    def __init__(self) -> None:
        self.done: list[Any] = []

    def connect(self, endpoint: str) -> None:
        self.done.append(("connect", endpoint))

    def disconnect(self, endpoint: str) -> None:
        self.done.append(("disconnect", endpoint))

    def setsockopt(self, option: int, value: bytes) -> None:
        assert option == zmq.CURVE_SERVERKEY
        self.done.append(value)


class Held:
    """A port of controller-0 (or another) that is connected, and the list it is judged by."""

    def __init__(self, keys: Path, role: KeyRole = "controllers", name: str = "controller-0", said: str = "") -> None:
        self.keys, self.role, self.name = keys, role, name
        self.socket: Any = Recorded()
        self.peers = PeerKeys(keys)
        self.peers.connected(self.socket, HERE, role, said, self.listed())

    def listed(self) -> bytes:
        return (self.keys / "allow" / self.role / f"{self.name}.key").read_bytes().strip()

    def after(self, looks: int) -> list[Any]:
        """What was done with the socket in so many looks."""
        self.socket.done.clear()
        for _ in range(looks):
            self.peers.look()
        return list(self.socket.done)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    new_keys(tmp_path / "keys", ("prefill-0", "decode-0"))
    return tmp_path / "keys"


@pytest.mark.parametrize("said", ["", "controller-0"])
def test_a_key_that_the_list_lacks_twice_in_a_row_is_let_go_of(keys: Path, said: str) -> None:
    held = Held(keys, said=said)
    assert held.after(3) == []
    revoke_key(keys, "controllers", "controller-0")
    assert held.after(1) == []
    assert held.after(1) == [("disconnect", HERE)]
    assert held.after(5) == []


def test_a_key_that_lacks_once_is_kept(keys: Path) -> None:
    held, file = Held(keys), keys / "allow" / "controllers" / "controller-0.key"
    for _ in range(4):
        file.rename(keys / "aside")
        assert held.after(1) == []
        (keys / "aside").rename(file)
        assert held.after(1) == []


@pytest.mark.parametrize("said", ["", "controller-0"])
def test_another_key_under_the_name_is_met_without_a_restart(keys: Path, said: str) -> None:
    held = Held(keys, said=said)
    revoke_key(keys, "controllers", "controller-0")
    add_key(keys, "controllers", "controller-0")
    assert held.after(1) == []
    assert held.after(1) == [("disconnect", HERE), held.listed(), ("connect", HERE)]
    assert held.after(5) == []
    revoke_key(keys, "controllers", "controller-0")
    assert held.after(2) == [("disconnect", HERE)]
    add_key(keys, "controllers", "controller-0")  # and some time later
    assert held.after(1) == [held.listed(), ("connect", HERE)]
    assert held.after(5) == []


def test_the_key_of_another_name_is_none_of_this_port(keys: Path) -> None:
    held = Held(keys, said="controller-0")
    add_key(keys, "controllers", "controller-1")
    key = held.listed()
    revoke_key(keys, "controllers", "controller-0")
    (keys / "allow" / "controllers" / "controller-1.key").write_bytes(key)
    assert held.after(2) == [("disconnect", HERE)]


def test_without_a_name_any_of_the_role_will_do_and_of_several_others_none(keys: Path) -> None:
    held = Held(keys)
    add_key(keys, "controllers", "controller-1")
    assert held.after(3) == []
    add_key(keys, "controllers", "controller-2")
    revoke_key(keys, "controllers", "controller-0")
    assert held.after(5) == [("disconnect", HERE)]


def test_a_node_is_known_by_its_key_alone(keys: Path) -> None:
    held = Held(keys, "nodes", "decode-0")
    assert held.after(3) == []
    revoke_key(keys, "nodes", "prefill-0")
    revoke_key(keys, "nodes", "decode-0")
    add_key(keys, "nodes", "decode-0")
    assert held.after(5) == [("disconnect", HERE)]


@pytest.mark.parametrize("away", ["allow", "allow/controllers"])
def test_a_list_that_is_away_changes_nothing_and_is_logged_once(keys: Path, away: str) -> None:
    held = Held(keys, said="controller-0")
    held.after(1)
    with structlog.testing.capture_logs() as logs:
        held.after(1)
        (keys / away).rename(keys / "aside")
        assert held.after(5) == []
        (keys / "aside").rename(keys / away)
        assert held.after(5) == []
        revoke_key(keys, "controllers", "controller-0")
        assert held.after(2) == [("disconnect", HERE)]
    said = [entry["event"] for entry in logs]
    assert said.count("allowlist.unreadable") == said.count("allowlist.readable") == 1


def test_where_no_list_of_a_role_is_held_nothing_is_judged(keys: Path) -> None:
    """As of a client and the nodes: the controller tells it of those."""
    held = Held(keys, "nodes", "decode-0")
    shutil.rmtree(keys / "allow" / "nodes")
    with structlog.testing.capture_logs() as logs:
        assert held.after(5) == []
    assert not logs


def test_a_closed_socket_is_forgotten(keys: Path) -> None:
    held = Held(keys)
    held.peers.closed(held.socket)
    revoke_key(keys, "controllers", "controller-0")
    assert held.after(5) == []


@pytest.fixture
def parts(keys: Path, tmp_path: Path) -> Iterator[tuple[Sockets, Sockets]]:
    """A node's sockets, and those of the controller it knows."""
    tmp_path.chmod(0o700)
    with (
        Sockets(keys=load_keys(keys, "controllers")) as controller,
        Sockets(keys=load_keys(keys, "nodes", name="decode-0")) as node,
    ):
        yield controller, node


def test_a_part_whose_key_was_revoked_hears_nothing_more_and_who_has_its_new_key_does(
    keys: Path, tmp_path: Path, parts: tuple[Sockets, Sockets]
) -> None:
    controller, node = parts
    endpoint = f"ipc://{tmp_path}/c"
    router = controller.router(endpoint, domain="nodes")
    dealer = node.dealer(endpoint, role="controllers")
    dealer.send(b"hello")
    assert router.poll(5000)
    router.recv_multipart()
    revoke_key(keys, "controllers", "controller-0")
    node.look()
    node.look()
    with pytest.raises(zmq.Again):
        dealer.send(b"more", zmq.NOBLOCK)
    controller.close_socket(router)
    add_key(keys, "controllers", "controller-0")
    node.look()
    with Sockets(keys=load_keys(keys, "controllers")) as heir:
        (tmp_path / "c").unlink()
        router = heir.router(endpoint, domain="nodes")
        dealer.send(b"again")
        assert router.poll(5000)
        assert router.recv_multipart()[1] == b"again"

"""CURVE keys and the allowlist: who gets in, who does not, and what the files look like."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
import zmq

from bus.errors import ConfigError, StartError
from bus.runtime import keys as security
from bus.runtime.keys import load_keys, new_client_keys, new_keys
from bus.runtime.sockets import Sockets


def _exchange(server: Sockets, client: Sockets, *, domain: str = "clients", wait_ms: int = 2000) -> bool:
    """Whether a message from `client` reaches a ROUTER of `server` over tcp, and its answer comes back."""
    router = server.router("tcp://127.0.0.1:*", domain=domain)  # type: ignore[arg-type]
    dealer = client.dealer(router.getsockopt_string(zmq.LAST_ENDPOINT))
    try:
        dealer.send(b"hello", zmq.NOBLOCK)
    except zmq.Again:
        return False  # refused before it could say so much
    if not router.poll(wait_ms):
        return False
    router.send_multipart([router.recv_multipart()[0], b"welcome"])
    assert dealer.poll(wait_ms)
    return dealer.recv() == b"welcome"


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    new_keys(tmp_path / "keys")
    return tmp_path / "keys"


def test_secrets_are_private_and_never_overwritten(cluster: Path) -> None:
    assert stat.S_IMODE(cluster.stat().st_mode) == 0o700
    for name in ("server.secret", "client.secret"):
        assert stat.S_IMODE((cluster / name).stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="already holds keys"):
        new_keys(cluster)


def test_a_secret_that_others_can_read_is_refused(cluster: Path) -> None:
    (cluster / "server.secret").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_keys(cluster, server=True)


def test_a_key_file_appears_whole_or_not_at_all_and_in_the_place_of_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: seen.append(sorted(os.listdir(tmp_path))))
    security._write(tmp_path / "a.key", b"first", 0o644)
    with pytest.raises(ConfigError, match="File exists"):
        security._write(tmp_path / "a.key", b"second", 0o644)
    assert (tmp_path / "a.key").read_bytes() == b"first\n"

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left"):
        security._write(tmp_path / "b.key", b"third", 0o644)
    assert os.listdir(tmp_path) == ["a.key"]
    assert not any(name.endswith(".key") and name != "a.key" for names in seen for name in names)
    assert not any(name == "a.key" for name in seen[0])


@pytest.mark.parametrize(("content", "message"), [(None, "is missing"), ("short", "does not hold"), ("ä" * 40, "does")])
def test_bad_key_files_are_named(cluster: Path, content: str | None, message: str) -> None:
    path = cluster / "client.key"
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_keys(cluster, server=True)


def test_listed_keys_get_in_and_clients_stay_out_of_the_nodes_ports(cluster: Path, tmp_path: Path) -> None:
    new_client_keys(cluster, "alice", tmp_path / "alice")
    alice = load_keys(tmp_path / "alice", server=False)
    with Sockets(keys=load_keys(cluster, server=True)) as server, Sockets(keys=alice) as client:
        assert _exchange(server, client, domain="clients")
        assert not _exchange(server, client, domain="nodes", wait_ms=300)
        assert server.gatekeeper is not None
        assert server.gatekeeper.refused["nodes"] >= 1


def test_plaintext_and_unlisted_peers_get_nowhere(cluster: Path, tmp_path: Path) -> None:
    new_client_keys(cluster, "mallory", tmp_path / "mallory")
    (cluster / "allow" / "clients" / "mallory.key").unlink()
    mallory = load_keys(tmp_path / "mallory", server=False)
    with Sockets(keys=load_keys(cluster, server=True)) as server:
        with Sockets() as plain:
            assert not _exchange(server, plain, wait_ms=300)
            assert server.gatekeeper is not None
            assert server.gatekeeper.refused["clients"] >= 1
        before = server.gatekeeper.refused["clients"]
        with Sockets(keys=mallory) as unlisted:
            assert not _exchange(server, unlisted, wait_ms=300)
        assert server.gatekeeper.refused["clients"] > before


def test_one_bad_file_locks_nobody_out(cluster: Path, tmp_path: Path) -> None:
    new_client_keys(cluster, "dora", tmp_path / "dora")
    (cluster / "allow" / "clients" / "a.key").write_text("oops")
    (cluster / "allow" / "nodes" / "a.key").write_text("")
    with Sockets(keys=load_keys(cluster, server=True)) as server:
        with Sockets(keys=load_keys(tmp_path / "dora", server=False)) as client:
            assert _exchange(server, client)
        with Sockets(keys=load_keys(cluster, server=True)) as node:
            assert _exchange(server, node, domain="nodes")


def test_the_list_is_read_at_each_connection(cluster: Path, tmp_path: Path) -> None:
    new_client_keys(cluster, "bob", tmp_path / "bob")
    listed = cluster / "allow" / "clients" / "bob.key"
    key = listed.read_bytes()
    with Sockets(keys=load_keys(cluster, server=True)) as server:
        client = Sockets(keys=load_keys(tmp_path / "bob", server=False))
        assert _exchange(server, client)
        client.close()
        listed.unlink()
        with Sockets(keys=load_keys(tmp_path / "bob", server=False)) as again:
            assert not _exchange(server, again, wait_ms=300)
        listed.write_bytes(key)
        with Sockets(keys=load_keys(tmp_path / "bob", server=False)) as back:
            assert _exchange(server, back)


def test_a_client_directory_cannot_open_a_port(cluster: Path, tmp_path: Path) -> None:
    new_client_keys(cluster, "carol", tmp_path / "carol")
    with (
        Sockets(keys=load_keys(tmp_path / "carol", server=False)) as carol,
        pytest.raises(StartError, match=r"server\.secret"),
    ):
        carol.router("tcp://127.0.0.1:*")

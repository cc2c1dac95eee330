"""CURVE keys and the allowlist: who gets in, as whom, who does not, and what the files look like."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq
import zmq.utils.z85
from patience import patience_s
from structlog.testing import capture_logs

from bus.errors import ConfigError, StartError
from bus.rights import Domain, KeyRole, key_of
from bus.runtime import frames
from bus.runtime import keys as security
from bus.runtime import security as gate
from bus.runtime.allowlist import read_key
from bus.runtime.keys import (
    Keys,
    add_key,
    ensure_keys,
    files_of,
    give_key,
    listed_keys,
    load_keys,
    new_keys,
    revoke_key,
)
from bus.runtime.sockets import Sockets
from pdbus.edge.client import EdgeClient


def _exchange(server: Sockets, client: Sockets, *, domain: Domain = "clients", wait_ms: int = 60_000) -> str:
    """As whom a message from `client` reaches a ROUTER of `server`, if it does and its answer comes back."""
    router = server.router("tcp://127.0.0.1:*", domain=domain)
    dealer = client.dealer(router.getsockopt_string(zmq.LAST_ENDPOINT))
    try:
        dealer.send(b"hello", zmq.NOBLOCK)
    except zmq.Again:
        return ""  # refused before it could say so much
    if not router.poll(wait_ms):
        return ""
    peer = frames.receive(router, keyed=server.keyed)[0]
    frames.send(router, (peer, b"welcome"))
    assert dealer.poll(wait_ms)
    assert dealer.recv() == b"welcome"
    return key_of(peer) or "nobody"


def of(cluster: Path, role: KeyRole, name: str = "") -> Keys:
    return load_keys(cluster, role, name=name)


def client_of(cluster: Path, name: str) -> Keys:
    """A client's keys, made and listed."""
    add_key(cluster, "clients", name)
    give_key(cluster, "clients", name, cluster.parent / name)
    return load_keys(cluster.parent / name, "admins", "clients")


@pytest.fixture
def ipc_directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="pd"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    new_keys(tmp_path / "keys", ("prefill-0",))
    return tmp_path / "keys"


def test_secrets_are_private_and_never_overwritten(cluster: Path) -> None:
    assert stat.S_IMODE(cluster.stat().st_mode) == 0o700
    secrets = list((cluster / "secrets").rglob("*"))
    assert sum(path.is_file() for path in secrets) == 5
    for path in [cluster / "secrets", *secrets]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    with pytest.raises(ConfigError, match="already holds keys"):
        new_keys(cluster)


def test_a_secret_that_others_can_read_is_refused(cluster: Path) -> None:
    (cluster / "secrets" / "brokers" / "broker.secret").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        of(cluster, "brokers")


@pytest.mark.parametrize(
    ("mode", "owner", "we", "refused"),
    [
        (0o600, 1000, 1000, False),
        (0o640, 1000, 1000, True),
        (0o440, 0, 1000, False),  # a volume of Kubernetes with an fsGroup; a credential of systemd
        (0o640, 0, 1000, False),
        (0o460, 0, 1000, True),
        (0o444, 0, 1000, True),
        (0o440, 0, 0, True),  # nothing that root needs
    ],
)
def test_a_secret_of_root_may_be_read_by_its_group(mode: int, owner: int, we: int, refused: bool) -> None:
    assert security._is_open(mode, owner, we) == refused


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
    path = cluster / "secrets" / "nodes" / "prefill-0.secret"
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        of(cluster, "nodes", "prefill-0")


def test_a_part_finds_its_own_secret_or_hears_what_to_do(cluster: Path, tmp_path: Path) -> None:
    assert of(cluster, "nodes", "prefill-0").name == of(cluster, "nodes").name == "nodes/prefill-0"
    with pytest.raises(ConfigError, match=r"make it with: pdbus keys add .* node decode-0$"):
        of(cluster, "nodes", "decode-0")
    add_key(cluster, "nodes", "decode-0")
    with pytest.raises(ConfigError, match=r"has secrets of decode-0, prefill-0"):
        of(cluster, "nodes")
    assert client_of(cluster, "alice").name == "clients/alice"
    add_key(cluster, "clients", "bob")
    assert load_keys(cluster, "admins", "clients").name == "admins/operator"
    with pytest.raises(ConfigError, match=r"has no secret of a node; give it one: pdbus keys give KEYS node NAME"):
        of(tmp_path / "alice", "nodes")


def test_no_two_parts_have_one_key_and_who_is_given_one_gets_no_other(cluster: Path, tmp_path: Path) -> None:
    add_key(cluster, "nodes", "decode-0")
    give_key(cluster, "nodes", "decode-0", tmp_path / "decode-0")
    keys = [key for _, _, key in listed_keys(cluster)]
    assert len(set(keys)) == len(keys) == 6
    assert [path.name for path in (tmp_path / "decode-0").rglob("*.secret")] == ["decode-0.secret"]
    assert not list(cluster.rglob("decode-0.secret")), "given away"
    assert of(tmp_path / "decode-0", "nodes", "decode-0").name == "nodes/decode-0"


@pytest.mark.parametrize(("role", "name"), [("nodes", "prefill-0"), ("admins", "operator")])
def test_the_files_of_a_key_are_those_it_would_be_given(
    cluster: Path, tmp_path: Path, role: KeyRole, name: str
) -> None:
    files, out = files_of(of(cluster, role, name)), tmp_path / "out"
    assert list(cluster.rglob(f"{name}.secret")), "it stays"
    give_key(cluster, role, name, out)
    given = {str(path.relative_to(out)): path.read_bytes().strip() for path in out.rglob("*") if path.is_file()}
    assert files == given


def test_what_was_given_away_is_renewed(cluster: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    give_key(cluster, "nodes", "prefill-0", out)
    for role, name in (("clients", "alice"), ("clients", "bob"), ("nodes", "decode-0")):
        add_key(cluster, role, name)  # type: ignore[arg-type]
    give_key(cluster, "nodes", "prefill-0", out)
    assert list(listed_keys(out)) == list(listed_keys(cluster))
    revoke_key(cluster, "clients", "alice")
    revoke_key(cluster, "clients", "bob")
    add_key(cluster, "clients", "bob")  # another key
    give_key(cluster, "nodes", "prefill-0", out)
    assert list(listed_keys(out)) == list(listed_keys(cluster))
    for role, name, why in (("nodes", "decode-0", "secret of another"), ("clients", "carol", "no client of that name")):
        with pytest.raises(ConfigError, match=why):
            give_key(cluster, role, name, out)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="given away"):
        give_key(cluster, "nodes", "prefill-0", tmp_path / "again")


def test_everybody_is_known_by_name(cluster: Path) -> None:
    with Sockets(keys=of(cluster, "brokers")) as server:
        for role, domain in (("nodes", "data"), ("controllers", "bootstrap"), ("admins", "clients")):
            with Sockets(keys=of(cluster, role)) as peer:  # type: ignore[arg-type]
                assert _exchange(server, peer, domain=domain).startswith(f"{role}/")  # type: ignore[arg-type]


def test_keys_count_over_ipc_too(cluster: Path, ipc_directory: Path) -> None:
    alice = client_of(cluster, "alice")
    with Sockets(keys=of(cluster, "brokers")) as server, Sockets(keys=alice) as client, Sockets() as plain:
        router = server.router(f"ipc://{ipc_directory}/r", domain="clients")
        for sockets in (plain, client):
            with suppress(zmq.Again):
                sockets.dealer(f"ipc://{ipc_directory}/r").send(b"hello", zmq.NOBLOCK)
        assert router.poll(60_000)
        assert key_of(frames.receive(router, keyed=True)[0]) == "clients/alice"
        assert not router.poll(200)


def test_a_port_must_prove_the_key_that_is_expected_there(cluster: Path) -> None:
    """A node whose secret was stolen cannot pass for the broker."""
    with Sockets(keys=of(cluster, "nodes")) as thief, Sockets(keys=of(cluster, "controllers")) as controller:
        assert not _exchange(thief, controller, domain="data", wait_ms=300)


def test_a_rank_says_in_its_endpoint_which_key_its_port_has(cluster: Path) -> None:
    alice = client_of(cluster, "alice")
    with Sockets(keys=of(cluster, "nodes")) as node, Sockets(keys=alice) as client:
        router, endpoint = node.ephemeral_router("tcp://127.0.0.1")
        client.dealer(endpoint, role="nodes").send(b"hello")
        assert router.poll(60_000)
        with pytest.raises(StartError, match="does not say which key"):
            client.dealer(router.getsockopt_string(zmq.LAST_ENDPOINT), role="nodes")


def test_one_of_several_controllers_is_named_in_its_address(cluster: Path) -> None:
    alice = client_of(cluster, "alice")
    add_key(cluster, "controllers", "controller-1")
    (cluster.parent / "alice" / "allow" / "controllers" / "controller-1.key").write_bytes(
        (cluster / "allow" / "controllers" / "controller-1.key").read_bytes()
    )
    with Sockets(keys=of(cluster, "controllers", "controller-1")) as controller, Sockets(keys=alice) as client:
        router = controller.router("tcp://127.0.0.1:*", domain="clients")
        at = router.getsockopt_string(zmq.LAST_ENDPOINT)
        with pytest.raises(ConfigError, match="as #controller-0"):
            client.dealer(at, role="controllers")
        for name, comes in (("controller-0", False), ("controller-1", True)):
            with suppress(zmq.Again):
                client.dealer(f"{at}#{name}", role="controllers").send(b"hello", zmq.NOBLOCK)
            assert bool(router.poll(60_000 if comes else 300)) is comes


def test_listed_keys_get_in_and_clients_stay_out_of_the_nodes_ports(cluster: Path) -> None:
    alice = client_of(cluster, "alice")
    with Sockets(keys=of(cluster, "brokers")) as server, Sockets(keys=alice) as client:
        assert _exchange(server, client, domain="clients") == "clients/alice"
        assert not _exchange(server, client, domain="nodes", wait_ms=300)
        assert server.gatekeeper is not None
        assert server.gatekeeper.refused["nodes"] >= 1


def test_every_port_takes_encrypted_connections_alone(cluster: Path) -> None:
    with Sockets(keys=of(cluster, "brokers")) as server:
        at = "tcp://127.0.0.1:*"
        for socket in (server.router(at), server.bus_in((b"load/",), at), server.bus_out(at)):
            assert (socket.getsockopt(zmq.MECHANISM), socket.getsockopt(zmq.CURVE_SERVER)) == (zmq.CURVE, 1)


def test_plaintext_and_unlisted_peers_get_nowhere(cluster: Path) -> None:
    mallory = client_of(cluster, "mallory")
    revoke_key(cluster, "clients", "mallory")
    with Sockets(keys=of(cluster, "brokers")) as server:
        with Sockets() as plain:
            assert not _exchange(server, plain, wait_ms=300)
            assert server.gatekeeper is not None
            assert server.gatekeeper.refused["clients"] >= 1
        before = server.gatekeeper.refused["clients"]
        with Sockets(keys=mallory) as unlisted:
            assert not _exchange(server, unlisted, wait_ms=300)
        assert server.gatekeeper.refused["clients"] > before


def test_one_bad_file_locks_nobody_out(cluster: Path) -> None:
    dora = client_of(cluster, "dora")
    (cluster / "allow" / "clients" / "a.key").write_text("oops")
    (cluster / "allow" / "nodes" / "a.key").write_text("")
    with Sockets(keys=of(cluster, "brokers")) as server:
        with Sockets(keys=dora) as client:
            assert _exchange(server, client)
        with Sockets(keys=of(cluster, "nodes")) as node:
            assert _exchange(server, node, domain="nodes")


def test_the_list_is_read_at_each_connection(cluster: Path) -> None:
    bob = client_of(cluster, "bob")
    listed = cluster / "allow" / "clients" / "bob.key"
    key = listed.read_bytes()
    with Sockets(keys=of(cluster, "brokers")) as server:
        client = Sockets(keys=bob)
        assert _exchange(server, client)
        client.close()
        listed.unlink()
        with Sockets(keys=bob) as again:
            assert not _exchange(server, again, wait_ms=300)
        listed.write_bytes(key)
        with Sockets(keys=bob) as back:
            assert _exchange(server, back)


def test_a_key_that_connects_too_often_has_to_wait_and_others_do_not(
    cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "HANDSHAKES", 2)
    monkeypatch.setattr(gate, "HANDSHAKES_PER_S", 0)
    keys = {name: client_of(cluster, name) for name in ("alice", "bob")}
    with Sockets(keys=of(cluster, "brokers")) as server:
        for name, gets_in in (("alice", True), ("alice", True), ("alice", False), ("bob", True)):
            with Sockets(keys=keys[name]) as client:
                assert bool(_exchange(server, client, wait_ms=60_000 if gets_in else 300)) is gets_in
        assert server.gatekeeper is not None
        assert server.gatekeeper.refused["clients"] >= 1


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_a_revoked_key_loses_its_connections_and_others_keep_theirs(
    transport: str, cluster: Path, ipc_directory: Path
) -> None:
    """Others of the same address (ipc: process), as bob is here, are cut off too, and come back by themselves."""
    keys = {name: client_of(cluster, name) for name in ("alice", "bob")}
    with Sockets(keys=of(cluster, "brokers")) as server, ExitStack() as stack:
        bind = "tcp://127.0.0.1:*" if transport == "tcp" else f"ipc://{ipc_directory}/r"
        router = server.router(bind, domain="clients")
        at = router.getsockopt_string(zmq.LAST_ENDPOINT)
        dealers = {}
        peers = {}
        for name, theirs in keys.items():
            dealers[name] = stack.enter_context(Sockets(keys=theirs)).dealer(at)
            dealers[name].send(b"hello")
            assert router.poll(60_000)
            peers[name] = frames.receive(router, keyed=True)[0]
        revoke_key(cluster, "clients", "alice")

        def gone() -> bool:
            try:
                frames.send(router, (peers["alice"], b"psst"))
            except zmq.ZMQError as error:
                return error.errno == errno.EHOSTUNREACH
            return False

        end = time.monotonic() + patience_s(60.0)
        while not gone():
            assert time.monotonic() < end, "its connection stands"
            while dealers["alice"].poll(20):
                dealers["alice"].recv()
        while not router.poll(100):  # what was on its way when the connection went is lost
            assert time.monotonic() < end, "bob does not come back"
            dealers["bob"].send(b"still there")
        assert key_of(frames.receive(router, keyed=True)[0]) == "clients/bob"


def test_an_edge_takes_a_clients_key_and_never_an_admins(cluster: Path, tmp_path: Path) -> None:
    """`edge` of several; the only one elsewhere; and a directory without any hears how it comes to one."""

    def of_an_edge(directory: Path, name: str = "") -> str:
        return load_keys(directory, "clients", name=name, default="edge").name

    add_key(cluster, "clients", "alice")
    assert of_an_edge(cluster) == "clients/edge"
    assert of_an_edge(cluster, "alice") == "clients/alice"
    add_key(cluster, "clients", "bob")
    give_key(cluster, "clients", "edge", tmp_path / "edge")
    with pytest.raises(ConfigError, match="has secrets of alice, bob: choose one with --key-name"):
        of_an_edge(cluster)
    give_key(cluster, "clients", "bob", tmp_path / "bob")
    assert of_an_edge(tmp_path / "bob") == "clients/bob"
    revoke_key(cluster, "clients", "alice")
    with pytest.raises(ConfigError, match=r"no secret of a client; make it one: pdbus keys add .*keys client edge$"):
        of_an_edge(cluster)
    with pytest.raises(ConfigError, match=r"carol.secret is missing; make it with: pdbus keys add .* client carol$"):
        EdgeClient("tcp://127.0.0.1:1", str(cluster), "carol")


def test_what_was_revoked_is_made_again_only_when_it_is_asked_for(cluster: Path) -> None:
    def names() -> set[str]:
        return {f"{role}/{name}" for role, name, _ in listed_keys(cluster)}

    wanted = {"clients/edge", "nodes/prefill-0", "nodes/decode-0"}
    ensure_keys(cluster, (), ("prefill-0", "decode-0"), edge=True)
    assert wanted < names()
    for key in wanted:
        role, name = key.split("/")
        revoke_key(cluster, role, name)  # type: ignore[arg-type]
    ensure_keys(cluster, (), ("prefill-0", "decode-0"), edge=True)
    assert not wanted & names()
    add_key(cluster, "clients", "edge")
    (cluster / "allow" / "clients" / "edge.key").unlink()  # as by hand
    ensure_keys(cluster, (), (), edge=True)
    assert "clients/edge" in names()


def test_a_key_that_was_replaced_is_given_once_more(cluster: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    give_key(cluster, "controllers", "controller-0", out)
    revoke_key(cluster, "controllers", "controller-0")
    add_key(cluster, "controllers", "controller-0")
    give_key(cluster, "controllers", "controller-0", out)
    listed = {name: key for role, name, key in listed_keys(cluster) if role == "controllers"}
    assert of(out, "controllers").public == listed["controller-0"]
    assert not (cluster / "secrets" / "controllers" / "controller-0.secret").exists()
    give_key(cluster, "controllers", "controller-0", out)  # nothing is left to replace
    assert of(out, "controllers").public == listed["controller-0"]


@pytest.mark.parametrize(
    ("nodes", "message"),
    [(("prefill-0", "decode 0"), "'decode 0': the name of a key"), (("a", "a"), "a is named twice")],
)
def test_keys_are_made_for_all_names_or_none(tmp_path: Path, nodes: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        new_keys(tmp_path / "keys", nodes)
    new_keys(tmp_path / "keys", ("prefill-0",))


def test_a_secret_without_a_listed_key_does_not_stand_in_the_way_of_another(cluster: Path) -> None:
    (cluster / "allow" / "clients" / "edge.key").unlink()
    add_key(cluster, "clients", "edge")
    assert load_keys(cluster, "clients").public in {key for _, _, key in listed_keys(cluster)}


def test_a_directory_without_a_list_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nosuch holds no list of keys; make one with: pdbus keys new"):
        list(listed_keys(tmp_path / "nosuch"))


def test_what_cannot_be_removed_or_written_is_one_line(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that is read-only."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("unlink", "link"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(ConfigError, match=r"cannot remove .*prefill-0.key: Read-only file system"):
        revoke_key(cluster, "nodes", "prefill-0")
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ConfigError, match=r"cannot write .*x.secret: Read-only file system"):
        add_key(cluster, "nodes", "x")
    assert len(list(listed_keys(cluster))) == 5


def test_the_log_of_refusals_does_not_run_dry() -> None:
    lines = gate.Lines()
    said = [lines.one("clients strangers", 0.0) for _ in range(1000)]
    assert said.count(0) == gate.LOGGED_MAX
    assert set(said) == {0, -1}
    assert lines.one("clients known", 1.0) == 0, "strangers leave no refusal of a key out"
    assert lines.one("clients strangers", 59.0) == -1
    assert lines.one("clients strangers", 60.0) == 1000 - gate.LOGGED_MAX + 1, "what was left out is told"
    assert lines.one("clients strangers", 60.0) == 0


@pytest.mark.parametrize(
    ("revoked", "why"),
    [(True, "was revoked"), (False, "its role may not connect here")],
    ids=["revoked", "of a client"],
)
def test_the_log_names_a_revoked_or_a_listed_key_whatever_strangers_do(tmp_path: Path, revoked: bool, why: str) -> None:
    """It never was here while it was listed, or may connect elsewhere."""
    new_keys(tmp_path / "keys")
    add_key(tmp_path / "keys", "clients", "alice")
    alice = read_key(tmp_path / "keys" / "allow" / "clients" / "alice.key")
    if revoked:
        revoke_key(tmp_path / "keys", "clients", "alice")

    def ask(key: bytes) -> bytes:
        return keeper.answer([b"1.0", b"1", b"nodes", b"10.0.0.1", b"", b"CURVE", zmq.utils.z85.decode(key)])[2]

    with zmq.Context() as context, capture_logs() as logs:
        keeper = gate.Gatekeeper(context, load_keys(tmp_path / "keys", "controllers"))
        try:
            assert {ask(zmq.curve_keypair()[0]) for _ in range(2 * gate.LOGGED_MAX)} == {b"400"}
            assert len(logs) == gate.LOGGED_MAX
            assert ask(alice) == b"400"
        finally:
            keeper.close()
    assert len(logs) == gate.LOGGED_MAX + 1
    assert (logs[-1]["event"], logs[-1]["key"], logs[-1]["why"]) == ("peer.refused", "clients/alice", why)


def test_keys_are_made_where_nobody_else_may_put_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(ConfigError, match="chmod go-w"):
        security.new_keys(open_to_all)
    before = os.umask(0)
    try:
        security.new_keys(tmp_path / "a" / "b" / "keys")
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / path).stat().st_mode) for path in ("a", "a/b", "a/b/keys")] == [0o755] * 2 + [
        0o700
    ]
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    if (tmp_path / "a").stat().st_uid:
        with pytest.raises(ConfigError, match="belongs to another user"):
            security.new_keys(tmp_path / "a")


@pytest.mark.parametrize("inside", ["", "allow", "allow/admins", "allow/admins/operator.key"])
def test_a_list_that_others_may_write_is_not_gone_by(tmp_path: Path, inside: str) -> None:
    """Each part asks before it opens a door."""
    keys = tmp_path / "keys"
    security.new_keys(keys)
    (keys / inside).chmod(0o777)
    with pytest.raises(ConfigError, match=f"others may write to {keys / inside}, .*chmod go-w"):
        security.load_keys(keys, "brokers")
    (keys / inside).chmod(0o755)
    assert security.load_keys(keys, "brokers").name == "brokers/broker"


@pytest.mark.parametrize(
    ("owner", "mode", "read_only", "passes"),
    [
        ("ours", 0o775, False, False),
        ("another", 0o775, False, False),
        ("another", 0o755, False, True),  # an operator who hands out the lists
        ("root", 0o2775, False, True),  # a volume with an fsGroup
        ("root", 0o1777, False, False),  # a sticky bit keeps nobody from adding a key
        ("root", 0o2777, True, True),  # a ConfigMap
    ],
)
def test_which_lists_others_may_write(
    tmp_path: Path, owner: str, mode: int, read_only: bool, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    security.new_keys(tmp_path / "keys")
    admins = tmp_path / "keys" / "allow" / "admins"
    (admins / "..data").mkdir()
    (admins / "operator.key").rename(admins / "..data" / "operator.key")
    (admins / "operator.key").symlink_to(Path("..data") / "operator.key")
    real, uid = Path.stat, {"ours": 1000, "root": 0, "another": 1001}[owner]

    def told(path: Path, **options: bool) -> os.stat_result:
        made = stat.S_IFDIR | mode, 0, 0, 1, uid, 65532, 0, 0, 0, 0
        return os.stat_result(made) if path == admins else real(path, **options)

    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY if read_only else 0))
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(Path, "stat", told)
    monkeypatch.setattr(security, "check_private", lambda path: None)
    with nullcontext() if passes else pytest.raises(ConfigError, match="others may write"):
        security.load_keys(tmp_path / "keys", "brokers")


@pytest.mark.parametrize("folder", ["x" * 3000, "/dev/null/keys"])
def test_a_folder_of_keys_that_cannot_be_looked_at_is_one_line(folder: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_keys(folder, "nodes")

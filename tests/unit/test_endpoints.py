"""Addresses: what derives from a base, what is refused and why, who may look into the directory."""

from __future__ import annotations

import os
import stat
from contextlib import nullcontext
from pathlib import Path

import pytest

from bus import endpoints
from bus.endpoints import BusAddress, ControllerAddress
from bus.errors import ConfigError


def test_ipc_endpoints_are_named_after_their_use() -> None:
    bus, controller = BusAddress("ipc:///run/x/bus"), ControllerAddress("ipc:///run/x/c")
    assert (bus.publish, bus.subscribe, bus.bootstrap) == (
        "ipc:///run/x/bus.pub",
        "ipc:///run/x/bus.sub",
        "ipc:///run/x/bus.bootstrap",
    )
    assert (controller.clients, controller.nodes) == ("ipc:///run/x/c.clients", "ipc:///run/x/c.nodes")


def test_tcp_endpoints_are_ports_in_a_row() -> None:
    bus, controller = BusAddress("tcp://[::1]:5550"), ControllerAddress("tcp://10.0.0.1:5560")
    assert (bus.publish, bus.subscribe, bus.bootstrap) == ("tcp://[::1]:5550", "tcp://[::1]:5551", "tcp://[::1]:5552")
    assert (controller.clients, controller.nodes) == ("tcp://10.0.0.1:5560", "tcp://10.0.0.1:5561")


@pytest.mark.parametrize(
    ("base", "says"),
    [
        ("", "starts with ipc:// or tcp://"),
        ("localhost:5550", "starts with ipc:// or tcp://"),
        ("http://x:1", "starts with ipc:// or tcp://"),
        ("ipc://relative/bus", "absolute path"),
        ("ipc:///" + "x" * 100, "too long"),
        ("ipc:///" + "é" * 50, "too long"),
        ("ipc:///\udcc3\udcbc/bus", "this locale cannot read"),
        ("tcp://host", "a host and a port"),
        ("tcp://:5550", "a host and a port"),
        ("tcp://host:0", "a host and a port"),
        ("tcp://host:65535", "a host and a port"),  # no room for the ports after it
        ("tcp://host:http", "a host and a port"),
        ("tcp://host:-1", "a host and a port"),
    ],
)
def test_a_bad_base_says_what_is_wrong(base: str, says: str) -> None:
    for kind in (BusAddress, ControllerAddress):
        with pytest.raises(ConfigError, match=says) as caught:
            kind(base)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("base", ["ipc:///" + "x" * 90, "tcp://host:65530", "tcp://127.0.0.1:1"])
def test_the_longest_and_highest_still_fit(base: str) -> None:
    bus = BusAddress(base)
    assert all(len(each.removeprefix("ipc://")) <= 107 for each in (bus.publish, bus.subscribe, bus.bootstrap))


@pytest.mark.parametrize(
    ("endpoint", "exposed"),
    [
        ("ipc:///run/bus.pub", False),
        ("inproc://x", False),
        ("tcp://127.0.0.1:5550", False),
        ("tcp://127.9.9.9:*", False),
        ("tcp://localhost:5550", False),
        ("tcp://[::1]:5550", False),
        ("tcp://0.0.0.0:5550", True),
        ("tcp://*:5550", True),
        ("tcp://eth0:5550", True),
        ("tcp://10.0.0.1:5550", True),
        ("tcp://[::]:5550", True),
        ("tcp://localhost.example.org:5550", True),
    ],
)
def test_who_can_reach_it(endpoint: str, exposed: bool) -> None:
    assert endpoints.is_exposed(endpoint) is exposed


def test_a_private_directory_is_made_with_mode_0700(tmp_path: Path) -> None:
    made = endpoints.private_dir(tmp_path / "a" / "b")
    assert made.stat().st_mode & 0o777 == 0o700
    assert endpoints.private_dir(made) == made


def test_a_directory_open_to_others_is_refused(tmp_path: Path) -> None:
    for mode in (0o750, 0o701, 0o777):
        tmp_path.chmod(mode)
        with pytest.raises(ConfigError, match="chmod 700"):
            endpoints.private_dir(tmp_path)
    tmp_path.chmod(0o700)


def test_a_file_in_the_way_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match="cannot use"):
        endpoints.private_dir(tmp_path / "taken")


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    with pytest.raises(ConfigError, match="another user"):
        endpoints.private_dir(tmp_path)


def test_where_the_defaults_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDBUS_DIR", "/chosen")
    assert endpoints.default_bus() == "ipc:///chosen/bus"
    assert endpoints.default_controller() == "ipc:///chosen/controller"
    monkeypatch.delenv("PDBUS_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1")
    assert endpoints.default_bus() == "ipc:///run/user/1/pdbus/bus"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert str(os.getuid()) in endpoints.default_bus()


@pytest.mark.parametrize(
    ("owner", "mode", "says"),
    [
        ("ours", 0o700, ""),
        ("ours", 0o755, ""),
        ("ours", 0o775, "chmod go-w"),
        ("ours", 0o777, "chmod go-w"),
        ("ours", 0o1777, ""),
        ("root", 0o755, ""),
        ("root", 0o2775, ""),  # a volume of Kubernetes with an fsGroup
        ("root", 0o1777, ""),  # /tmp
        ("root", 0o777, "chmod go-w"),
        ("another", 0o700, "belongs to another user"),
        ("another", 0o1777, "belongs to another user"),
    ],
)
def test_where_nobody_else_may_listen(owner: str, mode: int, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = {"ours": 1000, "root": 0, "another": 1001}[owner]
    status = os.stat_result((stat.S_IFDIR | mode, 0, 0, 1, uid, 65532, 0, 0, 0, 0))
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(Path, "stat", lambda self: status)
    with pytest.raises(ConfigError, match=says) if says else nullcontext():
        endpoints.check_dir(Path("/somewhere"))


def test_our_own_default_directory_is_made_before_anybody_else_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDBUS_DIR", str(tmp_path / "mine"))
    endpoints.check_dir(tmp_path / "another")
    endpoints.check_dir(tmp_path / "mine")
    assert [each.name for each in tmp_path.iterdir()] == ["mine"]
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("PDBUS_DIR", "/proc/nowhere")
    endpoints.check_dir(Path("/proc/nowhere"))  # nobody is there

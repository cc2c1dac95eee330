"""The allowlist: what is on disk decides at every handshake, and what did not change is not read again."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import pytest
import structlog
import zmq

from bus.runtime import allowlist
from bus.runtime.allowlist import SETTLED_NS, Allowlist


def new_key() -> bytes:
    return zmq.curve_keypair()[0]


def later_ns() -> int:
    """A clock by which every file has long settled."""
    return time.time_ns() + 10 * SETTLED_NS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("nodes", "clients"):
        (tmp_path / "allow" / name).mkdir(parents=True)
    return tmp_path / "allow" / "clients"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each file was read."""
    counts: Counter[str] = Counter()
    read = allowlist.read_key

    def counting(path: Path) -> bytes:
        counts[path.name] += 1
        return read(path)

    monkeypatch.setattr(allowlist, "read_key", counting)
    return counts


def test_files_are_read_once_and_after_a_change(folder: Path, tmp_path: Path, reads: Counter[str]) -> None:
    keys = {f"{number}.key": new_key() for number in range(200)}
    for name, key in keys.items():
        (folder / name).write_bytes(key + b"\n")
    listed = Allowlist(tmp_path, later_ns)
    for _ in range(3):
        assert all(listed.allows(key, "clients") for key in keys.values())
        assert not listed.allows(new_key(), "clients")
    assert reads == dict.fromkeys(keys, 1)
    changed = new_key()
    (folder / "7.key").write_bytes(changed)
    assert listed.allows(changed, "clients")
    assert not listed.allows(keys["7.key"], "clients")
    assert reads == dict.fromkeys(keys, 1) | {"7.key": 2}


def test_edits_new_files_and_deletions_count_at_once(folder: Path, tmp_path: Path) -> None:
    first, second, third = new_key(), new_key(), new_key()
    path = folder / "a.key"
    path.write_bytes(first)
    listed = Allowlist(tmp_path, later_ns)
    assert listed.allows(first, "clients")
    before = path.stat()
    path.write_bytes(second)  # as long as the first, and made to look as old
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not listed.allows(first, "clients")
    assert listed.allows(second, "clients")
    (folder / "b.key").write_bytes(third)
    assert listed.allows(third, "clients")
    (folder / "c.key").write_bytes(third)  # listed twice
    (folder / "b.key").unlink()
    assert listed.allows(third, "clients")
    (folder / "c.key").unlink()
    path.unlink()
    assert not any(listed.allows(key, "clients") for key in (first, second, third))


def test_a_file_that_changed_just_now_may_change_again_unseen_so_it_is_read_each_time(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allowlist, "_stamp", lambda status: (1,))  # a clock that stands still
    listed = Allowlist(tmp_path)
    for key in (new_key(), new_key()):
        (folder / "a.key").write_bytes(key)
        assert listed.allows(key, "clients")
    assert not listed.allows(new_key(), "clients")


def test_clients_do_not_get_into_the_nodes_ports(folder: Path, tmp_path: Path) -> None:
    client, node = new_key(), new_key()
    (folder / "a.key").write_bytes(client)
    (folder.parent / "nodes" / "n.key").write_bytes(node)
    listed = Allowlist(tmp_path, later_ns)
    for _ in range(2):
        assert listed.allows(client, "clients")
        assert not listed.allows(client, "nodes")
        assert listed.allows(node, "clients")
        assert listed.allows(node, "nodes")


def test_a_bad_file_is_skipped_and_logged_once(folder: Path, tmp_path: Path) -> None:
    good = new_key()
    (folder / "good.key").write_bytes(good)
    (folder / "a.key").write_text("not a key")
    (folder / "b.key").mkdir()
    os.mkfifo(folder / "c.key")
    (folder / "d.key").write_bytes(b"\xff" * 40)
    (folder / "gone.key").symlink_to(folder / "nowhere")
    listed = Allowlist(tmp_path)
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            assert listed.allows(good, "clients")
            assert not listed.allows(new_key(), "clients")
    assert sorted(Path(entry["path"]).name for entry in logs) == ["a.key", "b.key", "c.key", "d.key"]
    mended = new_key()
    (folder / "a.key").write_bytes(mended)
    assert listed.allows(mended, "clients")


def test_a_folder_that_is_missing_lists_nobody_until_it_is_there(tmp_path: Path) -> None:
    listed, key = Allowlist(tmp_path, later_ns), new_key()
    assert not listed.allows(key, "clients")
    (tmp_path / "allow" / "clients").mkdir(parents=True)
    (tmp_path / "allow" / "clients" / "a.key").write_bytes(key)
    assert listed.allows(key, "clients")


def test_while_a_folder_cannot_be_listed_those_get_in_whose_files_are_known_and_still_there(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when this process has run out of file descriptors."""
    key, removed = new_key(), new_key()
    (folder / "a.key").write_bytes(key)
    (folder / "b.key").write_bytes(removed)
    listed = Allowlist(tmp_path, later_ns)
    assert listed.allows(key, "clients")
    assert listed.allows(removed, "clients")
    (folder / "b.key").unlink()

    def refuse(path: Path) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch, structlog.testing.capture_logs() as logs:
        patch.setattr(os, "scandir", refuse)
        assert listed.allows(key, "clients")
        for _ in range(3):
            assert not listed.allows(new_key(), "clients")
            assert not listed.allows(removed, "clients")
    assert [entry["event"] for entry in logs] == ["allowlist.unreadable"] * 2  # a line for each folder
    assert listed.allows(key, "clients")

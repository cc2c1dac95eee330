"""The allowlist: what is on disk decides at every handshake, and what did not change is not read again."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog
import zmq

from bus.rights import DOMAINS, ROLES
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
        assert all(listed.admits(key, "clients") for key in keys.values())
        assert not listed.admits(new_key(), "clients")
    assert reads == dict.fromkeys(keys, 1)
    changed = new_key()
    (folder / "7.key").write_bytes(changed)
    assert listed.admits(changed, "clients") == "clients/7"
    assert not listed.admits(keys["7.key"], "clients")
    assert reads == dict.fromkeys(keys, 1) | {"7.key": 2}


def test_edits_new_files_and_deletions_count_at_once(folder: Path, tmp_path: Path) -> None:
    first, second, third = new_key(), new_key(), new_key()
    path = folder / "a.key"
    path.write_bytes(first)
    listed = Allowlist(tmp_path, later_ns)
    assert listed.admits(first, "clients")
    before = path.stat()
    path.write_bytes(second)  # as long as the first, and made to look as old
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not listed.admits(first, "clients")
    assert listed.admits(second, "clients")
    (folder / "b.key").write_bytes(third)
    assert listed.admits(third, "clients")
    (folder / "c.key").write_bytes(third)  # listed twice
    (folder / "b.key").unlink()
    assert listed.admits(third, "clients")
    (folder / "c.key").unlink()
    path.unlink()
    assert not any(listed.admits(key, "clients") for key in (first, second, third))


def test_a_file_that_changed_just_now_may_change_again_unseen_so_it_is_read_each_time(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allowlist, "_stamp", lambda status: (1,))  # a clock that stands still
    listed = Allowlist(tmp_path)
    for key in (new_key(), new_key()):
        (folder / "a.key").write_bytes(key)
        assert listed.admits(key, "clients")
    assert not listed.admits(new_key(), "clients")


def test_a_role_gets_in_where_it_has_business_and_under_its_name(folder: Path, tmp_path: Path) -> None:
    keys = {role: new_key() for role in ROLES}
    for role, key in keys.items():
        (folder.parent / role).mkdir(exist_ok=True)
        (folder.parent / role / "x.key").write_bytes(key)
    listed = Allowlist(tmp_path, later_ns)
    for _ in range(2):
        for domain, admitted in DOMAINS.items():
            for role, key in keys.items():
                assert listed.admits(key, domain) == (f"{role}/x" if role in admitted else "")
        assert not any(listed.admits(key, "elsewhere") for key in keys.values())


def test_a_file_whose_name_is_no_name_is_skipped(folder: Path, tmp_path: Path) -> None:
    key = new_key()
    (folder / "a b.key").write_bytes(key)
    assert not Allowlist(tmp_path, later_ns).admits(key, "clients")


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
            assert listed.admits(good, "clients")
            assert not listed.admits(new_key(), "clients")
    assert sorted(Path(entry["path"]).name for entry in logs) == ["a.key", "b.key", "c.key", "d.key"]
    mended = new_key()
    (folder / "a.key").write_bytes(mended)
    assert listed.admits(mended, "clients")


def test_a_folder_that_is_missing_lists_nobody_until_it_is_there(tmp_path: Path) -> None:
    listed, key = Allowlist(tmp_path, later_ns), new_key()
    assert not listed.admits(key, "clients")
    (tmp_path / "allow" / "clients").mkdir(parents=True)
    (tmp_path / "allow" / "clients" / "a.key").write_bytes(key)
    assert listed.admits(key, "clients")


def test_while_a_folder_cannot_be_listed_those_get_in_whose_files_are_known_and_still_there(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when this process has run out of file descriptors."""
    key, removed = new_key(), new_key()
    (folder / "a.key").write_bytes(key)
    (folder / "b.key").write_bytes(removed)
    listed = Allowlist(tmp_path, later_ns)
    assert listed.admits(key, "clients")
    assert listed.admits(removed, "clients")
    (folder / "b.key").unlink()

    def refuse(path: Path) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch, structlog.testing.capture_logs() as logs:
        patch.setattr(os, "scandir", refuse)
        assert listed.admits(key, "clients")
        for _ in range(3):
            assert not listed.admits(new_key(), "clients")
            assert not listed.admits(removed, "clients")
    assert [entry["event"] for entry in logs] == ["allowlist.unreadable"] * 3  # a line for each folder
    assert listed.admits(key, "clients")


@pytest.mark.parametrize("away", ["allow", "allow/clients"])
def test_a_folder_that_is_away_changes_nothing_and_is_logged_once(folder: Path, tmp_path: Path, away: str) -> None:
    key = new_key()
    (folder / "a.key").write_bytes(key)
    listed = Allowlist(tmp_path, later_ns)
    assert listed.admits(key, "clients")
    with structlog.testing.capture_logs() as logs:
        (tmp_path / away).rename(tmp_path / "aside")
        for _ in range(3):
            assert listed.admits(key, "clients") == "clients/a"
            assert not listed.admits(new_key(), "clients")
        (tmp_path / "aside").rename(tmp_path / away)
        (folder / "a.key").unlink()
        assert not listed.admits(key, "clients")
    assert [entry["event"] for entry in logs] == ["allowlist.unreadable", "allowlist.readable"]


@pytest.mark.parametrize("moment", ["before its files are looked at", "before they are read"])
def test_a_folder_that_goes_away_while_it_is_looked_at_changes_nothing(
    folder: Path, tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that changed just now is read at each look."""
    key = new_key()
    (folder / "7.key").write_bytes(key)
    aside = tmp_path / "aside"
    goes = False

    def leave() -> None:
        if goes and not aside.exists():
            (tmp_path / "allow").rename(aside)

    def now_ns() -> int:
        if moment == "before its files are looked at":
            leave()
        return time.time_ns()

    def read(path: Path, read: Callable[[Path], bytes] = allowlist.read_key) -> bytes:
        leave()
        return read(path)

    monkeypatch.setattr(allowlist, "read_key", read)
    listed = Allowlist(tmp_path, now_ns)
    assert listed.admits(key, "clients")
    goes = True
    for _ in range(3):
        assert listed.admits(key, "clients") == "clients/7"
    assert aside.exists()
    aside.rename(tmp_path / "allow")
    (folder / "7.key").unlink()
    assert not listed.admits(key, "clients")


def test_a_file_that_cannot_be_read_holds_what_it_held(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = new_key()
    (folder / "a.key").write_bytes(key)
    listed = Allowlist(tmp_path, later_ns)
    assert listed.admits(key, "clients")
    (folder / "a.key").touch()

    def refuse(path: Path, encoding: str) -> str:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", refuse)
        assert listed.admits(key, "clients") == "clients/a"
    (folder / "a.key").write_bytes(new_key())
    assert not listed.admits(key, "clients")

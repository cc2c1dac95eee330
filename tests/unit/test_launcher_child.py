"""One child process: READY, its failure in one line, its end, and its parent's end."""

from __future__ import annotations

import errno
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bus.errors import ConfigError, StartError
from pdbus.launcher.child import LOG_MAX_BYTES, Child
from pdbus.launcher.lifecycle import take_down, wait_ready
from pdbus.launcher.spec import PartSpec

Start = Callable[[str], Child]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Runs a snippet as a part would be run (`python -P -m`)."""
    children: list[Child] = []

    def run(code: str) -> Child:
        name = f"part_{len(children)}"
        (tmp_path / f"{name}.py").write_text(code)
        spec = PartSpec(name, "node", name, ())
        children.append(Child(spec, tmp_path / f"{name}.log", {"PYTHONPATH": str(tmp_path)}))
        return children[-1]

    yield run
    for child in children:
        child.close()
        assert child.returncode is not None


def waited(child: Child, timeout_s: float = 60.0) -> None:
    wait_ready([child], timeout_s)


def test_ready_line_and_its_facts(start: Start) -> None:
    child = start(
        "import sys\nprint('hello'); print('READY part=node endpoint=ipc:///x', flush=True)\nsys.stdin.read()"
    )
    waited(child)
    assert child.facts == {"part": "node", "endpoint": "ipc:///x"}
    child.send(signal.SIGTERM)
    assert child.wait(60.0)


def test_the_error_line_of_a_part_is_the_error(start: Start) -> None:
    child = start("import sys\nprint('noise\\npython -m x: error: --this is wrong', file=sys.stderr)\nsys.exit(2)")
    with pytest.raises(ConfigError, match=r"^part_0: --this is wrong$"):
        waited(child)


def test_a_part_that_dies_without_a_word(start: Start) -> None:
    child = start("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(StartError, match=r"^part_0: ended by SIGKILL; last words: none$"):
        waited(child)


def test_a_part_that_never_gets_ready(start: Start) -> None:
    child = start("import sys\nprint('still loading', file=sys.stderr, flush=True)\nsys.stdin.read()")
    end = time.monotonic() + 60.0
    while not child.last_lines():
        assert time.monotonic() < end
        time.sleep(0.01)
    with pytest.raises(StartError, match=r"part_0 not ready after 1 s; last words: still loading"):
        waited(child, 1.0)


def test_a_part_that_ignores_sigterm_is_killed_and_one_that_is_stopped_too(start: Start) -> None:
    stubborn = start(
        "import signal, sys\nfor n in (15, 2): signal.signal(n, signal.SIG_IGN)\nprint('READY a=b', flush=True)\n"
        "while True: signal.pause()"
    )
    stopped = start("import sys\nprint('READY a=b', flush=True)\nsys.stdin.read()")
    waited(stubborn)
    waited(stopped)
    stopped.send(signal.SIGSTOP)
    for child, grace_s, end in ((stopped, 60.0, signal.SIGTERM), (stubborn, 0.3, signal.SIGKILL)):
        take_down([child], grace_s)
        assert child.returncode == -end


def test_who_is_in_a_hurry_waits_no_grace_and_is_asked_again_at_once(start: Start) -> None:
    busy = start(
        "import signal, sys\nsignal.pthread_sigmask(signal.SIG_BLOCK, {15})\nprint('READY a=b', flush=True)\n"
        "signal.sigwait({15})\nprint('drains', file=sys.stderr, flush=True)\nsignal.sigwait({15})"
    )
    waited(busy)
    assert not take_down([busy], 250.0, hurried=lambda: "drains" in "".join(busy.last_lines()))
    assert busy.returncode == 0, "the second time it leaves"


def test_a_log_is_bounded_and_what_was_is_put_aside(start: Start) -> None:
    child = start("import sys\nprint('READY a=b', flush=True)\nsys.stdin.read()")
    waited(child)
    with child.log.open("ab") as log:
        log.truncate(LOG_MAX_BYTES + 1)
    child.trim_log()
    assert child.log.stat().st_size == 0
    assert child.log.with_name(f"{child.log.name}.1").stat().st_size == LOG_MAX_BYTES + 1
    child.log.write_text("later words\n")
    assert child.last_lines() == ["later words"]


@pytest.mark.parametrize("how", ["gone", "a directory", "in a file"])
def test_a_log_that_cannot_be_trimmed_or_read_stays_as_it_is(start: Start, tmp_path: Path, how: str) -> None:
    child = start("import sys\nprint('READY a=b', flush=True)\nsys.stdin.read()")
    waited(child)
    if how == "in a file":
        (tmp_path / "file").touch()
        child.log = tmp_path / "file" / "part_0.log"
    else:
        child.log.unlink()
        if how == "a directory":
            child.log.mkdir()
    child.trim_log()
    assert (child.tail(), child.last_lines()) == ("", [])


def test_a_log_that_may_only_grow_is_not_copied_again_and_again(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    child = start("import sys\nprint('READY a=b', flush=True)\nsys.stdin.read()")
    waited(child)
    with child.log.open("ab") as log:
        log.truncate(LOG_MAX_BYTES + 1)
    opened = Path.open

    def append_only(path: Path, mode: str = "r", **more: Any) -> Any:
        if "+" in mode:
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        return opened(path, mode, **more)

    monkeypatch.setattr(Path, "open", append_only)
    child.trim_log()
    assert child.log.stat().st_size == LOG_MAX_BYTES + 1
    assert not child.log.with_name(f"{child.log.name}.1").exists()


def test_no_failure_of_what_reports_progress_cuts_a_grace_short(start: Start) -> None:
    child = start(
        "import signal, sys\nsignal.pthread_sigmask(signal.SIG_BLOCK, {10, 15})\nprint('READY a=b', flush=True)\n"
        "signal.sigwait({15})\nsignal.sigwait({10})"
    )
    waited(child)
    said = []

    def progress(line: str) -> None:
        said.append(line)
        if len(said) == 2:
            child.send(signal.SIGUSR1)
        raise OSError("the disk is full")

    assert not take_down([child], 60.0, progress)
    assert child.returncode == 0, "it left by itself, within its grace"


def test_the_words_of_an_earlier_start_are_not_taken_for_those_of_this_one(start: Start, tmp_path: Path) -> None:
    (tmp_path / "part_0.log").write_text("python -m x: error: --that was wrong\n")
    child = start("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    child.wait(60.0)
    assert str(child.failure()) == "part_0: ended by SIGKILL; last words: none"
    assert "--that was wrong" in child.tail()


def test_the_data_socket_of_a_killed_part_is_removed(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "node-1"
    child = start(
        f"import socket, sys\nbound = socket.socket(socket.AF_UNIX)\nbound.bind({str(path)!r})\n"
        f"print('READY endpoint=ipc://{path}', flush=True)\nsys.stdin.read()"
    )
    waited(child)
    child.send(signal.SIGKILL)
    child.wait(60.0)
    child.remove_socket()
    child.remove_socket()
    assert not path.exists()


def test_children_leave_when_their_launcher_is_killed(tmp_path: Path) -> None:
    code = (
        "import os, signal\n"
        "from pdbus.launcher import Cluster, ClusterSpec\n"
        "cluster = Cluster(ClusterSpec(unified=1, engine='sim', model='sim')).start()\n"
        "print(*(child.pid for child in cluster.children.values()), cluster.directory, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    launcher = subprocess.run(
        [sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, text=True, check=False, timeout=110
    )
    assert launcher.returncode == -signal.SIGKILL
    *pids, directory = launcher.stdout.split()
    assert len(pids) == 3
    for pid in map(int, pids):
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        with os.fdopen(descriptor) as process:
            assert select.select([process], [], [], 60.0)[0], f"{pid} outlived its launcher"
    shutil.rmtree(directory)

"""No process of an engine outlives its node, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nodes.vllm import reaper as reapers
from nodes.vllm.reaper import MARK, Reaper

NODE = """
import os, subprocess, sys
from nodes.vllm.reaper import Reaper
SLEEP = "import time; time.sleep(300)"
CHILD = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).pid, flush=True); {SLEEP}"
with Reaper():
    child = subprocess.Popen([sys.executable, "-c", CHILD], start_new_session=True, stdout=subprocess.PIPE, text=True)
    print(child.pid, child.stdout.readline().strip(), flush=True)
    sys.stdin.readline()
print("left", flush=True)
"""


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("end", ["leaves", "is killed", "is stopped, then killed"])
def test_children_and_theirs_end_with_the_node(end: str) -> None:
    """In sessions of their own, and reparented: neither hides them."""
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    node = subprocess.Popen(
        [sys.executable, "-P", "-c", NODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert node.stdin is not None
        assert node.stdout is not None
        pids = [int(word) for word in node.stdout.readline().split()]
        assert len(pids) == 2
        assert not any(map(gone, pids))
        if end == "leaves":
            node.stdin.write("\n")
            node.stdin.flush()
            assert node.stdout.readline() == "left\n"
            assert all(map(gone, pids)), "when the node has left there is none"
        else:
            if "stopped" in end:
                node.send_signal(signal.SIGSTOP)
            node.kill()
        until = time.monotonic() + 60
        while not all(map(gone, pids)):
            assert time.monotonic() < until
            time.sleep(0.02)
        assert bystander.poll() is None, "nobody else's"
    finally:
        for process in (node, bystander):
            process.kill()
            process.wait(60)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        for pid in pids:
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)


TRACKED = """
import os, subprocess, sys
from nodes.vllm.reaper import Reaper
CHILD = "from multiprocessing import shared_memory as shm; print(shm.SharedMemory(None, True, 64).name); input()"
with Reaper():
    child = subprocess.Popen([sys.executable, "-uc", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    print(child.stdout.readline().strip(), flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("end", ["leaves", "is killed"])
def test_shared_memory_of_what_was_killed_is_unlinked(end: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-c", TRACKED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as node:
        assert node.stdout is not None
        segment = Path("/dev/shm") / node.stdout.readline().strip()
        assert segment.is_file()
        if end == "is killed":
            node.kill()
        node.communicate("\n" if end == "leaves" else None, timeout=60)
    until = time.monotonic() + 60
    while segment.exists():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_the_mark_comes_last_in_the_environment_of_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where we carry one ourselves: what stands before may be lost under a process's title."""
    monkeypatch.setenv(MARK, "outer")
    monkeypatch.setenv("SET_BY_AN_IMPORT", "1")
    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(300)"]
    with Reaper() as reaper, subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()  # it runs: its environment is its own
        last = Path(f"/proc/{child.pid}/environ").read_bytes().rstrip(b"\0").split(b"\0")[-1]
        assert last.startswith(f"{MARK}=".encode())
        assert reaper.processes() == [child.pid]
        child.kill()


def test_what_is_killed_may_end_on_any_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kill comes to nothing here, as where its own core is taken by others."""
    ours = os.sched_getaffinity(0)
    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(300)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, MARK: "its mark"}) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            os.sched_setaffinity(child.pid, {min(ours)})
            with monkeypatch.context() as held:
                held.setattr(reapers, "_GIVES_UP_S", 0.1)
                held.setattr(os, "kill", lambda pid, number: None)
                reapers.kill_all("its mark")
            assert os.sched_getaffinity(child.pid) == ours
        finally:
            child.kill()

"""The supervisor over real processes that are only a line of Python."""

from __future__ import annotations

import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bus.errors import StartError
from pdbus.launcher.child import LOG_MAX_BYTES, Child
from pdbus.launcher.cluster import Cluster
from pdbus.launcher.lifecycle import take_down, wait_ready
from pdbus.launcher.restarts import RestartPolicy
from pdbus.launcher.spec import ClusterSpec, PartSpec
from pdbus.launcher.supervisor import Supervisor

FAST = RestartPolicy(limit=2, first_delay_s=0.0, max_delay_s=0.0)
COUNTED = """
import os, sys
with open("starts", "a+") as starts:
    start = starts.tell()
    starts.write("x")
"""
READY = "print('READY a=b', flush=True)\n"
STAY = READY + "sys.stdin.read()\n"
Start = Callable[[str], Cluster]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """A cluster whose only part is a snippet, which finds `start` to be 0, 1, ...: how often it was run before."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    cluster = Cluster(ClusterSpec(unified=1, env={"PYTHONPATH": str(tmp_path)}, log_dir=str(tmp_path / "logs")))

    def run(code: str) -> Cluster:
        (tmp_path / "part.py").write_text(COUNTED + code)
        child = Child(PartSpec("part", "node", "part", ()), cluster.log_dir / "part.log", cluster.spec.env)
        cluster.children["part"] = child
        cluster.started.append(child)
        wait_ready([child], 60.0)
        return cluster

    yield run
    for child in cluster.started:
        child.close()


def turns(supervisor: Supervisor, until: Callable[[], bool] = lambda: False) -> None:
    end = time.monotonic() + 60.0
    while not until():
        assert time.monotonic() < end
        supervisor.turn()


def test_it_comes_back_and_is_told_apart(start: Start) -> None:
    cluster, said = start(STAY), list[str]()
    first = cluster.children["part"]
    supervisor = Supervisor(cluster, FAST, said.append)
    first.send(signal.SIGKILL)
    turns(supervisor, lambda: len(said) == 2)
    second = cluster.children["part"]
    assert said == [
        "part: ended by SIGKILL; last words: none; starts again in 0 s (1 of at most 2)",
        f"part is back (pid {second.pid})",
    ]
    assert second.pid != first.pid


def test_it_gives_up_with_the_last_words_of_the_last_start(start: Start) -> None:
    said: list[str] = []
    cluster = start(READY + "print(f'start {start}\\033[31m\\nboom', file=sys.stderr)\nsys.exit(1)\n")
    why = r"^part: exit code 1; last words: boom; gave up: it was started again 2 times within 60 s of service$"
    with pytest.raises(StartError, match=why):
        Supervisor(cluster, FAST, said.append).run()
    assert said[-2:] == ["part | start 2 [31m", "part | boom"]
    assert [line for line in said if line.startswith("part: ")] == [
        f"part: exit code 1; last words: boom; starts again in 0 s ({number} of at most 2)" for number in (1, 2)
    ]


def test_what_dies_while_nodes_start_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node may load for minutes, and needs the others at its end."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "part.py").write_text(COUNTED + READY + "sys.exit(1) if not start else sys.stdin.read()\n")
    wait = "import os, time\nwhile not os.path.exists('starts') or os.path.getsize('starts') < 2: time.sleep(0.01)\n"
    (tmp_path / "waits.py").write_text(wait + STAY.replace("sys.", "import sys; sys."))
    parts = [PartSpec("broker", "broker", "part", ()), PartSpec("node", "node", "waits", ())]
    monkeypatch.setattr(ClusterSpec, "parts", lambda spec, at: parts)
    spec, said = ClusterSpec(unified=1, env={"PYTHONPATH": str(tmp_path)}, start_timeout_s=60.0), list[str]()
    with Cluster(spec, restarts=FAST, notify=said.append) as cluster:
        assert (
            said
            == [
                "broker: exit code 1; last words: none; starts again in 0 s (1 of at most 2)",
                f"broker is back (pid {cluster.children['broker'].pid})",
            ][: len(said)]
        )
        assert said
        assert cluster.children["node"].ready


def test_one_that_hangs_at_its_start_is_killed_and_counts(start: Start) -> None:
    cluster, said = start("if start: sys.stdin.read()\n" + READY + "sys.exit(1)"), list[str]()
    policy = RestartPolicy(limit=1, first_delay_s=0.0, start_timeout_s=0.2)
    with pytest.raises(StartError, match=r"^part: not ready after 0.2 s; ended by SIGKILL; last words: none; gave up"):
        Supervisor(cluster, policy, said.append).run()


def test_one_that_drained_stays_away(start: Start) -> None:
    cluster, said = start(READY), list[str]()
    with pytest.raises(StartError, match=r"^part: it has left; gave up: no node is left$"):
        Supervisor(cluster, FAST, said.append).run()
    assert said == []


def test_one_that_cannot_even_be_run_counts_too(start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cluster, said = start(STAY), list[str]()
    supervisor = Supervisor(cluster, FAST, said.append)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    cluster.children["part"].send(signal.SIGKILL)
    with pytest.raises(StartError, match=r"could not be started: .*no-python No such file or directory; gave up"):
        supervisor.run()


def test_a_directory_of_logs_that_is_gone_is_made_again(start: Start, tmp_path: Path) -> None:
    cluster, said = start(STAY), list[str]()
    supervisor = Supervisor(cluster, FAST, said.append)
    shutil.rmtree(tmp_path / "logs")
    cluster.children["part"].send(signal.SIGKILL)
    turns(supervisor, lambda: len(said) == 2)
    assert said[-1].startswith("part is back")
    assert (tmp_path / "logs" / "part.log").exists()


def test_a_log_that_cannot_be_opened_is_no_reason_to_stay_away(start: Start, tmp_path: Path) -> None:
    cluster, said = start(STAY), list[str]()
    supervisor = Supervisor(cluster, FAST, said.append)
    shutil.rmtree(tmp_path / "logs")
    (tmp_path / "logs").touch()
    cluster.children["part"].send(signal.SIGKILL)
    turns(supervisor, lambda: len(said) == 3)
    assert said[1] == f"part: it starts without a log: {tmp_path}/logs File exists"
    assert said[2].startswith("part is back")
    cluster.children["part"].send(signal.SIGKILL)
    turns(supervisor, lambda: len(said) > 3)
    assert said[3].startswith("part: ended by SIGKILL; last words: none; starts again")


def test_a_log_is_trimmed_while_its_part_starts_and_leaves(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Which may take minutes. The part says much each time, and goes on when that was put aside."""
    cluster = start(
        "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, {15})\n"
        "def say_much():\n"
        f"    with open('logs/part.log', 'ab') as log: log.truncate({LOG_MAX_BYTES + 1})\n"
        "    while not os.path.exists('logs/part.log.1'): time.sleep(0.01)\n"
        "    os.remove('logs/part.log.1')\n"
        "if start: say_much()\n" + READY + "signal.sigwait({15})\nif start: say_much()\n"
    )
    cluster.restart("part")
    child = cluster.children["part"]
    monkeypatch.setattr(cluster, "_directory", tmp_path)
    cluster._stop_parts()
    assert child.returncode == 0
    assert child.log.stat().st_size == 0


def test_what_a_part_prints_never_blocks_it(start: Start) -> None:
    """A full pipe would."""
    cluster, said = start(READY + "sys.stdout.write('x' * 1_000_000)\nsys.stdout.flush()\nsys.exit(1)\n"), list[str]()
    turns(Supervisor(cluster, FAST, said.append), lambda: bool(said))
    assert said[0].startswith("part: exit code 1")


def test_ctrl_c_cuts_the_wait_short(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stage ends, the part is told again, and Ctrl-C is passed on when all is down."""
    cluster = start("import signal\nsignal.signal(15, lambda *_: None)\n" + STAY + "signal.pause()\n")
    child = cluster.children["part"]
    waits: list[float] = []
    wait = Child.wait

    def interrupted(self: Child, timeout_s: float) -> bool:
        waits.append(timeout_s)
        if len(waits) > 2:  # it was killed
            return wait(self, timeout_s)
        raise KeyboardInterrupt

    monkeypatch.setattr(Child, "wait", interrupted)
    assert take_down([child], cluster.spec.stop_grace_s)
    assert len(waits) == 3
    assert child.returncode == -signal.SIGKILL

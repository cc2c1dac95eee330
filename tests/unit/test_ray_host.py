"""One part of a Ray cluster on its machine: its files, its starts and its end. No Ray is needed for that."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bus.runtime.keys import add_key, files_of, load_keys, new_keys, revoke_key
from bus.runtime.ports import free_ports
from pdbus.launcher.restarts import RestartPolicy
from pdbus.launcher.spec import Addresses, ClusterSpec, PartSpec
from pdbus.ray.host import Ended, Event, Host, Notice, Ready, Task

FAST = RestartPolicy(limit=2, first_delay_s=0.0, max_delay_s=0.0)
AT = Addresses("tcp://127.0.0.1:7000", {"controller-0": "tcp://127.0.0.1:7100"}, "")
READY = "import sys\nprint('READY endpoint=here', flush=True)\n"


class Scripted(Host):
    """Its part is a snippet."""

    code = READY + "sys.stdin.read()"

    def _on_this_machine(self) -> PartSpec:
        (self._directory / "part.py").write_text(self.code)
        return PartSpec("part", "node", "part", (), env={"PYTHONPATH": str(self._directory)})


Start = Callable[..., Host]


@pytest.fixture
def start() -> Iterator[Start]:
    hosts: list[Host] = []

    def make(code: str, *, policy: RestartPolicy = FAST, again: bool = False) -> Host:
        kind = type("Part", (Scripted,), {"code": code})
        hosts.append(kind(Task(ClusterSpec(unified=1), AT, "part", policy, {}), "127.0.0.1", again=again))
        return hosts[-1]

    yield make
    for host in hosts:
        host.stop()


def seen(host: Host, count: int = 1, *, ended: bool = False) -> list[Event]:
    """All events, once there are `count`, or the part has ended for good."""
    events: list[Event] = []
    name = ""
    while len(events) < count or (ended and not isinstance(events[-1], Ended)):
        name, more = host.events(name, len(events))
        assert more, events
        events += more
    return events


def test_a_part_that_dies_is_started_again_here(start: Start) -> None:
    host = start(READY + "sys.stdin.read()")
    (ready,) = seen(host)
    assert isinstance(ready, Ready)
    assert (ready.ip, ready.facts) == ("127.0.0.1", {"endpoint": "here"})
    assert host.events("another", 1)[1] == [ready], "asked under another host's id: all of it"
    os.kill(ready.pid, signal.SIGKILL)
    _, died, back, second = seen(host, 4)
    assert died == Notice("part: ended by SIGKILL; last words: none; starts again in 0 s (1 of at most 2)")
    assert isinstance(second, Ready)
    assert back == Notice(f"part is back (pid {second.pid})")
    assert second.pid != ready.pid


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("import sys\nsys.exit('boom')", Ended(1, "exit code 1; last words: boom")),
        ("import sys\nprint('python -m x: error: --this is wrong', file=sys.stderr)\nsys.exit(2)",
         Ended(2, "--this is wrong")),
        (READY, Ended(0, "it has left")),
        (READY + "print('somebody has it', file=sys.stderr)\nsys.exit(4)",
         Ended(4, "exit code 4; last words: somebody has it")),
    ],
)  # fmt: skip
def test_its_end_is_told_with_its_code_and_why(start: Start, code: str, end: Ended) -> None:
    assert seen(start(code), ended=True)[-1] == end


def test_one_that_has_used_up_its_restarts_ends(start: Start) -> None:
    ended = seen(start(READY + "print('boom', file=sys.stderr)\nsys.exit(1)"), ended=True)[-1]
    why = "exit code 1; last words: boom; gave up: it was started again 2 times within 60 s of service"
    assert ended == Ended(1, why)


def test_a_failure_at_the_start_is_final_the_first_time_and_one_of_several_later(start: Start) -> None:
    code = "import sys\nprint('no memory', file=sys.stderr)\nsys.exit(1)"
    assert seen(start(code), ended=True) == [Ended(1, "exit code 1; last words: no memory")]
    *said, _ = seen(start(code, again=True), ended=True)
    assert Notice("part: exit code 1; last words: no memory; starts again in 0 s (2 of at most 2)") in said


def test_what_a_machine_lacks_for_it_is_waited_for_once_the_part_is_known_to_start(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its actor is there all the same: one that could not be made would end the cluster."""
    later = tmp_path / "later"
    monkeypatch.setenv("TMPDIR", str(later))
    (end,) = seen(start(READY), ended=True)
    assert isinstance(end, Ended)
    assert end.cause.startswith(f"cannot write {later}/pd")
    policy = RestartPolicy(1000, first_delay_s=0.01, max_delay_s=0.01)
    host = start(READY + "sys.stdin.read()", policy=policy, again=True)
    first = seen(host)[0]
    assert isinstance(first, Notice)
    assert first.line.startswith(f"part: cannot write {later}/pd")
    assert first.line.endswith(": No such file or directory; starts again in 0.01 s (1 of at most 1000)")
    later.mkdir()
    while not isinstance(seen(host)[-1], Ready):
        pass


def test_stopping_does_not_wait_for_a_part_that_never_gets_ready(start: Start) -> None:
    host = start("import sys\nsys.stdin.read()")
    began = time.monotonic()
    host.stop()
    assert time.monotonic() - began < 30.0
    assert host.children["part"].returncode == -signal.SIGTERM
    assert seen(host, ended=True) == [Ended(None, "it was asked to leave")]


def test_a_broker_runs_with_the_files_it_was_given(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    new_keys(keys)
    add_key(keys, "clients", "alice")
    base = f"tcp://127.0.0.1:{free_ports('127.0.0.1', 3)}"
    spec = ClusterSpec(unified=1, keys="elsewhere", config="elsewhere.toml", log_dir=str(tmp_path / "logs"))

    def files() -> dict[str, bytes]:
        theirs = files_of(load_keys(keys, "brokers"))
        return {"config.toml": b'[broker]\nlog-level = "info"\n'} | {
            f"keys/{name}": key for name, key in theirs.items()
        }

    at = Addresses(base, AT.controllers, "")
    host = Host(Task(spec, at, "broker", FAST, files()), "127.0.0.1")
    try:
        assert isinstance(seen(host)[-1], Ready)
        args = host.children["broker"].spec.args
        place = Path(args[args.index("--keys") + 1])
        assert args[args.index("--config") + 1] == str(place.parent / "config.toml")
        assert sorted(each.name for each in place.glob("allow/*/*")) == [
            "alice.key", "broker.key", "controller-0.key", "edge.key", "operator.key",
        ]  # fmt: skip
        assert not list(place.rglob("*.secret")), "it has read its own"
        assert place.parent.stat().st_mode & 0o077 == 0
        revoke_key(keys, "clients", "alice")
        host.renew(files())
        assert not (place / "allow" / "clients" / "alice.key").exists()
        assert (place / "allow" / "admins" / "operator.key").exists()
        assert not list(place.rglob("*.secret"))
        os.kill(host.children["broker"].pid, signal.SIGKILL)
        assert isinstance(seen(host, 4)[-1], Ready)
        assert not (place / "allow" / "clients" / "alice.key").exists(), "nor after its restart"
    finally:
        host.stop()
    assert not place.parent.exists()
    assert "broker.started" in (tmp_path / "logs" / "broker.log").read_text()


def test_the_part_dies_with_its_host_even_when_it_is_stopped(tmp_path: Path) -> None:
    """SIGSTOP stands for a part that does not see that its stdin is closed, or takes its time."""
    base = free_ports("127.0.0.1", 3)
    code = (
        "from pdbus.ray.host import *\n"
        f"at = Addresses('tcp://127.0.0.1:{base}', {{'controller-0': 'tcp://127.0.0.1:7100'}}, '')\n"
        "host = Host(Task(ClusterSpec(unified=1), at, 'broker', RestartPolicy(), {}), '127.0.0.1')\n"
        "print(host.events('', 0)[1][0].pid, flush=True)\n"
        "input()\n"
    )
    command = [sys.executable, "-c", code]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as host:
        assert host.stdout is not None
        pid = int(host.stdout.readline())
        handle = os.pidfd_open(pid)
        os.kill(pid, signal.SIGSTOP)
        host.kill()
    assert select.select([handle], [], [], 60.0)[0], "the part has ended"
    os.close(handle)

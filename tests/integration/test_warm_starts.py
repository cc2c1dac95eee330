"""Tests' processes start as forks (tests/support/warm_starts.py): what they are is what a new process is."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import warm_starts
from forked_workers import BOOTSTRAP, Workers
from terminal import Terminal
from warm_starts import STARTS, Starts

WAIT_S = 120.0
FACTS = """
import json, os, resource, signal, sys, threading
names = sorted(n for n in signal.valid_signals())
print(json.dumps({
    "main": __name__, "file": __file__, "globals": sorted(globals().keys() - {"__annotations__"}),
    "argv": sys.argv, "orig_argv": sys.orig_argv,
    "path": sys.path, "flags": str(sys.flags), "environ": dict(os.environ), "cwd": os.getcwd(),
    "parent": os.getppid(), "own group": os.getpgrp() == os.getpid(), "own session": os.getsid(0) == os.getpid(),
    "files": sorted(int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")),
    "handlers": [str(getattr(h, "__name__", h)) for h in map(signal.getsignal, names)],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())), "threads": len(os.listdir("/proc/self/task")),
    "limits": resource.getrlimit(resource.RLIMIT_NOFILE), "cores": sorted(os.sched_getaffinity(0)),
    "main thread": threading.current_thread() is threading.main_thread(),
    "id": threading.get_native_id() == os.getpid(),
    "streams": [(s.isatty(), s.encoding, s.errors, s.line_buffering, s.seekable()) for s in (sys.stdin, sys.stdout)],
    "stdin": sys.stdin.read(), "stderr": (sys.stderr.encoding, sys.stderr.errors, sys.stderr.line_buffering),
}))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "program.py"


@pytest.fixture(autouse=True)
def warm_again() -> Iterator[None]:
    yield
    STARTS.on = True


def is_fork(pid: int) -> bool:
    return Path(warm_starts.__file__).name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()


def run(script: Path, *words: str, warm: bool, **options: Any) -> subprocess.CompletedProcess[str]:
    STARTS.on = warm
    line = [sys.executable, "-P", str(script), *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=WAIT_S, check=False, **options)


def test_a_fork_is_what_a_new_process_is(script: Path, tmp_path: Path) -> None:
    script.write_text(FACTS)
    options: list[dict[str, Any]] = [
        {}, {"start_new_session": True, "cwd": tmp_path}, {"process_group": 0, "env": {"A": "b\udcff", "PATH": "/bin"}},
    ]  # fmt: skip
    for each in options:
        facts = [
            json.loads(run(script, "a", "-b", warm=warm, input="said\nmore", **each).stdout) for warm in (False, True)
        ]
        assert facts[0] == facts[1]


def test_a_signal_that_is_ignored_here_is_there_and_one_that_is_blocked_stays_so(script: Path) -> None:
    script.write_text(FACTS)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        cold, warm = (json.loads(run(script, warm=warm, input="").stdout) for warm in (False, True))
    finally:
        signal.signal(signal.SIGINT, before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    assert cold == warm


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0), ("sys.exit(3)", 3), ("sys.exit('a word')", 1), ("raise ValueError('a word')", 1), ("os._exit(4)", 4),
        ("raise KeyboardInterrupt", -signal.SIGINT), ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("threading.Thread(target=lambda: (time.sleep(0.01), print('late'))).start()", 0),
        ("os.close(1)", 0 if os.environ.get("PYTHONUNBUFFERED") else 120),
        ("class A:\n    def __del__(self): print('gone', flush=True)\na = A()", 0),
    ],
)  # fmt: skip
def test_its_end_is_that_of_a_new_process(script: Path, end: str, code: int) -> None:
    script.write_text(
        "import atexit, os, signal, sys, threading, time\nprint('said')\natexit.register(print, 'at its end')\n" + end
    )
    cold, warm = (run(script, warm=warm) for warm in (False, True))
    assert (warm.returncode, warm.stdout) == (cold.returncode, cold.stdout)
    assert warm.returncode == code
    assert warm.stderr.splitlines()[-1:] == cold.stderr.splitlines()[-1:]


def test_two_forks_draw_nothing_alike(script: Path) -> None:
    script.write_text(
        "import random, uuid, tempfile, os, pdbus.edge.exchange as e\n"
        "print(random.random(), e._rng.random(), uuid.uuid4(), os.urandom(8), tempfile.mktemp())"
    )
    first, second = (run(script, warm=True).stdout.split() for _ in range(2))
    assert not set(first) & set(second)


def test_a_part_is_a_fork_and_leaves_when_its_stdin_ends(tmp_path: Path) -> None:
    line = [sys.executable, "-P", "-m", "bus", "--bus", f"ipc://{tmp_path}/b", "--watch-parent"]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as part:
        assert part.stdout is not None
        assert part.stdin is not None
        assert part.stdout.readline().startswith(b"READY ")
        assert is_fork(part.pid)
        part.stdin.close()
        assert part.wait(WAIT_S) == 0
        assert part.stdout.read() == b"", "nobody else holds its end of a stream"


def test_a_program_that_is_killed_leaves_no_server(tmp_path: Path) -> None:
    line = [sys.executable, "-P", "-m", "pdbus", "up", "--model", "sim", "--prefill", "1", "--decode", "1"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, env=os.environ | {"PDBUS_DIR": str(tmp_path)}) as up:
        assert up.stdout is not None
        assert up.stdout.readline().startswith(b"READY ")
        children = [int(pid) for pid in Path(f"/proc/{up.pid}/task/{up.pid}/children").read_text().split()]
        assert len(children) == 5, "broker, controller, two nodes, a server"
        assert all(is_fork(pid) for pid in children)
        up.kill()
    until = time.monotonic() + WAIT_S
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_what_a_fork_cannot_be_starts_cold(script: Path) -> None:
    script.write_text("import os; print('warm_starts.py' in open(f'/proc/{os.getpid()}/cmdline').read())")
    line = [sys.executable, "-P", str(script)]
    for other, options in (
        (line, {}),
        ([sys.executable, "-I", str(script)], {}),
        (line, {"env": os.environ | {"PYTHONPATH": "/tmp"}}),
        (line, {"env": os.environ | {"OMP_NUM_THREADS": "3"}}),
        (line, {"preexec_fn": lambda: None}),
    ):
        done = subprocess.run(other, capture_output=True, text=True, timeout=WAIT_S, check=True, **options)
        assert done.stdout == f"{other is line and not options}\n"
    assert subprocess.run([sys.executable, "/no/such/program"], capture_output=True).returncode == 2


def test_a_command_with_a_seed_of_its_own_for_hashes_is_a_fork_of_a_server_that_has_it(script: Path) -> None:
    script.write_text(
        "import os; print('warm_starts.py' in open(f'/proc/{os.getpid()}/cmdline').read(), hash('a'), os.environ['A'])"
    )
    env = os.environ | {"PYTHONHASHSEED": "7", "A": "b"}
    cold, *warm = (run(script, warm=warm, env=env).stdout.split() for warm in (False, True, True))
    assert warm == [["True", *cold[1:]]] * 2
    assert run(script, warm=True, env=os.environ | {"A": "b"}).stdout.split()[1] != cold[1]


@pytest.mark.parametrize(
    ("name", "warm", "imported"),
    [
        ("OTEL_SDK_DISABLED", True, False),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", True, True),
        ("OTEL_PROPAGATORS", False, False),
    ],
)
def test_what_opentelemetry_reads_as_it_is_imported_starts_cold(
    script: Path, name: str, warm: bool, imported: bool
) -> None:
    """What it reads as it is used does not, and a fork that will use it has it imported."""
    script.write_text(
        "import os, sys; print('warm_starts.py' in open(f'/proc/{os.getpid()}/cmdline').read(), "
        "'opentelemetry.sdk.trace' in sys.modules)"
    )
    assert run(script, warm=True, env=os.environ | {name: "1"}).stdout == f"{warm} {imported}\n"


def test_a_module_of_ours_beside_the_tests_is_found(tmp_path: Path) -> None:
    line = [sys.executable, "-P", "-m", "fake_peer", f"ipc://{tmp_path}/p", f"ipc://{tmp_path}/rank"]
    env = os.environ | {"PYTHONPATH": str(Path(warm_starts.__file__).parent)}
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as peer:
        assert peer.stdout is not None
        assert peer.stdout.readline().startswith(b"READY")
        assert is_fork(peer.pid)
        peer.kill()


def test_where_the_server_is_gone_starts_are_cold() -> None:
    with STARTS.launch() as asked:
        asked.shutdown(socket.SHUT_RDWR)
        assert warm_starts.Starts(asked)._ask({}, [0, 1, 2], []) == 0


def test_what_only_some_commands_import_the_forks_of_others_do_without(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork does not print again what an import has printed (`this` prints much), also where Python buffers it."""
    monkeypatch.setattr(warm_starts, "WANTED", {"rare": ("this",), "missing": ("no_such_module",)})
    script.write_text("import os, sys; print(os.getppid(), 'this' in sys.modules)")
    for word, imported in (("rare", True), ("usual", False), ("rare", True), ("missing", False), ("missing", False)):
        assert run(script, word, warm=True).stdout == f"{os.getpid()} {imported}\n"


def test_a_worker_has_imported_the_tests_and_draws_its_own_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands that xdist starts; their input is what it says first. Nothing else is said, also where Python
    buffers what the imports printed."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    (tmp_path / "test_of_a_worker.py").write_text("import random\nSEEDED = random.Random(1)\ndef test(): pass\n")
    workers = Workers(["-c", os.devnull, "-W", "error", str(tmp_path)])
    workers.install()
    workers.on = True
    code = "import random, sys; test = sys.modules['test_of_a_worker']; print(test.SEEDED.random(), random.random())"
    line = [sys.executable, "-u", "-c", BOOTSTRAP]
    try:
        said = [
            subprocess.run(line, input=f"{code!r}\n", capture_output=True, text=True, timeout=WAIT_S, check=True).stdout
            for _ in range(2)
        ]
    finally:
        workers.close()
    (seeded, drawn), (seeded_again, drawn_again) = (each.split() for each in said)
    assert float(seeded) == float(seeded_again) == random.Random(1).random()
    assert drawn != drawn_again


def test_a_worker_takes_over_the_list_of_the_server(tmp_path: Path) -> None:
    """It lists nothing itself, its tests have its own options, and their folders are found, as by what they spawn."""
    (tmp_path / "test_of_a_list.py").write_text(
        "import pytest\n@pytest.mark.parametrize('n', range(3))\n"
        "def test(n, request, tmp_path): assert request.config.getoption('maxfail') == 7 and tmp_path.is_dir()\n"
    )
    args = ["-c", os.devnull, "-q", "-p", "no:cacheprovider", str(tmp_path)]
    workers = Workers(args)
    workers.install()
    workers.on = True
    code = (
        "import sys, pytest; pytest.Module.collect = None; "
        f"code = int(pytest.main({[*args, '--maxfail', '7']!r})); print(code, {str(tmp_path)!r} in sys.path)"
    )
    line = [sys.executable, "-u", "-c", BOOTSTRAP]
    try:
        done = subprocess.run(line, input=f"{code!r}\n", capture_output=True, text=True, timeout=WAIT_S, check=True)
    finally:
        workers.close()
    assert "3 passed" in done.stdout
    assert done.stdout.splitlines()[-1] == "0 True"


def test_what_a_server_is_too_late_for_starts_once(script: Path, tmp_path: Path) -> None:
    """A command starts cold where nobody answers in time; who answers later finds nobody."""
    script.write_text("print('started')")
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(0.05)
    starts = Starts(ours)
    starts.install()
    starts.on = True
    STARTS.on = False
    try:
        with (tmp_path / "said").open("w") as said:
            subprocess.run([sys.executable, str(script)], stdout=said, timeout=WAIT_S, check=True)
        assert (tmp_path / "said").read_text() == "started\n"
        with its:
            assert its.recv(warm_starts.MESSAGE_BYTES)
            with pytest.raises(BrokenPipeError):
                its.send(b"1")
    finally:
        starts.close()


def test_what_is_typed_starts_as_a_fork_and_dies_with_what_stands_for_it(tmp_path: Path) -> None:
    """Words, folder, environment, streams, exit codes and signals are the shell's."""
    script = tmp_path / "program.py"
    script.write_text(
        "import os, signal, sys\n"
        "pid = os.getpid()\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n"
        "print(pid, os.getcwd(), os.environ['SAID'], sys.argv[1:], sys.stdin.readline(), flush=True)\n"
        "sys.argv[1:] == ['stays'] and signal.pause()\n"
        "os.kill(pid, signal.SIGKILL) if sys.argv[1:] == ['killed'] else sys.exit(7)\n"
    )
    run = f"SAID=so python {script}"
    with Terminal(tmp_path) as terminal:
        terminal.type(
            f"echo in | {run} 'a b' ''; echo code $?", [f"{os.getpid()} {tmp_path} so ['a b', ''] in", "code 7"]
        )
        terminal.type(f"{run} killed < /dev/null; echo code $?", ["code 137"])
        for kill, code in (("", 3), ("-9", 137)):
            terminal.type(f"{run} stays < /dev/null > said & stays=$!", [])
            terminal.type("until test -s said; do sleep 0.05; done", [])
            pid = int((tmp_path / "said").read_text().split()[0])
            assert is_fork(pid)
            terminal.type(f"rm said; kill {kill} $stays; wait $stays; echo code $?", [f"code {code}"])
            until = time.monotonic() + WAIT_S
            while Path(f"/proc/{pid}").exists():
                assert time.monotonic() < until
                time.sleep(0.01)

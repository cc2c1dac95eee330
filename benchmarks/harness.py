"""Processes, runs, medians: what all benchmarks share. Owns the parts it starts; must not know what is measured.

Every part of a benchmark is a process of its own (`Process`), in a private folder that goes with it (`Workspace`).
A benchmark measures ours and the floor in turn, several times, so that a busy machine slows both alike; `Row` then
holds medians, their ratio and the spread.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from bus.errors import BusError

CHILD = str(Path(__file__).with_name("child.py"))
START_S = 60.0
ANSWER_S = 120.0
TERMINATE_S = 5.0


@dataclass(frozen=True, slots=True)
class Aim:
    """The aim of a figure: at most `limit` (or, with `at_least`, at least), as a ratio to its floor or as a value."""

    limit: float
    of_ratio: bool = True
    at_least: bool = False

    def met(self, value: float, ratio: float | None) -> bool | None:
        """Return whether the aim is met; None if it is a ratio and there is none."""
        figure = ratio if self.of_ratio else value
        if figure is None:
            return None
        return figure >= self.limit if self.at_least else figure <= self.limit

    def text(self, unit: str) -> str:
        """Return the aim as text, as in `≤ 1.5×`."""
        return f"{'≥' if self.at_least else '≤'} {self.limit:g}{'×' if self.of_ratio else ' ' + unit}"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: medians over the runs, of ours (`value`) and of the floor, and their ratio. `spread` is half of
    (largest - smallest) over the median, of `value`. None: no floor, or one run."""

    case: str
    metric: str
    value: float
    unit: str
    floor: float | None = None
    ratio: float | None = None
    spread: float | None = None
    aim: Aim | None = None

    @property
    def met(self) -> bool | None:
        """True if the aim is met; None without one."""
        return self.aim.met(self.value, self.ratio) if self.aim else None

    def as_json(self) -> dict[str, Any]:
        """Return the figures by name, without the aim."""
        keys = ("case", "metric", "value", "unit", "floor", "ratio", "spread")
        return {key: getattr(self, key) for key in keys}


def row(
    case: str,
    metric: str,
    unit: str,
    values: Sequence[float],
    floors: Sequence[float] = (),
    aim: Aim | None = None,
) -> Row:
    """Return the row of the runs' `values` and of the `floors` measured between them (empty: there is no floor). `aim`
    None: there is no aim."""
    value = statistics.median(values)
    floor = statistics.median(floors) if floors else None
    ratio = value / floor if floor else None
    spread = (max(values) - min(values)) / 2 / value if value and len(values) > 1 else None
    return Row(case, metric, value, unit, floor, ratio, spread, aim)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest of `values` that at least `share` (0 to 1) of them do not exceed. `values` must not be
    empty."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


@dataclass(frozen=True, slots=True)
class Scope:
    """The amount of measuring, and where progress is shown. `show` takes a line of progress, `note` a line that a
    reader of the figures has to know. `pythons`: interpreters that have what ours has not, by name."""

    runs: int = 5
    quick: bool = False
    show: Callable[[str], None] = lambda text: None
    note: Callable[[str], None] = lambda text: None
    pythons: Mapping[str, str] = field(default_factory=dict)

    @property
    def rounds(self) -> range:
        """The numbers of the runs, from 1 on, after a run 0 that is for warmth and does not count; a quick run has
        none for warmth."""
        return range(int(self.quick), 1 + self.runs)

    def size(self, full: int, quick: int) -> int:
        """Return `full`, or `quick` in a quick run."""
        return quick if self.quick else full


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark: its name, a line for people, and the function that measures."""

    name: str
    title: str
    run: Callable[[Scope], list[Row]]


class PartFailed(BusError):
    """A process of a benchmark ended, or did not answer in time."""


class Process:
    """A child process, started at once, that prints `READY ...`, then answers each JSON line on stdin with one JSON
    line on stdout. Methods that read raise PartFailed when it ends, or says nothing in time.

    Our own programs (broker, controller, nodes) answer nothing; they leave when stdin closes (`--watch-parent`).
    """

    def __init__(
        self, argv: Sequence[str], folder: Path, name: str, env: Mapping[str, str] | None = None, python: str = ""
    ) -> None:
        """`env`: variables beside our own. `python`: the interpreter, if not ours."""
        self.name = name
        self._log = folder / f"{name}.log"
        self._pending = b""
        with self._log.open("wb") as log:
            self._child = subprocess.Popen(
                [python or sys.executable, "-P", *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=log, env={**os.environ, **(env or {})},
            )  # fmt: skip
        assert self._child.stdout is not None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._child.stdout, selectors.EVENT_READ)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._child.pid

    @property
    def ended(self) -> bool:
        """True if it has exited."""
        return self._child.poll() is not None

    def wait_ready(self, timeout_s: float = START_S) -> str:
        """Wait for the READY line and return it."""
        line = self._line(timeout_s)
        while not line.startswith("READY"):
            line = self._line(timeout_s)
        return line

    def command(self, **command: Any) -> None:
        """Send a command, without waiting for its answer."""
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(command).encode() + b"\n")
        self._child.stdin.flush()

    def answer(self, timeout_s: float = ANSWER_S) -> Any:
        """Wait for the next JSON line and return it. Raises PartFailed also for an answer with `error`."""
        result = json.loads(self._line(timeout_s))
        if isinstance(result, dict) and "error" in result:
            raise PartFailed(f"{self.name}: {result['error']}")
        return result

    def ask(self, timeout_s: float = ANSWER_S, **command: Any) -> Any:
        """Send a command and return its answer."""
        self.command(**command)
        return self.answer(timeout_s)

    def cpu_s(self) -> float:
        """Return the processor seconds of all its threads so far, to the nanosecond."""
        return time.clock_gettime((~self.pid << 3) | 2)  # Linux: CPUCLOCK_SCHED of that process

    def memory_bytes(self) -> int:
        """Return its resident memory in bytes."""
        pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def pause(self) -> None:
        """Stop it (SIGSTOP): it gets no processor time until `resume`."""
        self._child.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on after `pause`."""
        self._child.send_signal(signal.SIGCONT)

    def stop(self, timeout_s: float = 5.0) -> None:
        """Close its stdin and wait for its exit; after `timeout_s` send SIGTERM, and after 5 s more SIGKILL. A second
        call does nothing."""
        self.resume()
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            self._child.stdin.close()
        except BrokenPipeError:
            pass
        try:
            self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._child.terminate()  # one that is not ours may have children of its own to end
            try:
                self._child.wait(TERMINATE_S)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()
        self._selector.close()
        self._child.stdout.close()

    def _line(self, timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        assert self._child.stdout is not None
        while b"\n" not in self._pending:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not self._selector.select(left_s):
                raise PartFailed(f"{self.name} said nothing for {timeout_s:g} s{self.tail()}")
            chunk = os.read(self._child.stdout.fileno(), 1 << 16)
            if not chunk:
                raise PartFailed(f"{self.name} ended with code {self._child.wait()}{self.tail()}")
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        return line.decode()

    def tail(self) -> str:
        """Return the last lines of its log as the end of a sentence; empty without any."""
        lines = self._log.read_text(errors="replace").strip().splitlines()[-8:]
        return "; it logged: " + " | ".join(lines) if lines else ""


class Workspace:
    """A private folder with a short path, and the processes of one measurement; all end with the `with`, the last
    started first."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pdb"))
        self._processes: list[Process] = []

    def __enter__(self) -> Workspace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in reversed(self._processes):
            process.stop(0.2 if error else 5.0)
        shutil.rmtree(self.folder, ignore_errors=True)

    def endpoint(self, name: str) -> str:
        """Return the ipc endpoint `name` in the folder."""
        return f"ipc://{self.folder}/{name}"

    def program(self, *argv: str, name: str = "", env: Mapping[str, str] | None = None, python: str = "") -> Process:
        """Start `python -m argv` in a process, and return without waiting for READY. `env`: variables beside our own;
        `python`: the interpreter, if not ours."""
        return self._start(("-m", *argv), name or argv[0], env, python)

    def part(self, target: str, env: Mapping[str, str] | None = None, python: str = "", **settings: Any) -> Process:
        """Start `module:function` of this package in a process of its own (`child.py`), with `settings` as arguments,
        and return without waiting for READY."""
        return self._start((CHILD, target, json.dumps(settings)), target.replace(":", "."), env, python)

    def _start(self, argv: Sequence[str], name: str, env: Mapping[str, str] | None, python: str) -> Process:
        process = Process(argv, self.folder, f"{len(self._processes)}-{name}", env, python)
        self._processes.append(process)
        return process


def in_child(
    target: str, timeout_s: float = ANSWER_S, env: Mapping[str, str] | None = None, python: str = "", **settings: Any
) -> Any:
    """Run `module:function` of this package in a fresh process, without our heap and caches, and return its result.
    Raises PartFailed as `Process.answer` does."""
    with Workspace() as space:
        return space.part(target, env, python, **settings).answer(timeout_s)


def await_url(url: str, timeout_s: float, server: Process | None = None) -> None:
    """Wait until `url` answers. Raises PartFailed when it does not within `timeout_s`, or when `server` has ended."""
    until = time.monotonic() + timeout_s
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError as error:  # URLError too
            if time.monotonic() > until or (server is not None and server.ended):
                log = "" if server is None else f" ({server.name}){server.tail()}"
                raise PartFailed(f"{url}: {error}{log}") from None
            time.sleep(0.1)

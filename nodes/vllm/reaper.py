"""No process of an engine outlives its node, whatever ends the node. This module imports nothing of ours, so that it
starts at once.

vLLM's engine core and workers outlive a killed parent for minutes, and hold its ports and memory. So a separate
process waits for the end of a pipe that only the node holds open. Then it kills every process with the node's mark:
an environment variable, which children inherit and cannot lose by changing their parent, group or session. Only
Python's resource tracker is left to end by itself, as it does once its processes are gone: it first unlinks their
shared memory and semaphores.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

MARK = "PDBUS_ENGINE_OF"
_PAUSE_S = 0.05
_GIVES_UP_S = 30.0  # on a process that the kernel holds though it was killed
_TRACKER = b"from multiprocessing.resource_tracker import main"


class Reaper:
    """The reaper: `with Reaper():` around everything that starts processes; at its end none of them is left.

    Make it after vLLM was imported. vLLM's processes write their titles over their environment, up to the first
    variable that they have changed; the import sets those, and the mark must come after them.
    """

    def __init__(self) -> None:
        self._mark = mark = secrets.token_hex(16)
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__, mark], stdin=subprocess.PIPE, start_new_session=True
        )
        os.environ.pop(MARK, None)  # one that was inherited would keep its place
        os.environ[MARK] = mark  # from now on: not for the reaper itself

    def processes(self) -> list[int]:
        """Return the pids of the processes that were started since, and live."""
        return marked(self._mark)

    def __enter__(self) -> Reaper:
        return self

    def __exit__(self, *_: object) -> None:
        os.environ.pop(MARK, None)
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(2 * _GIVES_UP_S)


def marked(mark: str) -> list[int]:
    """Return the pids of the processes that carry `mark`, except resource trackers. Those of other users cannot be
    read, and are not ours."""
    found = []
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                ours = wanted in (entry / "environ").read_bytes().split(b"\0")
                if ours and _TRACKER not in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                pass  # gone meanwhile, or another user's
    return found


def kill_all(mark: str) -> None:
    """Kill every process with `mark`, until two searches in a row find none (a process that was just forked may be
    missed by the first), or 30 s have passed. It blocks.

    The killed processes may end on any core. One that was kept to a core beside another engine's busy threads
    (nodes/vllm/cpus.py) was seen to stay there for minutes, killed, and to end at once on another.
    """
    clean, end = 0, time.monotonic() + _GIVES_UP_S
    while clean < 2 and time.monotonic() < end:
        found = marked(mark)
        clean = 0 if found else clean + 1
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
                for thread in os.listdir(f"/proc/{pid}/task"):
                    os.sched_setaffinity(int(thread), os.sched_getaffinity(0))
            except OSError:
                pass  # gone meanwhile
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    kill_all(sys.argv[1])

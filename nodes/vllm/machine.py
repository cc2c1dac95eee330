"""What an engine takes of its machine: ports, and on a CPU the cores of its threads. Opens no socket of ours."""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path

_PORT_TRIES = 64


def free_ports(host: str, count: int) -> int:
    """The first of `count` ports in a row that are free now. Somebody may take one before the engine does; it then
    does not start, and says so."""
    for _ in range(_PORT_TRIES):
        taken: list[socket.socket] = []
        try:
            for number in range(count):
                taken.append(socket.socket())
                taken[-1].bind((host, taken[0].getsockname()[1] + number if number else 0))
            return int(taken[0].getsockname()[1])
        except (OSError, OverflowError):
            continue
        finally:
            for each in taken:
                each.close()
    raise OSError(f"no {count} free ports in a row at {host}")


def claim_cores(folder: Path) -> str:
    """Half of the cores that we may use, and that no other engine of this machine has claimed so: the files stay locked
    for as long as this process lives. Empty: all are claimed. Two engines whose threads are bound to the same cores
    would wait for each other at each step."""
    cores = sorted(os.sched_getaffinity(0))
    folder.mkdir(parents=True, exist_ok=True)
    half = max(1, len(cores) // 2)
    for share in (cores[:half], cores[half : 2 * half]):
        if share:
            lock = os.open(folder / f"cores-{share[0]}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return ",".join(map(str, share))
            os.close(lock)
    return ""

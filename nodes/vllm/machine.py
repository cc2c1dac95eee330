"""What an engine takes of its machine: ports, and on a CPU the cores of its threads. Opens no socket of ours."""

from __future__ import annotations

import fcntl
import os
import random
import socket
from contextlib import suppress
from pathlib import Path

from bus.errors import StartError

_PORT_TRIES = 64
_PORTS = range(15_000, 32_000)


def free_ports(host: str, count: int) -> int:
    """The first of `count` ports in a row that are free now. An engine binds them only when it has loaded, so they are
    none of those that the system gives to whoever connects meanwhile."""
    for _ in range(_PORT_TRIES):
        first = random.randrange(_PORTS.start, _PORTS.stop - count)
        taken: list[socket.socket] = []
        try:
            for port in range(first, first + count):
                taken.append(socket.socket())
                taken[-1].bind((host, port))
            return first
        except OSError:
            continue
        finally:
            for each in taken:
                each.close()
    raise StartError(f"no {count} free ports in a row at {host}")


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

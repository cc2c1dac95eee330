"""The cores that an engine's threads are bound to where vLLM computes on a CPU."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path


def claim_cores(folder: Path) -> list[int]:
    """Half of the cores that we may use, and that no other engine of this machine has claimed so: the files stay locked
    for as long as this process lives. None: all are claimed. Two engines whose threads are bound to the same cores
    would wait for each other at each step."""
    cores = sorted(os.sched_getaffinity(0))
    folder.mkdir(parents=True, exist_ok=True)
    half = max(1, len(cores) // 2)
    for share in (cores[:half], cores[half : 2 * half]):
        if share:
            lock = os.open(folder / f"cores-{share[0]}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return share
            os.close(lock)
    return []


def keep_to(cores: Sequence[int], processes: Iterable[int]) -> None:
    """Bring every thread of `processes` to `cores`; one that has a part of them to itself keeps it.

    vLLM pins the main thread of each worker to the machine's last core for its KV transfers, computes on it, and starts
    NIXL's threads there, of which one never sleeps. An engine's start was seen to get a hundredth of that core beside
    the threads of another engine. So this is for while it starts, too."""
    kept = set(cores)
    for pid in processes if kept else ():
        with suppress(OSError):  # gone meanwhile
            for thread in map(int, os.listdir(f"/proc/{pid}/task")):
                if thread == pid or not os.sched_getaffinity(thread) <= kept:
                    os.sched_setaffinity(thread, kept)

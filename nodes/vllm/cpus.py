"""The CPU cores that an engine's threads are bound to where vLLM computes on a CPU."""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path


def claim_cores(folder: Path) -> list[int]:
    """Claim half of the cores that we may use, and return their numbers: the half that the fewest engines of this
    machine have claimed, by lock files in `folder`. The files stay locked while this process lives. Engines with
    threads on all cores would wait for each other at each step; engines that share a half take turns."""
    cores = sorted(os.sched_getaffinity(0))
    folder.mkdir(parents=True, exist_ok=True)
    half = max(1, len(cores) // 2)
    halves = [cores[:half], cores[half : 2 * half]]
    for number in itertools.count():
        for share in filter(None, halves):
            lock = os.open(folder / f"cores-{share[0]}-{number}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return share
            os.close(lock)
    raise AssertionError


def keep_to(cores: Sequence[int], processes: Iterable[int]) -> None:
    """Move every thread of these processes (by pid) to `cores`; a thread that already runs on a part of them only stays
    there. Without cores it does nothing.

    vLLM pins the main thread of each worker to the machine's last core for its KV transfers, computes on it, and starts
    NIXL's threads there, one of which never sleeps. A starting engine was seen to get a hundredth of that core beside
    the threads of another engine. So this is used during its start, too.
    """
    kept = set(cores)
    for pid in processes if kept else ():
        with suppress(OSError):  # gone meanwhile
            for thread in map(int, os.listdir(f"/proc/{pid}/task")):
                if thread == pid or not os.sched_getaffinity(thread) <= kept:
                    os.sched_setaffinity(thread, kept)

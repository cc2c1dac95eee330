"""Locks on GPUs: engines measure the memory of a GPU one at a time.

vLLM counts as its own all memory that its device lost between the engine's start and the end of its profiling. So an
engine that loads on the same device meanwhile takes its KV cache. A lock for each device, which the kernel releases
when its process ends, keeps engines apart that share the folder of the locks.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bus.errors import StartError


@contextmanager
def alone_on(folder: Path, devices: Sequence[str], wait_s: float, on_wait: Callable[[str], None]) -> Iterator[None]:
    """Hold the locks of `devices` during the `with`; all engines take them in the same order. It blocks while another
    engine has one, after a call of `on_wait` with that device; StartError after waiting `wait_s` seconds for one."""
    with ExitStack() as held:
        for device in sorted(set(devices)):
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"gpu-{''.join(each if each.isalnum() else '-' for each in device)}.lock"
            lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            held.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait(device)
                _wait(lock, device, wait_s)
        yield


def _wait(lock: int, device: str, wait_s: float) -> None:
    """Wait in a thread of its own: the kernel's wait has no limit, and signals must be handled here meanwhile."""
    ours = threading.Event()
    copy = os.dup(lock)  # the same lock, so that the thread never has a number that means another file by now

    def wait() -> None:
        fcntl.flock(copy, fcntl.LOCK_EX)
        ours.set()
        os.close(copy)

    threading.Thread(target=wait, name="gpu-lock", daemon=True).start()
    if not ours.wait(wait_s):
        raise StartError(
            f"another engine still loads on GPU {device} after {wait_s:g} s; raise --wait-s, or give each engine "
            "--kv-cache-memory-bytes, with which they can load at once"
        )

"""Resident memory and open files of processes, read from /proc (Linux). Owns the reading alone."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Usage(NamedTuple):
    rss_bytes: int = 0
    fds: int = 0


def usage_of(pids: Iterable[int]) -> Usage:
    """The sum over those of `pids` that live."""
    rss_bytes = fds = 0
    for pid in pids:
        process = Path(f"/proc/{pid}")
        try:
            pages = int((process / "statm").read_text().split()[1])
            files = len(os.listdir(process / "fd"))
        except OSError:
            continue
        rss_bytes += pages * os.sysconf("SC_PAGE_SIZE")
        fds += files
    return Usage(rss_bytes, fds)

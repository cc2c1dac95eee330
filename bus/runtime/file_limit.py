"""The limit on open files of this process: each connection takes one. This module owns the limit and counts nothing."""

from __future__ import annotations

import resource
from contextlib import suppress

from bus.errors import StartError

FILES_MIN = 512  # a part that binds cannot do with fewer descriptors
FILES_WANTED = 65_536


def raise_file_limit() -> None:
    """Raise the soft limit to FILES_WANTED, or as far as the system allows; it never fails. Our programs call it at
    their start."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_WANTED if hard == resource.RLIM_INFINITY else min(hard, FILES_WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def file_limit() -> int:
    """Return the number of files that this process may open, FILES_WANTED at most. StartError when it is too low for a
    part that accepts connections."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = FILES_WANTED if soft == resource.RLIM_INFINITY else min(soft, FILES_WANTED)
    if limit < FILES_MIN:
        raise StartError(f"this process may open {limit} files: raise the limit to {FILES_MIN} or more (ulimit -n)")
    return limit

"""`python -P -m pdbus.ray.parent_death MODULE ARGS` becomes `python -P -m MODULE ARGS` and ends when its parent does.

Ray gives a dead actor's CPUs and GPUs to its next start at once. A part that only noticed its closed stdin would drain
for a minute and keep their memory; so the kernel kills it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Have the kernel kill this process when its parent dies (Linux), then replace it by `python -P -m MODULE ARGS`,
    from argv. It does not return."""
    module, *args = sys.argv[1:]
    if sys.platform == "linux":  # elsewhere the closed stdin must be enough
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *args])


if __name__ == "__main__":
    main()

"""Ctrl-C while a program still imports its modules: the process exits at once, without a traceback.

A main calls `leave_at_once` before it imports anything else, so this module needs nothing heavy itself.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

EXIT_INTERRUPTED = 130


def leave_at_once() -> None:
    """Let SIGINT end the process with exit code 130 from now on, until another handler is set. If the process ignores
    SIGINT, that stays so."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _leave)


def raise_again() -> None:
    """Undo `leave_at_once`: SIGINT raises KeyboardInterrupt again, for code that cleans up. If another handler is set,
    it stays."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(EXIT_INTERRUPTED)  # an exception within an import may be caught, or shown, by whatever is imported

"""The keys pressed in a terminal, for `pdbus top`."""

from __future__ import annotations

import re
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

_KEY = re.compile(rb"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.S)
_NAMES = {
    b"\x1b[A": "up", b"\x1b[B": "down", b"\x1bOA": "up", b"\x1bOB": "down", b"\x1b[H": "home", b"\x1b[F": "end",
    b"\x1b[5~": "page up", b"\x1b[6~": "page down", b"\r": "enter", b"\n": "enter", b"\x1b": "escape",
    b"k": "up", b"j": "down", b"h": "?",
}  # fmt: skip


@contextmanager
def raw_keys(descriptor: int) -> Iterator[None]:
    """Have the terminal pass on each key as it is pressed, without showing it, inside the `with` block; afterwards its
    mode is as before."""
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def keys_in(data: bytes) -> list[str]:
    """Return the names of the keys in the bytes that a terminal sent (`up`, `enter`, `page down`); another key is its
    own character. `k`, `j` and `h` are `up`, `down` and `?`."""
    return [_NAMES.get(key, key.decode("ascii", "ignore")) for key in _KEY.findall(data)]


def is_terminal() -> bool:
    """Return true if stdin and stdout are both a terminal."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()

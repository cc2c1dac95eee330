"""A shell that types what a page says, and compares what comes back with what the page shows.

A page shows less than there is: lines may be left out, `…` stands for anything, and a number that begins a word for any
number; so do both of `1/3`. What it does show must come, in its order.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from typed import Typed
from warm_starts import STARTS

WAIT_S = 120.0
PAUSE_S = 0.2  # before it is asked again: each answer is a process or two
LOOKS = ("pdbus status", "grep ")  # changes nothing and may come too early: asked again
_RULE = re.compile(r"[\s─━…]*")


def pattern(line: str) -> re.Pattern[str]:
    """What a shown line matches."""
    parts = re.split(r"((?<!\S)\d+/\d+(?!\S)|(?<![\w/-])\d[\d.]*|…|\s+)", line.strip())
    return re.compile("".join(map(_like, parts)))


def _like(part: str) -> str:
    """What a part of a shown line stands for."""
    if part[:1].isdigit():
        return r"\d+/\d+" if "/" in part else r"\d[\d.]*"
    return ".*" if part == "…" else r"\s+" if part.isspace() else re.escape(part)


def unshown(said: str, shown: Sequence[str]) -> str:
    """The first line of `shown` that does not come in its turn; empty when all do."""
    lines = iter(said.splitlines())
    for line in shown:
        if not _RULE.fullmatch(line) and not any(pattern(line).search(each) for each in lines):
            return line
    return ""


class Terminal:
    """`with Terminal(directory, PDBUS_DIR=...) as terminal:`; what is typed runs in one bash, as a reader's would."""

    def __init__(self, directory: Path, **env: str) -> None:
        script, self._keys = os.pipe()
        self._warm = Typed() if STARTS.on else None
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        if self._warm is not None:
            path = f"{self._warm.folder}:{path}"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PDBUS_")}
        self._bash = subprocess.Popen(
            ["bash", "--noprofile", "--norc", f"/dev/fd/{script}"], cwd=directory, env=clean | {"PATH": path} | env,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=[script],
            start_new_session=True,
        )  # fmt: skip
        os.close(script)
        self._typed = 0

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._keys)
        os.killpg(self._bash.pid, signal.SIGKILL)  # and what it left running
        self._bash.wait(WAIT_S)
        if self._warm is not None:
            self._warm.close()
        assert self._bash.stdout is not None
        self._bash.stdout.close()

    def type(self, command: str, shown: Sequence[str]) -> None:
        """Until it is done and all of `shown` has come, which may be of a job in the background."""
        end = time.monotonic() + WAIT_S
        while True:
            self._typed += 1
            prompt = f"typed {self._typed}."
            os.write(self._keys, f"{command}\necho; echo '{prompt}'\n".encode())
            said = ""
            while f"\n{prompt}\n" not in said or (unshown(said, shown) and not command.startswith(LOOKS)):
                more = self._read(end)
                assert more, f"{command}\ndoes not say: {unshown(said, shown) or prompt}\nbut:\n{said}"
                said += more
            missing = unshown(said, shown)
            if not missing:
                return
            assert time.monotonic() < end, f"{command}\ndoes not say: {missing}\nbut:\n{said}"
            time.sleep(PAUSE_S)

    def _read(self, end: float) -> str:
        """What comes next; nothing when the time is up, or the shell has left."""
        assert self._bash.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._bash.stdout, selectors.EVENT_READ)
            if not selector.select(max(0.0, end - time.monotonic())):
                return ""
            return os.read(self._bash.stdout.fileno(), 65536).decode(errors="replace")

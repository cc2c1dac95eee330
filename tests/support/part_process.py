"""A part as a process of its own, with a log: for tests that start the parts one by one."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

WAIT_S = 120.0  # of a busy machine; a wait that succeeds ends with its event


class PartProcess:
    """`until_ready` waits for its READY line. It sees none of this process's own settings, and the end of its standard
    input when this process dies."""

    def __init__(self, line: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self._log = log
        bare = {key: value for key, value in os.environ.items() if not key.startswith("PDBUS_")}
        with open(log, "a", encoding="utf-8") as stderr:
            self.process = subprocess.Popen(
                line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
                env=bare | dict(env or {}), cwd="/",
            )  # fmt: skip

    def until_ready(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith("READY"), self.log()

    def stop(self, number: int = signal.SIGTERM) -> None:
        """It leaves with 0."""
        self.process.send_signal(number)
        assert self.process.wait(WAIT_S) == 0, self.log()
        self.close()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")[-4000:]

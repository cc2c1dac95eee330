"""`pdbus up` as a process of its own: what it says, its parts' pids, and its end."""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

START_S = 240.0  # on a machine that is busy: with torch each node takes seconds of it


class Up:
    """`with Up(directory, "--model", "sim") as up:`; READY on entry. `directory` is its place for sockets."""

    def __init__(self, directory: Path, *arguments: str, ready: bool = True) -> None:
        self.directory = directory
        self.said = {"stdout": "", "stderr": ""}
        self._ready = ready
        command = [sys.executable, "-P", "-m", "pdbus", "up", *arguments]
        env = os.environ | {"PDBUS_DIR": str(directory), "COLUMNS": "200"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._streams = {"stdout": self.process.stdout, "stderr": self.process.stderr}

    def __enter__(self) -> Up:
        if self._ready:
            self.until("stdout", r"^READY bus=.*\n(.*\n)*Try", START_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(60)
        for stream in self._streams.values():
            stream.close()

    @property
    def controller(self) -> str:
        return self.until("stdout", r"^READY bus=\S+ controller=(\S+)")[1]

    def until(self, stream: str, pattern: str, deadline_s: float = 60.0) -> re.Match[str]:
        """Read until `stream` has said `pattern`; fails when the process ends or the time is up."""
        end = time.monotonic() + deadline_s
        while not (found := re.search(pattern, self.said[stream], re.M)):
            assert time.monotonic() < end, f"no {pattern!r} in {self.said}"
            assert self.read(end - time.monotonic()) or re.search(pattern, self.said[stream], re.M), self.said
        return found

    def read(self, timeout_s: float) -> bool:
        """Take in what comes within `timeout_s`; whether more may come."""
        with selectors.DefaultSelector() as selector:
            for name, stream in self._streams.items():
                if not stream.closed:
                    selector.register(stream.fileno(), selectors.EVENT_READ, name)
            for key, _ in selector.select(max(0.0, timeout_s)):
                data = os.read(key.fd, 65536)
                self.said[key.data] += data.decode()
                if not data:
                    self._streams[key.data].close()
            return not all(stream.closed for stream in self._streams.values())

    def pid(self, part: str) -> int:
        """Of its newest start."""
        back = re.findall(rf"^pdbus up: {part} is back (?:on \S+ )?\(pid (\d+)\)", self.said["stderr"], re.M)
        return int(back[-1] if back else self.until("stdout", rf"{part}\s\D+(\d+)\s")[1])

    def kill_and_await(self, part: str, number: int = signal.SIGKILL) -> None:
        """Kill a part; until `up` has it back."""
        heard = len(self.said["stderr"])
        os.kill(self.pid(part), number)
        self.until("stderr", rf"(?s)\A.{{{heard}}}.*^pdbus up: {part} is back")

    def end(self, deadline_s: float = 60.0) -> int:
        """The exit code, once it has ended by itself or was asked to."""
        end = time.monotonic() + deadline_s
        while self.read(end - time.monotonic()):
            assert time.monotonic() < end, f"it goes on: {self.said}"
        return self.process.wait(max(0.1, end - time.monotonic()))

"""What the tests of foreign programs share: raw frames (msgpack and pyzmq alone) and processes with deadlines."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgpack
import zmq

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
OURS = ("bus", "nodes", "controller", "pdbus", "msgspec")
WAIT_S = 60.0  # of a busy machine; a wait that succeeds ends with its event


def encode(*fields: Any) -> bytes:
    return b"\x01" + msgpack.packb(fields)


def decode(frame: bytes) -> list[Any]:
    assert frame[:1] == b"\x01"
    return msgpack.unpackb(frame[1:])


def hidden_environment(directory: Path) -> dict[str, str]:
    """An environment in which importing anything of ours fails, though it is installed."""
    directory.mkdir(exist_ok=True)
    for name in OURS:
        (directory / f"{name}.py").write_text(f"raise ImportError('{name} is not for foreign programs')\n")
    return {**os.environ, "PYTHONPATH": str(directory)}


class Process:
    """A program and the lines it prints; killed on exit if it has not left by itself."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=cwd
        )
        self._errors: list[str] = []
        self._lines: list[str] = []
        self._ready = threading.Event()
        self._threads = [threading.Thread(target=read, daemon=True) for read in (self._read_out, self._read_errors)]
        for thread in self._threads:
            thread.start()

    def _read_out(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)
            if line.startswith("READY"):
                self._ready.set()
        self._ready.set()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self._errors.extend(self.process.stderr)

    @property
    def out(self) -> str:
        return "".join(self._lines)

    @property
    def errors(self) -> str:
        return "".join(self._errors)

    def wait_ready(self) -> dict[str, str]:
        """The facts of its READY line."""
        assert self._ready.wait(WAIT_S), f"not ready: {self.errors}"
        line = next((line for line in self._lines if line.startswith("READY")), None)
        assert line, f"it left: {self.errors}"
        return dict(fact.split("=", 1) for fact in line.split()[1:])

    def wait(self, timeout_s: float = WAIT_S) -> int:
        code = self.process.wait(timeout_s)
        for thread in self._threads:
            thread.join(WAIT_S)
        return code

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.wait()
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.process.stdout.close()
        self.process.stderr.close()


class Peers:
    """Raw sockets in one Context, closed together."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []

    def make(
        self, kind: int, *, connect: str = "", bind: str = "", subscribe: bytes | None = None
    ) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        self._sockets.append(socket)
        socket.setsockopt(zmq.LINGER, 0)
        if subscribe is not None:
            socket.setsockopt(zmq.SUBSCRIBE, subscribe)
        if connect:
            socket.connect(connect)
        if bind:
            socket.bind(bind)
        return socket

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)
        self.context.term()


def receive(socket: zmq.Socket[bytes], timeout_s: float = WAIT_S) -> list[bytes]:
    assert socket.poll(int(timeout_s * 1000)), "nothing came in time"
    return socket.recv_multipart()

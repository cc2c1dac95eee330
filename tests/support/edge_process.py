"""`pdbus serve` as a process of its own, and what its HTTP says."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable

from up_process import Up


def url(up: Up) -> str:
    return up.until("stdout", r"talk to it at (http://\S+)/ ")[1]


def get(base: str, path: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(base + path, timeout=120) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def wait(met: Callable[[], bool], deadline_s: float = 60.0) -> None:
    until = time.monotonic() + deadline_s
    while not met():
        assert time.monotonic() < until
        time.sleep(0.05)


def streaming(base: str) -> str:
    """The decode rank that runs something."""
    found: list[str] = []

    def looked() -> bool:
        ranks = json.loads(get(base, "/load")[1])["ranks"]
        found.extend(rank["rank"] for rank in ranks if rank["role"] == "decode" and rank["running"])
        return bool(found)

    wait(looked)
    return found[0]


class Serve:
    """`pdbus serve` beside a cluster; READY on entry."""

    def __init__(self, controller: str, *arguments: str, port: str = "0") -> None:
        line = [sys.executable, "-P", "-m", "pdbus", "serve", "--http", port, "--controller", controller, *arguments]
        self.process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def __enter__(self) -> Serve:
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        assert self.line.startswith("READY endpoint=http"), self.end()
        self.url = self.line.split("=", 1)[1].strip()
        self.port = int(self.url.rpartition(":")[2])
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.end()

    def end(self) -> tuple[int, str]:
        _, said = self.process.communicate(timeout=120)
        return self.process.returncode, said

"""A process that serves a fleet's page, as a reader of its stream sees it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0


class PageServer:
    """A process that serves a fleet's page."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": f"{ROOT / 'tests' / 'support'}:{ROOT}"},
        )  # fmt: skip
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.url = line.split("url=")[-1].split("endpoint=")[-1].strip()
        self.at = urlsplit(self.url)
        self.token = self.at.fragment.removeprefix("token=")
        self.connections: list[HTTPConnection] = []

    def ask(self, path: str, method: str = "GET", **headers: str) -> HTTPResponse:
        """Without a token unless a header gives it; underscores in names of headers are dashes."""
        connection = HTTPConnection(self.at.hostname or "", self.at.port or 0, timeout=WAIT_S)
        self.connections.append(connection)
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        return connection.getresponse()

    def look(self, path: str = "/fleet/stream") -> HTTPResponse:
        return self.ask(path, authorization=f"Bearer {self.token}")

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        self.process.kill()
        self.process.communicate()

    def leave(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S)


def next_event(response: HTTPResponse) -> tuple[str, dict[str, Any]]:
    lines = [response.readline().decode() for _ in range(3)]
    assert lines[2] == "\n", lines
    return lines[0].removeprefix("event: ").strip(), json.loads(lines[1].removeprefix("data: "))


def error_of(response: HTTPResponse) -> tuple[int, str]:
    assert response.status >= 400, "a stream does not end"
    return response.status, json.loads(response.read())["error"]["message"]

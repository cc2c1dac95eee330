"""vLLM's own server in front of a cluster, as a process, and what its HTTP says."""

from __future__ import annotations

import http.client
import json
import os
import signal
import ssl
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from bus.runtime.ports import free_ports

ROOT = Path(__file__).parents[2]
ENV = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONPATH": str(ROOT)}
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
START_S = 400.0  # 12 s on a quiet machine


def plugin_path(folder: Path) -> str:
    """A PYTHONPATH by which vLLM finds the plugin, as in an environment where pdbus is installed."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    for name, version in (("pdbus", "0"), ("vllm", "0.32.0+cpu")):  # by that name its command knows itself
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in each.items()) for group, each in groups.items()]
    (folder / "pdbus-0.dist-info" / "entry_points.txt").write_text("\n".join(lines))
    return os.pathsep.join([str(folder), str(ROOT)])


class Front:
    """One server; it is healthy on entry. `trust` is the certificate of one that speaks TLS."""

    def __init__(self, command: Sequence[str], port: int, log: Path, trust: Path | None = None, /, **env: str) -> None:
        self.port = port
        self.log = log
        self._trust = None if trust is None else ssl.create_default_context(cafile=str(trust))
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", *command],
                env={**os.environ, **ENV, **env},
                stdout=file,
                stderr=file,
            )

    def __enter__(self) -> Front:
        try:
            self._until_healthy()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _until_healthy(self) -> None:
        end = time.monotonic() + START_S
        while True:
            try:
                if self.get("/health")[0] == 200:
                    return
            except OSError:
                pass
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < end, self.log.read_text()[-4000:]
            time.sleep(0.2)

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        finally:
            for process in self.family():
                process.kill()

    def family(self) -> list[psutil.Process]:
        """Its processes, the first one first."""
        try:
            first = psutil.Process(self.process.pid)
            return [first, *first.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _connection(self) -> http.client.HTTPConnection:
        if self._trust is None:
            return http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=120, context=self._trust)

    def get(self, path: str) -> tuple[int, bytes]:
        connection = self._connection()
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def post(self, path: str, body: dict[str, Any], **headers: str) -> tuple[int, dict[str, Any], dict[str, str]]:
        """The status, the body, and the headers of an answer that is no stream."""
        connection, answer = self.begin(path, body, **headers)
        try:
            return answer.status, json.loads(answer.read()), {k.lower(): v for k, v in answer.getheaders()}
        finally:
            connection.close()

    def begin(
        self, path: str, body: dict[str, Any], **headers: str
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """An answer whose head has come."""
        connection = self._connection()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json", **named})
        return connection, connection.getresponse()

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The data of all events of a stream."""
        connection, answer = self.begin(path, {**body, "stream": True})
        try:
            assert answer.status == 200, answer.read()
            return list(events(answer))
        finally:
            connection.close()


def events(answer: http.client.HTTPResponse) -> Iterator[Any]:
    """Yield the data of events as they come; `[DONE]` is none."""
    for line in answer:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line[6:])


def front(controller: str, log: Path, *options: str, arguments: Sequence[str] = TOOLS) -> Front:
    """`pdbus serve --front vllm` of SmolLM2."""
    port = free_ports("127.0.0.1", 1)
    command = ["pdbus", "serve", "--front", "vllm", "--model", "smollm2", "--http", str(port), *options]
    return Front([*command, "--controller", controller, "--", *arguments], port, log)


def unmodified(model: Path, folder: Path, *arguments: str, **env: str) -> Front:
    """`vllm serve` by vLLM's own command, with pdbus installed beside it."""
    port = free_ports("127.0.0.1", 1)
    command = ["vllm.entrypoints.cli.main", "serve", str(model), "--port", str(port), *arguments]
    return Front(command, port, folder / "vllm-serve.log", PYTHONPATH=plugin_path(folder / "plugin"), **env)


def certificate(folder: Path) -> tuple[Path, Path]:
    """Make a certificate for 127.0.0.1 and its key; return their files."""
    made, key = folder / "cert.pem", folder / "key.pem"
    line = f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {made} -days 1 -subj /CN=localhost"
    subprocess.run([*line.split(), "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    return made, key

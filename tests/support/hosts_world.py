"""The cluster of docs/hosts.md, run by the commands that stand there, on hosts that are network namespaces."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fault_rig import WAIT_S, Rig
from netns import Host, Network

from bus.wire.messages import RankStatus

PAGE = Path(__file__).parents[2] / "docs" / "hosts.md"
OPERATOR = "client"
CONTROLLERS = {"controller-0": "tcp://10.0.0.2:5560#controller-0", "controller-1": "tcp://10.0.0.3:5560#controller-1"}
NODES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
EDGE = "http://10.0.0.8:8000"
# A prompt of 300 tokens takes 0.1 s, then a token 5 ms, and its KV cache 1.2 MB.
ENGINE = {
    "ENGINE": "sim", "MODEL": "sim", "SIM_BASE_S": "0.005", "SIM_PREFILL_S_PER_TOKEN": "0.0003", "SIM_DECODE_S": "0",
    "SIM_CONTEXT_S_PER_TOKEN": "0", "SIM_KV_BYTES_PER_TOKEN": "4096", "KV_TOKENS": "16384",
}  # fmt: skip


def addresses() -> dict[str, str]:
    """By host, as the page's table has them."""
    rows = re.findall(r"^\| (`.+?) \| ([\d., ]+?) \|", PAGE.read_text(), re.M)
    pairs = [zip(re.findall(r"`(.+?)`", names), ips.split(", "), strict=True) for names, ips in rows]
    return {name: address for row in pairs for name, address in row}


def commands() -> dict[str, list[str]]:
    """What the page has typed on each host, a line a command."""
    blocks = re.findall(r"^```sh\n# (\S+)\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    return {host: text.replace("\\\n", " ").splitlines() for host, text in blocks}


class Part:
    """A process that goes on, at one host, up to its READY."""

    def __init__(self, host: Host, line: str, directory: Path, env: dict[str, str]) -> None:
        self.host = host
        self.log = directory / "log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                host.command(line), cwd=directory, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
                text=True,
            )  # fmt: skip

    def ready(self) -> None:
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert said.startswith("READY"), f"{self.host.name} said {said!r}\n{self.log.read_text()[-3000:]}"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


class World:
    """`with World(directory) as world`: every part is READY on entry."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.net = Network()
        self.commands = commands()
        self.parts: dict[str, Part] = {}
        binaries = Path(sys.executable).parent
        self._env = {**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}"} | {
            f"PDBUS_NODE_{name}": value for name, value in ENGINE.items()
        }

    def __enter__(self) -> World:
        self.net.__enter__()
        try:
            self.hosts = {name: self.net.host(name, address) for name, address in addresses().items()}
            for name in self.hosts:
                (self.directory / name).mkdir()
            scp = self.directory / "scp"
            scp.write_text(f"#!/bin/sh\nexec cp \"$1\" \"$2\" {self.directory}/$(echo $3 | tr : /)\n")
            scp.chmod(0o755)
            for line in self.commands[OPERATOR]:
                self.run(OPERATOR, f"sh -c '{line}'")
            for name in self.commands:
                if name != OPERATOR:
                    self.begin(name)
            for part in self.parts.values():
                part.ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.net.__exit__()
        for part in self.parts.values():
            part.close()

    # --- commands -----------------------------------------------------------------------------------------------

    def begin(self, name: str) -> Part:
        """Start a host's part, or start it again where it has ended, at the address that its host has now."""
        if name in self.parts:
            self.parts[name].close()
        host = self.hosts[name]
        (line,) = self.commands[name]
        line = line.replace(addresses()[name], host.address)
        self.parts[name] = Part(host, line, self.directory / name, self._env)
        return self.parts[name]

    def run(self, name: str, line: str, wait_s: float = WAIT_S) -> subprocess.CompletedProcess[str]:
        """A command that ends, at one host."""
        env = self._env | {"PATH": f"{self.directory}:{self._env['PATH']}"}
        done = subprocess.run(
            self.hosts[name].command(line), cwd=self.directory / name, env=env, capture_output=True, text=True,
            timeout=wait_s,
        )  # fmt: skip
        return done

    # --- clients ------------------------------------------------------------------------------------------------

    def rig(self, controller: str = "controller-0", retries: int = 10) -> Rig:
        """A client at the operator's host, with the operator's key."""
        spec = SimpleNamespace(keys=self.directory / OPERATOR / "keys")
        with self.hosts[OPERATOR].inside():
            return Rig(SimpleNamespace(spec=spec), address=CONTROLLERS[controller], retries=retries)  # type: ignore[arg-type]

    def post(self, prompt: list[int], max_tokens: int) -> list[int]:
        """Through the edge, from the client's host."""
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": max_tokens}}
        request = urllib.request.Request(
            f"{EDGE}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with self.hosts[OPERATOR].inside(), urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            found: list[int] = json.loads(answer.read())["output_ids"]
        return found

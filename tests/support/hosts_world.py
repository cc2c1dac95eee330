"""The cluster of docs/hosts.md, run by the commands that stand there, on hosts that are network namespaces."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fault_rig import WAIT_S, Rig
from netns import Host, Network

PAGE = Path(__file__).parents[2] / "docs" / "hosts.md"
OPERATOR = "client"
CONTROLLERS = {"controller-0": "tcp://10.0.0.2:5560#controller-0", "controller-1": "tcp://10.0.0.3:5560#controller-1"}
NODES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
RANKS = {f"{name}/0": SimpleNamespace(spec=SimpleNamespace(kind="node")) for name in NODES}
EDGE = "http://10.0.0.8:8000"
# A prompt of 300 tokens takes 0.1 s, then a token 5 ms, and its KV cache 1.2 MB.
ENGINE = {
    "ENGINE": "sim", "MODEL": "sim", "SIM_BASE_S": "0.005", "SIM_PREFILL_S_PER_TOKEN": "0.0003", "SIM_DECODE_S": "0",
    "SIM_CONTEXT_S_PER_TOKEN": "0", "SIM_KV_BYTES_PER_TOKEN": "4096", "KV_TOKENS": "16384", "HOLD_S": "10",
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
                host.command(line), cwd=directory, env=env, text=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip

    def ready(self) -> None:
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert said.startswith("READY"), f"{self.host.name} said {said!r}\n{self.log.read_text()[-3000:]}"

    def close(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)
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
            scp.write_text(f'#!/bin/sh\nexec cp "$1" "$2" {self.directory}/$(echo $3 | tr : /)\n')
            scp.chmod(0o755)
            for line in self.commands[OPERATOR]:
                done = self.run(OPERATOR, f"sh -ec '{line}'")
                assert not done.returncode, done.stderr
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
        return subprocess.run(
            self.hosts[name].command(line), cwd=self.directory / name, env=env, capture_output=True, text=True,
            timeout=wait_s,
        )  # fmt: skip

    # --- clients ------------------------------------------------------------------------------------------------

    def rig(self, controller: str) -> Rig:
        """A client of this controller at the operator's host, with the operator's key."""
        cluster = SimpleNamespace(spec=SimpleNamespace(keys=self.directory / OPERATOR / "keys"), children=RANKS)
        with self.hosts[OPERATOR].inside():
            return Rig(cluster, address=CONTROLLERS[controller])  # type: ignore[arg-type]

    def get(self, path: str, body: object = None) -> tuple[int, bytes]:
        """What the edge says, at the client's host."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(EDGE + path, data, {"Content-Type": "application/json"})
        with self.hosts[OPERATOR].inside():
            try:
                with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
                    return answer.status, answer.read()
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, error.read()

    def generate(self, prompt: list[int], max_tokens: int) -> list[int]:
        """Through the edge."""
        status, answer = self.get("/generate", {"input_ids": prompt, "sampling_params": {"max_new_tokens": max_tokens}})
        assert status == 200, answer
        ids: list[int] = json.loads(answer)["output_ids"]
        return ids

    # --- looking ------------------------------------------------------------------------------------------------

    def between(self, one: str, other: str, way: str) -> list[tuple[Host, Host]]:
        """The ways to cut: `both`, or what the first of two hosts sends (`to`) or receives (`from`)."""
        there = self.hosts[one], self.hosts[other]
        return [pair for pair, named in ((there, "to"), (there[::-1], "from")) if way in (named, "both")]

    def around(self, name: str) -> list[tuple[Host, Host]]:
        """All ways from and to a host."""
        return [way for other in self.hosts if other != name for way in self.between(name, other, "both")]

    def linked(self, address: str) -> dict[str, int]:
        """How many connections to this address the hosts believe to have."""
        found = {name: [far for _, far in host.connections()] for name, host in self.hosts.items()}
        counts = {name: sum(far.rpartition(":")[0] == address for far in ends) for name, ends in found.items()}
        return {name: count for name, count in counts.items() if count}

    def log(self, name: str) -> Callable[[], list[str]]:
        """What a host's part logs from now on."""
        log = self.parts[name].log
        start = log.stat().st_size
        return lambda: log.read_bytes()[start:].decode().splitlines()

    @staticmethod
    def until(true: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + WAIT_S
        while not true():
            assert time.monotonic() < end, f"waited {WAIT_S:g} s until {what}"
            time.sleep(0.05)


class Load:
    """Requests at one controller, `width` of them at any time, until `end`. What waits meanwhile tells how long."""

    def __init__(self, rig: Rig, width: int = 8) -> None:
        self.rig = rig
        self.width = width
        self.rids: list[str] = []

    def until(self, true: Callable[[], Any], what: str) -> None:
        began = time.monotonic()
        self.rig.until(lambda: (self._top_up(), true())[1], what)
        print(f"{time.monotonic() - began:5.1f} s until {what}")

    def ends(self, count: int) -> None:
        """Until so many more have ended."""
        enough = len(self.rig.results) + count
        self.until(lambda: len(self.rig.results) >= enough, f"{count} more requests have ended")

    def end(self, *, undisturbed: bool = False) -> None:
        """All end, each once and rightly; `undisturbed`: and each at its first attempt."""
        self.width = 0
        self.until(lambda: not self._live(), "all have ended")
        self.rig.check()
        attempts = Counter(result.attempts for result in self.rig.results.values())
        print(f"{sum(attempts.values())} requests, by attempts: {dict(attempts)}")
        assert not undisturbed or set(attempts) == {1}

    def runs_at(self, part: str) -> None:
        self.until(lambda: (rank := self.rig.rank(part)) is not None and rank.outstanding, f"{part} has some of it")

    def _live(self) -> list[str]:
        self.rids = [rid for rid in self.rids if rid not in self.rig.results]
        return self.rids

    def _top_up(self) -> None:
        while len(self._live()) < self.width:
            self.rids.append(self.rig.begin())


def state(rig: Rig, part: str) -> str:
    """Of a rank, as the rig's controller sees it."""
    rank = rig.rank(part)
    return rank.state if rank is not None else ""

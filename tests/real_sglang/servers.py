"""Real SGLang servers on a CPU, for tests and the benchmark: started, asked, watched and taken down as process groups.

Imports neither SGLang nor pdbus. pdbus and the harness are seen by the servers as plugins installed by pip would be: by
`.dist-info` folders with their entry points.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
READY = "The server is fired up and ready to roll!"
START_S = 420.0  # on two cores that others use too; 50 s on quiet ones
ANSWER_S = 120.0
ARGUMENTS = (
    "--skip-tokenizer-init", "--device", "cpu", "--attention-backend", "torch_native", "--host", "127.0.0.1",
    "--max-total-tokens", "8192", "--max-running-requests", "16", "--disable-overlap-schedule",
    "--skip-server-warmup", "--disable-cuda-graph", "--dtype", "bfloat16",
)  # fmt: skip
PD = ("--disaggregation-transfer-backend", "mooncake")
DECODE = (*PD, "--disaggregation-mode", "decode", "--disaggregation-decode-retraction-backup", "cpu_tensor")


def prefill(bootstrap_port: int) -> tuple[str, ...]:
    return (*PD, "--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(bootstrap_port))


def until(true: Callable[[], Any], what: str, seconds: float) -> Any:
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, f"waited {seconds:g} s until {what}"
        time.sleep(0.05)
    return found


def free_port_with(*above: int) -> int:
    """A port that is free, as are those so far above it; below those that the kernel gives to whoever asks."""
    while True:
        port = random.randrange(12_000, 28_000)
        try:
            for step in (0, *above):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port + step))
        except OSError:
            continue
        return port


def plugins(folder: Path, *, pdbus: bool) -> str:
    """A PYTHONPATH by which SGLang finds the harness, and pdbus if that is wanted."""
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    found = {"harness": {"sglang.srt.plugins": {"harness": "harness:load"}}}
    if pdbus:
        found["pdbus"] = entries
    for name, groups in found.items():
        info = folder / f"{name}-0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
        lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in each.items()) for group, each in groups.items()]
        (info / "entry_points.txt").write_text("\n".join(lines))
    return os.pathsep.join([str(folder), str(Path(__file__).parent), *([str(ROOT)] if pdbus else [])])


class Server:
    """One `sglang.launch_server` and all that it starts, a process group."""

    def __init__(self, name: str, folder: Path, model: Path, arguments: Sequence[str], env: dict[str, str]) -> None:
        self.name = name
        self.port = free_port_with(*range(1, 10))
        self.log = folder / f"{name}.log"
        libraries = Path(sys.prefix) / "libraries"
        dp_size = int(arguments[arguments.index("--dp-size") + 1]) if "--dp-size" in arguments else 1
        cores = sorted(os.sched_getaffinity(0))
        environ = {
            **os.environ, "LD_LIBRARY_PATH": str(libraries), "MC_FORCE_TCP": "1", "MOONCAKE_PROTOCOL": "tcp",
            "SGLANG_HOST_IP": "127.0.0.1", "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[rank % len(cores)]) for rank in range(dp_size)), **env,
        }  # fmt: skip
        command = [
            sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(self.port),
            *ARGUMENTS, *arguments,
        ]  # fmt: skip
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command, env=environ, cwd=folder, stdout=log, stderr=log, start_new_session=True
            )

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def ready(self) -> bool:
        assert self.process.poll() is None, f"{self.name} ended at its start: {self.said()[-3000:]}"
        return READY in self.said()

    def ask(self, body: dict[str, Any], timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """What /generate answers; {"error": ...} where that is no answer."""
        url = f"http://127.0.0.1:{self.port}/generate"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                found: dict[str, Any] = json.loads(answer.read())
                return found
        except urllib.error.HTTPError as error:
            return {"error": error.read().decode(errors="replace")}
        except OSError as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def titled(self, title: str) -> dict[int, str]:
        """Its processes whose titles begin so: what comes after, by pid."""
        found = {}
        for path in Path("/proc").iterdir():
            try:
                if path.name.isdecimal() and os.getpgid(int(path.name)) == self.process.pid:
                    shown = (path / "cmdline").read_text()
                    if shown.startswith(title):
                        found[int(path.name)] = shown.removeprefix(title).strip("\0 ")
            except OSError:
                continue
        return found

    def ranks(self) -> dict[int, int]:
        """The pids of its schedulers by dp_rank."""
        return {int(shown.partition("DP")[2] or 0): pid for pid, shown in self.titled("sglang::scheduler").items()}

    def stop(self) -> None:
        """All of it, at once; nothing is left when this returns."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait(30)


@contextmanager
def fleet(folder: Path, model: Path, servers: dict[str, Sequence[str]], **env: str) -> Iterator[dict[str, Server]]:
    """Servers by name, all ready; each with its own arguments."""
    started: dict[str, Server] = {}
    try:
        for name, arguments in servers.items():
            started[name] = Server(name, folder, model, arguments, env)
        for name, server in started.items():
            until(server.ready, f"{name} is up", START_S)
        yield started
    finally:
        for server in started.values():
            server.stop()


class Pair:
    """A prefill and a decode server, asked as SGLang's router does: both at once, with one bootstrap room."""

    def __init__(self, prefill: Server, decode: Server, bootstrap_port: int) -> None:
        self.prefill, self.decode = prefill, decode
        self._bootstrap_port = bootstrap_port
        self._rooms = random.Random(7)

    def body(self, ids: Sequence[int], **also: Any) -> dict[str, Any]:
        """What both are asked."""
        return {
            "input_ids": list(ids), "bootstrap_host": "127.0.0.1", "bootstrap_port": self._bootstrap_port,
            "bootstrap_room": self._rooms.getrandbits(62), "sampling_params": greedy(8), **also,
        }  # fmt: skip

    def ask(self, ids: Sequence[int], timeout_s: float = ANSWER_S) -> tuple[dict[str, Any], dict[str, Any]]:
        """What prefill and decode answer."""
        body = self.body(ids)
        with ThreadPoolExecutor(1) as pool:
            prefilled = pool.submit(self.prefill.ask, body, timeout_s)
            decoded = self.decode.ask(body, timeout_s)
            return prefilled.result(), decoded

    def ask_all(self, prompts: Sequence[Sequence[int]], at_once: int = 4, timeout_s: float = ANSWER_S) -> list[Any]:
        """Of each prompt what `ask` gives."""
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda ids: self.ask(ids, timeout_s), prompts))


def greedy(tokens: int) -> dict[str, Any]:
    return {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}

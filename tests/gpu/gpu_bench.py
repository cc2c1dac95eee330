"""The machine as rows use it: models, devices, one cluster at a time, which rows in a row may share, requests to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import gpu_look
import msgspec
from gpu_checks import Answer
from real_engines import figure, processes_of, until
from tokenizers import Tokenizer

from bus.runtime.ports import free_ports
from pdbus.client import Client
from pdbus.launcher import Cluster, ClusterSpec

TOP = 3
TEXT = "A ship sails over the wide sea at night, and nobody knows where it goes. "
ENV = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "UCX_LOG_LEVEL": "info"}
# An engine core computes itself, as on one GPU: most of a start on a CPU is the import by each process.
CPU_ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
CPU_ARGUMENTS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024")
CPU_CONTROLLER = ("--lease-s", "90", "--hang-s", "90")
GPU_ARGUMENTS = ("--max-model-len", "8192")
SHARE = 0.45  # of a device that two engines have


class Bench:
    """`with Bench(...) as bench:`; at its end nothing that it started is left."""

    def __init__(
        self, gpus: Sequence[gpu_look.Gpu], models: Mapping[str, Path], full: bool, out: Path, limit_s: float = 300.0
    ) -> None:
        self.gpus = list(gpus)
        self.models = dict(models)
        self.full = full
        self.start_s = 0.9 * limit_s
        self.out = out
        self.logs = out  # of the cluster that is there
        self.row = 0
        self.host = ""  # of this machine, where another one reaches it
        self.cluster: Cluster | None = None
        self.used_mib: dict[str, float] = {}  # by device, before the cluster's engines were there
        self._name = ""
        self._stack = ExitStack()
        self._thread = ThreadPoolExecutor(1)
        self._alone: Future[dict[str, Any]] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._end_alone()
        self._thread.shutdown()

    @property
    def gpu(self) -> bool:
        return bool(self.gpus)

    @property
    def tolerance(self) -> float:
        """By which log probabilities differ where sums are made in another order."""
        return 0.1 if self.gpu else 1e-3

    @property
    def arguments(self) -> tuple[str, ...]:
        return GPU_ARGUMENTS if self.gpu else CPU_ARGUMENTS

    @property
    def env(self) -> dict[str, str]:
        return ENV if self.gpu else ENV | CPU_ENV

    @property
    def longest(self) -> int:
        return 8000 if self.gpu else 900

    # --- clusters -------------------------------------------------------------------------------------------------

    def start(self, name: str, model: str = "dense", **spec: Any) -> Cluster:
        """The cluster of that name: the one that is there, or a new one in its place."""
        if self.cluster is not None and self._name == name:
            return self.cluster
        self.close()
        self.logs = self.out / "logs" / f"row-{self.row}-{name}"
        self.used_mib = {gpu.number: gpu_look.used_mib(gpu.number) for gpu in self.gpus}
        made: dict[str, Any] = {
            "engine": "vllm", "model": str(self.models[model]), "log_dir": str(self.logs),
            "start_timeout_s": self.start_s,
            "stop_grace_s": 30.0, "env": self.env, "prefill_method": "cache_aware", "decode_method": "total_requests",
            "metrics_port": free_ports("127.0.0.1", 12), "controller_args": () if self.gpu else CPU_CONTROLLER,
            "engine_args": self.arguments,
        }  # fmt: skip
        self.cluster = self._stack.enter_context(Cluster(ClusterSpec(**made | spec)))
        self._name = name
        return self.cluster

    def pair(self) -> Cluster:
        """One prefill and one decode rank, on two devices or on one."""
        if len(self.gpus) > 1:
            return self.start("pair", prefill=1, decode=1, gpus=("0", "1"))
        if self.gpus:
            half = (*self.arguments, "--gpu-memory-utilization", str(SHARE))
            return self.start(
                "pair", prefill=1, decode=1, gpus=("0", "0"), engine_args=half, node_args=("--wait-s", "240")
            )
        return self.start("pair", prefill=1, decode=1)

    @property
    def decode_on(self) -> str:
        """The device of the pair's decode engine."""
        return "1" if len(self.gpus) > 1 else "0"

    def close(self) -> list[int]:
        """Take the cluster down. The processes of its engines that outlived it."""
        engines = self.engines() if self.cluster is not None else []
        self._stack.close()
        self.cluster, self._name = None, ""
        return [pid for pid in engines if gpu_look.lives(pid)]

    def engines(self) -> list[int]:
        assert self.cluster is not None
        return [pid for child in self.cluster.started for pid in processes_of(child.pid)]

    def log(self, part: str) -> str:
        """All of a part's log so far."""
        assert self.cluster is not None
        return self.cluster.children[part].log.read_text(encoding="utf-8", errors="replace")

    def figure(self, part: str, name: str, **labels: str) -> float:
        assert self.cluster is not None
        return figure(self.cluster, part, name, **labels)

    def load(self, role: str) -> dict[str, Any]:
        """The first such rank's, as `pdbus status --json` has it."""
        assert self.cluster is not None
        with self.cluster.client() as client:
            return until(lambda: _load(client, role), f"a {role} rank says its load", 60)  # type: ignore[no-any-return]

    # --- requests -------------------------------------------------------------------------------------------------

    @cached_property
    def _tokenizers(self) -> dict[str, Any]:
        return {name: Tokenizer.from_file(str(path / "tokenizer.json")) for name, path in self.models.items()}

    def ids(self, count: int, model: str = "dense", start: str = "") -> list[int]:
        """So many tokens of a text that begins with `start`."""
        found = list(self._tokenizers[model].encode(start + TEXT * (count // 8 + 1), add_special_tokens=False).ids)
        assert len(found) >= count
        return found[:count]

    def ask(self, client: Client, ids: Sequence[int], **params: Any) -> Any:
        """A stream of it; without sampling parameters the likeliest tokens, sixteen of them."""
        return client.generate_tokens(ids, **{"max_tokens": 16, "logprobs": TOP, "ignore_eos": True, **params})

    # --- one engine alone -----------------------------------------------------------------------------------------

    def begin_alone(self, cases: Mapping[str, Mapping[str, Any]]) -> None:
        """On a CPU it may load beside others; on a GPU memory is measured, and it is waited for."""
        if self._alone is None:
            if self.gpu:
                self.close()
            self._alone = self._thread.submit(self._run_alone, dict(cases))
            if self.gpu:
                self._alone.result()

    def alone(self) -> tuple[dict[str, Any], dict[str, Answer]]:
        """What `vllm serve` decides, and what one engine answers."""
        assert self._alone is not None
        said = self._alone.result()
        return said["facts"], {name: _answer(each) for name, each in said["answers"].items()}

    def _run_alone(self, cases: dict[str, Any]) -> dict[str, Any]:
        folder = self.out / "logs" / "alone"
        folder.mkdir(parents=True, exist_ok=True)
        arguments = [*self.arguments, *(() if self.gpu else ("--block-size", "32"))]
        asked = {"model": str(self.models["dense"]), "arguments": arguments, "cases": cases}
        (folder / "asked.json").write_text(json.dumps(asked))
        program = Path(__file__).parent / "gpu_alone.py"
        command = [sys.executable, "-P", str(program), str(folder / "asked.json"), str(folder / "said.json")]
        env = {**os.environ, **self.env, **({"CUDA_VISIBLE_DEVICES": "0"} if self.gpu else {})}
        with (folder / "alone.log").open("w") as log:
            process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        self._process = process
        try:
            code = process.wait(self.start_s)
        finally:
            self._end_alone()
        if code:
            raise RuntimeError(f"one engine alone ended with {code}: {folder / 'alone.log'}")
        return json.loads((folder / "said.json").read_text())  # type: ignore[no-any-return]

    def _end_alone(self) -> None:
        """With its engine core, which would outlive it."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def answer(stream: Any) -> Answer:
    """Of a stream, once it has ended."""
    result = stream.result
    top = tuple(dict(each.top) for each in result.logprobs)
    return Answer(tuple(result.ids), tuple(each.logprob for each in result.logprobs), top, result.code)


def timed(stream: Any) -> float:
    """Seconds from now to its end; it must end well."""
    began = time.monotonic()
    stream.result.raise_if_failed()
    return time.monotonic() - began


def _answer(said: Mapping[str, Any]) -> Answer:
    top = tuple({int(token): logprob for token, logprob in each.items()} for each in said["top"])
    return Answer(tuple(said["ids"]), tuple(said["logprobs"]), top, "ok", said["text"])


def _load(client: Client, role: str) -> dict[str, Any] | None:
    loads = [rank.load for rank in client.status().ranks if rank.role == role and rank.load is not None]
    return msgspec.structs.asdict(loads[0]) if loads else None

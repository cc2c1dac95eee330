"""What the tests with real vLLM share: the prompts, what one engine alone says to them, clusters, looks at engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bus.runtime.ports import free_ports
from nodes.vllm.reaper import MARK
from nodes.vllm.smollm2 import hugging_face
from pdbus.client import Client, Result
from pdbus.launcher import Cluster, ClusterSpec
from pdbus.launcher.restarts import RestartPolicy
from pdbus.launcher.supervisor import Supervisor
from pdbus.text.models import text_for

PREFILL, DECODE = "prefill-0/0", "decode-0/0"
BLOCK = 32
LEASE_S = 15
BLOCKS = 48  # of KV memory: so few that those of a lapsed lease are soon used again
ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
ENGINE = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--num-gpu-blocks-override", str(BLOCKS))
WAIT_S = 300.0
START_S = 150.0  # a start takes 25 s of a quiet machine
TOP = 2  # likeliest tokens that each answer tells


def until(true: Callable[[], Any], what: str, seconds: float = WAIT_S) -> Any:
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, f"waited {seconds:g} s until {what}"
        time.sleep(0.05)
    return found


# --- the prompts, and what one engine alone says ----------------------------------------------------------------------


def cases() -> list[dict[str, Any]]:
    tokens = text_for("smollm2")
    texts = [
        "What is the capital of France?",
        "Count from one to ten in words, one a line.",
        "Tell me of the sea. " * 12,
    ]
    greedy = [tokens.chat([{"role": "user", "content": text}]) for text in texts]
    long = tokens.encode("A ship sails over the wide sea at night, and nobody knows where it goes. " * 30)
    greedy += [long[:BLOCK], long[: 2 * BLOCK], long[: BLOCK - 1], long[: BLOCK + 1], long[:400]]
    stop = list(tokens.eos_ids)
    common: dict[str, Any] = {"max_tokens": 16, "stop_token_ids": stop, "logprobs": TOP}
    seeded = common | {"temperature": 0.8, "top_p": 0.95, "top_k": 40, "seed": 7}
    found = [{"ids": ids, "params": common | {"temperature": 0.0}} for ids in greedy]
    return [*found, {"ids": greedy[0], "params": seeded}]


class Alone(NamedTuple):
    """A case, and what vLLM answers when nothing of ours is in between."""

    case: dict[str, Any]
    ids: list[int]
    logprobs: list[float]

    def equals(self, result: Result) -> None:
        assert list(result.ids) == self.ids
        near(result, self.logprobs)


def near(result: Result, logprobs: Sequence[float]) -> None:
    """Whether the tokens of `result` are as likely; sums are made in another order in other batches."""
    assert len(result.logprobs) == len(result.ids) == len(logprobs)
    for said, expected in zip(result.logprobs, logprobs, strict=True):
        assert abs(said.logprob - expected) < 1e-3
        assert len(said.top) == TOP


def answers_alone(folder: Path) -> list[Alone]:
    asked = cases()
    return [Alone(case, *said) for case, said in zip(asked, said_alone(folder, asked), strict=True)]


def said_alone(folder: Path, asked: list[dict[str, Any]]) -> list[Any]:
    """What `alone.py` answers to these cases."""
    engine = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "block_size": BLOCK}
    (folder / "cases").write_text(json.dumps({"model": str(hugging_face()), "engine": engine, "cases": asked}))
    command = [sys.executable, str(Path(__file__).parent / "alone.py"), str(folder / "cases"), str(folder / "answers")]
    env = {**os.environ, **ENV, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}  # all in one process
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=WAIT_S + 6 * len(asked))
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[Any] = json.loads((folder / "answers").read_text())
    return found


@contextmanager
def cluster_of(ranks: int, logs: Path, lease_s: int = LEASE_S, **changes: Any) -> Iterator[Cluster]:
    """So many prefill and decode engines, as ranks of one instance each; `changes` of the spec. None of their processes
    is left at its end."""
    settings: dict[str, Any] = {
        "prefill": ranks,
        "decode": ranks,
        "engine": "vllm",
        "model": "smollm2",
        "prefill_method": "cache_aware",
        "metrics_port": free_ports("127.0.0.1", 2 + 2 * ranks),
        "controller_args": ("--lease-s", "90", "--hang-s", "300"),  # a step has taken 92 s of a busy machine
        "node_args": ("--hold-s", str(lease_s)),
        "engine_args": ENGINE,
        "env": ENV,
        "log_dir": str(logs),
        "start_timeout_s": WAIT_S,
        "stop_grace_s": 60.0,
    }
    with Cluster(ClusterSpec(**(settings | changes))) as made:
        yield made
        engines = [pid for child in made.started for pid in processes_of(child.pid)]
    until(lambda: not any(map(lives, engines)), "no process of an engine is left", 30)


def start_again(cluster: Cluster, part: str) -> None:
    """What `pdbus up` does about a part that has ended. A start that hangs is ended and begun again: an engine core was
    seen to wait for its worker for as long as anybody looked, once in some hundred starts."""
    ended = cluster.children[part]
    supervisor = Supervisor(cluster, RestartPolicy(start_timeout_s=START_S), lambda line: print(line, file=sys.stderr))

    def back() -> bool:
        supervisor.turn()
        return cluster.children[part] is not ended and cluster.children[part].ready

    until(back, f"{part} is back", 3 * START_S)


# --- looking at vLLM --------------------------------------------------------------------------------------------------


def figure(cluster: Cluster, part: str, name: str, **labels: str) -> float:
    """A metric of a node, its own or vLLM's."""
    port = cluster.children[part].spec.metrics_port
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.partition("{")[0].partition(" ")[0] == name and all(each in line for each in wanted)
    )


def processes_of(node: int) -> list[int]:
    """The engine's processes of a node: those that carry the mark which its children do."""
    marks = set()
    found: dict[int, bytes] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                environ = (entry / "environ").read_bytes().split(b"\0")
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            mark = next((each for each in environ if each.startswith(f"{MARK}=".encode())), b"")
            if mark:
                found[int(entry.name)] = mark
                if parent == node:
                    marks.add(mark)
    return [pid for pid, mark in found.items() if mark in marks]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def idle(cluster: Cluster) -> bool:
    """vLLM itself has nothing left."""
    parts = [part for part in cluster.children if part.startswith(("prefill", "decode"))]
    return not any(
        figure(cluster, part, f"vllm:num_requests_{state}") for part in parts for state in ("running", "waiting")
    )


def ask(client: Client, case: dict[str, Any], **changes: Any) -> Any:
    params = {name: value for name, value in case["params"].items() if name != "stop_token_ids"}
    return client.generate_tokens(case["ids"], **{**params, **changes})

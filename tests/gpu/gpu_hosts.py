"""Row 10: two hosts. The first has broker, controller and prefill, and asks; the second command has decode on the other
host, until the first has ended. Both start with empty compilation caches, as a new machine does."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from os import environ
from pathlib import Path

import gpu_checks as checks
import gpu_look
from gpu_bench import CPU_CONTROLLER, Bench, answer
from gpu_checks import Check
from gpu_rows import Row, cases
from real_engines import until

from pdbus.client import Client

BUS, CONTROLLER = 5550, 5560
OTHER_HOST_S = 240
GONE_S = 20.0
COLD = ("TRITON_CACHE_DIR", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")


@contextmanager
def part(name: str, bench: Bench, *arguments: str) -> Iterator[Path]:
    """A process of ours with caches of its own, ended at the end; its log."""
    bench.logs.mkdir(parents=True, exist_ok=True)
    log = bench.logs / f"{name}.log"
    cold = {variable: str(bench.logs / f"{name}-{variable.lower()}") for variable in COLD}
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", *arguments], stdout=file, stderr=file, stdin=subprocess.DEVNULL,
            env={**environ, **bench.env, **cold},
        )  # fmt: skip
    try:
        yield log
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)


def node(role: str, bench: Bench, host: str, first: str) -> tuple[str, ...]:
    return (
        f"nodes.{role}", "--engine", "vllm", "--model", str(bench.models["dense"]), "--instance", role,
        "--bus", f"tcp://{first}:{BUS}", "--controller", f"tcp://{first}:{CONTROLLER}", "--data", f"tcp://{host}",
        "--", *bench.arguments,
    )  # fmt: skip


def two_hosts(bench: Bench) -> list[Check]:
    host, states = bench.host, set()
    bench.close()
    bench.logs = bench.out / "logs" / "row-10"
    limits = () if bench.gpu else CPU_CONTROLLER  # on a GPU as they are
    serve = (
        "controller",
        "--with-broker",
        "--bus",
        f"tcp://{host}:{BUS}",
        "--controller",
        f"tcp://{host}:{CONTROLLER}",
    )
    with part("controller", bench, *serve, *limits), part("prefill", bench, *node("prefill", bench, host, host)) as log:
        print(f"    on the other host: make test-gpu MODEL=DIR HOST=ITS_ADDRESS JOIN={host}", flush=True)
        with Client(f"tcp://{host}:{CONTROLLER}", retries=0, connect_timeout_s=OTHER_HOST_S) as client:

            def there() -> bool:
                return {"prefill", "decode"} <= {rank.role for rank in client.status().ranks if rank.state == "ready"}

            until(there, "a prefill rank here and a decode rank on the other host are ready", OTHER_HOST_S)
            hosts = {rank.endpoint.partition("://")[2].rpartition(":")[0] for rank in client.status().ranks}
            codes = {}
            kinds = {**cases(bench), "a long prompt": {"ids": bench.ids(bench.longest), "params": {"max_tokens": 16}}}
            for kind, each in kinds.items():
                stream = bench.ask(client, each["ids"], **each["params"])
                answer(stream)
                codes[kind] = stream.result.code
                states |= {rank.state for rank in client.status().ranks}
        said = log.read_text(errors="replace")
    return checks.first_requests(codes, states, hosts, said, gpu_look.has_rdma())


def join(model: str, host: str, first: str, out: Path) -> int:
    """The second command: decode, until no controller has answered for GONE_S."""
    if not model or not host:
        print("test-gpu: error: JOIN wants MODEL=DIR and HOST=ADDRESS (of this host) too", file=sys.stderr)
        return 2
    with Bench(gpu_look.gpus(), {"dense": Path(model).resolve()}, False, out.resolve()) as bench:
        bench.logs = bench.out / "logs" / "row-10-joined"
        with part("decode", bench, *node("decode", bench, host, first)) as log:
            print(f"==> decode at {host} for {first}, until that ends; log: {log}", flush=True)
            heard = time.monotonic() + OTHER_HOST_S
            while time.monotonic() < heard:
                try:
                    with Client(f"tcp://{first}:{CONTROLLER}", connect_timeout_s=5.0) as client:
                        client.status()
                        heard = max(heard, time.monotonic()) if not seen(client) else time.monotonic() + GONE_S
                except Exception:
                    continue
                time.sleep(1.0)
    return 0


def seen(client: Client) -> bool:
    """Whether the first host's rank is there: from then on silence means that its row has ended."""
    return any(rank.role == "prefill" for rank in client.status().ranks)


ROW = Row(10, "two hosts: first requests with cold caches, RDMA", two_hosts, hosts=2)

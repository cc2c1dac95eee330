"""The rows: what each runs on the machine at hand, in the form for the least machine that can decide it or as it stands
(`full`), and the check of what was seen. A row looks and asks; what must hold is in `gpu_checks.py`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gpu_checks as checks
import gpu_look
import msgspec
from gpu_bench import SHARE, Bench, answer, timed
from gpu_checks import NEEDS_GPU, Check
from real_engines import lives, processes_of, until

from bus.endpoints import BusAddress
from bus.errors import StartError
from bus.runtime.sockets import Sockets
from pdbus.launcher import Cluster

PREFILL, DECODE, UNIFIED = "prefill-0/0", "decode-0/0", "unified-0/0"
MIN_P = 0.1
SCHEMA = '{"enum": ["red", "green", "blue"]}'
SAMPLED = ("min-p", "seed")
FREE_S = 5.0  # a restarted engine imports for longer before it asks for memory
GAP_S = 360.0


class Row(NamedTuple):
    """`gpus`: how many its least form needs where there are any; `cpu`: whether a CPU decides it too; `model`: dense,
    hybrid or moe; `hosts`: how many."""

    number: int
    title: str
    run: Callable[[Bench], list[Check]]
    gpus: int = 1
    cpu: bool = True
    model: str = "dense"
    hosts: int = 1


# --- 1 to 4 -----------------------------------------------------------------------------------------------------------


def cases(bench: Bench) -> dict[str, dict[str, Any]]:
    """A prompt and sampling parameters each, under the name of what is tried."""
    common: dict[str, Any] = {"max_tokens": 16, "logprobs": 3, "temperature": 0.0, "ignore_eos": True}
    ids = bench.ids(75)
    return {
        "greedy": {"ids": ids, "params": common},
        "a prompt of whole blocks": {"ids": bench.ids(64), "params": common},
        "presence penalty": {"ids": ids, "params": common | {"presence_penalty": 1.0}},
        "JSON schema": {"ids": ids, "params": common | {"json_schema": SCHEMA, "ignore_eos": False}},
        "seed": {"ids": ids, "params": common | {"temperature": 1.0, "seed": 7}},
        "min-p": {"ids": ids, "params": common | {"temperature": 1.0, "min_p": MIN_P, "seed": 11}},
    }


def figures(bench: Bench) -> list[Check]:
    """Of a unified rank; on a CPU, where starts are dear, of the pair's prefill rank."""
    bench.begin_alone(cases(bench))
    if bench.gpu:
        bench.start("unified", unified=1, gpus=("0",))
    else:
        bench.pair()
    serve, _ = bench.alone()
    role, part = ("unified", UNIFIED) if bench.gpu else ("prefill", PREFILL)
    return checks.figures(bench.load(role), bench.log(part), serve, bench.gpu)


def shared_device(bench: Bench) -> list[Check]:
    tries = []
    for number in range(5 if bench.full else 2):
        bench.close()
        arguments = (*bench.arguments, "--gpu-memory-utilization", str(SHARE))
        codes: dict[str, int | None] = {PREFILL: None, DECODE: None}
        try:
            bench.start(f"shared-{number}", prefill=1, decode=1, gpus=("0", "0"), engine_args=arguments,
                        node_args=("--wait-s", "240"))  # fmt: skip
        except StartError:
            codes = dict.fromkeys(codes, 3)  # one of them, and with it the cluster: the logs say which
        logs = {part: (bench.logs / f"{part.replace('/', '-')}.log") for part in codes}
        tries.append({part: (codes[part], path.read_text() if path.exists() else "") for part, path in logs.items()})
    bench.close()
    return checks.shared_device(tries)


def same_answers(bench: Bench) -> list[Check]:
    bench.begin_alone(cases(bench))
    _, alone = bench.alone()
    with bench.pair().client(retries=20) as client:
        pair = {name: answer(bench.ask(client, each["ids"], **each["params"])) for name, each in cases(bench).items()}
    found = checks.same_answers(alone, pair, bench.tolerance)
    wanted = alone["JSON schema"].text.strip()
    return [*found, checks.kept_to("min-p keeps to what is likely", pair["min-p"], MIN_P),
            Check("the grammar's text", wanted.strip('"') in ("red", "green", "blue"), wanted)]  # fmt: skip


def transfer(bench: Bench) -> list[Check]:
    by, local = "vllm:prompt_tokens_by_source_total", {"source": "local_compute"}
    fetch = "pdbus_node_kv_fetch_seconds_sum"
    with bench.pair().client(retries=20) as client:
        computed, seconds = bench.figure(DECODE, by, **local), bench.figure(DECODE, fetch)
        ids = bench.ids(bench.longest, start="Once more. ")
        bench.ask(client, ids, max_tokens=4).result.raise_if_failed()
        until(lambda: bench.figure(DECODE, fetch) > seconds, "the node counts the fetch", 60)
        until(lambda: checks.transports(bench.log(PREFILL) + bench.log(DECODE)), "UCX says what it uses", 60)
    return checks.transfer(
        bench.log(PREFILL) + bench.log(DECODE), len(ids) * kv_bytes(bench.models["dense"]),
        bench.figure(DECODE, fetch) - seconds, bench.figure(DECODE, by, **local) - computed, bench.gpu,
    )  # fmt: skip


def kv_bytes(folder: Path) -> int:
    """Of a token in the KV cache of a model with full attention."""
    config = msgspec.json.decode((folder / "config.json").read_bytes())
    config = config.get("text_config", config)
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    number = 4 if "32" in str(config.get("torch_dtype", config.get("dtype"))) else 2
    return 2 * int(config["num_hidden_layers"]) * int(heads) * int(size) * number


# --- 5 and 6 ----------------------------------------------------------------------------------------------------------


def prefixes(bench: Bench) -> list[Check]:
    half = len(bench.gpus) // 2
    if half > 1:
        names = [gpu.number for gpu in bench.gpus[: 2 * half]]
        cluster = bench.start("many", prefill=half, decode=half, gpus=tuple(names))
    else:
        cluster = bench.pair()
    chats, turns = (64, 4) if bench.full and bench.gpu else (3, 3)
    seen: list[checks.Turn] = []
    with cluster.client(retries=20) as client, Sockets() as sockets:
        events = sockets.sub(BusAddress(cluster.bus).subscribe, (b"kv/",))
        block = next(rank.block_tokens for rank in client.status().ranks if rank.role == "prefill")
        prompts = [bench.ids(5 * block // 2, start=f"Chat {number} of the sea. ") for number in range(chats)]
        before = [0] * chats
        for turn in range(turns):
            if turn and bench.full and bench.gpu:
                time.sleep(GAP_S)  # the row asks for it: what is remembered must outlast what is expected
            streams = [bench.ask(client, prompt) for prompt in prompts]
            for chat, stream in enumerate(streams):
                result = stream.result
                result.raise_if_failed()
                rank = result.prefill.dp_rank
                seen.append(checks.Turn(chat, turn, rank, before[chat], result.cached_tokens))
                before[chat] = len(prompts[chat])
                prompts[chat] = [*prompts[chat], *result.ids, *bench.ids(2 * block)]
        told = 0
        while events.poll(500):
            events.recv_multipart()
            told += 1
        counts = client.status().counts
    return [*checks.hits(seen, block, told, list(counts)), _devices(bench, cluster)]


def _devices(bench: Bench, cluster: Cluster) -> Check:
    what = "each engine is on its own devices"
    if not bench.gpu:
        return Check(what, None, NEEDS_GPU)
    by_number = {gpu.number: gpu.uuid for gpu in bench.gpus}
    nodes = [child for child in cluster.children.values() if child.spec.env.get("CUDA_VISIBLE_DEVICES")]
    wanted = {
        child.name: [by_number[index] for index in child.spec.env["CUDA_VISIBLE_DEVICES"].split(",")] for child in nodes
    }
    used = {child.name: gpu_look.used_by({child.pid, *processes_of(child.pid)}) for child in nodes}
    if not any(used.values()):
        return Check(what, None, "not run: nvidia-smi names none of our processes, as in a container")
    return checks.devices(wanted, used)


def tensor_parallel(bench: Bench) -> list[Check]:
    two = (*bench.arguments, "--tensor-parallel-size", "2")
    bench.begin_alone(cases(bench))
    _, alone = bench.alone()
    forms: list[tuple[str, dict[str, Any], dict[str, int]]]
    if len(bench.gpus) == 2:
        forms = [("unified", {"unified": 1, "gpus": ("0,1",)}, {UNIFIED: 2})]
    elif len(bench.gpus) == 3:  # prefill with one, decode with two
        spec = {"prefill": 1, "decode": 1, "gpus": ("0", "1,2"), "engine_args": (),
                "prefill_args": ("--", *bench.arguments), "decode_args": ("--", *two)}  # fmt: skip
        forms = [("one and two", spec, {DECODE: 2})]
    elif bench.full and len(bench.gpus) >= 6:
        forms = [("two each", {"prefill": 2, "decode": 1, "gpus": ("0,1", "2,3", "4,5")},
                  {PREFILL: 2, "prefill-0/1": 2, DECODE: 2})]  # fmt: skip
        if len(bench.gpus) >= 8:
            four = (*bench.arguments, "--tensor-parallel-size", "4")
            spec = {"prefill": 1, "decode": 1, "gpus": ("0,1", "4,5,6,7"), "engine_args": (),
                    "prefill_args": ("--", *two), "decode_args": ("--", *four)}  # fmt: skip
            forms.append(("two and four", spec, {PREFILL: 2, DECODE: 4}))
    else:
        forms = [("two each", {"prefill": 1, "decode": 1, "gpus": ("0,1", "2,3")}, {PREFILL: 2, DECODE: 2})]
    found = []
    for name, spec, wanted in forms:
        made: dict[str, Any] = {"engine_args": two} | spec
        cluster = bench.start(f"tensor parallel, {name}", **made)
        with cluster.client(retries=20) as client:
            pair = {each: answer(bench.ask(client, it["ids"], **it["params"])) for each, it in cases(bench).items()}
        same = [check for check in checks.same_answers(alone, pair, bench.tolerance) if check.what not in SAMPLED]
        workers = {
            part: sum("Worker" in title(pid) for pid in processes_of(child.pid))
            for part, child in cluster.children.items()
        }
        found += [Check(f"{name}: {each.what}", each.ok, each.found)
                  for each in checks.parallel(same, workers, wanted, bench.close())]  # fmt: skip
    return found


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        return ""


# --- 7 and 8 ----------------------------------------------------------------------------------------------------------


def kills(bench: Bench) -> list[Check]:
    whats = ["engine core"] if not bench.gpu else ["engine core", "node"] + ["worker"] * bench.full
    return checks.after_kills([_kill(bench, what) for what in whats])


def _kill(bench: Bench, what: str) -> checks.Kill:
    """Of the decode rank, with three requests running; they go on once it is back."""
    cluster = bench.pair()
    prompts = [bench.ids(60, start=f"Kill {number}. ") for number in range(3)]
    params: dict[str, Any] = {"max_tokens": 64}
    with cluster.client(retries=10_000) as client:
        whole = [answer(bench.ask(client, ids, **params)) for ids in prompts]
        streams = [bench.ask(client, ids, **params) for ids in prompts]
        for stream in streams:
            next(iter(stream._pieces()))
        child = cluster.children[DECODE]
        engine = processes_of(child.pid)
        if what == "node":
            victim = child.pid
        else:
            wanted = "Worker" if what == "worker" else "EngineCore"
            victim = next((pid for pid in engine if wanted in title(pid)), engine[-1])
        os.kill(victim, signal.SIGKILL)
        child.wait(120)
        code = child.returncode
        end = time.monotonic() + 30.0
        while any(map(lives, engine)) and time.monotonic() < end:
            time.sleep(0.05)
        left = sum(map(lives, engine))
        used = _used_mib(bench)
        starts: list[str] = []
        back = False
        while not back and len(starts) < 2:
            try:
                cluster.restart(DECODE)
                back = True
            except StartError as error:
                starts.append(str(error))
        answers = [answer(stream) for stream in streams] if back else []
    found = [checks.same_answer(f"request {number}", one, other, bench.tolerance)
             for number, (one, other) in enumerate(zip(whole, answers, strict=False))]  # fmt: skip
    return checks.Kill(what, code, left, tuple(starts), back, used, tuple(found))


def _used_mib(bench: Bench) -> tuple[float, float] | None:
    """Before the engine was there, and now that it has ended, once that is as much, or after FREE_S."""
    if not bench.gpu:
        return None
    number, end = bench.decode_on, time.monotonic() + FREE_S
    before = bench.used_mib[number]
    if len(bench.gpus) == 1:  # where prefill's half stays
        before += SHARE * bench.gpus[0].memory_mib
    while (used := gpu_look.used_mib(number)) > before + checks.SLACK_MIB and time.monotonic() < end:
        time.sleep(0.1)
    return before, used


def pressure(bench: Bench) -> list[Check]:
    if not bench.gpu:
        bench.begin_alone(cases(bench))  # loads meanwhile
    blocks = 2048 if bench.gpu else 80
    arguments = (*bench.arguments, "--num-gpu-blocks-override", str(blocks))
    gpus = ("0",) if bench.gpu else ()
    cluster = bench.start("hybrid", "hybrid", unified=1, gpus=gpus, engine_args=arguments)
    load = bench.load("unified")
    prompt, output = (1500, 300) if bench.gpu else (100, 100)
    count = max(8, load["kv_capacity"] * 3 // 2 // (prompt + output))
    prompts = [bench.ids(prompt, "hybrid", f"Number {number}. ") for number in range(count)]
    with cluster.client(retries=20) as client:
        first = [answer(bench.ask(client, ids, max_tokens=output)) for ids in prompts[:4]]
        streams = [bench.ask(client, ids, max_tokens=output) for ids in prompts]
        answers = [answer(stream) for stream in streams]
        until(lambda: not checks.held(bench.load("unified")), "nothing is held", 60)
    found = [checks.same_answer(f"request {number}", one, other, bench.tolerance)
             for number, (one, other) in enumerate(zip(first, answers, strict=False))]  # fmt: skip
    found += [Check(f"request {number}", len(each.ids) == output, f"{each.code}, {len(each.ids)} tokens")
              for number, each in enumerate(answers)]  # fmt: skip
    preempted = bench.figure(UNIFIED, "vllm:num_preemptions_total")
    asked = count * (prompt + output)
    return checks.pressure(load, bench.log(UNIFIED), asked, found, preempted, bench.load("unified"))


# --- 9 ----------------------------------------------------------------------------------------------------------------


def experts(bench: Bench) -> list[Check]:
    arguments = (*bench.arguments, "--enable-expert-parallel")
    spec: dict[str, Any] = {"unified": 2, "ranks_per_process": 2, "gpus": ("0,1",)}
    role, part = "unified", "unified-0/0-1"
    if bench.full and len(bench.gpus) >= 8:
        spec = {"prefill": 4, "decode": 4, "ranks_per_process": 4, "gpus": ("0,1,2,3", "4,5,6,7")}
        role, part = "decode", "decode-0/0-3"
    cluster = bench.start("experts", "moe", engine_args=arguments, **spec)
    states: dict[int, set[str]] = {}

    def look(client: Any) -> dict[int, str]:
        now = {rank.dp_rank: rank.state for rank in client.status().ranks if rank.role == role}
        for rank, state in now.items():
            states.setdefault(rank, set()).add(state)
        return now

    with cluster.client(retries=20) as client:
        look(client)
        ids = bench.ids(60, "moe")
        timed(bench.ask(client, ids, routed_dp_rank=1))  # the first of all
        alone_s = timed(bench.ask(client, ids, routed_dp_rank=1))
        streams = [
            bench.ask(client, bench.ids(60, "moe", f"{number}. "), routed_dp_rank=0, max_tokens=100)
            for number in range(6)
        ]
        for stream in streams:
            next(iter(stream._pieces()))
        idle_s = timed(bench.ask(client, ids, routed_dp_rank=1))
        look(client)
        codes = [stream.result.code for stream in streams]
        look(client)
        seen = {rank: set(found) for rank, found in states.items()}
        child = cluster.children[part]
        cores = [pid for pid in processes_of(child.pid) if "EngineCore" in title(pid)]
        os.kill(cores[-1], signal.SIGKILL)
        child.wait(60)

        def gone() -> list[int]:
            return [rank for rank, state in look(client).items() if state not in ("ready", "draining")]

        until(lambda: child.returncode is not None and gone(), "the node has left", 60)
        time_up = time.monotonic() + 10.0
        while len(left := gone()) < len(seen) and time.monotonic() < time_up:
            time.sleep(0.1)
    bench.close()
    return checks.one_rank_loaded(codes, seen, idle_s, alone_s, left)


ROWS = (
    Row(8, "a hybrid model under more load than its KV memory holds", pressure, model="hybrid"),
    Row(1, "one engine has the figures of vllm serve", figures),
    Row(3, "a pair answers as one engine, with each sampling parameter", same_answers),
    Row(4, "how KV caches travel", transfer),
    Row(5, "prefixes are found again, devices are dealt out", prefixes),
    Row(7, "an engine, a worker, a node killed under load", kills),
    Row(6, "tensor parallelism at prefill and decode", tensor_parallel, gpus=2, cpu=False),
    Row(2, "two engines on one device", shared_device, cpu=False),
    Row(9, "expert parallelism with load on one rank", experts, gpus=2, cpu=False, model="moe"),  # no all_gatherv there
)  # in an order in which neighbours share a cluster


def due(rows: Sequence[Row], wanted: Sequence[int]) -> Iterator[Row]:
    return (row for row in rows if not wanted or row.number in wanted)

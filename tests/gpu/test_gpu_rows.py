"""Each row's check on what a machine that is in order shows, and with a fault planted in it. No engine is started; the
lines of logs are those that vLLM 0.32, UCX and the nodes write."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import gpu_checks as checks
import pytest
from gpu_checks import Answer, Check, Kill, Turn
from gpu_report import FAILED, IN_PART, NOT_RUN, PASSED, Report, Verdict

SIZE = (
    "(EngineCore pid=7) INFO 11-24 19:09:25 [kv_cache_utils.py:2327] GPU KV cache size: 320,000 tokens, Maximum ...\n"
)
LOADED = {
    "model": "m", "kv_capacity": 320_000, "max_running": 1024, "step_tokens": 8192, "model_runner": "v2",
    "async_scheduling": True, "event": "engine.loaded", "level": "info",
}  # fmt: skip
LOG = SIZE + json.dumps(LOADED) + "\n"
SERVE = {
    "max_num_seqs": 1024, "max_num_batched_tokens": 8192, "kv_cache_size_tokens": 321_000, "model_runner": "v2",
    "async_scheduling": True,
}  # fmt: skip
LOAD = {"max_running": 1024, "kv_capacity": 320_000, "running": 0, "waiting": 0, "kv_tokens": 0}
REST = {"running": 0, "waiting": 0, "kv_tokens": 0}
WAITS = '{"gpu": "GPU-1", "event": "engine.waits"}\n'
UCX = (
    "[1732.1] [host:7:0] ucp_context.c:2 UCX  INFO  Version 1.19.0\n"
    "[1732.2] [host:7:0] ucp_worker.c:1888 UCX  INFO    0x7f intra-node cfg#2 rma_am(tcp/eth0) am(tcp/eth0 {})\n"
)


def memory(gib: float) -> str:
    return f"(Worker pid=9) INFO 11-24 19:09:25 [gpu_worker.py:760] Available KV cache memory: {gib} GiB\n"


def a(*ids: int, likely: float = -1.0, other: int = 0, other_likely: float = -2.0, code: str = "ok") -> Answer:
    top = tuple({token: likely, other: other_likely} for token in ids)
    return Answer(ids, (likely,) * len(ids), top, code)


HELD = (Check("request 0", True, "4 tokens equal"),)
LOST = (Check("request 0", False, "token 1 is another one"),)
KILL = Kill("engine core", 1, 0, (), True, (500.0, 600.0), HELD)
TURNS = [Turn(0, 0, 1, 0, 0), Turn(0, 1, 1, 80, 64), Turn(1, 0, 0, 0, 0), Turn(1, 1, 0, 100, 96)]
READY = {0: ("ready",), 1: ("ready",)}

# By row: what is in order, and what each fault makes of it.
Case = tuple[Callable[..., Sequence[Check] | Check], tuple[Any, ...]]
IN_ORDER: dict[str, Case] = {
    "1 figures": (checks.figures, (LOAD, LOG, SERVE, True)),
    "2 one device": (
        checks.shared_device,
        ([{"p": (None, memory(18.2)), "d": (None, WAITS + memory(18.0))}],),
    ),
    "3 answers": (checks.same_answers, ({"greedy": a(5, 6, 7)}, {"greedy": a(5, 6, 7)}, 0.01)),
    "3 min-p": (checks.kept_to, ("min-p", a(5, 6, likely=-2.0, other_likely=-1.0), 0.1)),
    "4 transfer": (checks.transfer, (UCX.format("cuda_ipc/cuda"), 1_000_000, 0.1, 0.0, True)),
    "5 hits": (checks.hits, (TURNS, 32, 5, ["submits"])),
    "5 devices": (checks.devices, ({"p": ["GPU-1"], "d": ["GPU-2"]}, {"p": {"GPU-1"}, "d": {"GPU-2"}})),
    "6 tensor parallel": (checks.parallel, (HELD, {"p": 2, "d": 2}, {"p": 2, "d": 2}, [])),
    "7 kills": (checks.after_kills, ([KILL],)),
    "8 pressure": (checks.pressure, (LOAD, LOG, 400_000, HELD, 5.0, REST)),
    "9 experts": (checks.one_rank_loaded, (["ok"] * 6, READY, 0.5, 0.2, [0, 1])),
    "10 two hosts": (
        checks.first_requests,
        ({"greedy": "ok"}, {"ready"}, {"10.0.0.1", "10.0.0.2"}, UCX.format("rc_mlx5/mlx5_0:1"), True),
    ),
}  # fmt: skip
FAULTS: list[tuple[str, str, Case]] = [
    ("1 figures", "a quarter of the tokens a step", (checks.figures, (LOAD, LOG.replace("8192", "2048"), SERVE, True))),
    ("1 figures", "an eighth of the requests", (checks.figures, (LOAD | {"max_running": 128}, LOG, SERVE, True))),
    ("1 figures", "2.9 times the KV capacity", (checks.figures, (LOAD | {"kv_capacity": 920_000}, LOG, SERVE, True))),
    ("1 figures", "less KV memory than alone",
     (checks.figures, (LOAD, LOG, SERVE | {"kv_cache_size_tokens": 400_000}, True))),
    ("1 figures", "the other model runner", (checks.figures, (LOAD, LOG.replace("v2", "v1"), SERVE, True))),
    ("1 figures", "both have the other model runner",
     (checks.figures, (LOAD, LOG.replace("v2", "v1"), SERVE | {"model_runner": "v1"}, True))),
    ("1 figures", "no async scheduling", (checks.figures, (LOAD, LOG.replace("true", "false"), SERVE, True))),
    ("1 figures", "a log without a word", (checks.figures, (LOAD, "", SERVE, True))),
    ("2 one device", "exit code 3",
     (checks.shared_device, ([{"p": (3, ""), "d": (None, WAITS + memory(18.0))}],))),
    ("2 one device", "the other's memory counts as its own",
     (checks.shared_device, ([{"p": (None, memory(18.2)), "d": (None, WAITS + memory(2.3))}],))),
    ("2 one device", "both load at once",
     (checks.shared_device, ([{"p": (None, memory(18.2)), "d": (None, memory(18.0))}],))),
    ("2 one device", "no try", (checks.shared_device, ([],))),
    ("3 answers", "another token", (checks.same_answers, ({"greedy": a(5, 6, 7)}, {"greedy": a(5, 9, 7)}, 0.01))),
    ("3 answers", "a token less", (checks.same_answers, ({"greedy": a(5, 6, 7)}, {"greedy": a(5, 6)}, 0.01))),
    ("3 answers", "less likely", (checks.same_answers, ({"greedy": a(5, 6)}, {"greedy": a(5, 6, likely=-1.2)}, 0.01))),
    ("3 answers", "a refusal", (checks.same_answers, ({"x": a(5)}, {"x": a(code="bad_request")}, 0.01))),
    ("3 answers", "no answer", (checks.same_answers, ({"x": a(5)}, {}, 0.01))),
    ("3 min-p", "too unlikely a token", (checks.kept_to, ("min-p", a(5, 6, likely=-4.0, other_likely=-1.0), 0.1))),
    ("3 min-p", "no log probabilities", (checks.kept_to, ("min-p", Answer((5, 6)), 0.1))),
    ("4 transfer", "TCP alone", (checks.transfer, (UCX.format("tcp/eth0"), 1_000_000, 0.1, 0.0, True))),
    ("4 transfer", "UCX says nothing", (checks.transfer, ("", 1_000_000, 0.1, 0.0, True))),
    ("4 transfer", "decode computed the prompt", (checks.transfer, (UCX.format("cuda_ipc/cuda"), 1, 0.1, 900.0, True))),
    ("4 transfer", "nothing was fetched", (checks.transfer, (UCX.format("cuda_ipc/cuda"), 1, 0.0, 0.0, True))),
    ("5 hits", "no event on the bus", (checks.hits, (TURNS, 32, 0, []))),
    ("5 hits", "blocks without names", (checks.hits, (TURNS, 32, 5, ["kv_blocks_unnamed"]))),
    ("5 hits", "a turn computed anew", (checks.hits, ([*TURNS, Turn(1, 2, 0, 164, 96)], 32, 5, []))),
    ("5 hits", "a turn elsewhere", (checks.hits, ([*TURNS, Turn(1, 2, 1, 100, 96)], 32, 5, []))),
    ("5 devices", "both on one",
     (checks.devices, ({"p": ["GPU-1"], "d": ["GPU-2"]}, {"p": {"GPU-1"}, "d": {"GPU-1"}}))),
    ("6 tensor parallel", "another answer", (checks.parallel, (LOST, {"p": 2}, {"p": 2}, []))),
    ("6 tensor parallel", "a worker without the mark", (checks.parallel, (HELD, {"p": 1}, {"p": 2}, []))),
    ("6 tensor parallel", "a worker that lives on", (checks.parallel, (HELD, {"p": 2}, {"p": 2}, [77]))),
    ("7 kills", "the node stays", (checks.after_kills, ([KILL._replace(code=None)],))),
    ("7 kills", "a worker lives on", (checks.after_kills, ([KILL._replace(left=1)],))),
    ("7 kills", "exit code 3 at the restart", (checks.after_kills, ([KILL._replace(starts=("exit code 3",))],))),
    ("7 kills", "never back", (checks.after_kills, ([KILL._replace(back=False, answers=())],))),
    ("7 kills", "memory is still taken", (checks.after_kills, ([KILL._replace(used_mib=(500.0, 40_000.0))],))),
    ("7 kills", "other tokens", (checks.after_kills, ([KILL._replace(answers=LOST)],))),
    ("7 kills", "nothing was killed", (checks.after_kills, ([],))),
    ("8 pressure", "2.9 times the KV capacity",
     (checks.pressure, (LOAD | {"kv_capacity": 920_000}, LOG, 10**6, HELD, 5.0, REST))),
    ("8 pressure", "no pressure", (checks.pressure, (LOAD, LOG, 300_000, HELD, 0.0, REST))),
    ("8 pressure", "other tokens", (checks.pressure, (LOAD, LOG, 400_000, LOST, 5.0, REST))),
    ("8 pressure", "memory is kept", (checks.pressure, (LOAD, LOG, 400_000, HELD, 5.0, REST | {"kv_tokens": 64}))),
    ("9 experts", "a request fails", (checks.one_rank_loaded, (["ok", "engine_failed"], READY, 0.5, 0.2, [0, 1]))),
    ("9 experts", "an idle rank hangs",
     (checks.one_rank_loaded, (["ok"], {0: ("ready",), 1: ("ready", "hung")}, 0.5, 0.2, [0, 1]))),
    ("9 experts", "an idle rank is slow", (checks.one_rank_loaded, (["ok"], READY, 9.0, 0.2, [0, 1]))),
    ("9 experts", "a rank without its group", (checks.one_rank_loaded, (["ok"], READY, 0.5, 0.2, [1]))),
    ("10 two hosts", "one host",
     (checks.first_requests, ({"x": "ok"}, {"ready"}, {"10.0.0.1"}, UCX.format("rc_mlx5/m"), True))),
    ("10 two hosts", "hung while it compiles",
     (checks.first_requests, ({"x": "ok"}, {"ready", "hung"}, {"a", "b"}, UCX.format("rc_mlx5/m"), True))),
    ("10 two hosts", "a first request fails",
     (checks.first_requests, ({"x": "poison"}, {"ready"}, {"a", "b"}, UCX.format("rc_mlx5/m"), True))),
    ("10 two hosts", "TCP beside an RDMA device",
     (checks.first_requests, ({"x": "ok"}, {"ready"}, {"a", "b"}, UCX.format("tcp/eth0"), True))),
]  # fmt: skip


def of(case: Case) -> Verdict:
    function, seen = case
    found = function(*seen)
    return Verdict(number=1, title="", checks=tuple([found] if isinstance(found, Check) else found))


@pytest.mark.parametrize("row", IN_ORDER)
def test_a_machine_in_order_passes(row: str) -> None:
    verdict = of(IN_ORDER[row])
    assert verdict.status == PASSED, verdict.checks


@pytest.mark.parametrize(("row", "fault", "case"), FAULTS, ids=[f"{row}: {fault}" for row, fault, _ in FAULTS])
def test_a_planted_fault_turns_the_row_red(row: str, fault: str, case: Case) -> None:
    assert of(case).status == FAILED
    assert case[0] is IN_ORDER[row][0]


def test_each_row_has_a_planted_fault() -> None:
    assert {int(row.split()[0]) for row, _, _ in FAULTS} == set(range(1, 11))


def test_outputs_may_part_where_two_tokens_are_as_likely() -> None:
    theirs = a(5, 6, 7, 8, other=9, other_likely=-1.004)
    assert checks.same_answer("greedy", theirs, a(5, 6, 7, 9), 0.01).ok
    assert not checks.same_answer("greedy", theirs, a(5, 6, 7, 4), 0.01).ok


def test_what_a_cpu_cannot_decide_is_not_passed() -> None:
    log = LOG.replace("v2", "v1")
    assert of((checks.figures, (LOAD, log, SERVE | {"model_runner": "v1"}, False))).status == IN_PART
    assert of((checks.after_kills, ([KILL._replace(used_mib=None)],))).status == IN_PART
    assert Verdict(number=2, title="", why="GPUs that it needs: 1; that are here: 0").status == NOT_RUN
    assert Verdict(number=2, title="", checks=(Check("V2", None, "no GPU"),)).status == NOT_RUN


def test_the_report_says_what_ran_where_and_what_did_not() -> None:
    failed = of((checks.after_kills, ([KILL._replace(left=1)],)))
    rows = [
        of(IN_ORDER["1 figures"]),
        Verdict(number=2, title="one device", why="GPUs that it needs: 1; that are here: 0"),
        Verdict(number=7, title="kills", checks=failed.checks, logs="/logs/row-7", tails={"decode-0.0": "last words"}),
    ]
    report = Report(verdicts=rows, versions={"vllm": "0.32.0"}, devices=["CPU: 2 cores"], command="run.py", began="now")
    text = report.as_markdown()
    assert "1 passed, 1 failed, 1 not run" in text
    for part in (
        "vllm: 0.32.0",
        "CPU: 2 cores",
        "GPUs that it needs: 1",
        "**fails**: engine core: no process",
        "/logs/row-7",
        "last words",
    ):
        assert part in text
    said = json.loads(report.as_json())
    assert [row["status"] for row in said["rows"]] == [PASSED, NOT_RUN, FAILED]
    assert said["versions"] == {"vllm": "0.32.0"}

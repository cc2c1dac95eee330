"""What each row of the table asks of what was seen: logs, a rank's load, answers, figures of `nvidia-smi`. Pure.

A row is a list of `Check`. One that could not be decided on the machine at hand has `ok=None` and says why, so that it
is never taken for one that held.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

KV_SIZE = re.compile(r"KV cache size: ([\d,]+) tokens")
MEMORY = re.compile(r"Available KV cache memory: (-?[\d.]+) GiB")
LOADED = re.compile(r'^\{.*"event": "engine.loaded".*\}$', re.MULTILINE)
WAITS = "engine.waits"
LANE = re.compile(r"\b(?:rma|tag|am)(?:_am)?\(([^)]*)\)")
FAST = ("cuda_ipc", "rc_", "dc_", "gdr_copy", "srd", "rocm_ipc")  # what UCX calls them: a device's memory, RDMA
NEEDS_GPU = "not run: needs a GPU"
LITTLE = 0.05  # by which two measurements of one device's free memory may differ
SLACK_MIB = 512  # of a device's memory, which a driver keeps for a process that has just ended


class Check(NamedTuple):
    """`ok` is None where it was not run; `found` says what was seen, or why not."""

    what: str
    ok: bool | None
    found: str


class Answer(NamedTuple):
    """Token ids, and of each token how likely the engine held it and the likeliest ones at its place."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    top: tuple[Mapping[int, float], ...] = ()
    code: str = "ok"
    text: str = ""


# --- 1: one engine as `vllm serve` runs it ----------------------------------------------------------------------------


def figures(load: Mapping[str, Any], log: str, serve: Mapping[str, Any], gpu: bool) -> list[Check]:
    """`load` is a rank's of `pdbus status --json`, `log` its engine's, `serve` what `vllm serve` has with the same
    arguments on this machine."""
    said = [json.loads(line) for line in LOADED.findall(log)]
    engine: Mapping[str, Any] = said[-1] if said else {}
    checks = [
        _equal("requests at once", load["max_running"], serve["max_num_seqs"]),
        _equal("tokens a step", engine.get("step_tokens"), serve["max_num_batched_tokens"]),
        _equal("the rank's KV capacity and its engine's own", load["kv_capacity"], _last(KV_SIZE, log)),
        Check(
            "KV capacity beside that of vllm serve",
            _near(load["kv_capacity"], serve["kv_cache_size_tokens"], LITTLE),
            f"{load['kv_capacity']:,} and {serve['kv_cache_size_tokens']:,} tokens",
        ),
        _equal("model runner", engine.get("model_runner"), serve["model_runner"]),
        _equal("async scheduling", engine.get("async_scheduling"), serve["async_scheduling"]),
    ]
    if not gpu:
        return [*checks, Check("Model Runner V2 runs", None, NEEDS_GPU)]
    return [*checks, Check("Model Runner V2 runs", engine.get("model_runner") == "v2", str(engine.get("model_runner")))]


# --- 2: two engines on one device -------------------------------------------------------------------------------------


def shared_device(tries: Sequence[Mapping[str, tuple[int | None, str]]]) -> list[Check]:
    """Of each try, by engine: its exit code (None: it serves) and its log."""
    ended = [f"try {number}: {part} left with {code}" for number, each in enumerate(tries, 1)
             for part, (code, _) in each.items() if code is not None]  # fmt: skip
    memory = [[_last(MEMORY, log, float) for _, log in each.values()] for each in tries]
    whole = [sizes for sizes in memory if None not in sizes and len(sizes) == 2]
    waited = sum(any(WAITS in log for _, log in each.values()) for each in tries)
    said = "; ".join(" and ".join(f"{size} GiB" for size in sizes) for sizes in memory)
    return [
        Check("both start, each time", bool(tries) and not ended, "; ".join(ended) or f"{len(tries)} of {len(tries)}"),
        Check(
            "each has the KV memory that its part of the device gives",
            len(whole) == len(tries) > 0 and all(min(sizes) > 0.85 * max(sizes) for sizes in whole),
            said,
        ),
        Check("the second waits for the first", waited == len(tries) > 0, f"in {waited} of {len(tries)} tries"),
    ]


# --- 3: a pair answers as one engine does -----------------------------------------------------------------------------


def same_answers(alone: Mapping[str, Answer], pair: Mapping[str, Answer], tolerance: float) -> list[Check]:
    """`tolerance` is by how much log probabilities may differ, and so where two likeliest tokens count as equal."""
    return [same_answer(name, theirs, pair.get(name), tolerance) for name, theirs in alone.items()]


def same_answer(name: str, theirs: Answer, ours: Answer | None, tolerance: float) -> Check:
    if ours is None or ours.code != "ok" or not ours.ids:
        return Check(name, False, "no answer" if ours is None else f"{ours.code}, {len(ours.ids)} tokens")
    for at, (one, other) in enumerate(zip(theirs.ids, ours.ids, strict=False)):
        if one != other:
            return _parts_at(name, at, theirs, other, tolerance)
        if at < len(theirs.logprobs) and (apart := abs(theirs.logprobs[at] - ours.logprobs[at])) > tolerance:
            return Check(name, False, f"token {at} is as likely but for {apart:.4f}, more than {tolerance:g}")
    if len(theirs.ids) != len(ours.ids):
        return Check(name, False, f"{len(ours.ids)} tokens, {len(theirs.ids)} of one engine")
    return Check(name, True, f"{len(ours.ids)} tokens equal")


def _parts_at(name: str, at: int, theirs: Answer, other: int, tolerance: float) -> Check:
    """Where outputs part, both tokens may have been as likely; nothing can be said of what follows."""
    top = theirs.top[at] if at < len(theirs.top) else {}
    apart = abs(top.get(other, -math.inf) - theirs.logprobs[at]) if top else math.inf
    tie = at >= 2 and apart <= tolerance
    return Check(name, tie, f"token {at} is another one" + (f", as likely to {apart:.4f}" if tie else ""))


def kept_to(name: str, answer: Answer, min_p: float) -> Check:
    """Whether each token of a sampled answer is at least `min_p` times as likely as the likeliest one."""
    low = [at for at, (own, top) in enumerate(zip(answer.logprobs, answer.top, strict=False))
           if own < max(top.values()) + math.log(min_p) - 0.01]  # fmt: skip
    ok = answer.code == "ok" and len(answer.top) == len(answer.ids) > 0 and not low
    return Check(name, ok, f"{len(answer.ids)} tokens" + (f", too unlikely at {low}" if low else ""))


# --- 4: how KV caches travel ------------------------------------------------------------------------------------------


def transports(log: str) -> set[str]:
    """What UCX says that it uses (`UCX_LOG_LEVEL=info`), as in `rma(cuda_ipc/cuda)`: cuda_ipc."""
    return {lane.partition("/")[0] for lanes in LANE.findall(log) for lane in lanes.split() if lane}


def transfer(log: str, size: int, seconds: float, computed: float, gpu: bool) -> list[Check]:
    """`size` bytes of KV came in `seconds`; decode computed `computed` tokens of the prompt itself."""
    used = transports(log)
    said = ", ".join(sorted(used)) or "UCX names none"
    rate = f"{size / 1e6:,.1f} MB in {seconds:.3f} s, {size / 1e6 / seconds:,.0f} MB/s" if seconds > 0 else "no time"
    checks = [
        Check("UCX says what it uses", bool(used), said),
        Check(
            "the KV cache came, and decode computed none of it",
            seconds > 0 and computed == 0,
            f"{rate}; {computed:g} tokens computed",
        ),
    ]
    if not gpu:
        return [*checks, Check("the fastest transport of the machine", None, NEEDS_GPU)]
    fast = any(each.startswith(FAST) for each in used)
    return [*checks, Check("a transport between devices, not TCP alone", fast, said)]


# --- 5: prefixes and devices ------------------------------------------------------------------------------------------


class Turn(NamedTuple):
    """A turn of a chat: its number, the prefill rank, how many prompt tokens the turn before had, what was cached."""

    chat: int
    number: int
    rank: int
    before: int
    cached: int


def hits(turns: Sequence[Turn], block: int, told: int, counts: Collection[str]) -> list[Check]:
    """`told`: publications of cached blocks seen on the bus; `counts`: what a controller counts as left out of them."""
    later = [turn for turn in turns if turn.number]
    first = {turn.chat: turn.rank for turn in turns if not turn.number}
    missed = [turn for turn in later if turn.cached < turn.before // block * block]
    moved = [turn for turn in later if turn.rank != first.get(turn.chat)]
    wrong = sorted({"kv_gaps", "kv_blocks_unnamed", "kv_unreadable"} & set(counts))
    return [
        Check(
            "engines tell of their blocks on the bus",
            told > 0 and not wrong,
            f"{told} messages" + f" {wrong}" * bool(wrong),
        ),
        Check(
            "each turn finds the one before cached",
            bool(later) and not missed,
            f"{len(later) - len(missed)} of {len(later)}",
        ),
        Check(
            "each turn goes to its chat's rank", bool(later) and not moved, f"{len(later) - len(moved)} of {len(later)}"
        ),
    ]


def devices(wanted: Mapping[str, Collection[str]], used: Mapping[str, Collection[str]]) -> Check:
    """By node process: the devices that it was given, and those on which its engine's processes have memory."""
    wrong = [f"{part} is on {sorted(used.get(part, ()))}, was given {sorted(given)}" for part, given in wanted.items()
             if set(given) != set(used.get(part, ()))]  # fmt: skip
    return Check(
        "each engine is on its own devices", bool(wanted) and not wrong, "; ".join(wrong) or f"{len(wanted)} engines"
    )


# --- 6: tensor parallelism --------------------------------------------------------------------------------------------


def parallel(
    answers: Sequence[Check], workers: Mapping[str, int], wanted: Mapping[str, int], left: Collection[int]
) -> list[Check]:
    """`workers`: marked `Worker_TP` processes of each node; `left`: those that lived on after its end."""
    wrong = [
        f"{part} has {workers.get(part, 0)} of {count}"
        for part, count in wanted.items()
        if workers.get(part, 0) != count
    ]
    return [
        *answers,
        Check(
            "each tensor-parallel worker carries the reaper's mark",
            bool(wanted) and not wrong,
            "; ".join(wrong) or f"{sum(wanted.values())} workers",
        ),
        Check("no worker outlives its node", not left, f"{len(left)} left"),
    ]


# --- 7: kills under load ----------------------------------------------------------------------------------------------


class Kill(NamedTuple):
    """What was killed under load, and what became of it. `used_mib`: its device's memory before the engine was there,
    and when the part was started again; None without a GPU."""

    what: str
    code: int | None  # of the node
    left: int  # processes of its engine that lived on
    starts: tuple[str, ...]  # of starts that failed afterwards: how
    back: bool
    used_mib: tuple[float, float] | None
    answers: tuple[Check, ...]


def after_kills(kills: Sequence[Kill]) -> list[Check]:
    checks = [Check("something was killed", bool(kills), f"{len(kills)}")]
    for kill in kills:
        wrong = [check for check in kill.answers if not check.ok]
        ends = (1, -9) if kill.what == "node" else (1,)
        checks += [
            Check(f"{kill.what}: its node leaves", kill.code in ends, f"exit code {kill.code}"),
            Check(f"{kill.what}: no process of its engine is left", not kill.left, f"{kill.left} left"),
            Check(f"{kill.what}: it is back at the first try", kill.back and not kill.starts,
                  "; ".join(kill.starts) or "no start failed"),
            Check(f"{kill.what}: what ran goes on, with the same output", bool(kill.answers) and not wrong,
                  "; ".join(f"{each.what}: {each.found}" for each in wrong) or f"{len(kill.answers)} requests"),
        ]  # fmt: skip
        memory = f"{kill.what}: its memory is free when it is started again"
        if kill.used_mib is None:
            checks.append(Check(memory, None, NEEDS_GPU))
        else:
            before, at_start = kill.used_mib
            checks.append(
                Check(memory, at_start <= before + SLACK_MIB, f"{at_start:,.0f} MiB in use, {before:,.0f} before")
            )
    return checks


# --- 8: more than the KV memory holds ---------------------------------------------------------------------------------


def held(load: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a rank with this load still has of requests."""
    return {name: load[name] for name in ("running", "waiting", "kv_tokens") if load[name]}


def pressure(
    load: Mapping[str, Any],
    log: str,
    asked: int,
    answers: Sequence[Check],
    preempted: float,
    rest: Mapping[str, Any],
) -> list[Check]:
    """`asked`: tokens that all requests at once come to; `rest`: the load once they have ended."""
    size = _last(KV_SIZE, log)
    wrong = [check for check in answers if not check.ok]
    left = held(rest)
    return [
        _equal("the rank's KV capacity and its engine's own", load["kv_capacity"], size),
        Check("more was asked for than the memory holds", asked > load["kv_capacity"],
              f"{asked:,} of {load['kv_capacity']:,} tokens"),
        Check("each answer is as without others", bool(answers) and not wrong,
              "; ".join(f"{each.what}: {each.found}" for each in wrong[:4])
              or f"{len(answers)} answers, {preempted:g} preemptions"),
        Check("nothing is held at rest", not left, str(left or "nothing")),
    ]  # fmt: skip


# --- 9: expert parallelism --------------------------------------------------------------------------------------------


def one_rank_loaded(
    codes: Sequence[str], states: Mapping[int, Collection[str]], idle_s: float, alone_s: float, gone: Collection[int]
) -> list[Check]:
    """All load went to rank 0 of those that share a process. `states`: what a controller called each meanwhile;
    `idle_s`: a request's time at an idle rank beside that load, `alone_s`: without it; `gone`: the ranks that left when
    one engine core was killed."""
    well = sum(code == "ok" for code in codes)
    idle = {rank: sorted(set(seen) - {"ready"}) for rank, seen in states.items() if set(seen) - {"ready"}}
    return [
        Check("each request of the loaded rank ends well", well == len(codes) > 0, f"{well} of {len(codes)}"),
        Check("idle ranks stay ready", len(states) > 1 and not idle, str(idle or f"{len(states)} ranks")),
        Check("an idle rank is not slow beside a loaded one", 0 < idle_s < 3 * alone_s + 1.0,
              f"{idle_s:.2f} s, {alone_s:.2f} s alone"),
        Check("one core's death takes all ranks of its process", set(gone) == set(states) != set(),
              f"{sorted(gone)} of {sorted(states)}"),
    ]  # fmt: skip


# --- 10: two hosts ----------------------------------------------------------------------------------------------------


def first_requests(
    codes: Mapping[str, str], states: Collection[str], hosts: Collection[str], log: str, rdma: bool
) -> list[Check]:
    """The first request of each kind, of engines with cold caches on two hosts: a code each; what a controller called
    the ranks meanwhile; the hosts on which the ranks are; the decode node's log; whether the hosts have RDMA."""
    failed = {kind: code for kind, code in codes.items() if code != "ok"}
    used = transports(log)
    said = ", ".join(sorted(used)) or "UCX names none"
    checks = [
        Check("the ranks are on two hosts", len(set(hosts)) > 1, ", ".join(sorted(hosts))),
        Check(
            "the first request of each kind ends well", bool(codes) and not failed, str(failed or f"{len(codes)} kinds")
        ),
        Check("no rank counts as hung while it compiles", "hung" not in states, ", ".join(sorted(states))),
        Check("UCX says what it uses", bool(used), said),
    ]
    if not rdma:
        return [*checks, Check("KV caches go by RDMA", None, "not run: the hosts have no RDMA device")]
    return [*checks, Check("KV caches go by RDMA", any(each.startswith(("rc_", "dc_", "srd")) for each in used), said)]


# --- all --------------------------------------------------------------------------------------------------------------


def _last(pattern: re.Pattern[str], log: str, kind: type[int] | type[float] = int) -> Any:
    found = pattern.findall(log)
    return kind(found[-1].replace(",", "")) if found else None


def _equal(what: str, ours: Any, theirs: Any) -> Check:
    return Check(what, ours is not None and ours == theirs, f"{ours} and {theirs}")


def _near(one: float, other: float, part: float) -> bool:
    return abs(one - other) <= part * max(one, other)

"""Figures that others published, and ours beside them. Owns these figures (anchors), the band in which ours agrees,
and the two runs behind each of ours. Runs and prints nothing.

An anchor is a ratio of two measurements of one source, because absolute figures are those of a machine and a model.
Ours is the same ratio of two runs in virtual time, with a setting as near to the source's as the lab has. The default
timing model stays, whatever theirs was: nothing is fitted. Ours agrees where it points the same way and is from half to
one and a half times as strong, by its logarithm: a ratio of 4 agrees with those from 2 to 8.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import isnan, nan
from pathlib import Path

from bus.errors import ConfigError
from pdbus.lab.compare import Result, Run
from pdbus.lab.config import CACHE_TOKENS, LabConfig
from pdbus.lab.formats import read_trace
from pdbus.lab.generator import generate
from pdbus.lab.metrics import Estimate, estimate
from pdbus.lab.sessions import Draw, generate_sessions
from pdbus.lab.simulate import simulate
from pdbus.lab.traces import BLOCK_TOKENS, Trace, TraceRequest, checked

LMETRIC = "pdbus.lab.lmetric:LMetric"
THRESHOLD = "pdbus.lab.threshold:Threshold"
SESSIONS = 1_000  # generated: enough for 512 under way
UNDER_WAY = (64, 128, 256, 512)  # DynoSim's
WEKA_UNDER_WAY = (8, 32)
SPEED_REQUESTS = 23_608  # of Mooncake's toolagent trace
SPEED_S = 2.41  # that DynoSim takes for them
EIGHT = LabConfig(
    ranks=0, decode_ranks=0, unified_ranks=8, unified_kv_tokens=CACHE_TOKENS, warm_up_s=120.0, end_requests=1_500
)
"""Eight workers that do both, past the first prompts of all sessions."""
SGLANG = LabConfig(
    ranks=3,
    decode_ranks=1,
    concurrency=128,
    first_at_decode=True,  # the first token comes to the client through the decode rank, once the KV cache is there
    link_s_per_token=2.6e-6,
    decode_kv_tokens=1_600_000,  # what their decode rank held: 1.243 requests/s of 355 tokens of 65 ms are 29 of 54,855
)
BLIS = LabConfig(
    ranks=1, decode_ranks=3, decode_kv_tokens=CACHE_TOKENS, decode_cache=True, decode_prefills=True,
    link_s_per_token=2.6e-6,
)  # fmt: skip
DYNAMO = LabConfig(
    load=0.0, decode_kv_tokens=CACHE_TOKENS, unified_kv_tokens=CACHE_TOKENS, slo_ttft_s=2.0, slo_tpot_s=0.025
)
VLLM = LabConfig(
    ranks=1,
    decode_ranks=1,
    concurrency=2,
    first_at_decode=True,
    decode_kv_tokens=CACHE_TOKENS,
    decode_method="cache_aware",
    decode_cache=True,
    cache_blocks=1_500,  # two prompts: what a conversation left is gone before its next turn
)
WHY = {
    "dynosim": "more of these sessions' prompts is cached than of theirs: up to 93 %, toolagent's 38 to 44 %",
    "weka": "which of the few sessions run together decides as much as the method",
    "sglang": "by the default timing 4,500 tokens take 0.5 s, so with the cache all 128 requests decode at once: they "
    "wait less, and get slower tokens, than theirs, which prefill held up at 1.6 requests/s",
    "blis": "by the default timing one prefill rank has more to do beside three decode ranks than theirs",
    "blis code": "how far the threshold is above depends on the load, which is not published: 2.3 with 8 under way",
    "vllm": "by the default timing a request costs next to nothing beside its tokens: theirs take 0.4 s at least",
    "lmetric": "LMetric finds 91 % of these prompts cached, so there is less to compute between two tokens",
}
"""The reason why ours lies outside the band, where it does."""


@dataclass(frozen=True, slots=True)
class Side:
    """A run behind a figure of ours: a trace (`generated`, `prompts`, or a file: `weka`, `conversation`), a method, and
    a setting."""

    trace: str
    method: str
    config: LabConfig


@dataclass(frozen=True, slots=True)
class Anchor:
    """A published figure. Ours is `field` (of Summary) of the run `over`, divided by that of the run `under`; there is
    none without `over`, and `note` says why. `theirs` are the ratios published: one, a range of two, or none."""

    name: str  # of its source, for --only
    case: str
    theirs: tuple[float, ...]
    source: str
    field: str = ""
    over: Side | None = None
    under: Side | None = None
    note: str = ""  # about ours, where it lies outside the band or there is none
    times: float = 0.0  # ours agrees up to so many times theirs, and however little it is; 0: by `theirs`

    @property
    def band(self) -> tuple[float, float] | None:
        """The least and the greatest ratio that agree; None: nothing was published."""
        if self.times:
            return 0.0, self.times
        return (min(self.theirs) ** 0.5, max(self.theirs) ** 1.5) if self.theirs else None


@dataclass(frozen=True, slots=True)
class Row:
    """An anchor with our figure (mean over seeds, and the half-width of its 95 % interval); None: there is none."""

    anchor: Anchor
    ours: Estimate | None
    agrees: str  # yes, no, open (the interval crosses an end of the band), or why there is nothing to say
    note: str  # "": none

    @property
    def figures(self) -> dict[str, object]:
        """The row for JSON output."""
        anchor, ours, band = self.anchor, self.ours, self.anchor.band
        half = None if ours is None or isnan(ours.half_width) else round(ours.half_width, 6)
        return {
            "name": anchor.name,
            "case": anchor.case,
            "theirs": [*anchor.theirs],
            "ours": None if ours is None else round(ours.mean, 6),
            "half_width_95": half,
            "band": None if band is None else [round(each, 6) for each in band],
            "agrees": self.agrees,
            "note": self.note,
            "source": anchor.source,
        }


def anchors() -> list[Anchor]:
    """Return all anchors, in the order of the table."""
    return [*_dynosim(), *_speed(), *_sglang(), *_lmetric(), *_dynamo(), *_blis(), *_vllm(), *_not_yet()]


def _dynosim() -> list[Anchor]:
    source = (
        "DynoSim: ai-dynamo/dynamo, docs/blogs/digital-twin-simulation (Mooncake toolagent, 8 workers, closed loop)"
    )
    found = []
    for number, rr_ms, kv_ms in zip(UNDER_WAY, (496, 827, 1_777, 5_149), (239, 307, 477, 1_444), strict=True):
        over, under = (
            Side("generated", method, replace(EIGHT, concurrency=number)) for method in ("round_robin", "cache_aware")
        )
        case = f"mean TTFT, round robin to KV-aware: generated sessions, {number} under way"
        found.append(Anchor("dynosim", case, (rr_ms / kv_ms,), source, "ttft_mean_s", over, under, WHY["dynosim"]))
    four = replace(EIGHT, unified_ranks=4, warm_up_s=0.0, end_requests=0)
    for number in WEKA_UNDER_WAY:
        over, under = (Side("weka", each, replace(four, concurrency=number)) for each in ("round_robin", "cache_aware"))
        case = f"the same: WEKA's sessions, {number} under way on 4 ranks"
        found.append(Anchor("dynosim", case, (496 / 239, 1_777 / 477), source, "ttft_mean_s", over, under, WHY["weka"]))
    return found


def _speed() -> list[Anchor]:
    source = "DynoSim, the same: 2.41 s on one thread of an M4, 8 workers, round robin"
    case = f"seconds to simulate {SPEED_REQUESTS:,} requests on 8 + 8 ranks, over their 2.41"
    side = Side("open loop", "round_robin", LabConfig())
    why = "seconds of CPU of this machine, with the scheduler and the load table that run live, in Python"
    return [Anchor("speed", case, (1.0,), source, over=side, note=why, times=5.0)]


def _sglang() -> list[Anchor]:
    source = "SGLang #19746: Qwen3-32B, 1,000 requests of 50k shared + 4.5k own tokens, 128 under way"
    plain = Side("prompts", "cache_aware", SGLANG)
    cached = replace(plain, config=replace(SGLANG, decode_cache=True))
    why = WHY["sglang"]
    return [
        Anchor("sglang", "decode cache: requests/s", (1.608 / 1.243,), source, "duration_s", plain, cached, why),
        Anchor("sglang", "median TTFT without it, to with it", (71.9 / 7.0,), source, "ttft_p50_s", plain, cached, why),
        Anchor("sglang", "time per token with it, to without", (135 / 65,), source, "tpot_mean_s", cached, plain, why),
    ]


def _lmetric() -> list[Anchor]:
    source = "LMetric: arXiv 2603.15202, abstract (against vLLM-v1's balancer)"
    config = replace(EIGHT, concurrency=128)
    over, under = Side("generated", "vllm_counts", config), Side("generated", LMETRIC, config)
    why = WHY["lmetric"]
    return [
        Anchor("lmetric", "mean TTFT, vLLM's counts to LMetric", (1 / 0.08,), source, "ttft_mean_s", over, under, why),
        Anchor("lmetric", "time per token, the same", (1 / 0.79,), source, "tpot_mean_s", over, under, why),
    ]


def _dynamo() -> list[Anchor]:
    source = "Dynamo's recipe qwen3-32b-kv-routing (Mooncake conversation, TTFT 2 s, 25 ms a token); no figures"
    split = Side("conversation", "cache_aware", replace(DYNAMO, ranks=6, decode_ranks=2))
    alone = Side("conversation", "round_robin", replace(DYNAMO, ranks=0, decode_ranks=0, unified_ranks=8))
    return [
        Anchor("dynamo", f"goodput, KV-aware 6P+2D to 8 aggregated by {what}", (), source, "goodput_per_s", split, each)
        for what, each in (("round robin", alone), ("KV-aware routing", replace(alone, method="cache_aware")))
    ]


def _blis() -> list[Anchor]:
    source = "llm-d's blog of 2026-06-05 (BLIS, 1P+3D): local or remote prefill"
    chat, code = (
        Side(name, "cache_aware", replace(BLIS, concurrency=number, decode_method=THRESHOLD))
        for name, number in (("chat", 64), ("code", 24))
    )
    least = replace(chat, config=replace(chat.config, decode_method="least_cost"))
    local = replace(code, config=replace(code.config, decode_method="cache_aware", trip="at_decode"))
    cheaper = replace(code, config=replace(code.config, decode_method="least_cost"))
    chat_case = "chat (5,000 + 50, 4 turns): mean TTFT, threshold to EDPP (ours: least_cost)"
    code_case = "code (30,000 + 1,500, 15 turns): mean TTFT"
    why = WHY["blis code"]
    return [
        Anchor("blis", chat_case, (2.0, 3.0), source, "ttft_mean_s", chat, least, WHY["blis"]),
        Anchor("blis", f"{code_case}, threshold to always local", (20.0,), source, "ttft_mean_s", code, local, why),
        Anchor("blis", f"{code_case}, least_cost to always local", (), source, "ttft_mean_s", cheaper, local),
    ]


def _vllm() -> list[Anchor]:
    plain = "vLLM #32553: Llama 3.3 70B, 1P1D, 2 clients with 24 conversations; more than 2 without a prefix cache"
    found = []
    for case, theirs, source, blocks in (
        ("no prefix cache at prefill", (2.0,), plain, VLLM.cache_blocks),
        ("prefix cache at prefill", (1 / (1 - 0.18), 1 / (1 - 0.41)), "llm-d #1307: 18 to 41 % less", 0),
    ):
        over, under = (
            Side("conversations", "cache_aware", replace(VLLM, cache_blocks=blocks, trip=trip))
            for trip in ("delta", "read_back")
        )
        text = f"{case}: mean TTFT without reading back, to with it"
        found.append(Anchor("vllm", text, theirs, source, "ttft_mean_s", over, under, WHY["vllm"]))
    return found


def _not_yet() -> list[Anchor]:
    vllm = "vLLM's blog of 2026-10-12 and #32553: 1P1D, Qwen3-32B"
    back = "it is not published what a turn adds"
    return [
        Anchor("vllm", "TTFT at 24k without and with bidirectional transfer", (778 / 460,), vllm, note=back),
    ]


class Traces:
    """The traces of the sides, by seed: generated, or read once from the files that the user names (`files`, by the
    name of the side's trace). A file's trace is the same for each seed, which draws the order of its sessions and the
    jitter of its times."""

    def __init__(self, files: dict[str, Path]) -> None:
        self._read = {name: read_trace(path) for name, path in files.items()}
        most = max(WEKA_UNDER_WAY)
        if "weka" in files and len(self._read["weka"].starts_s) <= most:
            raise ConfigError(
                f"{files['weka']} has {len(self._read['weka'].starts_s)} sessions: more than {most} are needed"
            )
        self._made = cache(_made)

    def has(self, name: str) -> bool:
        """Return true if there is such a trace: it is generated, or its file was named."""
        return name in _MAKERS or name in self._read

    def get(self, name: str, seed: int) -> Trace:
        """Return the trace `name` for this seed."""
        return self._read[name] if name in self._read else self._made(name, seed)


def prompts(seed: int, requests: int = 1_000, shared: int = 50_000, own: int = 4_500, output: int = 355) -> Trace:
    """Return requests of `shared` tokens that are the same in all, and `own` ones. Outputs are drawn from a sixth
    around `output`."""
    rng = random.Random(f"prompts {seed}")
    common = tuple(range(1, 1 + shared // BLOCK_TOKENS))
    blocks = (shared + own) // BLOCK_TOKENS - len(common)
    made = []
    for number in range(requests):
        first = 1 + len(common) + number * blocks
        length = rng.randint(output * 5 // 6, output * 7 // 6)
        made.append(TraceRequest(0.0, shared + own, length, common + tuple(range(first, first + blocks))))
    return checked("prompts", made, BLOCK_TOKENS, timed=False)


def conversations(seed: int, clients: int = 2, each: int = 12, block_tokens: int = 16) -> Trace:
    """Return the requests of clients that go on with `each` conversations in turns. All begin with 500 tokens, each
    with some 4,000 of its own; a turn has some 140 new ones and an answer of 1,000. vLLM's benchmark draws so."""
    rng = random.Random(f"conversations {seed}")
    own, next_id = Draw(4_000, 3_400, 10_000), iter(range(1, 1 << 62)).__next__
    common = [next_id() for _ in range(500 // block_tokens)]
    made: list[TraceRequest] = []
    for client in range(clients):
        rounds = [rng.randint(6, 9) for _ in range(each)]  # 12 to 18 messages
        tokens = [500 + own.count(rng) for _ in range(each)]
        blocks = [common.copy() for _ in range(each)]
        last: list[tuple[int, ...]] = [()] * each  # the request of the turn before
        before: tuple[int, ...] = ()  # the client's last request
        for number in (number for turn in range(9) for number in range(each) if turn < rounds[number]):
            tokens[number] += rng.randint(120, 160)
            blocks[number] += [next_id() for _ in range(tokens[number] // block_tokens - len(blocks[number]))]
            after, output = tuple(dict.fromkeys(before + last[number])), rng.randint(800, 1_200)
            at_s = float(len(made))  # their order alone
            made.append(TraceRequest(at_s, tokens[number], output, tuple(blocks[number]), client, after))
            tokens[number] += output
            before = last[number] = (len(made) - 1,)
    return checked("conversations", made, block_tokens, timed=False)


def turns(seed: int, shared: int, new: int, count: int, sessions: int, block_tokens: int = 16) -> Trace:
    """Return sessions of `count` turns. All begin with `shared` tokens; a turn has some `new` ones, within a quarter,
    and an answer of 100 to 300."""
    rng = random.Random(f"turns {seed}")
    next_id = iter(range(1, 1 << 62)).__next__
    common = [next_id() for _ in range(shared // block_tokens)]
    made: list[TraceRequest] = []
    for session in range(sessions):
        tokens, blocks = shared, common.copy()
        after: tuple[int, ...] = ()
        for _ in range(count):
            tokens += rng.randint(new * 3 // 4, new * 5 // 4)
            blocks += [next_id() for _ in range(tokens // block_tokens - len(blocks))]
            output = rng.randint(100, 300)
            made.append(TraceRequest(float(len(made)), tokens, output, tuple(blocks), session, after))
            tokens += output
            after = (len(made) - 1,)
    return checked("turns", made, block_tokens, timed=False)


def open_loop(seed: int, requests: int = SPEED_REQUESTS) -> Trace:
    """Return the first `requests` requests of a generated trace."""
    trace = generate(requests / 3.0, seed=seed)  # it has more: 3.4 in a second
    return replace(trace, requests=trace.requests[:requests])


_MAKERS: dict[str, Callable[[int], Trace]] = {
    "generated": lambda seed: generate_sessions(SESSIONS, seed=seed),
    "prompts": prompts,
    "conversations": conversations,
    "chat": lambda seed: turns(seed, 5_000, 50, 4, 600),
    "code": lambda seed: turns(seed, 30_000, 1_500, 15, 120),
    "open loop": open_loop,
}


def _made(name: str, seed: int) -> Trace:
    return _MAKERS[name](seed)


def cpu_s(side: Side, trace: Trace) -> float:
    """Return the seconds of CPU that this process takes for a run: those of the clock, where nothing else runs."""
    began = time.process_time()
    simulate(trace, side.method, side.config)
    return time.process_time() - began


def measure(
    wanted: Sequence[Anchor],
    traces: Traces,
    seeds: Sequence[int],
    run: Callable[[Sequence[Run]], Sequence[Result]],
    clock: Callable[[Side, Trace], float] = cpu_s,
) -> list[Row]:
    """Make the runs behind the anchors, each once for a seed, and return a row for each anchor. `run` makes the given
    runs and returns their results in the same order. `clock` returns the seconds that a run takes; it is called before
    the others, for the first seed alone."""
    timed = {
        each: clock(side, traces.get(side.trace, seeds[0])) for each in wanted if (side := each.over) and each.times
    }
    sides = [side for each in wanted if not each.times for side in (each.over, each.under) if side is not None]
    there = [side for side in dict.fromkeys(sides) if traces.has(side.trace)]
    asked = [(side, seed) for seed in seeds for side in there]  # runs of one trace follow each other
    runs = [Run(traces.get(side.trace, seed), side.method, replace(side.config, seed=seed)) for side, seed in asked]
    found = dict(zip(asked, run(runs) if runs else (), strict=True))

    def ours(anchor: Anchor) -> Estimate:
        assert anchor.over is not None
        if anchor.times:
            return Estimate(timed[anchor] / SPEED_S, nan)
        assert anchor.under is not None
        return estimate([_ratio(anchor.field, found[anchor.over, seed], found[anchor.under, seed]) for seed in seeds])

    rows = []
    for anchor in wanted:
        if anchor.over is None:
            rows.append(Row(anchor, None, "not yet", anchor.note))
        elif not traces.has(anchor.over.trace):
            rows.append(Row(anchor, None, "no file", f"give --{anchor.over.trace} FILE"))
        else:
            figure = ours(anchor)
            agrees = verdict(figure, anchor.band)
            rows.append(Row(anchor, figure, agrees, anchor.note if agrees in ("no", "open") else ""))
    return rows


def verdict(ours: Estimate, band: tuple[float, float] | None) -> str:
    """Return whether ours lies in the band: `yes` or `no` with its whole interval, else `open`. Without a band it is
    `first`."""
    if band is None:
        return "first"
    half = 0.0 if isnan(ours.half_width) else ours.half_width
    low, high = ours.mean - half, ours.mean + half
    if band[0] <= low and high <= band[1]:
        return "yes"
    return "no" if high < band[0] or low > band[1] else "open"


def _ratio(field: str, over: Result, under: Result) -> float:
    below: float = getattr(under.summary, field)
    above: float = getattr(over.summary, field)
    return above / below if below else nan

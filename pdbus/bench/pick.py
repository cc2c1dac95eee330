"""`pick`: one pick with its raise of the estimate, by method and number of ranks, beside an argmin over a list."""

from __future__ import annotations

import random
import time
from typing import Any

from bus.messages import Hello, Load, Submit
from controller.loads import LoadTable
from controller.policies import POLICIES
from pdbus.bench.harness import Aim, Row, Scope, in_child, row

RANKS = (8, 64, 512, 4_096)
AIMS_US = {8: 2.0, 512: 4.0, 4_096: 6.0}
ROUNDS = 7
INSTANCE = "bench"


def run(scope: Scope) -> list[Row]:
    rows = []
    for method in POLICIES:
        for ranks in RANKS:
            scope.say(f"{method}, {ranks} ranks")
            taken = in_child("pick:measure", method=method, ranks=ranks, picks=scope.size(20_000, 4_000))
            aim = Aim(AIMS_US[ranks], of_ratio=False) if ranks in AIMS_US else None
            rows.append(row(f"{method}, {ranks} ranks", "pick and raise", "µs", taken["ours"], taken["argmin"], aim))
    return rows


def table_of(ranks: int) -> LoadTable:
    """A load table of `ranks` unified ranks that have all reported an even load, ready for dispatch."""
    table = LoadTable(1)
    for dp_rank in range(ranks):
        hello = Hello(INSTANCE, dp_rank, 1, "unified", "m", ranks, "ready", "", 0, 0, 0, 16)
        rank = table.open(hello)
        table.set_ready(rank, True)
        table.apply(rank.key, 1, Load(1, 0, 4, 0, 0, 1_000, 0, 0), 0.0)
    return table


def requests(count: int, seed: int) -> list[Submit]:
    """Seeded requests of 1 to 4,096 tokens."""
    rng = random.Random(seed)
    return [Submit(f"r{n}", "unified", rng.randint(1, 4_096), 1, rng.getrandbits(63)) for n in range(count)]


def measure(method: str, ranks: int, picks: int) -> dict[str, Any]:
    """Microseconds of CPU a pick, ours and a linear argmin over a list, `ROUNDS` values each after one for warmth."""
    table = table_of(ranks)
    policy = POLICIES[method]()
    group = table.group("unified", "m")
    submits = requests(picks, seed=ranks)
    loads = [1_000] * ranks
    ours, argmin = [], []
    for _ in range(1 + ROUNDS):
        began = time.thread_time()
        for submit in submits:
            tokens = submit.prompt_tokens
            rank = policy.pick(group, submit, tokens)
            assert rank is not None
            table.charge(rank, tokens)
        ours.append((time.thread_time() - began) / picks * 1e6)
        linear = submits[: max(200, picks * 8 // ranks)]
        began = time.thread_time()
        for submit in linear:
            best = loads.index(min(loads))
            loads[best] += submit.prompt_tokens
        argmin.append((time.thread_time() - began) / len(linear) * 1e6)
    return {"ours": ours[1:], "argmin": argmin[1:]}

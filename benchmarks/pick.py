"""`pick`: one pick of a rank with its raise of the rank's estimated load, by method and number of ranks, beside an
argmin over a list.

`cache_aware` is measured with hits too: prompts whose blocks some ranks hold (`Hits`).
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import Aim, Row, Scope, in_child, row
from bus.wire.hashing import pack_hashes
from bus.wire.messages import Hello, Load, Submit
from controller.load.table import LoadTable
from controller.policies import POLICIES, Policy, make_policy
from controller.policies.methods import CacheAware

RANKS = (8, 64, 512, 4_096)
AIMS_US = {8: 2.0, 512: 4.0, 4_096: 6.0}
ROUNDS = 7
INSTANCE = "bench"
BLOCK_TOKENS = 16
FAMILIES = 64  # different prompts, at least


@dataclass(frozen=True, slots=True)
class Hits:
    """Prompts of `blocks` full blocks, the whole of each held by `holders` ranks drawn at random."""

    blocks: int
    holders: int


HITS = {  # by number of ranks
    512: (
        Hits(16, 8), Hits(16, 256), Hits(64, 1), Hits(64, 8), Hits(64, 256), Hits(64, 512),
        Hits(256, 1), Hits(256, 8), Hits(256, 256), Hits(256, 512),
    ),
    4_096: (Hits(16, 8), Hits(64, 8), Hits(64, 2_048), Hits(256, 8)),
}  # fmt: skip
AIM_HITS_US = 10.0  # with 512 ranks


def run(scope: Scope) -> list[Row]:
    """Called by `python -m benchmarks`: measure, which blocks for up to minutes, and return the rows."""
    rows = []
    for method in POLICIES:
        for ranks in RANKS:
            scope.show(f"{method}, {ranks} ranks")
            taken = in_child("pick:measure", method=method, ranks=ranks, picks=scope.size(20_000, 4_000))
            aim = Aim(AIMS_US[ranks], of_ratio=False) if ranks in AIMS_US else None
            rows.append(row(f"{method}, {ranks} ranks", "pick and raise", "µs", taken["ours"], taken["argmin"], aim))
    for ranks, some in HITS.items():
        for hits in some:
            case = f"cache_aware, {ranks} ranks, {hits.blocks} blocks held by {hits.holders}"
            scope.show(case)
            arguments: dict[str, Any] = {
                "ranks": ranks,
                "picks": scope.size(5_000, 500),
                "blocks": hits.blocks,
                "holders": hits.holders,
            }
            taken = in_child("pick:measure_hits", **arguments)
            aim = Aim(AIM_HITS_US, of_ratio=False) if ranks == 512 else None
            rows.append(row(case, "pick and raise", "µs", taken["ours"], taken["argmin"], aim))
    return rows


def table_of(ranks: int) -> LoadTable:
    """Return a load table of `ranks` unified ranks that have all reported the same load and are ready."""
    table = LoadTable(1)
    for dp_rank in range(ranks):
        hello = Hello(
            instance=INSTANCE, dp_rank=dp_rank, epoch=1, role="unified", model="m", dp_size=ranks, state="ready",
            endpoint="", max_context=0, kv_capacity=0, max_running=0, block_tokens=BLOCK_TOKENS,
        )  # fmt: skip
        rank = table.open(hello)
        table.set_ready(rank, True)
        table.apply(
            rank.key,
            1,
            Load(seq=1, step=0, running=4, waiting=0, waiting_tokens=0, kv_tokens=1_000, kv_capacity=0, max_running=0),
            0.0,
        )
    return table


def requests(count: int, seed: int) -> list[Submit]:
    """Return `count` requests with 1 to 4,096 prompt tokens, drawn by `seed`."""
    rng = random.Random(seed)
    return [Submit(f"r{n}", "unified", rng.randint(1, 4_096), 1, rng.getrandbits(63)) for n in range(count)]


def cached(table: LoadTable, hits: Hits, count: int, seed: int) -> tuple[CacheAware, list[Submit]]:
    """Return a policy that knows which ranks hold which blocks, by `hits`, and `count` requests for such prompts."""
    rng = random.Random(seed)
    policy, ranks = CacheAware(), list(table.ranks.values())
    families = []
    for _ in range(max(FAMILIES, len(ranks) // hits.holders)):
        hashes = [rng.getrandbits(64) for _ in range(hits.blocks)]
        families.append(pack_hashes(hashes))
        for rank in rng.sample(ranks, hits.holders):
            policy.prefixes.stored(rank.slot, hashes)
    tokens = hits.blocks * BLOCK_TOKENS + 1
    submits = [
        Submit(f"r{n}", "unified", tokens, 1, n, block_tokens=BLOCK_TOKENS, block_hashes=rng.choice(families))
        for n in range(count)
    ]
    return policy, submits


def measure(method: str, ranks: int, picks: int) -> dict[str, Any]:
    """Time picks by `method` for requests without hashes, in this process; return as `timed` does."""
    table = table_of(ranks)
    return timed(table, make_policy(method), requests(picks, seed=ranks))


def measure_hits(ranks: int, picks: int, blocks: int, holders: int) -> dict[str, Any]:
    """Time picks by `cache_aware`, for requests of which some ranks hold all blocks; return as `timed` does."""
    table = table_of(ranks)
    return timed(table, *cached(table, Hits(blocks, holders), picks, seed=ranks))


def timed(table: LoadTable, policy: Policy, submits: list[Submit]) -> dict[str, Any]:
    """Return microseconds of CPU for a pick, `ours` by the policy and `argmin` over a list: ROUNDS values each, after
    one for warmth."""
    group = table.group("unified", "m")
    picks, ranks = len(submits), len(table.ranks)
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

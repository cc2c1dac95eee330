"""`pick`: one pick of a rank with its raise of the rank's estimated load, by method and number of ranks, beside an
argmin over a list.

`cache_aware` is measured with hits too: prompts whose blocks some ranks hold (`Hits`). So are placements of pairs whose
decode ranks have caches: ranks, and where the prompt is computed, by `least_cost`, beside the ranks by `cache_aware`.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import Aim, Row, Scope, in_child, row
from bus.wire.hashing import pack_hashes
from bus.wire.kv_names import Stored
from bus.wire.messages import Hello, Load, Role, Submit
from controller.balancer import Balancer
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
PAIRS = {ranks: (Hits(64, 1), Hits(64, 8), Hits(256, 8)) for ranks in (8, 64, 512)}  # ranks of each role
AIM_PAIRS = 1.5  # times what `cache_aware` takes
PAIR_REPORTS = 2  # of each rank: two show its speeds


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
    for ranks, some in PAIRS.items():
        for hits in some:
            case = f"pairs of {ranks} + {ranks} ranks, {hits.blocks} blocks held by {hits.holders} of each"
            scope.show(case)
            arguments = {
                "ranks": ranks,
                "pairs": scope.size(1_000, 100),
                "blocks": hits.blocks,
                "holders": hits.holders,
            }
            taken = in_child("pick:measure_pairs", **arguments)
            aim = Aim(AIM_PAIRS, of_ratio=True)
            rows.append(row(case, "least_cost over cache_aware", "µs", taken["least_cost"], taken["cache_aware"], aim))
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


def measure_pairs(ranks: int, pairs: int, blocks: int, holders: int) -> dict[str, Any]:
    """Time placements of `pairs` prompts, of which `holders` decode ranks hold all blocks, and as many prefill ranks
    three quarters, by each method of decode ranks; return microseconds of CPU by method, ROUNDS values each, after one
    for warmth."""
    worlds = {method: pairs_of(method, ranks, Hits(blocks, holders), pairs) for method in ("least_cost", "cache_aware")}
    taken: dict[str, Any] = {method: [] for method in worlds}
    for _ in range(1 + ROUNDS):
        for method, (balancer, submits) in worlds.items():
            began = time.thread_time()
            for submit in submits:
                for leg in balancer.place(submit, 0.0).legs:
                    balancer.table.undo(leg.rank, leg.charge)
            taken[method].append((time.thread_time() - began) / pairs * 1e6)
    return {method: values[1:] for method, values in taken.items()}


def pairs_of(method: str, ranks: int, hits: Hits, count: int) -> tuple[Balancer, list[Submit]]:
    """Return a balancer of `ranks` prefill and as many decode ranks with caches, with `method` for the latter, and
    `count` requests for prompts that they hold as `measure_pairs` says."""
    rng = random.Random(ranks)
    policies: dict[Role, Policy] = {"prefill": make_policy("cache_aware"), "decode": make_policy(method)}
    balancer = Balancer(LoadTable(1), policies)
    balancer.speeds()  # which are learnt from now on
    for role in policies:
        for dp_rank in range(ranks):
            hello = Hello(
                instance=role, dp_rank=dp_rank, epoch=1, role=role, model="m", dp_size=ranks, state="ready",
                endpoint="", max_context=0, kv_capacity=0, max_running=0, block_tokens=BLOCK_TOKENS,
                prefills=role == "decode", reads_back=True,
            )  # fmt: skip
            rank = balancer.opened(hello, ready=True)
            for seq in range(1, 1 + PAIR_REPORTS):
                load = Load(
                    seq=seq, step=seq, running=4, waiting=0, waiting_tokens=0, kv_tokens=1_000, kv_capacity=0,
                    max_running=0, busy_us_total=100_000 * seq, admitted_tokens_total=1_000 * seq,
                    computed_tokens_total=1_000 * seq, fetches_total=seq, fetched_tokens_total=1_000 * seq,
                    fetch_us_total=3_000 * seq,
                )  # fmt: skip
                balancer.report(rank.key, 1, load, float(seq))
    families = []
    for _ in range(max(FAMILIES, ranks // hits.holders)):
        hashes = [rng.getrandbits(64) for _ in range(hits.blocks)]
        families.append(pack_hashes(hashes))
        for role, held in (("prefill", hits.blocks * 3 // 4), ("decode", hits.blocks)):
            members = [rank for rank in balancer.table.ranks.values() if rank.info.role == role]
            for rank in rng.sample(members, hits.holders):
                balancer.cache(rank, (Stored(tuple(hashes[:held])),))
    tokens = hits.blocks * BLOCK_TOKENS + 100
    submits = [
        Submit(f"r{n}", "pair", tokens, 1, n, model="m", block_tokens=BLOCK_TOKENS, block_hashes=rng.choice(families))
        for n in range(count)
    ]
    return balancer, submits

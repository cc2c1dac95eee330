"""`cache_aware` against its definition: of all candidates, the least (queued + weight x to compute), by brute force."""

from __future__ import annotations

from typing import Any

from cases import Case, cases
from prefix_hits import run_length

from bus.wire.hashing import pack_hashes
from bus.wire.messages import Hello, Load, Submit
from controller.load.groups import Subset
from controller.load.rank import RankLoad
from controller.load.table import LoadTable
from controller.policies import PolicySettings
from controller.policies.methods import CacheAware

SIZE = 16
CHAIN = list(range(1, 81))
DEPTHS = [0, 1, 2, 31, 32, 33, 63, 64, 65, 79, 80]


def facts_of(case: Case) -> dict[str, Any]:
    """The state of one rank."""
    queued = case.choice((case.randint(0, 3), case.randint(0, 90) * SIZE, case.randint(0, 2000)))
    return {
        "queued": queued,
        "waiting": case.randint(0, 3),
        # how many blocks from the first on are cached, and which of them are not after all
        "run": (case.choice(DEPTHS), {case.choice(CHAIN) for _ in range(case.randint(0, 3))}),
        "named": case.choice((1, 16, 80)),  # so many at a time
        "ready": case.randrange(4) > 0,
        "size": case.choice((SIZE, SIZE, SIZE, 2 * SIZE)),
        "charges": case.randint(0, 2),
    }


def test_the_choice_is_the_least_of_all_candidates() -> None:
    for case in cases(800):
        with case:
            the_choice_is_the_least(
                ranks=case.note([facts_of(case) for _ in range(case.length(1, 24))]),
                blocks=case.one((1, 2, 32, 33, 64, 80)),
                fork=case.one((3, 40, 80, 80)),  # from here on the prompt is not what was cached
                rest=case.note(case.randint(-40, 40)),
                weight=case.one((0.0, 0.5, 1.0, 3.0)),
                narrow=case.one((False, True)),
            )


def the_choice_is_the_least(
    ranks: list[dict[str, Any]], blocks: int, fork: int, rest: int, weight: float, narrow: bool
) -> None:
    table, policy = LoadTable(1), CacheAware(PolicySettings(cache_weight=weight))
    held: dict[int, set[int]] = {}
    for dp_rank, facts in enumerate(ranks):
        hello = Hello(
            instance="p", dp_rank=dp_rank, epoch=1, role="prefill", model="m", dp_size=len(ranks), state="ready",
            endpoint="", max_context=0, kv_capacity=0, max_running=0, block_tokens=facts["size"],
        )  # fmt: skip
        rank = table.open(hello)
        table.set_ready(rank, facts["ready"])
        load = Load(
            seq=1, step=0, running=0, waiting=facts["waiting"], waiting_tokens=facts["queued"], kv_tokens=0,
            kv_capacity=0, max_running=0,
        )  # fmt: skip
        table.apply(rank.key, 1, load, 0.0)
        depth, holes = facts["run"]
        held[rank.slot] = set(CHAIN[:depth]) - holes
        cached, named = sorted(held[rank.slot]), facts["named"]
        for start in range(0, len(cached), named):
            policy.prefixes.stored(rank.slot, cached[start : start + named])
        for _ in range(facts["charges"]):
            table.charge(rank, 0)
    hashes = [each if each <= fork else each + 1_000 for each in CHAIN[:blocks]]
    prompt_tokens = max(0, blocks * SIZE + rest)
    request = Submit("r", "prefill", prompt_tokens, 1, block_tokens=SIZE, block_hashes=pack_hashes(hashes))

    def cost(rank: RankLoad) -> tuple[float, int, int]:
        cached = run_length(held[rank.slot], hashes) * SIZE if rank.info.block_tokens == SIZE else 0
        return rank.tokens + weight * max(1, prompt_tokens - cached), rank.requests, rank.last_turn

    group = table.group("prefill")
    some = [rank for rank in table.ranks.values() if rank.ready]
    some = some[: len(some) // 2 + 1] if narrow else some
    chosen = policy.pick(Subset(some) if narrow else group, request, prompt_tokens)
    table.validate()
    assert all(policy.cost(rank, request) == cost(rank)[0] for rank in some), "what `pdbus trace --why` shows"
    best = min((cost(rank) for rank in some if rank.candidate), default=None)
    assert (None if chosen is None else cost(chosen)) == best

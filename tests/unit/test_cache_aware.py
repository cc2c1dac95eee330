"""The cache_aware policy: on its own over a load table, and in the controller's core."""

from __future__ import annotations

import pytest
from controller_world import EPOCH, World, hello, peer_of, submit
from prefix_hits import hits

from bus.errors import ConfigError
from bus.wire.hashing import block_hashes, pack_hashes
from bus.wire.kv_names import Stored
from bus.wire.messages import Bye, Hello, Load, Submit
from controller.config import ControllerConfig
from controller.events import CacheChanged, FromNode
from controller.load.table import LoadTable
from controller.policies import PolicySettings
from controller.policies.methods import CacheAware

SIZE = 16
PROMPT = list(range(3, 3 + 20 * SIZE))
HASHES = block_hashes(PROMPT, SIZE)


def request(tokens: int = len(PROMPT), hashes: list[int] | None = None, size: int = SIZE) -> Submit:
    found = HASHES if hashes is None else hashes
    return Submit("r", "prefill", tokens, 1, bootstrap_room=1, block_tokens=size, block_hashes=pack_hashes(found))


def load(seq: int, waiting_tokens: int = 0) -> Load:
    return Load(
        seq=seq, step=0, running=0, waiting=0, waiting_tokens=waiting_tokens, kv_tokens=0, kv_capacity=0, max_running=0
    )


class Table:
    def __init__(self, *queued: int, weight: float = 1.0) -> None:
        self.table = LoadTable(EPOCH)
        self.policy = CacheAware(PolicySettings(cache_weight=weight))
        for dp_rank, tokens in enumerate(queued):
            rank = self.table.open(
                Hello(
                    instance="p", dp_rank=dp_rank, epoch=1, role="prefill", model="m", dp_size=len(queued),
                    state="ready", endpoint="", max_context=0, kv_capacity=0, max_running=0, block_tokens=SIZE,
                )
            )  # fmt: skip
            self.table.set_ready(rank, True)
            self.table.apply(rank.key, 1, load(1, tokens), 0.0)

    def pick(self, wanted: Submit) -> int:
        rank = self.policy.pick(self.table.group("prefill"), wanted, wanted.prompt_tokens)
        assert rank is not None
        return rank.key[1]


def test_a_cached_prefix_wins_while_it_saves_more_than_the_queue_costs() -> None:
    for queued, chosen in ((159, 1), (161, 0)):
        table = Table(0, queued)
        table.policy.prefixes.stored(1, HASHES[:10])  # 160 tokens
        assert table.pick(request()) == chosen


def test_a_long_run_is_followed_to_its_end_where_the_last_block_decides() -> None:
    hashes = list(range(1, 34))  # the first chance to stop is a block before the end
    for queued, chosen in ((520, 1), (528, 0), (536, 0)):
        table = Table(0, queued)
        table.policy.prefixes.stored(1, hashes)
        assert table.pick(request(33 * SIZE + 1, hashes)) == chosen


def test_the_weight_moves_the_balance() -> None:
    for weight, chosen in ((0.5, 0), (1.0, 0), (2.0, 1)):
        table = Table(0, 200, weight=weight)
        table.policy.prefixes.stored(1, HASHES[:10])
        assert table.pick(request()) == chosen


def test_of_two_hits_the_sum_decides() -> None:
    table = Table(500, 100, 0)
    table.policy.prefixes.stored(0, HASHES)
    table.policy.prefixes.stored(1, HASHES[:15])
    assert table.pick(request()) == 1


def test_without_hashes_or_with_another_block_size_it_is_total_tokens() -> None:
    table = Table(20, 10, 30)
    table.policy.prefixes.stored(2, HASHES)
    assert table.pick(request(hashes=[])) == 1
    assert table.pick(request(size=SIZE * 2)) == 1


def test_ties_rotate() -> None:
    table = Table(0, 0, 0)
    for dp_rank in range(3):
        table.policy.prefixes.stored(dp_rank, HASHES)
    seen = []
    for _ in range(6):
        dp_rank = table.pick(request())
        table.table.charge(table.table.ranks[("p", dp_rank)], 0)
        seen.append(dp_rank)
        for rank in table.table.ranks.values():  # all idle again
            now_load = load(rank.load.seq + 1 if rank.load else 1)
            table.table.reconnected(rank)
            table.table.apply(rank.key, 1, now_load, 0.0)
    assert sorted(seen[:3]) == [0, 1, 2] == sorted(seen[3:])


def test_a_rank_that_cannot_be_dispatched_to_is_no_candidate_however_much_it_caches() -> None:
    table = Table(1000, 0)
    table.policy.prefixes.stored(1, HASHES)
    table.table.set_ready(table.table.ranks[("p", 1)], False)
    assert table.pick(request()) == 0


def test_a_prefill_rank_is_charged_what_it_has_to_compute() -> None:
    table = Table(0, 0)
    table.policy.prefixes.stored(1, HASHES[:10])
    first, second = table.table.ranks.values()
    for rank, wanted, charge in (
        (first, request(), len(PROMPT)),
        (second, request(), len(PROMPT) - 10 * SIZE),
        (second, request(hashes=[]), len(PROMPT)),
        (second, request(10 * SIZE, HASHES[:10]), 1),
    ):
        assert table.policy.charge(rank, wanted) == charge


# --- in the controller ------------------------------------------------------------------------------------------

BIG = {"kv_capacity": 100_000, "max_context": 100_000, "max_running": 100}


def aware_submit(rid: str, leg: str = "unified") -> Submit:
    return submit(rid, leg, prompt_tokens=len(PROMPT), block_tokens=SIZE, block_hashes=pack_hashes(HASHES))


def test_the_controller_learns_from_its_own_dispatches_and_forgets_a_restarted_rank() -> None:
    world = World(unified_method="cache_aware")
    nodes = [hello("u", dp_rank, **BIG) for dp_rank in range(2)]  # type: ignore[arg-type]
    for node in nodes:
        world.join(node)
        world.report(node)
    world.submit(aware_submit("a"))
    first = world.dispatches()[0].dp_rank

    def slot(dp_rank: int) -> int:
        return int(world.core.table.ranks[("u", dp_rank)].slot)

    world.progress(nodes[first], started=world.dispatches(), ended=world.dispatches())
    world.report(nodes[first], acks=[(EPOCH, 1, len(PROMPT))])  # ingested, done, idle again
    world.submit(aware_submit("b"))
    assert world.dispatches()[1].dp_rank == first  # total_tokens would have rotated
    assert hits(world.core.prefixes["unified"], HASHES) == {slot(first): len(HASHES)}
    world.join(hello("u", first, epoch=2, **BIG))  # type: ignore[arg-type]
    assert slot(first) not in hits(world.core.prefixes["unified"], HASHES)
    assert world.core.tally()["prefix_blocks"] == len(HASHES)  # the second went to the other rank


def test_a_prompt_whose_prefix_is_cached_makes_its_rank_look_no_busier_than_it_is() -> None:
    world = World(prefill_method="cache_aware")
    nodes = [hello("p", dp_rank, role="prefill", **BIG) for dp_rank in range(2)]  # type: ignore[arg-type]
    for node in nodes:
        world.join(node)
        world.report(node)
    first = nodes[0]
    world.feed(CacheChanged(("p", 0), (Stored(tuple(HASHES)),)))
    for rid in ("a", "b", "c"):  # nothing is reported meanwhile
        world.submit(aware_submit(rid, "prefill"))
    assert [(dispatch.dp_rank, dispatch.charge) for dispatch in world.dispatches()] == [(0, 1)] * 3
    assert world.rank(first).tokens == 3
    world.report(first, waiting_tokens=7, acks=[(EPOCH, 2, 2)])
    assert world.rank(first).tokens == 7 + 1
    world.progress(first, started=world.dispatches(), ended=world.dispatches())
    world.report(first, acks=[(EPOCH, 3, 3)])
    world.assert_empty()


def test_a_unified_rank_is_charged_what_it_computes_and_a_decode_rank_all_that_it_will_hold() -> None:
    for role, charges in (("unified", [len(PROMPT), 1]), ("decode", [len(PROMPT)] * 2)):
        world = World(unified_method="cache_aware", decode_method="cache_aware")
        node = hello("n", role=role, **BIG)  # type: ignore[arg-type]
        world.join(node)
        world.report(node)
        for rid in ("a", "b"):
            world.submit(aware_submit(rid, role))
        assert [dispatch.charge for dispatch in world.dispatches()] == charges, role


def two_of_which_the_first_caches() -> tuple[World, Hello, Hello]:
    world = World(unified_method="cache_aware")
    first, second = (hello("u", dp_rank, **BIG) for dp_rank in range(2))  # type: ignore[arg-type]
    for node in (first, second):
        world.join(node)
    world.feed(CacheChanged(("u", 0), (Stored(tuple(HASHES)),)))
    return world, first, second


def test_what_a_unified_rank_holds_for_requests_that_decode_keeps_no_prompt_from_its_cache() -> None:
    world, busy, idle = two_of_which_the_first_caches()
    world.report(busy, running=4, kv_tokens=50_000)
    world.report(idle)
    world.submit(aware_submit("a"))
    assert world.dispatches()[0].dp_rank == 0
    assert (world.rank(busy).tokens, world.rank(busy).held_tokens) == (1, 50_000)
    world.report(busy, running=5, waiting_tokens=len(PROMPT), kv_tokens=50_000, acks=[(EPOCH, 1, 1)])
    world.submit(aware_submit("b"))
    assert world.dispatches()[1].dp_rank == 1, "a prompt waits there"


def test_a_unified_rank_whose_kv_memory_is_full_gets_nothing_whatever_its_queue_counts() -> None:
    world, full, other = two_of_which_the_first_caches()
    world.report(full, running=4, kv_tokens=BIG["kv_capacity"])
    world.report(other)
    world.submit(aware_submit("a"))
    assert world.dispatches()[0].dp_rank == 1


def test_the_callers_rank_is_learned_too() -> None:
    world = World(unified_method="cache_aware")
    for dp_rank in range(2):
        node = hello("u", dp_rank, **BIG)  # type: ignore[arg-type]
        world.join(node)
        world.report(node)
    request = submit("a", prompt_tokens=len(PROMPT), block_tokens=SIZE, block_hashes=pack_hashes(HASHES),
                     routed_dp_rank=1)  # fmt: skip
    world.submit(request)
    assert hits(world.core.prefixes["unified"], HASHES) == {world.rank(node).slot: len(HASHES)}


def test_a_rank_that_is_forgotten_leaves_nothing_in_the_index_whenever_its_events_come() -> None:
    world = World(unified_method="cache_aware", forget_s=5.0)
    node, other = hello("u", 0, **BIG), hello("u", 1, **BIG)  # type: ignore[arg-type]
    for each in (node, other):
        world.join(each)
        world.report(each)
    world.feed(CacheChanged(("u", 0), (Stored((1, 2)),)))
    world.feed(FromNode(peer_of(node), Bye("u", 0, 1)))
    assert len(world.core.prefixes["unified"]) == 0
    world.feed(CacheChanged(("u", 0), (Stored((3, 4)),)))  # the bus was slower than its goodbye
    world.pass_time(6.0, alive=[other])
    assert ("u", 0) not in world.core.table.ranks
    assert len(world.core.prefixes["unified"]) == 0


def test_bad_weight() -> None:
    with pytest.raises(ConfigError, match="cache_weight"):
        ControllerConfig(bus="ipc:///x/bus", controller="ipc:///x/c", cache_weight=-1)

"""Where a pair's prompt is computed: the method `least_cost`, and what the controller says of it."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from controller_world import P, World, hello, peer_of, submit
from msgspec.structs import replace

from bus.wire.messages import Accepted, Dispatch, Done, Ended, Hello, Load, Progress, ReadBack, Submit
from controller.balancer import Balancer, Placed
from controller.events import FromNode
from controller.load.rank import RankLoad
from controller.load.table import LoadTable
from controller.policies import PolicySettings, make_policy
from controller.requests.record import trace_events_of
from controller.speeds import queued_tokens

SIZE = 16


class Pairs:
    """One prefill rank and two decode ranks, which compute prompts too. `reads_back`: which roles do."""

    def __init__(
        self, decode: str = "least_cost", *, prefills: bool = True, prefill_at: str = "auto",
        reads_back: tuple[str, ...] = (), kv_transfer: str = "blocks",
    ) -> None:  # fmt: skip
        self.reads_back, self.kv_transfer = reads_back, kv_transfer
        methods = {"prefill": "cache_aware", "decode": decode, "unified": "round_robin"}
        policies = {role: make_policy(name, PolicySettings(role)) for role, name in methods.items()}  # type: ignore[arg-type]
        self.table = LoadTable(1)
        self.balancer = Balancer(self.table, policies, prefill_at=prefill_at)  # type: ignore[arg-type]
        self.prefill = self.rank("prefill", 0)
        self.decode = [self.rank("decode", n, prefills) for n in range(2)]

    def rank(self, role: str, number: int, prefills: bool = False) -> RankLoad:
        hello = Hello(
            instance=role, dp_rank=number, epoch=1, role=role, model="m", dp_size=2, state="ready", endpoint="",  # type: ignore[arg-type]
            max_context=0, kv_capacity=0, max_running=0, block_tokens=SIZE, prefills=prefills,
            reads_back=role in self.reads_back, kv_transfer=self.kv_transfer,
        )  # fmt: skip
        return self.balancer.opened(hello, ready=True)

    def caches(self, rank: RankLoad, blocks: int) -> None:
        self.balancer.policies[rank.info.role].stored(rank, list(range(1, blocks + 1)))

    def busy(self, rank: RankLoad, requests: int, tokens: int) -> None:
        for _ in range(requests):
            self.table.charge(rank, tokens // requests)

    def reports(self, rank: RankLoad, **figures: int | None) -> None:
        fields = dict.fromkeys(("running", "waiting", "waiting_tokens", "kv_tokens"), 0) | figures
        load = Load(seq=1, step=1, kv_capacity=8000, max_running=90, **fields)  # type: ignore[arg-type]
        assert self.balancer.report(rank.key, 1, load, 1.0) is not None

    def steps(self, rank: RankLoad, *of: tuple[int, float]) -> None:
        """Reports of 100 steps each, in which so many requests decoded, for so many seconds a step; the last stays."""
        self.balancer.speeds()
        busy_us = 1
        for seq, (requests, step_s) in enumerate(of, 1):
            load = Load(
                seq=seq, step=100 * seq, running=requests, waiting=0, waiting_tokens=0, kv_tokens=10 * requests,
                kv_capacity=8000, max_running=90, acks=(), busy_us_total=busy_us,
            )  # fmt: skip
            busy_us += round(1e8 * step_s)
            assert self.balancer.report(rank.key, 1, load, float(seq)) is not None

    def submit(self, blocks: int, **fields: object) -> Submit:
        hashes = array("Q", range(1, blocks + 1)).tobytes()
        return Submit(
            "r", "pair", blocks * SIZE + 8, 10, bootstrap_room=1, block_tokens=SIZE, block_hashes=hashes,
            **fields,  # type: ignore[arg-type]
        )  # fmt: skip

    def place(self, blocks: int = 10, **fields: object) -> Placed:
        return self.balancer.place(self.submit(blocks, **fields), 0.0)


def at(placed: Placed) -> list[str]:
    return [f"{leg.role} at {leg.rank.info.role}-{leg.rank.key[1]}" for leg in placed.legs]


def test_a_turn_stays_where_the_last_one_was() -> None:
    world = Pairs()
    world.caches(world.decode[1], 9)
    placed = world.place()
    assert at(placed) == ["unified at decode-1"]
    assert placed.legs[0].charge == SIZE + 8, "it is charged what it must compute"
    assert placed.predicted is not None
    here_s, pair_s = placed.predicted
    assert here_s < pair_s


def test_a_new_prompt_goes_to_a_prefill_rank_and_so_does_a_turn_whose_rank_is_busy() -> None:
    assert at(Pairs().place()) == ["prefill at prefill-0", "decode at decode-0"]
    world = Pairs()
    world.caches(world.decode[0], 5)
    world.busy(world.decode[0], 4, 60)
    world.busy(world.decode[1], 4, 400)
    assert at(world.place()) == ["prefill at prefill-0", "decode at decode-0"]


@pytest.mark.parametrize(("said", "stays"), [(0, True), (None, False), (3200, False)])
def test_a_turn_stays_at_a_rank_where_many_only_wait_for_their_kv_caches(said: int | None, stays: bool) -> None:
    """Nothing is computed there before it. A rank that does not say so is taken to compute all that waits."""
    world = Pairs()
    world.caches(world.decode[1], 9)
    for rank in world.decode:
        world.reports(rank, waiting=20, waiting_tokens=3200, to_compute_tokens=said)
    assert (at(world.place()) == ["unified at decode-1"]) is stays


def test_a_turn_stays_where_pairs_were_sent_since_the_last_report() -> None:
    world = Pairs()
    world.caches(world.decode[1], 9)
    other = Submit("o", "pair", 640, 10, bootstrap_room=2)
    for rank in world.decode:
        world.reports(rank)
        for _ in range(9):
            world.balancer.charge(other, 0.0, (("decode", rank),))
    assert at(world.place()) == ["unified at decode-1"]
    world.balancer.charge(other, 0.0, (("unified", world.decode[1]),))
    assert at(world.place()) == ["prefill at prefill-0", "decode at decode-0"]
    world.table.validate()


CROWDED = ((1, 0.010), (1, 0.010), (31, 0.040), (31, 0.040))  # requests, and seconds of a step


def test_rank_and_trip_are_chosen_together() -> None:
    """Half of the prompt is at a rank with slow steps, and as a pair the other half is soon there, wherever it goes."""
    world = Pairs()
    world.steps(world.decode[0], *CROWDED)
    world.steps(world.decode[1], (1, 0.010), (1, 0.010))
    world.caches(world.decode[0], 5)
    assert at(world.place()) == ["prefill at prefill-0", "decode at decode-1"]
    world.caches(world.decode[0], 3000)
    assert at(world.place(3000)) == ["unified at decode-0"], "as a pair it would be five seconds later"


def test_where_the_trip_is_settled_the_rank_is_picked_by_tokens() -> None:
    world = Pairs(prefill_at="prefill")
    world.steps(world.decode[0], *CROWDED)
    world.caches(world.decode[0], 5)
    assert at(world.place()) == ["prefill at prefill-0", "decode at decode-0"]


def test_the_rank_with_the_fewest_requests_is_a_candidate() -> None:
    """It has more tokens that wait only to be fetched than the other, whose steps are slow."""
    world = Pairs()
    world.steps(world.decode[0], *CROWDED)
    world.steps(world.decode[1], (1, 0.010), (1, 0.010))
    world.balancer.charge(Submit("o", "pair", 640, 10, bootstrap_room=2), 0.0, (("decode", world.decode[1]),))
    assert world.decode[1].tokens > world.decode[0].tokens
    assert at(world.place()) == ["prefill at prefill-0", "decode at decode-1"]


def test_the_costs_that_are_shown_are_those_that_were_compared() -> None:
    for crowded in (0, 1):
        world = Pairs()
        world.steps(world.decode[crowded], *CROWDED)
        world.caches(world.decode[crowded], 5)
        submit, policy = world.submit(10), world.balancer.policies["decode"]
        assert [policy.cost(rank, submit) for rank in world.decode] == [None, None], "it was not picked for"
        placed = world.balancer.place(submit, 0.0)
        costs = [policy.cost(rank, submit) or 0.0 for rank in world.decode]
        assert costs[1 - crowded] < costs[crowded] - 0.1, costs
        assert placed.legs[-1].rank is world.decode[1 - crowded]


def test_a_busy_prefill_rank_leaves_it_to_decode() -> None:
    world = Pairs()
    world.busy(world.prefill, 1, 10_000)
    assert at(world.place()) == ["unified at decode-0"]


def test_the_wish_for_a_first_token_decides_where_one_keeps_it() -> None:
    """At 0.1 ms a token: 168 tokens at decode in 18 ms, behind 200 at prefill in 37 ms."""
    for wish_s, chosen in ((0.0, ["prefill at prefill-0", "decode at decode-0"]), (0.03, ["unified at decode-0"])):
        world = Pairs()
        world.busy(world.prefill, 1, 200)
        for rank in world.decode:
            world.busy(rank, 16, 16)
        assert at(world.place(ttft_slo_s=wish_s)) == chosen


@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_it_can_be_forced_with_any_method(where: str) -> None:
    world = Pairs("total_requests", prefill_at=where)
    assert len(world.place().legs) == (1 if where == "decode" else 2)
    assert world.place().predicted is None
    assert len(world.place(routed_dp_rank=1).legs) == 2, "a caller that names a rank gets a pair"


def test_ranks_without_a_cache_are_asked_nothing() -> None:
    world = Pairs(prefills=False)
    world.busy(world.prefill, 1, 10_000)
    placed = world.place()
    assert len(placed.legs) == 2
    assert placed.predicted is None


BOTH = ("prefill", "decode")


def test_prefill_reads_back_what_decode_has_where_that_is_quicker() -> None:
    """At 0.1 ms a token and 5 ms for the question: 51 tokens and more."""
    for blocks, read in ((3, 0), (4, 64), (9, 144)):
        world = Pairs(prefill_at="prefill", reads_back=BOTH)
        world.caches(world.decode[1], blocks)
        placed = world.place()
        assert at(placed) == ["prefill at prefill-0", "decode at decode-1"]
        assert [leg.read for leg in placed.legs] == [read, 0]
        assert placed.legs[0].charge == 10 * SIZE + 8 - read, "it is charged what it must compute"


def test_nothing_is_read_that_prefill_has_or_that_one_of_the_two_cannot() -> None:
    world = Pairs(prefill_at="prefill", reads_back=BOTH)
    world.caches(world.decode[1], 5)
    world.caches(world.prefill, 5)
    assert world.place().legs[0].read == 0
    for roles in ((), ("prefill",), ("decode",)):
        world = Pairs(prefill_at="prefill", reads_back=roles)
        world.caches(world.decode[1], 9)
        assert world.place().legs[0].read == 0
    world = Pairs("cache_aware", prefill_at="prefill", reads_back=BOTH)
    world.caches(world.decode[1], 9)
    assert world.place().legs[0].read == 0, "a method that does not say so"


@pytest.mark.parametrize("stated", [0, 6])
def test_nothing_is_read_that_decode_is_only_expected_to_have(stated: int) -> None:
    """What it is still to fetch or compute cannot be read yet."""
    world = Pairs(prefill_at="prefill", reads_back=BOTH)
    world.balancer.policies["decode"].dispatched(world.decode[1], world.submit(9), 0.0)
    world.caches(world.decode[1], stated)
    placed = world.place()
    assert at(placed) == ["prefill at prefill-0", "decode at decode-1"]
    assert placed.legs[0].read == stated * SIZE


@pytest.mark.parametrize(("pinned", "read"), [(None, 0), (0, 0), (96, 96), (800, 144)])
def test_an_engines_own_connector_reads_what_is_pinned_alone(pinned: int | None, read: int) -> None:
    """Whatever is cached beyond that; a rank that says nothing of it pins nothing."""
    world = Pairs(prefill_at="prefill", reads_back=BOTH, kv_transfer="NixlConnector")
    world.caches(world.decode[1], 9)
    world.reports(world.decode[1], kv_tokens=pinned or 0, kv_pinned=pinned)
    assert [leg.read for leg in world.place().legs] == [read, 0]


def test_that_prefill_can_read_back_makes_a_pair_cheaper() -> None:
    """Decode lacks 72 of 168 tokens and has 28 requests; prefill has 120 queued and lacks all, of which it can read
    96."""
    for roles, legs in (((), 1), (BOTH, 2)):
        world = Pairs(reads_back=roles)
        world.caches(world.decode[1], 6)
        world.busy(world.decode[1], 28, 28)
        world.busy(world.decode[0], 9, 900)
        world.busy(world.prefill, 1, 150)
        assert len(world.place().legs) == legs


def test_without_a_ready_prefill_rank_decode_does_it_all() -> None:
    world = Pairs()
    world.table.set_ready(world.prefill, False)
    assert at(world.place()) == ["unified at decode-0"]
    world.caches(world.decode[1], 9)
    world.busy(world.decode[1], 3, 60)
    assert at(world.place()) == ["unified at decode-1"], "where there is the least to compute"
    world = Pairs("total_requests")
    world.table.set_ready(world.prefill, False)
    placed = world.place()
    assert placed.refusal is not None
    assert placed.refusal.code == "no_rank"


D = [replace(hello("d", n, role="decode"), prefills=True, wants_prompt=True) for n in range(2)]


def test_a_decode_rank_that_computes_counts_a_part_of_what_it_holds() -> None:
    world = World(decode_method="least_cost")
    world.join(D[0])
    world.report(D[0], waiting_tokens=10, kv_tokens=640)
    rank = world.rank(D[0])
    assert (rank.tokens, rank.held_tokens, queued_tokens(rank)) == (30, 620, 10)


def begun(**settings: Any) -> World:
    world = World(decode_method="least_cost", **settings)
    for node in (P[0], *D):
        world.join(node)
    return world


def test_a_pair_that_decode_does_alone_is_one_unified_leg_there_and_is_counted() -> None:
    world = begun(prefill_at="decode")
    world.submit(submit("r", "pair"))
    (sent,) = world.dispatches()
    assert (sent.leg, sent.prompt_tokens) == ("unified", 10)
    node = D[sent.dp_rank]
    assert len(world.to_nodes[-1].frames) == 2, "with its prompt"
    (accepted,) = world.answers(Accepted)
    assert (accepted.prefill, accepted.decode) == (None, world.rank(node).location)
    world.progress(node, started=[sent])
    world.progress(node, ended=[sent], output_tokens=5)
    assert world.answers(Done)[0].legs[0].leg == "unified"
    assert world.core.counts["trip_at_decode"] == 1
    assert "first_token_us_at_decode_taken" not in world.core.counts, "nothing was predicted"
    world.assert_empty()


def test_the_seconds_to_the_first_token_are_counted_beside_those_predicted() -> None:
    world = begun()
    world.submit(submit("r", "pair"))
    prefill, decode = world.dispatches()
    world.progress(P[0], started=[prefill], ended=[prefill])
    world.now += 0.25
    world.progress(D[decode.dp_rank], started=[decode])
    world.progress(D[decode.dp_rank], ended=[decode], cached_tokens=8)
    counts = {name: count for name, count in world.core.counts.items() if name.startswith("first_token_us_")}
    assert counts == {"first_token_us_delta_predicted": 1000, "first_token_us_delta_taken": 250_000}
    (samples,) = [each.samples for each in world.core.metrics(world.now) if "trip_first_token" in each.name]
    assert [(sample.value, sample.labels) for sample in samples] == [
        (0.001, {"trip": "delta", "kind": "predicted"}),
        (0.25, {"trip": "delta", "kind": "taken"}),
    ]


@pytest.mark.parametrize(("cached", "trip"), [(0, "trip_whole"), (8, "trip_delta")])
def test_the_other_trips_are_told_apart_by_what_decode_had(cached: int, trip: str) -> None:
    world = begun(prefill_at="prefill")
    world.submit(submit("r", "pair"))
    prefill, decode = world.dispatches()
    assert [len(action.frames) for action in world.to_nodes if type(action.message) is Dispatch] == [2, 2]
    world.progress(P[0], started=[prefill], ended=[prefill])
    world.progress(D[decode.dp_rank], started=[decode])
    world.progress(D[decode.dp_rank], ended=[decode], cached_tokens=cached)
    assert {name: count for name, count in world.core.counts.items() if name.startswith("trip_")} == {trip: 1}


def test_what_is_read_back_stands_in_the_dispatch_of_prefill_and_is_counted() -> None:
    prefill, decode = replace(P[0], reads_back=True), replace(D[0], reads_back=True)
    world = World(decode_method="least_cost", prefill_method="cache_aware", prefill_at="prefill")
    for node in (prefill, decode):
        world.join(node)
    hashes = array("Q", range(1, 6)).tobytes()
    load = world.rank(decode)
    world.core.balancer.policies["decode"].stored(load, list(range(1, 6)))
    world.submit(submit("r", "pair", prompt_tokens=100, block_tokens=16, block_hashes=hashes))
    first, second = world.dispatches()
    assert (first.leg, first.read_back) == ("prefill", ReadBack(load.location, 80))
    assert (second.leg, second.read_back) == ("decode", None)
    assert (first.charge, second.charge) == (20, 20)
    world.progress(prefill, started=[first], ended=[first])
    world.progress(decode, started=[second])
    world.progress(decode, ended=[second], cached_tokens=80)
    assert {name: count for name, count in world.core.counts.items() if name.startswith("trip_")} == {
        "trip_read_back": 1
    }


def test_the_trip_and_its_predictions_are_in_the_trace() -> None:
    world = begun()
    world.submit(submit("r", "pair"))
    (record,) = world.core.life.table.records("r")
    (trip,) = [event.detail for event in trace_events_of(record, 0.0) if event.what == "trip"]
    assert trip == "a pair; predicted: 0.001 s at decode, 0.001 s as a pair"


def test_a_controller_that_restarts_takes_over_what_a_decode_rank_does_alone() -> None:
    """A hello does not say which leg it is, so it counts as a decode leg until its end says it was a unified one."""
    world = World(decode_method="least_cost")
    for node in (P[0], D[0], replace(D[1], running=(("r", 1),))):
        world.join(node)
    world.report(D[1], running=1)
    world.submit(submit("r", "pair"))
    (sent,) = world.dispatches()
    assert (sent.rid, sent.attempt, sent.dp_rank) == ("r", 1, 1)
    world.progress(D[1], started=[sent])
    world.feed(FromNode(peer_of(D[1]), Progress("d", 1, 1, (), (Ended("r", 1, "unified", "ok", output_tokens=5),))))
    assert world.answers(Done)[0].legs[0].leg == "unified"
    world.assert_empty()


def test_a_decode_rank_that_is_lost_costs_one_more_try() -> None:
    world = begun(prefill_at="decode")
    world.submit(submit("r", "pair"))
    (first,) = world.dispatches()
    world.cut(D[first.dp_rank])
    *_, second = world.dispatches()
    assert (second.attempt, second.leg, second.dp_rank) == (2, "unified", 1 - first.dp_rank)

"""The balancer by itself: all legs of a submit or none, what waits, what is refused, and what policies are told."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from controller_world import hello, load, submit

from bus.wire.kv_names import Cleared, Removed, Stored
from bus.wire.messages import Ended, Role, Submit
from controller.balancer import Balancer
from controller.load.rank import RankLoad
from controller.load.table import LoadTable
from controller.policies import Metric, Policy, View


class Told(Policy):
    """Goes by requests, charges seven tokens, and keeps what it is told, in order."""

    def __init__(self, told: list[tuple[object, ...]]) -> None:
        self.told = told

    def pick(self, view: View, request: Submit, tokens: int) -> RankLoad | None:
        return view.least(Metric.REQUESTS)

    def charge(self, rank: RankLoad, request: Submit) -> int:
        self.told.append(("charge", *rank.key))
        return 7

    def dispatched(self, rank: RankLoad, request: Submit, now: float) -> None:
        self.told.append(("dispatched", *rank.key, now))

    def ended(self, rank: RankLoad, request: Submit, end: Ended | None, took_s: float) -> None:
        self.told.append(("ended", *rank.key, end and end.code, took_s))

    def stored(self, rank: RankLoad, hashes: Iterable[int]) -> None:
        self.told.append(("stored", *rank.key, *hashes))

    def removed(self, rank: RankLoad, hashes: Iterable[int]) -> None:
        self.told.append(("removed", *rank.key, *hashes))

    def forgotten(self, rank: RankLoad) -> None:
        self.told.append(("forgotten", *rank.key, rank.epoch))


class World:
    """Two prefill and two decode ranks, each with a credit of eight requests."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []
        roles: tuple[Role, ...] = ("prefill", "decode", "unified")
        self.balancer = Balancer(LoadTable(1), {role: Told(self.told) for role in roles})
        self.table = self.balancer.table
        for role in ("prefill", "decode"):
            for dp_rank in range(2):
                self.balancer.opened(hello(role[0], dp_rank, role=role), ready=True)

    @property
    def sent(self) -> list[int]:
        return [rank.outstanding for rank in self.table.ranks.values()]


@pytest.fixture
def world() -> World:
    return World()


def test_both_legs_of_a_pair_are_placed_and_charged_by_one_call(world: World) -> None:
    placed = world.balancer.place(submit("r", "pair"), 2.0)
    assert placed.refusal is None
    assert placed.model == "m"
    legs = [(leg.role, leg.rank.key, leg.charge, leg.number, leg.began, leg.answers) for leg in placed.legs]
    assert legs == [("prefill", ("p", 0), 7, 1, 2.0, False), ("decode", ("d", 0), 7, 1, 2.0, True)]
    assert world.told == [
        ("charge", "p", 0), ("dispatched", "p", 0, 2.0), ("charge", "d", 0), ("dispatched", "d", 0, 2.0)
    ]  # fmt: skip


def test_a_pair_that_decode_has_no_credit_for_is_charged_nowhere(world: World) -> None:
    for number in range(16):
        assert world.balancer.place(submit(f"d{number}", "decode"), 0.0).legs
    del world.told[:]
    placed = world.balancer.place(submit("r", "pair"), 0.0)
    assert (placed.legs, placed.refusal, placed.model) == ((), None, "m")
    assert (world.sent, world.told) == ([0, 0, 8, 8], [])


def test_while_it_is_not_settled_everything_waits(world: World) -> None:
    world.balancer.settled = False
    placed = world.balancer.place(submit(instance="nowhere"), 0.0)
    assert (placed.legs, placed.refusal) == ((), None)


def test_a_request_waits_for_a_rank_that_may_come_back(world: World) -> None:
    ranks = [world.table.ranks["d", dp_rank] for dp_rank in range(2)]
    for rank in ranks:
        world.table.set_ready(rank, False)
    refusal = world.balancer.place(submit("r", "pair"), 0.0).refusal
    assert refusal is not None
    assert refusal.code == "no_rank"
    world.balancer.suspects = ranks[:1]
    placed = world.balancer.place(submit("r", "pair"), 0.0)
    assert (placed.legs, placed.refusal, placed.model) == ((), None, "m")
    refusal = world.balancer.place(submit("u"), 0.0).refusal
    assert refusal is not None, "a decode rank is none for this"


def test_while_it_is_young_a_refusal_that_rests_on_the_ranks_may_be_tried_again(world: World) -> None:
    wish = submit("r", "pair", prompt_tokens=5000)
    codes = []
    for young in (True, False):
        world.balancer.young = young
        refusal = world.balancer.place(wish, 0.0).refusal
        assert refusal is not None
        codes.append((refusal.code, "ranks may be missing" in refusal.sentence))
    assert codes == [("no_rank", True), ("too_long", False)]


@pytest.mark.parametrize("turn", [True, False])
def test_whose_turn_it_is_is_asked_before_a_rank_is_chosen_and_after_the_model_is_known(
    world: World, turn: bool
) -> None:
    asked: list[str] = []

    def in_turn(model: str) -> bool:
        asked.append(model)
        return turn

    placed = world.balancer.place(submit("r", "pair"), 0.0, in_turn=in_turn)
    assert (asked, bool(placed.legs)) == (["m"], turn)
    assert world.balancer.place(submit("r", "pair", instance="x"), 0.0, in_turn=in_turn).refusal is not None
    assert asked == ["m"], "it can run nowhere"


def test_ranks_that_were_chosen_elsewhere_are_charged(world: World) -> None:
    rank = world.table.ranks["d", 1]
    world.table.set_ready(rank, False)
    (leg,) = world.balancer.charge(submit("r", "decode"), 3.0, (("decode", rank),))
    assert (leg.rank, leg.number, rank.outstanding_tokens) == (rank, 1, 7)
    assert world.told == [("charge", "d", 1), ("dispatched", "d", 1, 3.0)]


def test_each_leg_ends_once_for_table_and_policy(world: World) -> None:
    request = submit("r", "pair")
    prefill, decode = world.balancer.place(request, 1.0).legs
    del world.told[:]
    assert world.balancer.ended(prefill, request, Ended("r", 1, "prefill", "ok"), 1.5)
    assert not world.balancer.ended(decode, request)
    world.balancer.unsent_late(decode.rank, decode.charge)
    (again, unsent) = world.balancer.place(request, 2.0).legs
    del world.told[2:]
    assert not world.balancer.ended(again, request, Ended("r", 1, "prefill", "overloaded"), 2.25)
    world.balancer.unsent(unsent, request)
    assert world.told == [
        ("ended", "p", 0, "ok", 0.5), ("ended", "d", 0, None, 0.0),
        ("ended", "p", 1, "overloaded", 0.25), ("ended", "d", 1, None, 0.0),
    ]  # fmt: skip
    assert world.sent == [0, 0, 0, 0]
    assert [rank.failed_total for rank in world.table.ranks.values()] == [0, 1, 1, 0]
    assert [rank.undone for rank in world.table.ranks.values()] == [0, 0, 1, 1]
    world.table.validate()


def test_what_caches_hold_comes_to_the_policy_of_the_role(world: World) -> None:
    rank = world.table.ranks["p", 1]
    world.balancer.cache(rank, (Stored((1, 2)), Removed((1,)), Cleared()))
    world.balancer.opened(hello("p", 1, role="prefill", epoch=2))
    world.balancer.closed(world.table.ranks["p", 1])
    assert world.told == [
        ("stored", "p", 1, 1, 2), ("removed", "p", 1, 1), ("forgotten", "p", 1, 1),
        ("forgotten", "p", 1, 1), ("forgotten", "p", 1, 2),
    ]  # fmt: skip
    assert ("p", 1) not in world.table.ranks


def test_an_engine_that_acknowledges_nothing_overwrites(world: World) -> None:
    request = submit("r", "decode")
    (leg,) = world.balancer.place(request, 0.0).legs
    said = world.balancer.overwrite(leg.rank, load(0, running=1, kv_tokens=10), 0.0)
    assert (said.seq, leg.rank.in_flight, leg.rank.requests, leg.rank.tokens) == (1, 0, 1, 10)
    assert world.balancer.overwrite(leg.rank, load(0), 1.0).seq == 2
    assert (leg.rank.requests, leg.rank.tokens) == (0, 0)

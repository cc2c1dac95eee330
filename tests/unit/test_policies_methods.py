"""Load balancing methods and the names users may give them."""

from __future__ import annotations

import pytest
import structlog
from controller_world import hello, load, submit

from bus.errors import ConfigError
from bus.wire.codes import Refusal
from bus.wire.messages import Submit
from controller.balancer import Balancer
from controller.config import ControllerConfig
from controller.load.rank import RankLoad
from controller.load.table import LoadTable
from controller.policies import POLICIES, make_policy, resolve


def table_of(count: int, instances: int = 1, dp_size: int | None = None) -> tuple[LoadTable, list[RankLoad]]:
    table = LoadTable(1)
    ranks = []
    for i in range(instances):
        for n in range(count):
            rank = table.open(hello(f"i{i}", n, dp_size=dp_size or count))
            table.set_ready(rank, True)
            ranks.append(rank)
    return table, ranks


def picks(table: LoadTable, method: str, count: int, room: int = 0) -> list[tuple[str, int] | None]:
    policy, group = make_policy(method), table.group("unified")
    chosen = []
    for n in range(count):
        request = submit(f"r{n}", bootstrap_room=room)
        rank = policy.pick(group, request, request.prompt_tokens)
        chosen.append(rank.key if rank else None)
        if rank:
            table.charge(rank, request.prompt_tokens)
    return chosen


def test_round_robin_goes_round_the_live_ranks_whatever_their_load() -> None:
    table, ranks = table_of(4)
    table.apply(ranks[1].key, 1, load(1, running=3), 0.0)
    table.set_ready(ranks[2], False)
    assert [key and key[1] for key in picks(table, "round_robin", 6)] == [0, 1, 3, 0, 1, 3]


def test_total_requests_and_total_tokens_differ_where_they_should() -> None:
    table, ranks = table_of(2)
    table.apply(ranks[0].key, 1, load(1, running=3, kv_tokens=10), 0.0)
    table.apply(ranks[1].key, 1, load(1, running=1, kv_tokens=500), 0.0)
    assert picks(table, "total_requests", 1) == [("i0", 1)]
    assert picks(table, "total_tokens", 1) == [("i0", 0)]


def test_total_tokens_breaks_ties_by_requests() -> None:
    table, ranks = table_of(2)
    table.apply(ranks[0].key, 1, load(1, running=2, kv_tokens=100), 0.0)
    table.apply(ranks[1].key, 1, load(1, running=1, kv_tokens=100), 0.0)
    assert picks(table, "total_tokens", 1) == [("i0", 1)]


def test_follow_bootstrap_room_is_the_room_modulo_dp_size_or_nothing() -> None:
    table, ranks = table_of(4)
    assert picks(table, "follow_bootstrap_room", 2, room=2**63 - 1) == [("i0", 3)] * 2
    table.set_ready(ranks[3], False)
    assert picks(table, "follow_bootstrap_room", 1, room=7) == [None]


def test_follow_bootstrap_room_rotates_between_instances_whose_rank_is_there() -> None:
    table, ranks = table_of(2, instances=3)
    assert [key and key[0] for key in picks(table, "follow_bootstrap_room", 4, room=5)] == ["i0", "i1", "i2", "i0"]
    table.set_ready(ranks[3], False)  # i1/1
    assert {key and key[0] for key in picks(table, "follow_bootstrap_room", 4, room=5)} == {"i0", "i2"}


@pytest.mark.parametrize("method", [name for name in POLICIES if name != "follow_bootstrap_room"])
def test_a_rank_that_is_not_ready_is_no_candidate_under_any_method(method: str) -> None:
    table, ranks = table_of(3)
    for rank in ranks[:2]:
        table.set_ready(rank, False)
    assert {key and key[1] for key in picks(table, method, 4)} == {2}
    table.set_ready(ranks[2], False)
    assert picks(table, method, 1) == [None]


def test_auto_depends_on_the_role() -> None:
    assert resolve("auto", "prefill") == "follow_bootstrap_room"
    assert resolve("auto", "decode") == resolve("auto", "unified") == "round_robin"


@pytest.mark.parametrize(("old", "new"), [("shortest_queue", "total_requests"), ("minimum_tokens", "total_tokens")])
def test_old_names_are_taken_with_a_warning(old: str, new: str) -> None:
    with structlog.testing.capture_logs() as logs:
        assert resolve(old, "decode") == new
    assert [(line["event"], line["log_level"], line["use"]) for line in logs] == [("method.deprecated", "warning", new)]


@pytest.mark.parametrize("method", ["decode_round_robin", "prefill_round_robin_balance"])
def test_removed_names_are_refused_with_their_replacement(method: str) -> None:
    with pytest.raises(ConfigError, match="round_robin") as error:
        ControllerConfig(decode_method=method)
    assert "use --" in str(error.value)


def test_an_unknown_method_is_refused_with_the_list_of_methods() -> None:
    with pytest.raises(ConfigError) as error:
        ControllerConfig(prefill_method="fastest")
    assert all(name in str(error.value) for name in ("'fastest'", "auto", *POLICIES))
    assert "\n" not in str(error.value)


def test_the_configuration_warns_once_and_holds_the_new_name() -> None:
    with structlog.testing.capture_logs() as logs:
        config = ControllerConfig(decode_method="shortest_queue")
    assert config.methods["decode"] == "total_requests"
    assert len(logs) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lease_s", 0.0),
        ("attempts", 0),
        ("settle_s", -1.0),
        ("name", "a b"),
        ("queue_requests", 0),
        ("bus", "udp://x"),
        ("name", "a\n"),
        ("instances", ("prefill-0\n",)),
    ],
)
def test_a_bad_setting_is_one_clear_line(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as error:
        ControllerConfig(**{field: value})  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


class TestPlacement:
    def balancer(self, table: LoadTable, method: str = "round_robin") -> Balancer:
        return Balancer(table, {"unified": make_policy(method), "decode": make_policy(method)})

    def rank(self, balancer: Balancer, request: Submit, *avoid: RankLoad) -> RankLoad | None:
        """Where its only leg goes; raises what it is refused with."""
        placed = balancer.place(request, 0.0, avoid=avoid)
        if placed.refusal is not None:
            raise placed.refusal
        return placed.legs[0].rank if placed.legs else None

    def test_the_callers_rank_wins_even_without_credit(self) -> None:
        table, ranks = table_of(2)
        balancer = self.balancer(table)
        for _ in range(20):  # credit is 8
            assert self.rank(balancer, submit(routed_dp_rank=1)) is ranks[1]

    def test_a_rank_beyond_all_bounds_refuses_even_its_caller(self) -> None:
        table, ranks = table_of(1)
        for _ in range(32):
            table.charge(ranks[0], 1)
        with pytest.raises(Refusal, match="has 32 requests") as error:
            self.rank(self.balancer(table), submit(routed_dp_rank=0))
        assert error.value.code == "overloaded"

    @pytest.mark.parametrize("dp_rank", [-1, 2, 10**30])
    def test_a_rank_outside_the_instance_is_refused(self, dp_rank: int) -> None:
        table, _ = table_of(2)
        with pytest.raises(Refusal, match=r"outside 0\.\.1 of i0") as error:
            self.rank(self.balancer(table), submit(routed_dp_rank=dp_rank))
        assert error.value.code == "bad_rank"

    def test_a_rank_of_several_instances_needs_a_name(self) -> None:
        table, ranks = table_of(2, instances=2)
        with pytest.raises(Refusal, match="name one of i0, i1") as error:
            self.rank(self.balancer(table), submit(routed_dp_rank=1))
        assert error.value.code == "bad_rank"
        assert self.rank(self.balancer(table), submit(instance="i1", routed_dp_rank=1)) is ranks[3]

    def test_a_rank_that_is_not_ready_or_has_not_joined_is_unavailable(self) -> None:
        table, ranks = table_of(2, dp_size=3)
        table.set_ready(ranks[0], False)
        for dp_rank in (0, 2):
            with pytest.raises(Refusal) as error:
                self.rank(self.balancer(table), submit(routed_dp_rank=dp_rank))
            assert error.value.code == "rank_unavailable"

    def test_a_request_too_large_for_one_rank_goes_to_another(self) -> None:
        table = LoadTable(1)
        small, large = table.open(hello("i", 0, max_context=50)), table.open(hello("i", 1, max_context=500))
        for rank in (small, large):
            table.set_ready(rank, True)
        balancer = self.balancer(table)
        for _ in range(3):
            assert self.rank(balancer, submit(prompt_tokens=80)) is large
        with pytest.raises(Refusal, match="500") as error:
            self.rank(balancer, submit(prompt_tokens=500))
        assert error.value.code == "too_long"

    def test_ranks_to_avoid_are_avoided_while_there_are_others(self) -> None:
        table, (a, b) = table_of(2)
        balancer = self.balancer(table)
        assert {self.rank(balancer, submit(), a) for _ in range(3)} == {b}
        table.set_ready(b, False)
        assert self.rank(balancer, submit(), a) is a

    def test_a_request_without_a_room_is_bad_where_the_room_picks_the_rank(self) -> None:
        table, (_, b) = table_of(2)
        balancer = self.balancer(table, "follow_bootstrap_room")
        with pytest.raises(Refusal, match="the request has none") as error:
            self.rank(balancer, submit(bootstrap_room=None))
        assert error.value.code == "bad_room"
        assert self.rank(balancer, submit(bootstrap_room=None, routed_dp_rank=1)) is b  # the caller's rank wins
        assert self.rank(balancer, submit(bootstrap_room=3)) is b

    def test_who_serves_nothing_of_it_is_said(self) -> None:
        table, _ = table_of(1)
        balancer = self.balancer(table)
        for leg, wish, code in (
            ("decode", {}, "no_rank"),
            ("decode", {"instance": "i0"}, "bad_rank"),
            ("unified", {"instance": "nope"}, "bad_rank"),
            ("unified", {"model": "other"}, "bad_request"),
        ):
            with pytest.raises(Refusal) as error:
                self.rank(balancer, submit(leg=leg, **wish))  # type: ignore[arg-type]
            assert error.value.code == code, (leg, wish)

    def test_several_live_models_need_a_name(self) -> None:
        table, _ = table_of(1)
        other = table.open(hello("j", model="other"))
        balancer = self.balancer(table)
        assert balancer.place(submit(), 0.0).model == "m"  # j/0 is not ready yet
        table.set_ready(other, True)
        with pytest.raises(Refusal, match="m, other") as error:
            self.rank(balancer, submit())
        assert error.value.code == "no_rank"

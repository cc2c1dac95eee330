"""Which model a submit means while ranks change, and what waits for a place."""

from __future__ import annotations

import pytest
from controller_world import EPOCH, P, U, failure, hello, pd, peer_of, submit, unified
from msgspec.structs import replace

from bus.wire.messages import Bye, Dispatch, DrainRank, Failed
from controller.events import FromClient, FromNode


class TestModels:
    """Submits that name no model, while the ranks change from `m` to `new`."""

    V = hello("v", 0, dp_size=1, model="new")

    @pytest.mark.parametrize("how", ["starting", "draining", "gone", "lost", "silent lease"])
    def test_a_model_whose_ranks_take_nothing_does_not_count(self, how: str) -> None:
        world = unified(*U, hello("v", 0, dp_size=1, model="new", state="starting" if how == "starting" else "ready"))
        if how == "draining":
            world.feed(FromClient("op", DrainRank(1, "v", 0), ()))
        elif how == "gone":
            world.feed(FromNode(peer_of(self.V), Bye("v", 0, 1)))
        elif how == "lost":
            world.cut(self.V)
        elif how == "silent lease":
            world.pass_time(3.5, alive=U)
        world.submit(submit("r"))
        assert [d.rid for u in U for d in world.dispatches(u)] == ["r"]

    def test_a_rank_that_the_caller_chose_says_which_model(self) -> None:
        """M55"""
        world = unified(*U, self.V)
        world.submit(submit("a", instance="u", routed_dp_rank=1))
        world.cut(self.V)
        world.submit(submit("b", routed_dp_rank=1))  # v is not meant: it is gone
        assert [d.rid for d in world.dispatches(U[1])] == ["a", "b"]

    def test_while_two_are_live_the_answer_names_them_and_is_not_final(self) -> None:
        world = unified(*U, self.V)
        world.submit(submit("r"))
        failed = failure(world)
        assert (failed.code, failed.retryable) == ("no_rank", True)
        assert failed.retry_after_s > 0
        assert "m, new" in failed.message
        world.submit(submit("named", model="new"))
        assert [d.rid for d in world.dispatches()] == ["named"]
        for u in U:
            world.feed(FromClient("op", DrainRank(1, "u", u.dp_rank), ()))
        world.submit(submit("r"))
        assert [d.rid for d in world.dispatches(self.V)] == ["named", "r"]

    def test_both_legs_run_one_model(self) -> None:
        world = pd()
        world.join(hello("q", 0, role="prefill", dp_size=1, model="new"))
        for p in P:
            world.feed(FromNode(peer_of(p), Bye("p", p.dp_rank, 1)))
        world.submit(submit("r", "pair"))
        failed = failure(world)
        assert (failed.code, failed.retryable) == ("no_rank", True)
        assert "prefill: new; decode: m" in failed.message
        world.join(hello("e", 0, role="decode", dp_size=1, model="new"))
        world.submit(submit("r", "pair"))
        assert [(d.leg, a.peer) for a in world.to_nodes if isinstance(d := a.message, Dispatch)] == [
            ("prefill", "q/0@1"),
            ("decode", "e/0@1"),
        ]

    def test_what_waits_stays_with_the_model_it_waits_for(self) -> None:
        u = hello("u", 0, dp_size=1, max_running=1)
        world = unified(u, request_overcommit=1.0)
        world.submit(submit("a"))
        world.submit(submit("b"))
        world.join(self.V)
        assert not world.answers(Failed)
        world.submit(submit("late"))  # behind `b`, and still told at once
        assert failure(world).code == "no_rank"
        assert not world.dispatches(self.V)
        world.report(u, acks=[(EPOCH, 1, 10)])
        assert [d.rid for d in world.dispatches(u)] == ["a", "b"]

    def test_another_attempt_stays_with_the_model_of_the_first(self) -> None:
        world = unified()
        world.submit(submit("r"))
        world.join(self.V)
        world.progress(U[0], ended=world.dispatches(U[0]), code="kv_failed")
        assert [d.attempt for d in world.dispatches(U[1])] == [2]
        world.progress(U[1], ended=world.dispatches(U[1]), code="kv_failed")
        assert [d.attempt for d in world.dispatches() if d.attempt == 3] == [3]
        assert not world.dispatches(self.V)


class TestQueue:
    def test_waits_for_credit_and_goes_to_whoever_frees_up_first(self) -> None:
        world = unified(request_overcommit=1.0)
        for n in range(10):
            world.submit(submit(f"r{n}"))
        assert len(world.dispatches()) == 8
        assert len(world.core.life.queue) == 2
        world.report(U[1], running=3, acks=[(EPOCH, 4, 40)])
        assert [d.rid for d in world.dispatches(U[1])][-1] == "r8"
        world.report(U[1], running=4, acks=[(EPOCH, 5, 50)])
        assert len(world.core.life.queue) == 1

    def test_priority_overtakes_and_arrival_decides_among_equals(self) -> None:
        world = unified(hello("u", 0, dp_size=1, max_running=1), request_overcommit=1.0)
        for rid, priority in (("run", 0), ("low", -1), ("a", 5), ("b", 5)):
            world.submit(submit(rid, priority=priority))
        order = []
        for seq in range(1, 4):
            world.report(hello("u", 0), acks=[(EPOCH, seq, seq * 10)])
            order.append(world.dispatches()[-1].rid)
        assert order == ["a", "b", "low"]

    def test_a_full_queue_refuses_early_with_a_hint(self) -> None:
        world = unified(hello("u", 0, dp_size=1, max_running=1), request_overcommit=1.0, queue_requests=2)
        for n in range(4):
            world.submit(submit(f"r{n}"))
        failed = failure(world)
        assert (failed.rid, failed.code, failed.retryable) == ("r3", "overloaded", True)
        assert failed.retry_after_s > 0

    def test_bytes_stay_bounded_when_small_requests_are_replaced_by_large_ones(self) -> None:
        world = unified(payload_bytes=200)
        for n in range(4):
            world.submit(submit(f"r{n}"))
        world.submit(submit("r0", prompt_tokens=20, attempt=2))
        assert failure(world).code == "overloaded"
        assert world.core.life.requests["r0"].attempt == 1  # the old one goes on
        world.submit(submit("r0", prompt_tokens=13, attempt=2))
        assert world.core.life.requests["r0"].attempt == 2

    def test_bytes_are_bounded_too(self) -> None:
        world = unified(hello("u", 0, dp_size=1, max_running=1), request_overcommit=1.0, payload_bytes=100)
        for n in range(3):
            world.submit(submit(f"r{n}"))
        assert failure(world).code == "overloaded"
        assert world.core.life.table.payload_bytes <= 100

    def test_a_deadline_passes_in_the_queue(self) -> None:
        world = unified(hello("u", 0, dp_size=1, max_running=1), request_overcommit=1.0)
        world.submit(submit("a"))
        world.submit(submit("b", deadline_s=0.5))
        world.pass_time(0.7, alive=[hello("u", 0)])
        failed = failure(world)
        assert (failed.rid, failed.code) == ("b", "deadline")
        assert "waited" in failed.message
        assert len(world.dispatches()) == 1

    def test_nobody_overtakes_whoever_waits_for_the_same_ranks(self) -> None:
        world = unified(hello("u", 0, dp_size=1, max_running=2, kv_capacity=100), request_overcommit=1.0)
        for rid in ("a", "b", "c"):
            world.submit(submit(rid))
        world.report(hello("u", 0), running=1, acks=[(EPOCH, 2, 20)])
        world.submit(submit("d"))
        assert [d.rid for d in world.dispatches()] == ["a", "b", "c"]

    def test_who_waits_is_told_when_the_last_rank_goes(self) -> None:
        world = unified(hello("u", 0, dp_size=1, max_running=1), request_overcommit=1.0)
        world.submit(submit("a"))
        world.submit(submit("b"))
        world.feed(FromNode("u/0@1", Bye("u", 0, 1)))
        assert {f.rid: f.code for f in world.answers(Failed)} == {"a": "no_rank", "b": "no_rank"}
        world.assert_empty()

    def test_lanes_that_want_the_same_rank_go_by_arrival(self) -> None:
        node = replace(hello("u", 0, dp_size=1, max_running=1), params=("min_p",))
        world = unified(node, request_overcommit=1.0)
        for number in range(6):
            world.submit(submit(f"r{number}", needs=("min_p",) if number % 3 == 2 else ()))
        for number in range(1, 6):
            world.progress(node, ended=world.dispatches()[-1:])
            world.report(node, acks=[(EPOCH, number, 10 * number)])
        assert [d.rid for d in world.dispatches()] == [f"r{number}" for number in range(6)]

    def test_who_names_the_only_model_waits_in_one_lane_with_who_does_not(self) -> None:
        world = unified(hello("u", 0, dp_size=1, max_running=1), request_overcommit=1.0)
        for number in range(4):
            world.submit(submit(f"r{number}", model="m" if number % 2 else ""))
        assert len(world.core.life.queue.lanes()) == 1

    def test_what_only_some_ranks_can_hold_holds_up_nothing_that_others_can(self) -> None:
        large = hello("large", max_running=1, max_context=9000, kv_capacity=9000)
        world = unified(large, hello("small", max_running=4), request_overcommit=1.0, unified_method="total_tokens")
        for rid in ("runs", "waits"):
            world.submit(submit(rid, prompt_tokens=5000))
        for number in range(4):
            world.submit(submit(f"short{number}"))
        assert [request.rid for request in world.core.life.queue] == ["waits"]

    def test_who_avoids_a_rank_holds_up_nobody_else(self) -> None:
        a, b = hello("a", max_running=8), hello("b", max_running=1)
        world = unified(a, b, request_overcommit=1.0)
        world.submit(submit("x", instance="b"))
        world.submit(submit("avoids a", avoid=(("a", 0),)))
        for number in range(6):
            world.submit(submit(f"other{number}"))
        assert [request.rid for request in world.core.life.queue] == ["avoids a"]

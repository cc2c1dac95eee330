"""A request runs once: its rid, room and attempts are known again, also by a controller that has just started."""

from __future__ import annotations

from typing import Any

import pytest
from controller_world import D, P, U, World, failure, hello, pd, peer_of, submit, unified

from bus.rights import Known
from bus.wire.messages import Accepted, Cancel, Done, Ended, Failed, Progress
from controller.events import ClientGone, FromClient, FromNode


def known(key: str) -> Known:
    peer = Known(key.encode())
    peer.key = key
    return peer


class TestIdentity:
    def test_a_room_of_a_live_request_is_refused_and_free_again_after_it(self) -> None:
        world = pd()
        world.submit(submit("a", "pair", bootstrap_room=7))
        world.submit(submit("b", "pair", bootstrap_room=7))
        assert failure(world).code == "duplicate_room"
        world.feed(FromClient("client", Cancel("a"), ()))
        world.submit(submit("b", "pair", bootstrap_room=7))
        assert len(world.answers(Accepted)) == 2

    def test_the_same_submit_from_a_client_that_reconnected_is_answered_not_run_again(self) -> None:
        """M71"""
        world = unified()
        world.submit(submit("r"), peer="before")
        world.submit(submit("r"), peer="after")
        assert len(world.dispatches()) == 1
        assert len(world.answers(Accepted, "after")) == 1
        world.progress(U[0], ended=world.dispatches(U[0]))
        assert len(world.answers(Done, "after")) == 1
        assert not world.answers(Done, "before")
        world.assert_empty()

    def test_a_submit_that_came_late_over_a_lost_connection_spoils_nothing_for_the_one_that_is_said_again(self) -> None:
        """Ranks remember how they were told to end an attempt, and say so when it comes again: another one comes."""
        world = unified()
        world.submit(submit("r"), peer="before")
        world.feed(ClientGone("before", "r"))
        world.submit(submit("r"), peer="after")
        (cancel,) = world.cancels(U[0])
        assert cancel.attempt == 1
        assert [accepted.attempt for accepted in world.answers(Accepted, "after")] == [2]
        world.feed(FromNode(peer_of(U[1]), Progress("u", 1, 1, (), (Ended("r", 1, "unified", cancel.code),))))
        assert not world.answers(Failed, "after")
        assert world.core.life.requests["r"].attempt == 2

    def test_another_request_under_a_live_rid_is_refused(self) -> None:
        """M71"""
        world = unified()
        world.submit(submit("r"))
        world.submit(submit("r", prompt_tokens=11), peer="thief")
        (failed,) = world.answers(Failed, "thief")
        assert failed.code == "duplicate_rid"
        assert len(world.core.life.requests) == 1

    def test_a_higher_attempt_supersedes_and_fences_the_old_one(self) -> None:
        """M72"""
        world = unified()
        world.submit(submit("r"), peer="old")
        (first,) = world.dispatches(U[0])
        world.submit(submit("r", prompt_tokens=12, max_tokens=3, attempt=4, offset=2), peer="new")
        (cancel,) = world.cancels(U[0])
        assert (cancel.attempt, cancel.code) == (1, "fenced")
        assert world.answers(Failed, "old")[0].code == "fenced"
        (second,) = world.dispatches(U[1])
        assert (second.attempt, second.offset) == (4, 2)
        world.progress(U[0], ended=[first])  # the old attempt wakes up late
        assert not world.answers(Done)
        world.progress(U[1], ended=[second])
        assert len(world.answers(Done, "new")) == 1
        world.assert_empty()

    def test_a_resumed_submit_is_known_again_also_as_it_was_at_first(self) -> None:
        """M71"""
        world = unified()
        resumed = submit("r", prompt_tokens=12, max_tokens=3, attempt=2, offset=2)
        for n, again in enumerate((resumed, resumed, submit("r"))):
            world.submit(again, peer=f"connection {n}")
        assert [accepted.attempt for accepted in world.answers(Accepted)] == [2, 2, 2]
        assert len(world.dispatches()) == 1

    def test_an_old_attempt_at_the_very_rank_of_the_new_one_is_fenced_too(self) -> None:
        world = unified(U[0])
        world.submit(submit("r"))
        world.submit(submit("r", attempt=2))
        first, second = world.dispatches(U[0])
        world.progress(U[0], started=[first], ended=[first])
        assert not world.answers(Done)
        assert world.core.life.table.payload_bytes == 46  # for another attempt
        world.progress(U[0], ended=[second])
        assert [d.attempt for d in world.answers(Done)] == [2]
        world.assert_empty()

    def test_no_try_has_a_number_that_was_used_here_whatever_other_request_had_the_rid_since(self) -> None:
        """Ranks remember how an attempt of a room ended, and answer it again with that."""
        world = unified(attempts=2)
        world.submit(submit("r", bootstrap_room=1))
        for node in U:
            world.progress(node, ended=world.dispatches(node)[-1:], code="engine_failed")
        for room, attempt in ((2, 1), (3, 4)):
            world.submit(submit("r", bootstrap_room=room, attempt=attempt), peer="another")
            dispatched = world.dispatches()[-1]
            for node in U:
                world.progress(node, ended=[each for each in world.dispatches(node) if each is dispatched])
        world.submit(submit("r", bootstrap_room=1, attempt=2))
        assert [dispatch.attempt for dispatch in world.dispatches()] == [1, 2, 3, 4, 5]

    def test_one_client_may_not_fill_the_house(self) -> None:
        world = unified(client_requests=2)
        for n in range(3):
            world.submit(submit(f"r{n}"))
        assert failure(world).code == "too_many"
        world.submit(submit("other"), peer="another")
        assert len(world.answers(Accepted)) == 3

    def test_nor_by_taking_over_what_another_connection_has(self) -> None:
        world = unified(client_requests=1)
        world.submit(submit("r"))
        world.submit(submit("mine"), peer="another")
        world.submit(submit("r", attempt=2), peer="another")
        assert failure(world).code == "too_many"
        world.submit(submit("r", attempt=2), peer="back")
        assert [accepted.attempt for accepted in world.answers(Accepted, "back")] == [2], "one that comes back may"


class TestStart:
    def test_nothing_is_dispatched_on_an_empty_picture(self) -> None:
        world = World(settle_s=0.5)
        world.submit(submit("r"))
        world.pass_time(0.3)
        world.join(U[0])
        world.join(hello("u", 1, running=(("x", 1),)))
        assert not world.dispatches()
        world.pass_time(0.4, alive=U)
        assert not world.dispatches()  # u/1 runs something and has not said how much
        world.report(U[1], running=1)
        assert len(world.dispatches()) == 1

    def test_a_node_that_never_reports_holds_up_at_most_a_lease(self) -> None:
        world = World(settle_s=0.5)
        world.submit(submit("r"))
        world.join(U[0])
        world.join(hello("u", 1, running=(("x", 1),)))
        world.pass_time(3.2, alive=U)
        assert len(world.dispatches(U[0])) == 1

    def test_what_nodes_still_run_is_taken_over_not_run_twice(self) -> None:
        world = World(prefill_method="total_tokens")
        world.join(P[0])
        world.join(hello("d", 1, role="decode", running=(("r", 2),)))
        world.report(D[1], running=1)
        world.submit(submit("r", "pair", attempt=1))
        (dispatch,) = world.dispatches()
        assert (dispatch.leg, dispatch.attempt, dispatch.dp_rank) == ("decode", 2, 1)
        assert world.answers(Accepted)[0].attempt == 2
        world.progress(D[1], started=[dispatch], ended=[dispatch])
        assert len(world.answers(Done)) == 1
        world.assert_empty()

    @pytest.mark.parametrize("newer_first", [True, False])
    def test_of_two_attempts_the_newer_is_taken_over_and_the_older_ended(self, newer_first: bool) -> None:
        """M72: in whichever order their ranks say hello."""
        old, new = hello("u", 0, running=(("r", 1),)), hello("u", 1, running=(("r", 2),))
        world = World()
        for node in (new, old) if newer_first else (old, new):
            world.join(node)
            world.report(node, running=1)
        world.submit(submit("r"))
        assert [(d.attempt, d.dp_rank) for d in world.dispatches()] == [(2, 1)]
        assert [(c.attempt, c.code) for c in world.cancels(old)] == [(1, "fenced")]
        assert not world.cancels(new)
        assert len(world.core.life.table.orphans) == 0

    def test_it_is_taken_over_also_before_its_rank_has_reported(self) -> None:
        """It is no candidate for others until then; what it runs, it runs."""
        world = World(settle_s=0.5)
        idle = hello("w")
        world.join(idle)
        world.report(idle)
        world.pass_time(0.7, alive=[idle])
        node = hello("u", 0, running=(("r", 1),))
        world.join(node)
        assert not world.rank(node).ready
        world.submit(submit("r"))
        assert [d.attempt for d in world.dispatches(node)] == [1]
        assert not world.cancels()
        assert world.core.counts["adopted"] == 1

    def test_another_key_that_knows_a_rid_neither_ends_nor_takes_nor_hides_what_runs_under_it(self) -> None:
        alice, bob, admin = (known(key) for key in ("clients/alice", "clients/bob", "admins/a"))
        node = hello("u", 0, running=(("s", 1), ("r", 1)), clients=(("clients/bob", 1), ("clients/alice", 1)))
        world = unified(node, U[1])
        world.report(node, running=2)
        world.feed(FromClient(bob, Cancel("r"), ()))
        world.submit(submit("r"), peer=bob)
        assert [failed.code for failed in world.answers(Failed, bob)] == ["duplicate_rid"]
        assert not world.cancels()
        assert not world.dispatches()
        world.submit(submit("r"), peer=alice)
        assert [(d.attempt, d.client) for d in world.dispatches(node)] == [(1, "clients/alice")]
        world.feed(FromClient(admin, Cancel("s"), ()))
        assert [cancel.rid for cancel in world.cancels(node)] == ["s"]

    def test_where_a_rank_does_not_say_whose_a_leg_is_it_decides(self) -> None:
        alice = known("clients/alice")
        node = hello("u", 0, running=(("r", 3), ("s", 1)))
        world = unified(node, U[1])
        world.report(node, running=2)
        world.submit(submit("r", instance="u", routed_dp_rank=1), peer=alice)
        world.feed(FromClient(alice, Cancel("s"), ()))
        assert [(c.rid, c.client) for c in world.cancels(node)] == [("r", "clients/alice"), ("s", "clients/alice")]

    def test_half_of_a_pair_is_started_anew_under_a_higher_attempt(self) -> None:
        world = World(prefill_method="total_tokens")
        world.join(hello("p", 0, role="prefill", running=(("r", 2),)))
        world.join(D[0])
        world.report(P[0], running=1)
        world.submit(submit("r", "pair"))
        assert {d.attempt for d in world.dispatches()} == {3}
        assert [(c.attempt, c.code) for c in world.cancels(P[0])] == [(2, "fenced")]

    @pytest.mark.parametrize(("attempt", "ended"), [(1, ["r"]), (2, ["r"]), (3, [])])
    def test_what_a_rank_runs_of_a_request_that_was_placed_elsewhere_before_its_hello_ends_at_once(
        self, attempt: int, ended: list[str]
    ) -> None:
        """Not an attempt above the one that runs elsewhere, whose number may come again."""
        world = unified(U[1])
        world.submit(submit("r", attempt=2))
        assert len(world.dispatches(U[1])) == 1
        late = hello("u", 0, running=(("r", attempt), ("former", 1)))
        world.join(late)
        assert [(cancel.rid, cancel.attempt, cancel.code) for cancel in world.cancels(late)] == [
            (rid, attempt, "fenced") for rid in ended
        ]
        assert not world.cancels(U[1])
        assert [rid for rid in ("former", "r") if not world.core.life.table.orphans.of(rid, "")] == ended

    def test_the_kv_cache_of_what_was_taken_over_stays_where_it_is(self) -> None:
        world = World(prefill_method="total_tokens")
        world.join(P[0])
        world.join(hello("d", 1, role="decode", running=(("r", 2),)))
        world.report(D[1], running=1)
        world.submit(submit("r", "pair", attempt=1))
        assert world.core.counts["adopted"] == 1
        holds = hello("p", 1, role="prefill", running=(("r", 2),))
        world.join(holds)
        assert not world.cancels(holds)

    def test_only_what_a_rank_ran_before_it_was_given_anything_is_taken_over(self) -> None:
        world = unified(hello("u", 0, running=(("former", 1),)), U[1])
        world.report(U[0], running=1)
        world.submit(submit("r", routed_dp_rank=1))
        (dispatch,) = world.dispatches(U[1])
        for peer in ("", "again"):  # the same connection, as when its state changes, and a new one
            world.join(hello("u", 1, running=(("r", 1),)), peer=peer)
        assert world.core.life.table.orphans.of("former", "")
        assert not world.core.life.table.orphans.of("r", "")
        world.progress(U[1], ended=[dispatch], peer="again")
        world.submit(submit("r", routed_dp_rank=0))
        assert [d.attempt for d in world.dispatches(U[0])] == [1]
        assert not world.cancels()
        world.pass_time(61.0, alive=U[:1])
        world.join(hello("u", 0, running=(("former", 1), ("r", 1))))
        assert len(world.core.life.table.orphans) == 0

    def test_what_could_not_run_there_is_not_taken_over_and_harms_nobody(self) -> None:
        """M56"""
        world = unified(hello("u", 0, running=(("r", 1),)))
        world.report(U[0], running=1)
        world.submit(submit("r", prompt_tokens=1800), peer="mistaken")
        assert failure(world).code == "too_long"
        assert not world.dispatches()
        assert not world.cancels()
        world.submit(submit("r"))
        assert [d.attempt for d in world.dispatches(U[0])] == [1]
        assert world.core.counts["adopted"] == 1

    @pytest.mark.parametrize(
        "wish",
        [
            {"model": "m", "routed_dp_rank": 1},
            {"instance": "v"},
            {"model": "other"},
            {"model": "m", "prompt_tokens": 1800},
        ],
    )
    def test_a_wish_for_another_rank_than_runs_it_is_met_anew(self, wish: dict[str, Any]) -> None:
        """M55"""
        large = hello("u", 1, max_context=2000, kv_capacity=2000)
        world = unified(hello("u", 0, running=(("r", 2),)), large, hello("v", model="other"))
        world.report(U[0], running=1)
        world.submit(submit("r", **wish))
        (dispatch,) = world.dispatches()
        assert dispatch.attempt == 3
        assert not world.dispatches(U[0])
        assert [(c.attempt, c.code) for c in world.cancels(U[0])] == [(2, "fenced")]

    def test_a_rank_that_the_room_does_not_name_does_not_go_on_with_it(self) -> None:
        world = World(unified_method="follow_bootstrap_room")
        world.join(hello("u", 0, running=(("even", 1), ("odd", 1))))
        world.join(U[1])
        world.report(U[0], running=2)
        world.submit(submit("even", bootstrap_room=4))
        world.submit(submit("odd", bootstrap_room=5))
        assert [(d.rid, d.attempt) for d in world.dispatches(U[0])] == [("even", 1)]
        assert [(d.rid, d.attempt) for d in world.dispatches(U[1])] == [("odd", 2)]

    def test_a_cancel_before_the_controller_has_settled_reaches_what_still_runs(self) -> None:
        world = World(settle_s=0.5)
        world.join(hello("u", 0, running=(("r", 1),)))
        world.submit(submit("r"))
        world.feed(FromClient("client", Cancel("r"), ()))
        assert failure(world).code == "cancelled"
        assert [(c.rid, c.attempt) for c in world.cancels(U[0])] == [("r", 1)]

    def test_adoption_is_forgotten_with_its_rank_and_with_time(self) -> None:
        world = World()
        world.join(hello("u", 0, running=(("a", 1), ("b", 1))))
        world.join(hello("u", 1, running=(("b", 1),)))
        assert len(world.core.life.table.orphans) == 2
        world.cut(U[0])
        assert len(world.core.life.table.orphans) == 1
        world.pass_time(61.0, alive=U[1:])
        assert len(world.core.life.table.orphans) == 0

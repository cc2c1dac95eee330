"""The controller's core: what a submit gets, how requests live and end, and what becomes of them when ranks go."""

from __future__ import annotations

from typing import Any

import pytest
from controller_world import EPOCH, PARAMS, World, hello, load, peer_of, prompt, submit

from bus.wire.messages import (
    Accepted,
    Beacon,
    Bye,
    Cancel,
    Dispatch,
    Done,
    Drain,
    DrainRank,
    Failed,
    Location,
    Member,
    Message,
    Ping,
    Refused,
    Rooms,
    Sent,
    Status,
    StatusQuery,
    Welcome,
    Who,
)
from controller.events import EngineLoad, FromClient, FromNode, Published, Undelivered, Unreachable

P = [hello("p", n, role="prefill") for n in range(2)]
D = [hello("d", n, role="decode") for n in range(2)]
U = [hello("u", n) for n in range(2)]


def pd(**settings: Any) -> World:
    settings = {"prefill_method": "total_tokens", "decode_method": "total_requests", **settings}
    world = World(**settings)
    for node in (*P, *D):
        world.join(node)
    return world


def unified(*nodes: Any, **settings: Any) -> World:
    world = World(**settings)
    for node in nodes or U:
        world.join(node)
    return world


def failure(world: World) -> Failed:
    failures = world.answers(Failed)
    assert len(failures) == 1, failures
    return failures[0]


class TestPair:
    def test_both_legs_are_dispatched_and_decode_is_told_where_prefill_runs(self) -> None:
        """M45, M51, M52"""
        world = pd()
        world.submit(submit("r", "pair", bootstrap_room=7, priority=3, offset=2))
        (prefill,), (decode,) = world.dispatches(P[0]), world.dispatches(D[0])
        assert (prefill.leg, prefill.number, prefill.charge, prefill.bootstrap_room) == ("prefill", 1, 10, 7)
        assert prefill.prefill is None
        assert (decode.leg, decode.charge, decode.priority, decode.offset) == ("decode", 10, 3, 2)
        assert decode.prefill == Location("p", 0, 1, "ipc:///p.0")
        assert decode.controller_epoch == EPOCH
        frames = {a.message.leg: tuple(a.frames) for a in world.to_nodes if a.message in (prefill, decode)}  # type: ignore[attr-defined]
        assert frames == {"prefill": (prompt(10), PARAMS), "decode": (PARAMS,)}
        (accepted,) = world.answers(Accepted)
        assert accepted == Accepted("r", 1, 7, decode.prefill, Location("d", 0, 1, "ipc:///d.0"))

    def test_it_is_done_when_both_legs_have_ended(self) -> None:
        """M53"""
        world = pd()
        world.submit(submit("r", "pair"))
        (prefill,), (decode,) = world.dispatches(P[0]), world.dispatches(D[0])
        assert world.core.life.table.payload_bytes == 46
        world.progress(P[0], started=[prefill])
        assert world.core.life.table.payload_bytes == 46
        world.progress(D[0], started=[decode])
        assert world.core.life.table.payload_bytes == 0
        world.progress(D[0], ended=[decode])
        assert not world.answers(Done)
        world.progress(P[0], ended=[prefill])
        (done,) = world.answers(Done)
        assert [leg.leg for leg in done.legs] == ["prefill", "decode"]
        world.assert_empty()
        world.progress(P[0], ended=[prefill])  # said twice
        assert len(world.answers(Done)) == 1

    def test_a_computed_prompt_is_no_output_so_decode_may_still_be_dispatched_again(self) -> None:
        world = pd()
        world.submit(submit("r", "pair"))
        world.progress(P[0], ended=world.dispatches(P[0]))
        world.feed(Unreachable(peer_of(D[0])))
        assert [d.attempt for d in world.dispatches(D[1])] == [2]
        assert not world.answers(Failed)

    def test_a_trace_says_where_each_request_went(self) -> None:
        world = pd()
        world.core.life.trace = True
        world.submit(submit("r", "pair"))
        (note,) = [note for note in world.notes if note.event == "request.dispatched"]
        assert note.fields == {"rid": "r", "attempt": 1, "prefill": "p/0", "decode": "d/0"}

    def test_numbers_count_up_for_each_rank(self) -> None:
        """M45"""
        world = pd()
        for n in range(6):
            world.submit(submit(f"r{n}", "pair", bootstrap_room=n))
        for node in (*P, *D):
            assert [d.number for d in world.dispatches(node)] == [1, 2, 3]

    def test_the_caller_may_fix_both_ranks(self) -> None:
        """M55"""
        world = pd()
        world.submit(submit("r", "pair", routed_dp_rank=1, disagg_prefill_dp_rank=1))
        assert len(world.dispatches(P[1])) == len(world.dispatches(D[1])) == 1
        assert world.rank(D[1]).routed_total == 1
        assert world.rank(D[1]).requests == 1  # charged like any other

    def test_follow_bootstrap_room_is_kept_even_when_its_rank_is_gone(self) -> None:
        world = pd(prefill_method="follow_bootstrap_room")
        world.submit(submit("a", "pair", bootstrap_room=5))
        assert len(world.dispatches(P[1])) == 1
        world.feed(Unreachable(peer_of(P[1])))
        world.submit(submit("b", "pair", bootstrap_room=9))
        assert [f.code for f in world.answers(Failed)] == ["peer_lost", "no_rank"]
        world.submit(submit("c", "pair", bootstrap_room=10))
        assert len(world.dispatches(P[0])) == 1

    def test_what_is_too_long_for_the_rank_of_its_room_is_refused(self) -> None:
        world = World(prefill_method="follow_bootstrap_room")
        for node in (P[0], hello("p", 1, role="prefill", max_context=100), *D):
            world.join(node)
        for room in (4, 5):
            world.submit(submit(f"r{room}", "pair", 200, bootstrap_room=room))
        assert [d.rid for d in world.dispatches(P[0])] == ["r4"]
        assert (failure(world).rid, failure(world).code) == ("r5", "too_long")

    def test_decode_ended_before_prefill_is_lost_is_done(self) -> None:
        world = pd()
        world.submit(submit("r", "pair"))
        (decode,) = world.dispatches(D[0])
        world.progress(D[0], ended=[decode])
        world.feed(Unreachable(peer_of(P[0])))
        (done,) = world.answers(Done)
        assert [leg.leg for leg in done.legs] == ["decode"]
        world.assert_empty()

    def test_losing_prefill_after_decode_has_begun_fails_nothing(self) -> None:
        world = pd()
        world.submit(submit("r", "pair"))
        (decode,) = world.dispatches(D[0])
        world.progress(D[0], started=[decode])
        world.feed(Unreachable(peer_of(P[0])))
        assert not world.answers(Failed)
        (cancel,) = world.cancels(D[0])  # of use only if its KV cache was not fetched yet
        assert (cancel.rid, cancel.code, cancel.if_unfetched) == ("r", "prefill_failed", True)
        world.progress(D[0], ended=[decode])
        assert len(world.answers(Done)) == 1
        world.assert_empty()


class TestLoneLegs:
    def test_prefill(self) -> None:
        world = pd()
        world.submit(submit("r", "prefill", bootstrap_room=4))
        (dispatch,) = world.dispatches()
        assert world.answers(Accepted) == [Accepted("r", 1, 4, Location("p", 0, 1, "ipc:///p.0"), None)]
        world.progress(P[0], started=[dispatch])
        world.progress(P[0], ended=[dispatch])
        assert len(world.answers(Done)) == 1
        world.assert_empty()

    @pytest.mark.parametrize("told", [-1, 4096])
    def test_a_prefill_rank_that_no_instance_can_have_is_refused(self, told: int) -> None:
        world = pd()
        world.submit(submit("r", "decode", bootstrap_room=4, disagg_prefill_dp_rank=told))
        assert failure(world).code == "bad_rank"
        world.assert_empty()

    def test_decode_is_told_what_the_caller_says(self) -> None:
        world = pd()
        world.submit(submit("r", "decode", disagg_prefill_dp_rank=1))
        (dispatch,) = world.dispatches()
        assert dispatch.prefill == Location("p", 1, 1, "ipc:///p.1")

    def test_decode_whose_prefill_is_elsewhere_looks_it_up_itself(self) -> None:
        world = World()
        world.join(D[0])
        world.submit(submit("a", "decode", disagg_prefill_dp_rank=6, prefill_instance="far"))
        world.submit(submit("b", "decode", prefill_instance="far"))
        a, b = world.dispatches()
        assert (a.prefill, a.disagg_prefill_dp_rank, a.prefill_instance) == (None, 6, "far")
        assert (b.prefill, b.disagg_prefill_dp_rank, b.prefill_instance) == (None, None, "far")

    def test_the_two_legs_of_one_room_may_come_apart(self) -> None:
        world = pd()
        world.submit(submit("a", "prefill", bootstrap_room=4))
        world.submit(submit("b", "decode", bootstrap_room=4))
        assert len(world.answers(Accepted)) == 2
        world.submit(submit("c", "decode", bootstrap_room=4))
        assert failure(world).code == "duplicate_room"

    def test_unified_needs_no_room(self) -> None:
        world = unified()
        world.submit(submit("r"))
        (dispatch,) = world.dispatches()
        assert dispatch.bootstrap_room is None
        assert world.answers(Accepted)[0].decode == Location("u", 0, 1, "ipc:///u.0")


@pytest.mark.parametrize(
    ("wish", "code", "word"),
    [
        ({"bootstrap_room": None}, "bad_room", "needs a bootstrap_room"),
        ({"bootstrap_room": -1}, "bad_room", "-1"),
        ({"bootstrap_room": 2**63}, "bad_room", "outside"),
        ({"prompt_tokens": 0}, "empty_prompt", "at least 1"),
        ({"prompt_tokens": -4}, "empty_prompt", "-4"),
        ({"max_tokens": 0}, "bad_request", "max_tokens"),
        ({"prompt_tokens": 1001}, "too_long", "1002"),
        ({"prompt_tokens": 996}, "too_long", "1001"),
        ({"routed_dp_rank": 2}, "bad_rank", "0..1"),
        ({"routed_dp_rank": -1}, "bad_rank", "0..1"),
        ({"disagg_prefill_dp_rank": 99}, "bad_rank", "99"),
        ({"instance": "p"}, "bad_rank", "prefill"),
        ({"prefill_instance": "zzz"}, "bad_rank", "zzz"),
        ({"model": "other"}, "bad_request", "other"),
    ],
)
def test_a_bad_pair_fails_with_its_code_and_goes_nowhere(wish: dict[str, Any], code: str, word: str) -> None:
    """M56"""
    world = pd()
    world.submit(submit("r", "pair", **wish))
    failed = failure(world)
    assert (failed.code, failed.rid) == (code, "r")
    assert word in failed.message
    assert "\n" not in failed.message
    assert not world.dispatches()
    world.assert_empty()


@pytest.mark.parametrize("frames", [(), (prompt(10),), (prompt(9), PARAMS), (prompt(10), PARAMS, b"")])
def test_a_payload_that_does_not_match_its_header_is_refused(frames: tuple[bytes, ...]) -> None:
    """M69"""
    world = unified()
    world.submit(submit("r"), frames=frames)
    assert failure(world).code == "bad_request"


def test_a_context_limit_counts_prompt_and_output() -> None:
    world = unified()
    world.submit(submit("a", prompt_tokens=995, max_tokens=5))
    assert len(world.dispatches()) == 1
    world.submit(submit("b", prompt_tokens=996, max_tokens=5))
    assert failure(world).code == "too_long"


def test_nobody_there_is_no_rank_and_may_be_tried_again() -> None:
    world = World()
    world.pass_time(0.1)
    world.submit(submit("r"))
    failed = failure(world)
    assert (failed.code, failed.retryable) == ("no_rank", True)
    assert failed.retry_after_s > 0


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

    def test_one_client_may_not_fill_the_house(self) -> None:
        world = unified(client_requests=2)
        for n in range(3):
            world.submit(submit(f"r{n}"))
        assert failure(world).code == "too_many"
        world.submit(submit("other"), peer="another")
        assert len(world.answers(Accepted)) == 3


class TestRetries:
    def test_a_mendable_failure_before_any_output_goes_elsewhere_under_the_next_attempt(self) -> None:
        """M54"""
        world = pd()
        world.submit(submit("r", "pair"))
        (decode,) = world.dispatches(D[0])
        world.progress(D[0], ended=[decode], code="kv_failed")
        (cancel,) = world.cancels(P[0])
        assert (cancel.rid, cancel.attempt, cancel.code) == ("r", 1, "fenced")
        (again,) = world.dispatches(D[1])
        assert again.attempt == 2
        assert [a.attempt for a in world.answers(Accepted)] == [1, 2]
        assert world.core.counts["redispatched"] == 1

    def test_a_failure_that_is_the_requests_own_is_final(self) -> None:
        world = pd()
        world.submit(submit("r", "pair"))
        (prefill,) = world.dispatches(P[0])
        world.progress(P[0], ended=[prefill], code="bad_request")
        assert failure(world).code == "bad_request"
        assert [c.code for c in world.cancels(D[0])] == ["prefill_failed"]
        world.assert_empty()

    def test_after_output_it_is_the_clients_to_resume(self) -> None:
        world = unified()
        world.submit(submit("r"))
        (dispatch,) = world.dispatches(U[0])
        world.progress(U[0], started=[dispatch])
        world.feed(Unreachable(peer_of(U[0])))
        failed = failure(world)
        assert (failed.code, failed.retryable) == ("peer_lost", True)
        assert len(world.dispatches()) == 1
        world.assert_empty()

    def test_attempts_are_bounded(self) -> None:
        world = unified(attempts=2)
        world.submit(submit("r"))
        for node in U:
            world.progress(node, ended=world.dispatches(node)[-1:], code="engine_failed")
        assert failure(world).code == "engine_failed"
        assert len(world.dispatches()) == 2
        world.assert_empty()

    def test_a_request_that_takes_down_every_rank_is_poison(self) -> None:
        nodes = [hello("u", n, dp_size=4) for n in range(4)]
        world = unified(*nodes)
        world.submit(submit("r"))
        for node in nodes[:3]:
            world.feed(Unreachable(peer_of(node)))
        failed = failure(world)
        assert (failed.code, failed.retryable) == ("poison", False)
        assert not world.dispatches(nodes[3])
        world.assert_empty()

    def test_what_failed_in_the_cluster_is_in_the_log_by_its_rid(self) -> None:
        """And what a client got wrong is not, or it could fill the log."""
        world = unified(attempts=2)
        world.submit(submit("wrong", prompt_tokens=0))
        world.submit(submit("killer"))
        for node in U:
            world.feed(Unreachable(peer_of(node)))
        assert [failed.code for failed in world.answers(Failed)] == ["empty_prompt", "poison"]
        (note,) = [note for note in world.notes if note.event == "request.failed"]
        assert note.level == "warning"
        assert note.fields.items() >= {"rid": "killer", "attempt": 2, "code": "poison"}.items()
        assert "rank u/1 is lost" in note.fields["why"]

    def test_poison_is_known_again_when_its_client_comes_back_without_progress(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("controller.requests.table.MAX_LOSSES", 1)
        world = unified(U[0])
        for epoch in (1, 2, 3):  # its only rank dies of it, and is started again each time
            node = hello("u", 0, epoch=epoch)
            world.join(node)
            world.report(node)
            world.submit(submit("r", attempt=epoch))
            assert len(world.dispatches(node)) == 1
            world.feed(Unreachable(peer_of(node)))
        assert [f.code for f in world.answers(Failed)] == ["peer_lost", "peer_lost", "poison"]
        world.assert_empty()

    def test_of_those_that_took_down_ranks_the_oldest_is_forgotten_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("controller.requests.table.MAX_LOSSES", 1)
        world = unified(hello("u", 0, dp_size=1))
        epoch = 1
        for rid in ("old", "young", "young", "young"):
            world.report(hello("u", 0, dp_size=1, epoch=epoch))
            world.submit(submit(rid, attempt=epoch))
            world.feed(Unreachable(peer_of(hello("u", 0, epoch=epoch))))
            epoch += 1
            world.join(hello("u", 0, dp_size=1, epoch=epoch))
        assert [(f.rid, f.code) for f in world.answers(Failed)][-1] == ("young", "poison")

    def test_a_rank_that_merely_lost_its_connection_did_not_die_of_its_requests(self) -> None:
        world = unified(U[0], attempts=2)
        world.submit(submit("r"))
        for number in range(2):
            world.join(U[0], peer=f"again {number}")
            world.report(U[0])
        assert failure(world).code == "peer_lost"

    def test_a_request_that_made_progress_before_its_rank_was_lost_is_no_poison(self) -> None:
        world = unified(U[0])
        for epoch in (1, 2, 3, 4):
            node = hello("u", 0, epoch=epoch)
            world.join(node)
            world.report(node)
            world.submit(submit("r", attempt=epoch, offset=epoch))
            world.feed(Unreachable(peer_of(node)))
        assert [f.code for f in world.answers(Failed)] == ["peer_lost"] * 4

    def test_an_undelivered_dispatch_leaves_no_trace_in_the_estimate(self) -> None:
        world = unified()
        world.report(U[0])
        world.submit(submit("r"))
        world.feed(Undelivered(peer_of(U[0]), world.dispatches(U[0])[0]))
        assert (world.rank(U[0]).requests, world.rank(U[1]).requests) == (0, 1)

    def test_with_nowhere_to_go_it_fails_with_what_happened(self) -> None:
        world = unified(U[0])
        world.submit(submit("r"))
        world.feed(Unreachable(peer_of(U[0])))
        failed = failure(world)
        assert (failed.code, failed.retryable) == ("peer_lost", True)
        assert "no live unified rank" in failed.message

    def test_a_message_that_could_not_be_queued_never_happened(self) -> None:
        world = unified()
        world.submit(submit("r"))
        (dispatch,) = world.dispatches(U[0])
        world.feed(Undelivered(peer_of(U[0]), dispatch))
        assert world.rank(U[0]).sent == 0
        assert [d.attempt for d in world.dispatches(U[1])] == [2]


class TestEnds:
    def test_cancel_ends_both_legs_and_answers_at_once(self) -> None:
        """M76"""
        world = pd()
        world.submit(submit("r", "pair"))
        world.feed(FromClient("client", Cancel("r"), ()))
        assert failure(world).code == "cancelled"
        assert len(world.cancels(P[0])) == len(world.cancels(D[0])) == 1
        world.assert_empty()
        world.feed(FromClient("client", Cancel("r"), ()))  # over already
        world.progress(D[0], ended=world.dispatches(D[0]), code="cancelled")
        assert len(world.answers(Failed)) == 1

    def test_a_strangers_cancel_is_answered_and_its_owner_hears_the_end(self) -> None:
        world = unified(client_requests=1)
        world.submit(submit("mine"), peer="stranger")
        world.submit(submit("r"), peer="owner")
        world.feed(FromClient("stranger", Cancel("r"), ()))
        for peer in ("owner", "stranger"):
            (failed,) = world.answers(Failed, peer)
            assert (failed.rid, failed.attempt, failed.code, failed.retryable) == ("r", 1, "cancelled", False)
        assert world.core.counts["failed_cancelled"] == 1
        world.submit(submit("next"), peer="owner")  # its one place is free again
        assert len(world.answers(Accepted, "owner")) == 2
        world.feed(FromClient("stranger", Cancel("nothing"), ()))
        assert len(world.answers(Failed)) == 2

    def test_a_deadline_ends_it_and_is_told_to_the_nodes(self) -> None:
        world = unified()
        world.submit(submit("r", deadline_s=1.0))
        assert 0.9 < world.dispatches()[0].deadline_s <= 1.0
        world.pass_time(0.95, alive=U)
        assert not world.answers(Failed)
        world.pass_time(0.2, alive=U)
        assert failure(world).code == "deadline"
        assert [c.code for c in world.cancels()] == ["deadline"]
        world.assert_empty()

    def test_shutdown_ends_everything(self) -> None:
        world = pd()
        for n in range(3):
            world.submit(submit(f"r{n}", "pair", bootstrap_room=n))
        actions = world.core.shutdown(world.now)
        failed = [a.message for a in actions if isinstance(a.message, Failed)]  # type: ignore[union-attr]
        assert [(f.code, f.retryable) for f in failed] == [("shutting_down", True)] * 3
        world.core.validate()
        world.assert_empty()


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
            world.feed(Unreachable(peer_of(self.V)))
        elif how == "silent lease":
            world.pass_time(3.5, alive=U)
        world.submit(submit("r"))
        assert [d.rid for u in U for d in world.dispatches(u)] == ["r"]

    def test_a_rank_that_the_caller_chose_says_which_model(self) -> None:
        """M55"""
        world = unified(*U, self.V)
        world.submit(submit("a", instance="u", routed_dp_rank=1))
        world.feed(Unreachable(peer_of(self.V)))
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


class TestRanks:
    def test_a_hello_is_welcomed_with_what_the_node_must_know(self) -> None:
        world = pd(prefill_method="auto", decode_method="auto", name="c9")
        (p, *_), (d, *_) = world.sent(Welcome, P[0]), world.sent(Welcome, D[0])
        assert (p.controller, p.epoch, p.follow_bootstrap_room, p.dp_rank) == ("c9", EPOCH, True, 0)
        assert not d.follow_bootstrap_room

    def test_a_stranger_is_asked_who_it_is(self) -> None:
        """M44"""
        world = World()
        world.feed(FromNode("x", Bye("u", 0, 1)))
        assert [a.peer for a in world.to_nodes if isinstance(a.message, Who)] == ["x"]

    @pytest.mark.parametrize(
        ("claim", "code"),
        [
            (hello("u", 5, dp_size=2), "bad_identity"),
            (hello("u", 1, dp_size=3), "bad_identity"),
            (hello("u", 1, role="decode"), "bad_identity"),
            (hello("u", 1, model="other"), "bad_identity"),
            (hello("u", 0, model="other"), "bad_identity"),  # the same start of the same rank
        ],
    )
    def test_a_claim_that_contradicts_its_instance_is_refused(self, claim: Any, code: str) -> None:
        world = unified(U[0])
        world.join(claim, peer="new")
        assert [r.code for r in world.sent(Refused)] == [code]
        assert world.core.counts[f"hello_{code}"] == 1
        assert len(world.core.table.ranks) == 1

    def test_only_ranks_that_live_bind_their_instance(self) -> None:
        """Another start of a rank may be another thing, once no other rank of its instance lives as the old one."""
        world = unified()
        changed = hello("u", 0, epoch=2, model="other")
        world.join(changed, peer="new")
        assert [r.code for r in world.sent(Refused)] == ["bad_identity"]  # u/1 still serves the first model
        world.feed(FromNode(peer_of(U[1]), Bye("u", 1, 1)))
        world.join(changed, peer="new")
        assert world.rank(changed).info.model == "other"
        world.join(U[1], peer="back")  # the start that had left, with the model of then
        assert [r.code for r in world.sent(Refused)] == ["bad_identity", "fenced", "bad_identity"]  # u/0 was replaced

    def test_one_connection_speaks_for_one_rank(self) -> None:
        world = unified(U[0])
        world.join(U[1], peer=peer_of(U[0]))
        assert [r.code for r in world.sent(Refused)] == ["bad_identity"]
        world.submit(submit("r"))
        world.progress(U[1], ended=world.dispatches(U[0]), peer=peer_of(U[0]))
        assert world.core.counts["rejected_bad_identity"] == 1
        assert len(world.core.life.requests) == 1

    def test_only_named_instances_are_served(self) -> None:
        world = World(instances=("mine",))
        world.join(hello("mine"))
        world.join(hello("other"))
        assert set(world.core.table.ranks) == {("mine", 0)}

    def test_a_restarted_node_takes_over_and_the_old_start_is_fenced(self) -> None:
        world = unified()
        world.submit(submit("r"))
        world.join(hello("u", 0, epoch=2))
        assert [d.attempt for d in world.dispatches(U[1])] == [2]
        world.join(U[0], peer="zombie")
        told = [(a.peer, a.message.code) for a in world.to_nodes if isinstance(a.message, Refused)]
        assert told == [(peer_of(U[0]), "fenced"), ("zombie", "fenced")], "at once, and whenever it asks"
        assert world.rank(U[0]).epoch == 2
        assert world.rank(U[0]).in_flight == 0

    @pytest.mark.parametrize("order", [(1, 2), (2, 1), (2, 1, 2), (1, 2, 1)])
    def test_of_two_starts_the_later_has_the_rank_whichever_is_heard_first(self, order: tuple[int, ...]) -> None:
        starts = {n: hello("u", 0, epoch=100 - n, started_us=n) for n in (1, 2)}
        world = World()  # it may have been started again itself, and have forgotten the order
        for n in order:
            world.join(starts[n])
        assert world.rank(U[0]).epoch == 98
        told = {a.peer: a.message for a in world.to_nodes if isinstance(a.message, Refused)}
        assert {peer: (m.code, m.message) for peer, m in told.items()} == {
            peer_of(starts[1]): ("fenced", "u/0 was started again elsewhere (epoch 98)")
        }

    def test_a_start_that_says_it_is_earlier_gets_the_rank_of_a_dead_one(self) -> None:
        """Clocks of two machines need not agree: a rank that moved must not stay out."""
        world = World()
        world.join(hello("u", 0, epoch=1, started_us=2))
        moved = hello("u", 0, epoch=2, started_us=1)
        world.join(moved)
        assert [m.code for m in world.sent(Refused, moved)] == ["fenced"]
        world.pass_time(3.5)
        world.join(moved)
        assert world.rank(moved).epoch == 2
        assert len(world.sent(Refused)) == 1

    def test_a_start_that_was_replaced_stays_out_also_when_the_later_one_dies(self) -> None:
        world = World()
        first, second = (hello("u", 0, epoch=n, started_us=n) for n in (1, 2))
        world.join(first)
        world.join(second)
        world.pass_time(3.5)
        world.join(first)
        assert [m.code for m in world.sent(Refused, first)] == ["fenced"] * 2
        world.join(second)
        assert world.rank(second).epoch == 2
        assert not world.sent(Refused, second)

    def test_another_start_over_the_same_connection_is_welcome(self) -> None:
        world = World()
        world.join(hello("u", 0, epoch=1), peer="p")
        world.join(hello("u", 0, epoch=2), peer="p")
        assert not world.sent(Refused)
        assert world.rank(U[0]).epoch == 2

    def test_a_reconnection_keeps_what_runs_and_redoes_what_the_old_one_swallowed(self) -> None:
        world = unified(U[0])
        world.submit(submit("kept"))
        world.submit(submit("swallowed"))
        world.join(hello("u", 0, running=(("kept", 1),)), peer="again")
        last = [a for a in world.to_nodes if a.peer == "again" and getattr(a.message, "rid", "") == "swallowed"]
        assert [a.message.attempt for a in last] == [2]  # type: ignore[attr-defined]
        assert not world.cancels()
        world.progress(U[0], ended=world.dispatches(U[0])[:1], peer="again")
        assert [d.rid for d in world.answers(Done)] == ["kept"]

    def test_a_node_silent_past_its_lease_is_lost_and_its_work_goes_elsewhere(self) -> None:
        world = unified()
        world.submit(submit("r"))
        world.pass_time(3.5, alive=[U[1]])
        assert world.core.members.state(world.rank(U[0])) == "lost"
        (note,) = [note for note in world.notes if note.fields.get("new") == "lost"]
        assert (note.event, note.level, note.fields["dp_rank"]) == ("rank.state_changed", "warning", 0)
        assert [d.attempt for d in world.dispatches(U[1])] == [2]
        assert [c.attempt for c in world.cancels(U[0])] == [1]  # in case it wakes up

    @pytest.mark.parametrize("kind", [Member, Rooms])
    def test_a_load_that_comes_with_another_publication_counts(self, kind: type[Message]) -> None:
        world = unified()
        where = ("unified", "m", 2, "ready", "ipc:///u.0", False, 0, 1.0) if kind is Member else ("ipc:///u.0",)
        world.feed(Published(kind("u", 0, 1, 1, load(1, running=3), *where)))
        assert world.rank(U[0]).requests == 3

    def test_who_comes_back_starts_slowly(self) -> None:
        world = unified()
        world.pass_time(3.5, alive=[U[1]])
        world.progress(U[0])
        for n in range(6):
            world.submit(submit(f"r{n}"))
        assert len(world.dispatches(U[0])) == 1
        world.report(U[0], acks=[(EPOCH, 1, 10)])
        for n in range(6, 10):
            world.submit(submit(f"r{n}"))
        assert len(world.dispatches(U[0])) > 2

    def test_ranks_are_pinged_three_times_a_lease(self) -> None:
        world = unified()
        world.pass_time(6.0, alive=U)
        assert 5 <= len(world.sent(Ping, U[0])) <= 7

    def test_a_hung_rank_loses_its_work(self) -> None:
        world = unified()
        world.submit(submit("r"))
        for n in range(1, 15):
            world.report(U[0], running=1, step=3, acks=[(EPOCH, 1, 10)])
            world.report(U[1], step=n, running=1)
            world.pass_time(1.0, alive=U[1:])
            world.feed(FromNode(peer_of(U[0]), Bye("nobody", 0, 1)))  # its connection lives
        assert world.core.members.state(world.rank(U[0])) == "hung"
        assert [d.attempt for d in world.dispatches(U[1])] == [2]

    def test_drain_takes_a_rank_out_and_lets_it_finish(self) -> None:
        world = unified()
        world.submit(submit("r"))
        world.feed(FromClient("op", DrainRank(5, "u", 0), ()))
        assert len(world.sent(Drain, U[0])) == 1
        (status,) = world.answers(Status, "op")
        assert (status.id, [r.state for r in status.ranks]) == (5, ["draining", "ready"])
        for n in range(4):
            world.submit(submit(f"s{n}"))
        assert len(world.dispatches(U[0])) == 1
        world.progress(U[0], ended=world.dispatches(U[0]))
        assert len(world.answers(Done)) == 1
        world.feed(FromNode(peer_of(U[0]), Bye("u", 0, 1)))
        assert not world.answers(Failed)
        world.feed(FromClient("op", DrainRank(6, "nope", 0), ()))
        assert world.answers(Refused, "op")[0].code == "bad_rank"

    def test_a_rank_gone_for_long_is_forgotten(self) -> None:
        world = unified(forget_s=5.0)
        world.feed(FromNode(peer_of(U[0]), Bye("u", 0, 1)))
        world.pass_time(6.0, alive=[U[1]])
        assert set(world.core.table.ranks) == {("u", 1)}

    @pytest.mark.parametrize("peer", ["", "another"])
    def test_a_forgotten_rank_that_returns_in_its_epoch_is_numbered_on(self, peer: str) -> None:
        """M45: a process stopped for that long would take numbers from 1 on for repeats, and ignore them."""
        world = unified(forget_s=5.0)
        for n in range(4):
            world.submit(submit(f"r{n}"))
        world.pass_time(9.5, alive=[U[1]])
        assert set(world.core.table.ranks) == {("u", 1)}
        world.join(hello("u", 0, running=(("r0", 1),)), peer=peer)
        assert not len(world.core.life.table.inherited)  # it runs what this controller gave it, not a former one
        before = len(world.dispatches())
        world.report(U[0])
        world.submit(submit("again"))
        (dispatch,) = world.dispatches()[before:]
        assert (dispatch.dp_rank, dispatch.number) == (0, 3)
        world.report(U[0], running=1, acks=[(EPOCH, 3, 30)])
        assert world.rank(U[0]).requests == 1
        world.pass_time(1.0, alive=U)
        counters = [c for sent in world.published if isinstance(sent, Sent) for c in sent.counters if c.dp_rank == 0]
        assert counters[-1].dispatches == 3  # as the rank's acknowledgements count


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

    def test_half_of_a_pair_is_started_anew_under_a_higher_attempt(self) -> None:
        world = World(prefill_method="total_tokens")
        world.join(hello("p", 0, role="prefill", running=(("r", 2),)))
        world.join(D[0])
        world.report(P[0], running=1)
        world.submit(submit("r", "pair"))
        assert {d.attempt for d in world.dispatches()} == {3}
        assert [(c.attempt, c.code) for c in world.cancels(P[0])] == [(2, "fenced")]

    def test_only_what_a_rank_ran_before_it_was_given_anything_is_taken_over(self) -> None:
        world = unified(hello("u", 0, running=(("former", 1),)), U[1])
        world.report(U[0], running=1)
        world.submit(submit("r", routed_dp_rank=1))
        (dispatch,) = world.dispatches(U[1])
        for peer in ("", "again"):  # the same connection, as when its state changes, and a new one
            world.join(hello("u", 1, running=(("r", 1),)), peer=peer)
        assert world.core.life.table.inherited.of("former")
        assert not world.core.life.table.inherited.of("r")
        world.progress(U[1], ended=[dispatch], peer="again")
        world.submit(submit("r", routed_dp_rank=0))
        assert [d.attempt for d in world.dispatches(U[0])] == [1]
        assert not world.cancels()
        world.pass_time(61.0, alive=U[:1])
        world.join(hello("u", 0, running=(("former", 1), ("r", 1))))
        assert len(world.core.life.table.inherited) == 0

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
        assert len(world.core.life.table.inherited) == 2
        world.feed(Unreachable(peer_of(U[0])))
        assert len(world.core.life.table.inherited) == 1
        world.pass_time(61.0, alive=U[1:])
        assert len(world.core.life.table.inherited) == 0


def test_counters_are_stated_each_second_and_changes_at_once_where_controllers_share_ranks() -> None:
    def stated(seconds: float, first: int) -> list[Sent]:
        before = len(world.published)
        for n in range(round(seconds / 0.1)):
            world.submit(submit(f"r{first + n}"))
            world.pass_time(0.1, alive=U)
        return [m for m in world.published[before:] if isinstance(m, Sent)]

    world = unified()
    world.pass_time(0.9, alive=U)
    alone = stated(0.5, 0)
    assert len(alone) == 1
    world.feed(Published(Sent("other", EPOCH + 1, 1, ())))
    shared = stated(1.0, 100)
    assert 9 <= len(shared) <= 13  # one for each change, and the full statements
    assert any(len(m.counters) < len(U) for m in shared)  # a change states the ranks concerned alone
    seen = {(c.instance, c.dp_rank): c.dispatches for m in alone + shared for c in m.counters}
    assert seen == {(u.instance, u.dp_rank): world.rank(u).sent for u in U}  # the last word on each rank is the truth
    assert [m.seq for m in alone + shared] == list(range(alone[0].seq, alone[0].seq + len(alone + shared)))


def test_status_shows_each_rank_as_it_is() -> None:
    world = unified()
    world.report(U[0], running=2, kv_tokens=30)
    world.submit(submit("r"))
    world.now = 0.5
    world.feed(FromClient("op", StatusQuery(9), ()))
    (status,) = world.answers(Status, "op")
    first, second = status.ranks
    assert (status.id, status.epoch, status.methods["unified"]) == (9, EPOCH, "round_robin")
    assert (first.state, first.report_age_s, first.estimate_requests, first.in_flight_requests) == ("ready", 0.5, 3, 1)
    assert (first.estimate_tokens, first.outstanding, first.dispatched_total) == (40, 1, 1)
    assert (second.report_age_s, second.load) == (-1.0, None)


def test_a_broker_alone_on_the_bus_makes_no_rank_silent_at_once() -> None:
    world = unified()
    for n in range(20):
        world.pass_time(0.25, alive=U)
        world.feed(Published(Beacon(1, n, 0.25)))
    assert {world.core.members.state(r) for r in world.core.table.ranks.values()} == {"silent"}
    world.report(U[0])
    assert world.core.members.state(world.rank(U[0])) == "ready"
    world.feed(EngineLoad(("u", 1), load(0, running=1)))
    assert world.core.members.state(world.rank(U[1])) == "ready"


def test_a_load_that_acknowledges_nothing_takes_all_that_was_sent_for_ingested() -> None:
    world = unified(U[0])
    for n in range(3):
        world.submit(submit(f"r{n}"))
    assert world.rank(U[0]).requests == 3
    for running in (2, 1):
        world.feed(EngineLoad(("u", 0), load(0, running=running)))
        assert world.rank(U[0]).requests == running
    world.feed(EngineLoad(("nobody", 0), load(0)))
    assert world.core.counts["report_unknown"] == 1

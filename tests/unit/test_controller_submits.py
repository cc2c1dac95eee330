"""What a submit gets: a pair, one leg alone, or a refusal that says why."""

from __future__ import annotations

from typing import Any

import pytest
from controller_world import EPOCH, PARAMS, D, P, World, failure, hello, pd, prompt, submit, unified

from bus.wire.hashing import pack_hashes
from bus.wire.messages import Accepted, Done, Failed, Location
from controller.events import Tick


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
        world.cut(D[0])
        assert [d.attempt for d in world.dispatches(D[1])] == [2]
        assert not world.answers(Failed)

    def test_a_trace_says_where_each_request_went(self) -> None:
        world = pd()
        world.core.log_requests(True)
        world.submit(submit("r", "pair"))
        (note,) = [note for note in world.notes if note.event == "request.dispatched"]
        about = {"rid": "r", "attempt": 1, "room": sum(b"r"), "prefill": "p/0", "decode": "d/0"}
        assert note.fields == about
        world.progress(D[0], ended=world.dispatches(D[0]))
        world.progress(P[0], ended=world.dispatches(P[0]))
        assert [(note.event, note.fields) for note in world.notes[-1:]] == [("request.done", about)]

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
        world.cut(P[1])
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
        world.cut(P[0])
        (done,) = world.answers(Done)
        assert [leg.leg for leg in done.legs] == ["decode"]
        world.assert_empty()

    def test_losing_prefill_after_decode_has_begun_fails_nothing(self) -> None:
        world = pd()
        world.submit(submit("r", "pair"))
        (decode,) = world.dispatches(D[0])
        world.progress(D[0], started=[decode])
        world.cut(P[0])
        assert not world.answers(Failed)
        (cancel,) = world.cancels(D[0])  # of use only if its KV cache was not fetched yet
        assert (cancel.rid, cancel.code, cancel.if_unfetched) == ("r", "prefill_failed", True)
        world.progress(D[0], ended=[decode])
        assert len(world.answers(Done)) == 1
        world.assert_empty()


class TestRepeats:
    def test_what_waits_and_is_submitted_again_counts_once(self) -> None:
        world = unified(hello("u", max_running=1), request_overcommit=1.0)
        for rid in ("runs", "waits"):
            for _ in range(4):
                world.submit(submit(rid))
        world.submit(submit("waits", max_tokens=7))  # another request under its rid
        counts = world.core.counts
        assert (counts["submitted"], counts["reattached"], counts["failed_duplicate_rid"]) == (3, 6, 1)


def test_hashes_that_its_prompt_has_not_are_refused_before_anything_looks_at_them() -> None:
    world = unified(unified_method="cache_aware")
    for size, tokens, count in ((16, 40, 2), (1, 3, 3)):
        world.submit(submit(f"fits-{size}", prompt_tokens=tokens, block_tokens=size, block_hashes=bytes(8 * count)))
        for more in (1, 60_000):
            hashes = bytes(8 * (count + more))
            world.submit(submit(f"more-{size}", prompt_tokens=tokens, block_tokens=size, block_hashes=hashes))
    world.submit(submit("none", prompt_tokens=1, block_hashes=bytes(16)))
    assert [each.code for each in world.answers(Failed)] == ["bad_request"] * 5
    assert [each.rid for each in world.answers(Accepted)] == ["fits-16", "fits-1"]


def test_a_prefix_is_expected_as_long_if_it_was_dispatched_before_the_first_tick() -> None:
    world = unified(unified_method="cache_aware", now=5_000.0)
    hashes = pack_hashes(range(1, 21))
    world.submit(submit("r", prompt_tokens=320, block_tokens=16, block_hashes=hashes))
    prefixes = world.core.policies["unified"].prefixes  # type: ignore[attr-defined]
    for passes_s, left in ((0.0, 20), (299.0, 20), (2.0, 0)):
        world.now += passes_s
        world.feed(Tick())
        assert len(prefixes) == left


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

    def test_a_lone_decode_leg_does_not_wait_behind_legs_whose_caches_its_own_may_hold_up(self) -> None:
        """Two controllers' pairs: the prefill rank's memory is full of caches whose decode legs wait here for credit,
        which those have that wait for that memory. A rank that computes nothing takes more, one that computes not."""
        world = World()
        world.join(D[0])
        world.report(D[0], waiting=4, waiting_tokens=2000)
        assert not world.known(D[0]).load.candidate
        world.submit(submit("pair", "decode"))
        assert [each.rid for each in world.dispatches(D[0])] == ["pair"]
        world.report(D[0], running=1, waiting=4, waiting_tokens=2000, kv_tokens=10, acks=[(EPOCH, 1, 10)])
        world.submit(submit("later", "decode"))
        assert len(world.dispatches(D[0])) == 1
        world.report(D[0], waiting=100, waiting_tokens=2000, acks=[(EPOCH, 1, 10)])
        assert len(world.dispatches(D[0])) == 1, "not without a bound"
        world.report(D[0], waiting=4, waiting_tokens=2000, acks=[(EPOCH, 1, 10)])
        assert [each.rid for each in world.dispatches(D[0])] == ["pair", "later"]

    def test_such_a_leg_keeps_away_from_ranks_that_it_avoids(self) -> None:
        """The leg goes to the other rank, although the one to avoid has less to do."""
        world = World()
        for rank, waiting in zip(D, (4, 5), strict=True):
            world.join(rank)
            world.report(rank, waiting=waiting, waiting_tokens=2000)
            assert not world.known(rank).load.candidate
        world.submit(submit("r", "decode", avoid=((D[0].instance, D[0].dp_rank),)))
        assert [each.rid for each in world.dispatches(D[1])] == ["r"]

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
        ({"offset": 10}, "bad_request", "10 output tokens"),
        ({"offset": 11}, "bad_request", "11 output tokens"),
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

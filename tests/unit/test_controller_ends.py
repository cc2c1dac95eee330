"""How requests end: done elsewhere after a failure, poison, cancelled, too late."""

from __future__ import annotations

import pytest
from controller_world import EPOCH, D, P, U, failure, hello, pd, peer_of, submit, unified
from msgspec.structs import replace

from bus.wire.messages import Accepted, Cancel, Failed, Hello
from controller.events import FromClient, Tick, ToClient, Undelivered, Unreachable
from controller.requests.life import LOGGED_MAX


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

    def test_it_goes_elsewhere_than_where_its_client_gets_no_stream_as_long_as_there_are_others(self) -> None:
        world = unified()
        for n in range(4):
            world.submit(submit(f"r{n}", avoid=(("u", 0), ("nobody", 0))))
        assert {(d.dp_rank, d.attempt) for d in world.dispatches()} == {(1, 1)}
        world.submit(submit("cornered", avoid=(("u", 0), ("u", 1))))
        assert world.dispatches()[-1].rid == "cornered"
        world.submit(submit("told", avoid=(("u", 0),), routed_dp_rank=0))
        assert world.dispatches()[-1].dp_rank == 0, "its caller's word counts"

    def test_a_failure_that_is_the_requests_own_is_final(self) -> None:
        world = pd()
        world.submit(submit("r", "pair"))
        (prefill,) = world.dispatches(P[0])
        world.progress(P[0], ended=[prefill], code="bad_request")
        assert failure(world).code == "bad_request"
        assert [c.code for c in world.cancels(D[0])] == ["prefill_failed"]
        world.assert_empty()

    def test_a_room_that_no_rank_registers_is_its_clients_to_renew(self) -> None:
        """Only the client can have the prefill leg run again, at the other controller."""
        world = pd()
        world.submit(submit("r", "decode"))
        world.progress(D[0], ended=world.dispatches(D[0]), code="unknown_room")
        assert (failure(world).code, failure(world).retryable, failure(world).attempt) == ("unknown_room", True, 1)
        world.assert_empty()

    def test_after_output_it_is_the_clients_to_resume(self) -> None:
        world = unified()
        world.submit(submit("r"))
        (dispatch,) = world.dispatches(U[0])
        world.progress(U[0], started=[dispatch])
        world.cut(U[0])
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
            assert len(world.dispatches(node)) == 1
            world.cut(node)
        assert failure(world).code == "peer_lost", "whether they died is not known yet"
        world.submit(submit("r", attempt=4))
        world.pass_time(3.0, alive=[nodes[3]])
        world.submit(submit("r", attempt=5))
        assert [(f.code, f.retryable) for f in world.answers(Failed)[1:]] == [("peer_lost", True), ("poison", False)]
        assert not world.dispatches(nodes[3])
        world.assert_empty()

    def test_what_failed_in_the_cluster_is_in_the_log_by_its_rid(self) -> None:
        """And what a client got wrong is not, or it could fill the log."""
        world = unified(attempts=2)
        world.submit(submit("wrong", prompt_tokens=0))
        world.submit(submit("killer"))
        world.pass_time(3.5, alive=[U[1]])
        world.pass_time(3.5)
        assert [failed.code for failed in world.answers(Failed)] == ["empty_prompt", "peer_lost"]
        (note,) = [note for note in world.notes if note.event == "request.failed"]
        assert note.level == "warning"
        assert note.fields.items() >= {"rid": "killer", "attempt": 2, "room": None, "unified": "u/1"}.items()
        assert note.fields["code"] == "peer_lost"
        assert "rank u/1 is lost" in note.fields["why"]
        (retried,) = [note for note in world.notes if note.event == "request.retried"]
        assert retried.level == "info"
        assert retried.fields == {
            "rid": "killer", "attempt": 1, "room": None, "unified": "u/0", "rank": "u/0", "code": "peer_lost",
            "why": "rank u/0 is lost",
        }  # fmt: skip

    def test_what_a_busy_cluster_turns_down_is_in_the_log_up_to_so_many_a_second(self) -> None:
        world = unified(hello("u", max_running=1), request_overcommit=1.0, queue_requests=1)
        for n in range(-2, LOGGED_MAX + 5):
            world.submit(submit(f"r{n}"))  # the first two run and wait
        assert {failed.code for failed in world.answers(Failed)} == {"overloaded"}
        told = [note for note in world.notes if note.event == "request.failed"]
        assert [note.fields["rid"] for note in told] == [f"r{n}" for n in range(LOGGED_MAX)]
        assert {note.level for note in told} == {"info"}
        world.pass_time(1.0, alive=[U[0]])
        (note,) = [note for note in world.notes if note.event == "request.lines_left_out"]
        assert note.fields == {"count": 5}
        world.submit(submit("later"))
        assert world.notes[-1].fields["rid"] == "later"

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
            world.cut(node)
        world.join(hello("u", 0, epoch=4))
        world.submit(submit("r", attempt=4))
        assert [f.code for f in world.answers(Failed)] == ["peer_lost", "peer_lost", "peer_lost", "poison"]
        world.assert_empty()

    def test_of_those_that_took_down_ranks_the_oldest_is_forgotten_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("controller.requests.table.MAX_LOSSES", 1)
        world = unified(hello("u", 0, dp_size=1))
        epoch = 1
        for rid in ("old", "young", "young", "young"):
            world.report(hello("u", 0, dp_size=1, epoch=epoch))
            world.submit(submit(rid, attempt=epoch))
            world.cut(hello("u", 0, epoch=epoch))
            epoch += 1
            world.join(hello("u", 0, dp_size=1, epoch=epoch))
        for rid in ("old", "young"):
            world.submit(submit(rid, attempt=epoch))
        assert [(f.rid, f.code) for f in world.answers(Failed)][-1] == ("young", "poison")
        assert [d.rid for d in world.dispatches()] == ["old", "young", "young", "young", "old"]

    def test_a_rank_that_merely_lost_its_connection_did_not_die_of_its_requests(self) -> None:
        world = unified(U[0], attempts=2)
        world.submit(submit("r"))
        for number in range(2):
            world.back(U[0], peer=f"again {number}")
            world.report(U[0])
        assert failure(world).code == "peer_lost"

    def test_a_request_that_made_progress_before_its_rank_was_lost_is_no_poison(self) -> None:
        world = unified(U[0])
        for epoch in (1, 2, 3, 4):
            node = hello("u", 0, epoch=epoch)
            world.join(node)
            world.report(node)
            world.submit(submit("r", attempt=epoch, offset=epoch))
            world.cut(node)
        assert [f.code for f in world.answers(Failed)] == ["peer_lost"] * 4

    @pytest.mark.parametrize("silently", [True, False])
    def test_the_rank_that_sent_the_last_token_counts_among_those_that_died_since(self, silently: bool) -> None:
        nodes = [hello("u", n, dp_size=4) for n in range(4)]
        world = unified(*nodes, attempts=2)

        def dies(node: Hello) -> None:
            if not silently:
                world.feed(Unreachable(peer_of(node)))
            world.pass_time(6.5 if silently else 0.6, alive=[other for other in nodes if other is not node])
            nodes[nodes.index(node)] = again = replace(node, epoch=node.epoch + 1)
            world.join(again)
            world.report(again)

        for attempt, (offset, output) in enumerate([(0, True), (1, True), (2, True), (3, False)]):
            world.submit(submit("r", attempt=10 * attempt + 1, prompt_tokens=100 + offset, offset=offset))
            (node,) = [node for node in nodes if world.work(node)]
            if output:
                world.progress(node, started=world.dispatches(node)[-1:])
            assert [f.code for f in world.answers(Failed)] == ["peer_lost"] * attempt, (
                "each one sent a token before it died"
            )
            dies(node)
        world.submit(submit("r", attempt=50, prompt_tokens=103, offset=3))
        assert [f.code for f in world.answers(Failed)][-1] == "poison", (
            "two ranks died after the third token: its sender and the next one"
        )
        assert len(world.dispatches()) == 4

    def test_an_undelivered_dispatch_leaves_no_trace_in_the_estimate(self) -> None:
        world = unified()
        world.report(U[0])
        world.submit(submit("r"))
        world.feed(Undelivered(peer_of(U[0]), world.dispatches(U[0])[0]))
        assert (world.rank(U[0]).requests, world.rank(U[1]).requests) == (0, 1)

    def test_with_nowhere_to_go_it_fails_with_what_happened(self) -> None:
        world = unified(U[0])
        world.submit(submit("r"))
        world.cut(U[0])
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

    def test_nor_does_one_that_was_cancelled_before_it_could_be_sent(self) -> None:
        world = unified()
        world.submit(submit("r"))
        (dispatch,) = world.dispatches(U[0])
        world.feed(FromClient("client", Cancel("r")))
        world.feed(Undelivered(peer_of(U[0]), dispatch))
        world.report(U[0], acks=[(EPOCH, 0, 0)])
        rank = world.rank(U[0])
        assert (rank.sent, rank.in_flight, rank.requests, rank.tokens) == (0, 0, 0, 0)

    def test_a_cancel_that_no_queue_took_is_sent_again_until_one_does(self) -> None:
        world = unified()
        world.submit(submit("r"))
        world.feed(FromClient("client", Cancel("r")))
        for times in (1, 2):
            assert len(world.cancels(U[0])) == times
            world.feed(Undelivered(peer_of(U[0]), world.cancels(U[0])[-1]))
            world.feed(Tick())
        world.feed(Tick())
        assert len(world.cancels(U[0])) == 3

    @pytest.mark.parametrize("forgotten", [False, True])
    def test_it_is_not_where_its_attempt_runs_again(self, forgotten: bool) -> None:
        """A controller may have forgotten its request: it remembers so many."""
        world = unified()
        world.submit(submit("r"))
        world.feed(FromClient("client", Cancel("r")))
        world.feed(Undelivered(peer_of(U[0]), world.cancels(U[0])[0]))
        if forgotten:
            world.core.life.table._made.clear()
        world.submit(submit("r"))
        world.feed(Tick())
        assert len(world.cancels(U[0])) == 2 - forgotten


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
        failed = [a.message for a in actions if isinstance(a, ToClient) and isinstance(a.message, Failed)]
        assert [(f.code, f.retryable) for f in failed] == [("shutting_down", True)] * 3
        world.core.validate()
        world.assert_empty()

"""A rid that names another request than before: never answered with the first one's tokens, or with its end (M85)."""

from __future__ import annotations

from typing import Any

import pytest
from controller_world import U, World, peer_of, submit, unified
from legs_world import PROMPT, VOCAB, Rank
from legs_world import World as LegsWorld
from msgspec.structs import replace

from bus.rights import Known
from bus.wire.codes import Code
from bus.wire.messages import Accepted, Attach, Cancel, CancelLeg, Detach, Dispatch, Failed, Submit, Tokens
from controller.config import ControllerConfig
from controller.dispatcher import Dispatcher
from controller.events import FromClient
from controller.requests.unclear import Unclear
from nodes.link.reports import REMEMBER_S
from nodes.own.engines.sim import sim_generate

OTHER = [20 + n for n in range(len(PROMPT))]
SHORTER = OTHER[:-1]


def known(name: str) -> Known:
    peer = Known(name.encode())
    peer.key = f"clients/{name}"
    return peer


ALICE, BOB = known("alice"), known("bob")


@pytest.fixture
def rank() -> Rank:
    return Rank(LegsWorld(), "unified", "u")


def again(rank: Rank, prompt: list[int] = OTHER, **changes: Any) -> None:
    """Another request under the rid `r`, whose reader attaches as a client of today does."""
    rank.tokens.clear()
    rank.finishes.clear()
    room = changes.setdefault("bootstrap_room", 6)
    rank.streams.attach(b"other", Attach("r", changes.get("attempt", 1), room=room), rank.world.now)
    rank.dispatch("r", prompt, **changes)


def ends(rank: Rank, attempt: int = 1) -> list[Code]:
    return [end.code for end in rank.ended.get(("r", attempt), [])]


@pytest.mark.parametrize("how", ["refused", "replaced", "cancelled early"])
def test_each_end_says_of_which_room_it_is(rank: Rank, how: str) -> None:
    """M99"""
    if how == "cancelled early":
        rank.do(rank.core.cancel(0, CancelLeg("r", 1, room=5), rank.world.now))
    else:
        rank.dispatch("r", PROMPT, bootstrap_room=5, max_tokens=0 if how == "refused" else 40)
        rank.world.run(0.02)
        again(rank)
    rank.world.run(1.0)
    said = [(end.code, end.room) for end in rank.ended["r", 1]]
    assert said[0] == ({"refused": "bad_request", "replaced": "fenced", "cancelled early": "cancelled"}[how], 5)
    assert said[1:] == ([] if how == "cancelled early" else [("ok", 6)])


@pytest.mark.parametrize("how", ["read", "detached", "never read", "cancelled", "deadline", "gone"])
def test_another_request_under_a_rid_that_is_over_is_run_and_gets_its_own_answer(rank: Rank, how: str) -> None:
    """M85: it differs in its room."""
    if how != "never read":
        rank.read("r")
    rank.dispatch("r", PROMPT, max_tokens=200 if how in ("cancelled", "deadline") else 6, deadline_s=0.2)
    rank.world.run(0.05)
    if how == "cancelled":
        rank.do(rank.core.cancel(0, CancelLeg("r", 1, room=5), rank.world.now))
    rank.world.run(1.0)
    if how == "detached":
        rank.streams.detach(b"client", Detach("r", 1))
    first = len(ends(rank))
    assert first == 1
    again(rank)
    rank.world.run(1.0)
    assert rank.tokens["r"] == sim_generate(OTHER, 6, VOCAB)
    assert (rank.finishes["r"].finish, ends(rank)[first:]) == ("length", ["ok"])


def test_one_that_differs_in_its_prompts_length_alone_is_another(rank: Rank) -> None:
    """M85: of clients that name no room."""
    rank.read("r")
    rank.dispatch("r", PROMPT, bootstrap_room=None)
    rank.world.run(1.0)
    rank.tokens.clear()
    rank.dispatch("r", SHORTER, bootstrap_room=None)
    rank.read("r")
    rank.world.run(1.0)
    assert rank.tokens["r"] == sim_generate(SHORTER, 6, VOCAB)
    assert ends(rank) == ["ok", "ok"]


def test_while_the_first_is_read_another_is_refused(rank: Rank) -> None:
    """M85"""
    rank.read("r")
    rank.dispatch("r", PROMPT, max_tokens=40)
    rank.world.run(0.02)
    for attempt in (1, 2):
        rank.dispatch("r", OTHER, bootstrap_room=6, attempt=attempt)
        assert ends(rank, attempt) == ["duplicate_rid"]
        rank.ended.clear()
    rank.world.run(1.0)
    assert rank.tokens["r"] == sim_generate(PROMPT, 40, VOCAB)
    assert ends(rank) == ["ok"]


def test_one_that_nobody_reads_makes_way(rank: Rank) -> None:
    """M85: its client has gone, and its controller may not even know."""
    rank.dispatch("r", PROMPT, max_tokens=200, attempt=3)
    rank.world.run(0.02)
    again(rank)
    rank.world.run(1.0)
    assert (ends(rank, 3), ends(rank)) == (["fenced"], ["ok"])
    assert rank.tokens["r"] == sim_generate(OTHER, 6, VOCAB)
    assert rank.idle()


@pytest.mark.parametrize("room", [5, None])
def test_what_agrees_is_the_same_request_whichever_controller_says_it(rank: Rank, room: int | None) -> None:
    """M49 M85: after a controller's restart a request goes on, also where one side names no room."""
    rank.read("r")
    rank.dispatch("r", PROMPT, max_tokens=40)
    rank.world.run(0.02)
    rank.dispatch("r", PROMPT, max_tokens=40, bootstrap_room=room, controller_epoch=8, number=1)
    rank.world.run(1.0)
    assert rank.tokens["r"] == sim_generate(PROMPT, 40, VOCAB)
    resumed = [*PROMPT, *rank.tokens["r"][:3]]
    rank.dispatch("r", resumed, offset=3, max_tokens=37, bootstrap_room=room, controller_epoch=8, number=2)
    assert len(set(ends(rank))) == 1, "the end is told again: nothing ran twice"
    assert rank.scheduler.prompt_tokens_total == len(PROMPT)


def test_the_same_attempt_of_the_same_request_is_answered_for_as_long_as_one_may_be_late(rank: Rank) -> None:
    """M49"""
    rank.read("r")
    rank.dispatch("r", PROMPT)
    rank.world.run(1.0)
    rank.dispatch("r", PROMPT)
    assert ends(rank) == ["ok", "ok"]
    assert rank.scheduler.prompt_tokens_total == len(PROMPT)
    rank.world.run(REMEMBER_S)
    rank.dispatch("r", PROMPT)
    assert ends(rank) == ["ok", "ok"]
    rank.world.run(1.0)
    assert ends(rank) == ["ok", "ok", "ok"], "it is run: nothing is remembered for ever"


def test_the_end_of_another_keys_request_is_told_to_nobody_else(rank: Rank) -> None:
    """M85"""
    rank.dispatch("r", PROMPT, client=ALICE.key, bootstrap_room=None)
    rank.world.run(1.0)
    rank.dispatch("r", PROMPT, client=BOB.key, bootstrap_room=None)
    assert ends(rank) == ["ok"]
    rank.world.run(1.0)
    assert ends(rank) == ["ok", "ok"]
    assert rank.scheduler.prompt_tokens_total == 2 * len(PROMPT)


def test_a_stream_is_never_another_submits(rank: Rank) -> None:
    """M85: whoever attaches for its own submit waits for that, whatever streams there are under the rid."""
    rank.read("r")
    rank.dispatch("r", PROMPT, max_tokens=40)
    rank.world.run(0.02)
    rank.streams.attach(b"other", Attach("r", 1, room=6), rank.world.now)
    rank.world.run(1.0)
    assert rank.tokens["r"] == sim_generate(PROMPT, 40, VOCAB), "the first reader reads on"
    assert rank.finishes["r"].code == "ok"
    rank.tokens.clear()
    rank.dispatch("r", OTHER, bootstrap_room=6)
    rank.world.run(1.0)
    assert rank.tokens["r"] == sim_generate(OTHER, 6, VOCAB)


def test_ranks_of_one_process_share_their_streams_and_the_rule(rank: Rank) -> None:
    """M85"""
    other = Rank(rank.world, "unified", "v")
    other.streams = other.core.streams = rank.streams
    rank.read("r")
    rank.dispatch("r", PROMPT, max_tokens=40)
    rank.world.run(0.02)
    other.dispatch("r", OTHER, bootstrap_room=6, attempt=2)
    assert ends(other, 2) == ["duplicate_rid"]
    rank.world.run(1.0)
    other.dispatch("r", OTHER, bootstrap_room=6, client=BOB.key)
    other.world.run(1.0)
    assert ends(other) == ["ok"], "the first one's end has been read"


def test_what_is_detached_before_its_end_is_kept_for_nobody(rank: Rank) -> None:
    rank.read("r")
    rank.dispatch("r", PROMPT, max_tokens=40)
    rank.world.run(0.02)
    rank.streams.detach(b"client", Detach("r", 1))
    rank.world.run(1.0)
    assert ends(rank) == ["ok"]
    assert len(rank.streams) == 0
    rank.dispatch("s", PROMPT, bootstrap_room=7, max_tokens=40)
    rank.read("s")
    rank.streams.detach(b"client", Detach("s", 1))
    rank.read("s")  # it wants it after all
    rank.world.run(1.0)
    assert rank.tokens["s"] == sim_generate(PROMPT, 40, VOCAB)


def test_a_cancel_ends_the_leg_of_its_own_room_alone(rank: Rank) -> None:
    """M85: and is remembered for that, which may still come."""
    rank.read("r")
    rank.dispatch("r", PROMPT, max_tokens=40)
    rank.do(rank.core.cancel(0, CancelLeg("r", 1, room=6), rank.world.now))
    assert ends(rank) == ["cancelled"], "of the one that is not here"
    rank.world.run(1.0)
    assert ends(rank) == ["cancelled", "ok"]
    rank.do(rank.core.cancel(0, CancelLeg("s", 1, room=6), rank.world.now))
    rank.dispatch("s", PROMPT, bootstrap_room=6)
    rank.dispatch("s", PROMPT, bootstrap_room=7)
    rank.world.run(1.0)
    assert [end.code for end in rank.ended["s", 1]] == ["cancelled", "cancelled", "ok"]


def test_a_hello_says_whose_legs_it_lists(rank: Rank) -> None:
    """What runs is nobody else's after a controller's restart either."""
    for number, client in enumerate(["", BOB.key, ALICE.key, BOB.key]):
        rank.dispatch(f"r{number}", PROMPT, bootstrap_room=None, client=client, max_tokens=40)
    running, clients = rank.core.running()
    assert clients == ((BOB.key, 2), ("", 1), (ALICE.key, 1))
    assert running == (("r1", 1), ("r3", 1), ("r0", 1), ("r2", 1))


class Readers:
    """What each peer was sent of the streams of one rank."""

    def __init__(self, rank: Rank) -> None:
        self.said: list[tuple[bytes, Tokens]] = []
        flush = rank.streams.flush

        def spy(now: float) -> list[Any]:
            sends = flush(now)
            self.said += [(send.peer, send.message) for send in sends]  # type: ignore[misc]
            return []

        rank.streams.flush = spy  # type: ignore[method-assign]

    def ids(self, peer: bytes) -> list[int]:
        return [token for to, message in self.said if to is peer for token in message.ids]

    def codes(self, peer: bytes) -> list[Code]:
        return [message.code for to, message in self.said if to is peer and message.finish]


@pytest.mark.parametrize("order", [(ALICE, BOB), (BOB, ALICE)])
def test_an_early_attach_of_another_key_takes_nobodys_place(rank: Rank, order: tuple[Known, ...]) -> None:
    """M80 M59: it is told so when the leg comes."""
    readers = Readers(rank)
    for peer in order:
        rank.streams.attach(peer, Attach("r", 1), rank.world.now)
    rank.dispatch("r", PROMPT, client=ALICE.key)
    rank.world.run(1.0)
    assert readers.ids(ALICE) == sim_generate(PROMPT, 6, VOCAB)
    assert (readers.codes(ALICE), readers.codes(BOB)) == (["ok"], ["bad_identity"])
    rank.streams.attach(BOB, Attach("never", 1), rank.world.now)
    rank.streams.attach(BOB, Attach("never", 2, room=8), rank.world.now)
    rank.world.run(6.0)
    rank.do([])
    assert readers.codes(BOB)[1:] == ["peer_lost", "peer_lost"]


def test_clients_that_attach_early_for_two_rooms_each_get_their_own(rank: Rank) -> None:
    """M85: without keys, at two controllers."""
    readers = Readers(rank)
    one, two = b"one", b"two"
    rank.streams.attach(two, Attach("r", 1, room=6), rank.world.now)
    rank.streams.attach(one, Attach("r", 1, room=5), rank.world.now)
    rank.dispatch("r", PROMPT)
    rank.world.run(1.0)
    rank.dispatch("r", OTHER, bootstrap_room=6)
    rank.world.run(1.0)
    assert (readers.ids(one), readers.ids(two)) == (sim_generate(PROMPT, 6, VOCAB), sim_generate(OTHER, 6, VOCAB))


class TestController:
    """What ranks say late of the request before is not taken for this one's."""

    @staticmethod
    def cancelled(**rest: Any) -> tuple[World, Dispatch]:
        world = unified(U[0])
        world.submit(submit("r", bootstrap_room=5, **rest))
        (first,) = world.dispatches()
        world.feed(FromClient("client", Cancel("r"), ()))
        return world, first

    @pytest.mark.parametrize("other", [{"bootstrap_room": 6}, {"bootstrap_room": 5, "prompt_tokens": 11}])
    def test_another_request_begins_with_an_attempt_of_its_own(self, other: dict[str, Any]) -> None:
        """M85"""
        world, first = self.cancelled()
        world.submit(submit("r", **other), peer="other")
        second = world.dispatches()[-1]
        assert second.attempt == 2 == world.answers(Accepted, "other")[0].attempt
        world.progress(U[0], started=[first], ended=[first], code="cancelled")
        assert not world.answers(Failed, "other")
        world.submit(submit("r", **other), peer="again")
        assert [accepted.attempt for accepted in world.answers(Accepted, "again")] == [2], "M71"
        world.progress(U[0], ended=[second])
        world.assert_empty()

    @pytest.mark.parametrize(("said", "live", "ends"), [(6, 5, False), (5, 5, True), (None, 5, True), (6, None, True)])
    def test_a_cancel_ends_the_request_of_its_own_room_alone(
        self, said: int | None, live: int | None, ends: bool
    ) -> None:
        """M93 M9: a client of release 0.1.0 says no room."""
        world = unified(U[0])
        world.submit(submit("r", bootstrap_room=live))
        world.feed(FromClient("another", Cancel("r", said), ()))
        assert [bool(world.answers(Failed, peer)) for peer in ("client", "another")] == [ends, ends]
        assert bool(world.cancels()) == ends

    def test_what_a_former_controller_dispatched_is_ended_by_its_own_room_alone(self) -> None:
        """M93: the rank knows which that is."""
        node = replace(U[0], running=(("r", 1), ("s", 1)))
        world = unified(node, U[1])
        world.report(node, running=2)
        world.feed(FromClient("client", Cancel("r", 6), ()))
        assert [(cancel.rid, cancel.room) for cancel in world.cancels()] == [("r", 6)]
        world.submit(submit("s", bootstrap_room=6, attempt=2))
        assert [(cancel.rid, cancel.room) for cancel in world.cancels()[1:]] == [("s", 6)]

    def test_what_could_not_be_told_ends_by_its_room_when_its_rank_is_back(self) -> None:
        """M85: another controller's request of that rid may run there by now."""
        world = unified(U[0])
        world.submit(submit("r", bootstrap_room=5))
        world.gone = {peer_of(U[0])}
        world.feed(FromClient("client", Cancel("r"), ()))
        world.join(replace(U[0], running=(("r", 1),)), peer="new")
        assert [cancel.room for cancel in world.cancels()] == [5]

    @pytest.mark.parametrize(("said", "live", "ends"), [(5, 6, False), (6, 6, True), (None, 6, True), (5, None, True)])
    def test_the_end_of_another_rooms_leg_is_not_its_own(self, said: int | None, live: int | None, ends: bool) -> None:
        """M99: a former start of the controller dispatched it, and this start knows nothing of that."""
        world = unified(U[0])
        world.submit(submit("r", bootstrap_room=live), peer="other")
        (dispatch,) = world.dispatches()
        world.progress(U[0], ended=[dispatch], code="fenced", room=said)
        assert [each.attempt for each in world.dispatches()] == ([1, 2] if ends else [1])
        world.progress(U[0], ended=world.dispatches()[-1:], room=live)
        world.assert_empty()

    def test_what_was_cancelled_for_a_former_start_of_the_controller_is_another_attempt_too(self) -> None:
        """M49: its client need not know that it was tried twice there; it says its second attempt now."""
        world = unified(replace(U[0], running=(("r", 2),)))
        world.feed(FromClient("client", Cancel("r", 5), ()))
        world.submit(submit("r", bootstrap_room=5, attempt=2))
        assert [(cancel.rid, cancel.attempt) for cancel in world.cancels()] == [("r", 2)]
        assert world.core.life.requests["r"].attempt == 3

    @pytest.mark.parametrize(("second", "room"), [(5, 5), (6, None)])
    def test_of_two_rooms_that_could_not_be_told_nobody_knows_which_runs(self, second: int, room: int | None) -> None:
        unclear = Unclear()
        unclear.untold("r", 1, 5)
        unclear.untold("r", 2, second)
        assert unclear.given_up([("r", 1), ("r", 3)]) == [("r", 1, room)]

    @pytest.mark.parametrize("cancelled", [True, False])
    def test_a_later_attempt_follows_all_that_were_made_here(self, cancelled: bool) -> None:
        """M73: its client does not know of the second, whose ranks answer it with that one's end, also a good one."""
        world = unified()
        world.submit(submit("r", bootstrap_room=5))
        world.progress(U[0], ended=world.dispatches(U[0]), code="overloaded")
        if cancelled:
            world.feed(FromClient("client", Cancel("r", 5), ()))
        else:
            world.progress(U[1], ended=world.dispatches(U[1]))
        for _ in range(5):
            world.submit(submit("r", bootstrap_room=5, attempt=2))
            world.feed(FromClient("client", Cancel("r", 5), ()))
        assert [dispatch.attempt for dispatch in world.dispatches()] == [1, 2, 3, 4, 5, 6, 7]

    def test_the_same_request_said_again_is_another_attempt(self) -> None:
        """M49: its rank would answer the one that was cancelled with that end."""
        world, _ = self.cancelled()
        world.submit(submit("r", bootstrap_room=5, prompt_tokens=12, max_tokens=3, offset=2))
        assert [dispatch.attempt for dispatch in world.dispatches()] == [1, 2]

    def test_cancels_say_whose_leg_is_meant(self) -> None:
        """M85"""
        world, _ = self.cancelled()
        assert [cancel.room for cancel in world.cancels()] == [5]


def test_each_use_of_a_rid_at_a_dispatcher_has_a_room_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher = Dispatcher(ControllerConfig(bus="ipc:///x/bus", controller="ipc:///x/c"))
    said: list[Submit] = []
    monkeypatch.setattr(dispatcher.controller, "raise_if_closed", lambda: None)
    monkeypatch.setattr(dispatcher.controller, "_submit", lambda message, frames=(): said.append(message))
    frames = [b"\0\0\0\0", b""]
    for attempt in (1, 1, 2):
        dispatcher._live.clear()
        assert dispatcher.dispatch("r", frames, max_tokens=1, attempt=attempt, routed_dp_rank=0)
    assert dispatcher.dispatch("s", frames, max_tokens=1, bootstrap_room=7)
    rooms = [submit.bootstrap_room for submit in said]
    assert None not in rooms[:2]
    assert rooms[0] != rooms[1]
    assert rooms[2:] == [None, 7], "one that is resumed agrees with whichever it was"

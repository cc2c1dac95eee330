"""Ranks that join, restart, fall silent, hang, drain and return; and what is stated of them."""

from __future__ import annotations

from typing import Any

import pytest
from controller_world import EPOCH, D, P, U, World, hello, load, pd, peer_of, submit, unified

from bus.wire.messages import (
    Beacon,
    Bye,
    Done,
    Drain,
    DrainRank,
    Failed,
    LoadReport,
    Member,
    Message,
    Ping,
    Pong,
    Refused,
    Rooms,
    Sent,
    Status,
    StatusQuery,
    Welcome,
    Who,
)
from controller.events import EngineLoad, FromClient, FromNode, Published


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

    @pytest.mark.parametrize("known", [False, True])
    @pytest.mark.parametrize("leaves", [False, True])
    def test_what_a_dead_start_says_late_keeps_nobody_out_for_good(self, leaves: bool, known: bool) -> None:
        """The clock of that machine has gone back since, so that the dead start is the later one by its word."""
        world = World()
        dead, present = hello("u", 0, epoch=1, started_us=2), hello("u", 0, epoch=2, started_us=1)
        if known:
            world.join(dead)
            world.pass_time(3.5)
        world.join(present)
        world.join(dead, peer="late")
        if leaves:
            world.feed(FromNode("late", Bye("u", 0, 1)))
        world.pass_time(3.5)
        world.join(present)
        stays_out = not known and not leaves  # as if it had been replaced
        assert world.rank(present).epoch == (1 if stays_out else 2)
        assert len(world.sent(Refused, present)) == 1 + stays_out, "once when the dead one was heard"

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
        world.back(hello("u", 0, running=(("kept", 1),)), peer="again")
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
        assert not len(world.core.life.table.orphans)  # it runs what this controller gave it, not a former one
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


class TestPublicationsThatAreNotTheRanks:
    """Without keys anybody may publish a load in a rank's name; what the rank says over its connection settles it."""

    def forged(self, seq: int, step: int = 0) -> World:
        world = unified(U[0])
        world.report(U[0], step=3)
        world.feed(Published(LoadReport("u", 0, 1, seq, load(seq, running=900, step=step))))
        return world

    def pong(self, world: World, **fields: Any) -> None:
        (*_, ping) = world.sent(Ping, U[0])
        world.feed(FromNode(peer_of(U[0]), Pong(ping.n, **fields)))

    def test_a_load_that_fills_a_rank_is_asked_about_at_once_and_no_longer_believed(self) -> None:
        world = self.forged(500)
        world.submit(submit("r"))
        assert not world.dispatches()
        self.pong(world, step=3, busy=False, load_seq=1)
        assert [d.rid for d in world.dispatches()] == ["r"]
        world.report(U[0], running=1, acks=[(EPOCH, 1, 10)])
        assert (world.rank(U[0]).requests, world.core.counts["report_forged"]) == (1, 0)
        assert world.core.table.counts["report_forged"] == 1

    def test_the_ranks_own_load_stands_also_when_the_answer_was_on_its_way_first(self) -> None:
        world = unified(U[0])
        world.report(U[0])
        world.pass_time(3.0, alive=U[:1])
        world.report(U[0], running=900)  # after the ping, before the pong
        self.pong(world, step=0, busy=False, load_seq=1)
        self.pong(world, step=0, busy=False, load_seq=2)
        assert world.rank(U[0]).requests == 900

    def test_who_does_not_say_how_far_its_loads_have_come_is_believed(self) -> None:
        world = self.forged(500)
        self.pong(world, step=3, busy=False)
        assert world.rank(U[0]).requests == 900

    def test_a_load_that_was_read_from_the_engine_has_no_seq_of_the_ranks(self) -> None:
        world = unified(U[0])
        world.report(U[0])
        world.feed(EngineLoad(("u", 0), load(0, running=900)))
        world.pass_time(1.1, alive=U[:1])
        self.pong(world, step=0, busy=False, load_seq=1)
        assert world.rank(U[0]).requests == 900

    def test_a_step_that_it_has_not_reached_makes_no_busy_rank_hung(self) -> None:
        world = self.forged(2, step=2**40)
        for step in range(4, 30):
            world.pass_time(1.0)
            self.pong(world, step=step, busy=True, load_seq=2 + step)
            assert world.core.members.state(world.rank(U[0])) == "ready"
        for _ in range(11):
            world.pass_time(1.0)
            self.pong(world, step=29, busy=True, load_seq=40)
        assert world.core.members.state(world.rank(U[0])) == "hung", "once it does stand still"


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


def test_a_rank_is_silent_only_where_the_bus_carries_the_loads_of_others() -> None:
    """Where no rank reaches the bus, that is no rank's fault: all of them go on by what this controller has counted."""
    world = unified()

    def states() -> list[str]:
        return [world.core.members.state(rank) for rank in world.core.table.ranks.values()]

    for n in range(20):
        world.pass_time(0.25, alive=U)
        world.feed(Published(Beacon(1, n, 0.25)))
    assert states() == ["ready", "ready"]
    for _ in range(20):
        world.pass_time(0.25, alive=U)
        world.report(U[1])
    assert states() == ["silent", "ready"]
    world.feed(EngineLoad(("u", 0), load(0, running=1)))
    assert states() == ["ready", "ready"]
    for _ in range(20):
        world.pass_time(0.25, alive=U)
        world.report(U[1])
    assert states() == ["silent", "ready"]
    world.pass_time(3.5, alive=U)  # the other's loads no longer come either
    assert states() == ["ready", "ready"]


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

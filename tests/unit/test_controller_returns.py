"""Connections that are lost, ranks that come back or do not, and the first moments of a controller: nothing fails for
nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from controller_world import D, P, U, World, failure, hello, pd, peer_of, submit, unified
from msgspec.structs import replace

from bus.wire.messages import (
    Accepted,
    Bye,
    Cancel,
    CancelLeg,
    Done,
    DrainRank,
    Ended,
    Failed,
    Hello,
    Ping,
    Pong,
    Progress,
    Status,
    Who,
)  # fmt: skip
from controller.events import FromClient, FromNode, Tick, Undelivered, Unreachable


def ends(node: Hello, rid: str, attempt: int = 1, **said: Any) -> Progress:
    return Progress(node.instance, node.dp_rank, node.epoch, (), (Ended(rid, attempt, node.role, "ok", **said),))


def large(instance: str, count: int, **options: Any) -> list[Hello]:
    sizes = {"max_running": 256, "max_context": 100_000, "kv_capacity": 10_000_000}
    return [hello(instance, n, dp_size=count, **sizes, **options) for n in range(count)]


class TestManyRanksAtOnce:
    @pytest.mark.parametrize(("dying", "living"), [(8, 8), (8, 1), (2, 2)])
    @pytest.mark.parametrize("role", ["unified", "prefill"])
    @pytest.mark.parametrize("method", ["total_tokens", "round_robin", "cache_aware"])
    def test_when_a_process_of_several_ranks_dies_nothing_fails_and_each_request_is_given_away_once(
        self, dying: int, living: int, role: str, method: str
    ) -> None:
        nodes = {"a": large("a", dying, role=role), "b": large("b", living, role=role)}
        world = World(unified_method=method, prefill_method=method)
        for node in (*nodes["a"], *nodes["b"], *large("d", 1, role="decode")):
            world.join(node)
        count = 4 * (dying + living)
        for n in range(count):
            leg = {"leg": "pair", "bootstrap_room": n} if role == "prefill" else {}
            world.submit(submit(f"r{n}", prompt_tokens=100, **leg))
        there = {rid for node in nodes["a"] for rid in world.work(node)}
        world.gone = {peer_of(node) for node in nodes["a"]}
        world.pass_time(2.0, alive=[*nodes["b"]])
        assert there
        assert not world.answers(Failed)
        requests = world.core.life.requests
        assert len(requests) == count
        assert {rid: request.tries for rid, request in requests.items()} == {
            rid: 2 if rid in there else 1 for rid in requests
        }

    def test_when_a_process_is_started_again_what_it_ran_is_not_given_to_its_other_ranks(self) -> None:
        """They come back one after the other, and each that had not yet would count as one more death."""
        old = [replace(node, endpoint="ipc:///a", started_us=10 + node.dp_rank) for node in large("a", 4)]
        new = [replace(node, epoch=2, endpoint="ipc:///b", started_us=99 + node.dp_rank) for node in old]
        other = hello("b", 0, dp_size=1)
        world = unified(*old, other)
        for n in range(20):
            world.submit(submit(f"r{n}"))
        for node in new:
            world.join(node)
            world.report(node)
        assert not world.answers(Failed)
        assert all(request.losses <= 1 for request in world.core.life.requests.values())
        assert all(rank.ready for rank in world.core.table.ranks.values())

    def test_when_the_only_process_dies_what_ran_there_may_be_tried_again(self) -> None:
        nodes = large("a", 8)
        world = unified(*nodes)
        for n in range(80):
            world.submit(submit(f"r{n}", prompt_tokens=100))
        world.gone = {peer_of(node) for node in nodes}
        world.pass_time(2.0)
        assert Counter((f.code, f.retryable) for f in world.answers(Failed)) == {("peer_lost", True): 80}

    def test_where_all_connections_are_lost_at_once_and_come_back_nothing_is_dispatched_twice(self) -> None:
        nodes = large("a", 8)
        world = unified(*nodes)
        for n in range(80):
            world.submit(submit(f"r{n}", prompt_tokens=100))
        world.gone = {peer_of(node) for node in nodes}
        world.pass_time(0.4)
        world.submit(submit("meanwhile"))  # waits
        for node in nodes:
            running = tuple((rid, 1) for rid in world.work(node))
            world.back(replace(node, running=running), peer=f"{peer_of(node)} again")
        world.pass_time(1.0)
        world.report(nodes[0])
        assert not world.answers(Failed)
        assert world.core.counts["redispatched"] == world.core.counts["legs_lost"] == 0
        assert [a.rid for a in world.answers(Accepted)][-1] == "meanwhile"
        assert world.core.counts["ranks_lost"] == 0

    def test_a_dispatch_that_never_left_costs_no_try_and_no_loss(self) -> None:
        nodes = large("a", 8)
        world = unified(*nodes, attempts=2)
        world.gone = {peer_of(node) for node in nodes[:7]}
        for n in range(8):
            world.submit(submit(f"r{n}"))
        assert len(world.dispatches(nodes[7])) == 8
        assert not world.answers(Failed)
        assert {(r.tries, r.losses) for r in world.core.life.requests.values()} == {(1, 0)}
        assert all(world.rank(node).requests == 0 for node in nodes[:7])

    def test_one_that_could_not_be_sent_waits_where_all_ranks_may_be_back_soon(self) -> None:
        world = unified(U[0])
        world.gone = {peer_of(U[0])}
        world.submit(submit("r"))
        world.submit(submit("pinned", routed_dp_rank=0))
        assert not world.answers(Failed)
        world.back(U[0], peer="again")
        world.report(U[0])
        assert sorted(a.message.rid for a in world.to_nodes if a.peer == "again" and hasattr(a.message, "rid")) == [
            "pinned", "r"
        ]  # fmt: skip
        assert {r.tries for r in world.core.life.requests.values()} == {1}

    def test_and_no_longer_than_for_a_moment(self) -> None:
        world = unified(U[0])
        world.gone = {peer_of(U[0])}
        world.submit(submit("r"))
        world.pass_time(0.6)
        assert (failure(world).code, failure(world).retryable) == ("no_rank", True)

    def test_a_message_that_a_full_queue_did_not_take_costs_a_try(self) -> None:
        """The rank is still there, and would be chosen again and again."""
        world = unified(U[0], attempts=2)
        world.submit(submit("r"))
        for attempt in range(2):
            world.feed(Undelivered(peer_of(U[0]), world.dispatches()[attempt]))
        assert failure(world).code == "overloaded"


class TestDeaths:
    def test_a_rank_that_is_started_again_died_with_what_it_ran(self) -> None:
        world = unified(U[0], attempts=2)
        for epoch in (2, 3):
            world.submit(submit("r", attempt=epoch))
            world.join(hello("u", 0, epoch=epoch))
            world.report(hello("u", 0, epoch=epoch))
        assert failure(world).code == "poison"

    def test_a_rank_that_comes_back_within_its_lease_has_not_died(self) -> None:
        world = unified(U[0], attempts=2)
        for n in range(4):
            world.submit(submit("r", attempt=10 * n + 1))
            world.feed(Unreachable(peer_of(U[0]) if not n else f"again {n - 1}"))
            world.pass_time(0.6)
            world.back(U[0], peer=f"again {n}")
            world.report(U[0])
        assert [f.code for f in world.answers(Failed)] == ["peer_lost"] * 4
        world.pass_time(4.0)
        world.join(U[0], peer="at last")
        world.submit(submit("r", attempt=50))
        assert world.core.life.requests["r"].losses == 0

    @pytest.mark.parametrize("says", [U[0], Pong(0, 0, False)], ids=["hello", "pong"])
    def test_a_rank_that_falls_silent_and_is_heard_again_within_a_lease_has_not_died(self, says: Hello | Pong) -> None:
        """It does not hear its controller: its hellos come, a little later than its lease."""
        world = unified(U[0], attempts=2)
        for n in range(4):
            world.submit(submit("r", attempt=10 * n + 1))
            world.pass_time(3.5)
            world.feed(FromNode(peer_of(U[0]), says))
        assert [f.code for f in world.answers(Failed)] == ["peer_lost"] * 4
        world.pass_time(4.0, alive=U[:1])
        world.submit(submit("r", attempt=50))
        assert world.core.life.requests["r"].losses == 0

    def test_a_rank_that_stays_silent_for_another_lease_has_died(self) -> None:
        world = unified(U[0], attempts=2)
        for n in range(2):
            world.submit(submit("r", attempt=10 * n + 1))
            world.pass_time(6.5)
            world.join(U[0])
        assert [f.code for f in world.answers(Failed)] == ["peer_lost"] * 2
        world.submit(submit("r", attempt=50))
        assert world.answers(Failed)[-1].code == "poison"

    def test_the_ranks_of_a_process_that_falls_silent_are_lost_together(self) -> None:
        """One of them was heard a little later; the request is not tried there in between."""
        nodes = [replace(hello("u", dp_rank), endpoint="ipc:///u") for dp_rank in range(2)]
        elsewhere = hello("u2")
        world = unified(*nodes)
        world.submit(submit("r"))
        (first,) = world.dispatches()
        world.pass_time(0.4, alive=[nodes[1 - first.dp_rank]])
        world.join(elsewhere)
        world.report(elsewhere)
        world.pass_time(6.5, alive=[elsewhere])
        assert (len(world.dispatches()), len(world.dispatches(elsewhere))) == (2, 1)
        assert world.core.life.requests["r"].losses == 1

    @pytest.mark.parametrize(("started_us", "losses"), [(5, 1), (0, 2)])
    def test_a_process_dies_once_whichever_of_its_ranks_had_the_request(self, started_us: int, losses: int) -> None:
        """Over a slow network their connections are known to be gone one after another. Where a node does not say when
        it began, each of its ranks may have a process of its own."""
        nodes = [replace(hello("u", n, dp_size=3), endpoint="ipc:///u", started_us=started_us) for n in range(3)]
        world = unified(*nodes)
        world.submit(submit("r"))
        lost: list[Hello] = []
        for _ in range(2):
            (at,) = [node for node in nodes if "r" in world.work(node)]
            world.feed(Unreachable(peer_of(at)))
            world.pass_time(0.6, alive=[node for node in nodes if node not in (*lost, at)])
            lost.append(at)
        life = world.core.life
        assert life.losses.of(life.requests["r"]) == losses
        for node in lost:
            world.join(replace(node, epoch=node.epoch + 1, started_us=started_us and 9), peer=f"again {node.dp_rank}")
        assert life.requests["r"].losses == life.losses.of(life.requests["r"]) == losses
        assert not world.answers(Failed)

    def test_ranks_that_hang_one_by_one_each_count(self) -> None:
        """Their process lives."""
        nodes = [replace(hello("u", n, dp_size=3), endpoint="ipc:///u", started_us=5) for n in range(3)]
        world = unified(*nodes)
        world.submit(submit("r"))
        request = world.core.life.requests["r"]
        for _ in range(24):
            for node in nodes:
                world.report(node, running=1, step=3 if "r" in world.work(node) else round(world.now))
                world.feed(FromNode(peer_of(node), Bye("nobody", 0, 1)))  # its connection lives
            world.pass_time(1.0, alive=[node for node in nodes if "r" not in world.work(node)])
        assert request.losses == 2

    def test_a_rank_that_answers_is_not_lost_with_a_silent_one_of_its_process(self) -> None:
        nodes = [replace(hello("u", dp_rank), endpoint="ipc:///u") for dp_rank in range(2)]
        world = unified(*nodes)
        world.pass_time(4.0, alive=nodes[:1])
        assert [world.rank(node).ready for node in nodes] == [True, False]

    @pytest.mark.parametrize(("said", "losses"), [(False, 1), (True, 0)])
    def test_a_rank_may_have_died_of_a_leg_that_was_given_up_until_it_says_its_end(
        self, said: bool, losses: int
    ) -> None:
        """The decode leg's dispatch was not sent, so the prefill leg was cancelled: too late."""
        world = pd()
        world.gone = {peer_of(node) for node in D}
        world.submit(submit("r", "pair"))
        had = [node for node in P if world.dispatches(node)]
        assert had
        for node in had:
            world.progress(node, ended=world.dispatches(node) if said else (), code="fenced")
            world.join(replace(node, epoch=node.epoch + 1), peer=f"again {node.dp_rank}")
        kept = world.core.life.table._losses.get("r", (0, 0))
        live = world.core.life.requests.get("r")
        assert max(kept[1], live.losses if live else 0) == losses * len(had)

    def test_a_pair_that_loses_both_legs_has_lost_once(self) -> None:
        world = pd()
        world.submit(submit("r", "pair"))
        at = [node for node in (*P, *D) if world.dispatches(node)]
        world.pass_time(6.5, alive=[node for node in (*P, *D) if node not in at])
        assert world.core.life.requests["r"].losses == 1


class TestBesideWhatKillsRanks:
    """What was lost as often as makes one more loss poison goes nowhere beside another such."""

    def play(self, world: World, nodes: list[Hello], *, silently: bool) -> None:
        """Each rank that gets `killer` dies of it before anything there has a token, and is started again. Elsewhere
        all that runs has its first token at once, and ends."""
        for _ in range(100):
            for n, node in enumerate(nodes):
                work = {rid: request.attempt for rid, (request, _) in world.work(node).items()}
                mine = [d for d in world.dispatches(node) if work.get(d.rid) == d.attempt]
                if "killer" not in work:
                    world.progress(node, started=mine)
                    world.progress(node, ended=mine)
                    continue
                if not silently:
                    world.feed(Unreachable(peer_of(node)))
                world.pass_time(3.5 if silently else 0.6, alive=[other for other in nodes if other is not node])
                nodes[n] = replace(node, epoch=node.epoch + 1)
                world.join(nodes[n])
                world.report(nodes[n])
            if not world.core.life.requests:
                return
        raise AssertionError("requests are left over")

    @pytest.mark.parametrize("silently", [True, False])
    @pytest.mark.parametrize("count", [2, 3])
    @pytest.mark.parametrize("first", [True, False])
    def test_nothing_fails_but_that(self, silently: bool, count: int, first: bool) -> None:
        nodes = large("a", count)
        world = unified(*nodes)
        rids = [f"r{n}" for n in range(30)]
        for rid in ["killer", *rids] if first else [*rids, "killer"]:
            world.submit(submit(rid))
        self.play(world, nodes, silently=silently)
        assert {done.rid for done in world.answers(Done)} == set(rids)
        assert failure(world).code == "peer_lost"  # that the last one died as well was not known then
        world.submit(submit("killer", attempt=4))
        assert [failed.rid for failed in world.answers(Failed)] == ["killer"] * 2
        assert world.answers(Failed)[-1].code == "poison"

    def at_risk(self, count: int, **settings: Any) -> tuple[World, Hello, Hello]:
        """Requests that lost two ranks; the third is there, and the fourth is not yet."""
        nodes = large("a", 4)
        world = World(**settings)
        world.join(nodes[0])
        for n in range(count):
            world.submit(submit(f"r{n}"))
        for node in nodes[1:3]:
            world.join(node)
            world.pass_time(3.5, alive=[node])
        life = world.core.life
        assert [life.losses.of(request) for request in life.requests.values()] == [2] * count
        return world, nodes[2], nodes[3]

    def test_they_go_one_by_one_until_each_has_a_token_and_hold_up_nothing_else(self) -> None:
        world, one, other = self.at_risk(5)
        assert [d.rid for d in world.dispatches(one)] == ["r0"]
        world.join(other)
        assert [d.rid for d in world.dispatches(other)] == ["r1"]
        for n in range(6):
            world.submit(submit(f"plain{n}"))
        assert len(world.dispatches(one)) + len(world.dispatches(other)) == 8
        world.progress(one, started=world.dispatches(one)[:1])
        assert world.dispatches(one)[-1].rid == "r2"
        world.progress(other, ended=world.dispatches(other)[:1])
        assert world.dispatches(other)[-1].rid == "r3"
        world.feed(FromClient("client", Cancel("r2"), ()))
        assert world.dispatches(one)[-1].rid == "r4"

    def test_a_leg_that_was_given_up_may_take_down_the_last_rank(self) -> None:
        """Until its rank says that it has ended, the request is tried nowhere else."""
        world, one, other = self.at_risk(1)
        world.join(other)
        (sent,) = world.dispatches(one)
        request, losses = world.core.life.requests["r0"], world.core.life.losses
        rank = world.core.members.known((other.instance, other.dp_rank))
        assert rank is not None
        rank.gives_up(request)
        assert losses.of(request) == 3
        world.progress(other, ended=[sent], code="fenced")
        assert losses.of(request) == 2
        rank.gives_up(request)
        world.progress(one, ended=[sent], code="overloaded")
        assert failure(world).code == "overloaded", "it would have been tried again"

    def test_a_leg_that_is_given_up_as_the_other_never_left_may_take_down_the_last_rank(self) -> None:
        world = pd()
        world.submit(submit("r", "pair"))
        (prefill,), (decode,) = ([n for n in nodes if world.dispatches(n)] for nodes in (P, D))
        world.core.life.requests["r"].losses = 2
        world.feed(Unreachable(peer_of(decode), world.dispatches(decode)[0]))
        assert len(world.dispatches()) == 2, "tried nowhere else until prefill has said that its leg has ended"
        assert failure(world).code == "peer_lost"
        assert [(cancel.rid, cancel.attempt) for cancel in world.cancels(prefill)] == [("r", 1)]

    def test_where_the_caller_names_the_rank_they_do_not_wait(self) -> None:
        world, one, _ = self.at_risk(2)
        assert [d.rid for d in world.dispatches(one)] == ["r0"]
        request = world.core.life.requests["r1"]
        request.submit = replace(request.submit, routed_dp_rank=one.dp_rank)
        world.feed(Tick())
        assert [d.rid for d in world.dispatches(one)] == ["r0", "r1"]

    def test_with_another_number_of_attempts(self) -> None:
        world, one, _ = self.at_risk(3, attempts=4)
        assert len(world.dispatches(one)) == 3


class TestConnectionsThatComeBack:
    def one(self) -> World:
        world = unified(U[0])
        world.report(U[0])
        world.submit(submit("r"))
        return world

    @pytest.mark.parametrize("streaming", [False, True])
    def test_what_ended_while_the_connection_was_away_has_ended(self, streaming: bool) -> None:
        world = self.one()
        if streaming:
            world.progress(U[0], started=world.dispatches())
        world.feed(FromNode("new", ends(U[0], "r", output_tokens=5)))  # queued there before the hello
        assert [a.peer for a in world.to_nodes if isinstance(a.message, Who)] == ["new"]
        world.join(U[0], peer="new")
        world.feed(FromNode("new", ends(U[0], "r", output_tokens=5)))  # said again behind the welcome
        world.pongs("new")
        assert [done.attempt for done in world.answers(Done)] == [1]
        assert len(world.dispatches()) == 1
        assert world.core.counts["legs_lost"] == 0

    def test_what_the_old_connection_swallowed_is_dispatched_again_once_two_pings_were_answered(self) -> None:
        """M88"""
        world = self.one()
        world.join(U[0], peer="new")
        assert len(world.dispatches()) == 1
        world.pongs("new")
        assert [d.attempt for d in world.dispatches()] == [1, 2]
        assert world.core.life.requests["r"].losses == 0

    def test_one_answered_ping_proves_nothing_yet(self) -> None:
        """M88: the rank may say how its last legs did between the two."""
        world = self.one()
        world.join(U[0], peer="new")
        ping = next(a.message for a in world.to_nodes if a.peer == "new" and isinstance(a.message, Ping))
        world.feed(FromNode("new", Pong(ping.n, 0, False)))
        assert len(world.dispatches()) == 1
        world.feed(FromNode("new", ends(U[0], "r")))
        assert len(world.answers(Done)) == 1
        world.pongs("new")
        assert world.core.counts["legs_lost"] == 0

    def test_what_is_dispatched_after_the_hello_is_in_no_doubt(self) -> None:
        world = self.one()
        world.join(U[0], peer="new")
        world.submit(submit("s"))
        world.feed(FromNode("new", ends(U[0], "r")))
        world.pongs("new")
        assert world.core.counts["legs_lost"] == 0
        assert "s" in world.work(U[0])

    def test_what_came_over_the_old_connection_before_it_closed_counts(self) -> None:
        world = self.one()
        world.feed(Unreachable(peer_of(U[0])))
        world.feed(FromNode(peer_of(U[0]), ends(U[0], "r")))
        assert len(world.answers(Done)) == 1

    @pytest.mark.parametrize("late", [False, True], ids=["at once", "after more cancels"])
    def test_a_cancel_that_the_old_connection_swallowed_is_sent_again(
        self, late: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("controller.rank.MAX_CANCELLED", 2)
        world = self.one()
        world.feed(FromClient("client", Cancel("r"), ()))
        for n in range(2 if late else 1):
            world.submit(submit(f"s{n}"))
            world.feed(FromClient("client", Cancel(f"s{n}"), ()))
        world.join(replace(U[0], running=(("r", 1), ("other", 1))), peer="new")
        cancels = [a.message for a in world.to_nodes if a.peer == "new" and isinstance(a.message, CancelLeg)]
        assert [(cancel.rid, cancel.attempt, cancel.code) for cancel in cancels] == [("r", 1, "fenced")] * (not late)

    def test_of_two_attempts_of_one_rid_each_gets_its_own_cancel(self) -> None:
        world = self.one()
        world.feed(FromClient("client", Cancel("r"), ()))
        world.submit(submit("r", attempt=2, bootstrap_room=9))
        world.feed(FromClient("client", Cancel("r", 9), ()))
        world.join(replace(U[0], running=(("r", 1), ("r", 2))), peer="new")
        cancels = [a.message for a in world.to_nodes if a.peer == "new" and isinstance(a.message, CancelLeg)]
        assert [(cancel.attempt, cancel.room) for cancel in cancels] == [(1, None), (2, 9)]

    def test_what_was_given_up_while_a_rank_could_not_be_told_ends_when_it_is_back(self) -> None:
        world = unified()
        for n in range(6):
            world.submit(submit(f"r{n}"))
        mine = tuple((d.rid, d.attempt) for d in world.dispatches(U[0]))
        world.gone = {peer_of(U[0])}
        world.feed(FromClient("client", Cancel(mine[0][0]), ()))
        world.cut(U[0])
        assert [d.attempt for d in world.dispatches(U[1])][3:] == [2, 2]
        world.join(replace(U[0], running=mine), peer="new")
        assert [
            (a.message.rid, a.message.attempt, a.message.code)
            for a in world.to_nodes
            if a.peer == "new" and a.message in world.cancels()
        ] == [(rid, 1, "fenced") for rid, _ in mine]

    def test_what_runs_on_is_left_alone(self) -> None:
        world = self.one()
        world.feed(Unreachable(peer_of(U[0])))
        world.back(replace(U[0], running=(("r", 1),)), peer="new")
        assert not world.cancels()
        assert "r" in world.work(U[0])

    @pytest.mark.parametrize("forgotten", [False, True])
    def test_an_attempt_that_was_given_up_is_not_wanted_unless_it_has_come_anew(self, forgotten: bool) -> None:
        """That is one of more requests than a controller remembers."""
        world = self.one()
        world.gone = {peer_of(U[0])}
        world.feed(FromClient("client", Cancel("r"), ()))
        world.join(U[0], peer="new")
        if forgotten:
            world.core.life.table._made.clear()
        world.submit(submit("r"))
        world.join(replace(U[0], running=(("r", 1),)), peer="newer")
        assert len(world.cancels()) == 1 - forgotten

    def test_after_an_absence_of_our_own_lost_connections_have_a_lease_to_come_back(self) -> None:
        """Over tcp their peers close them meanwhile."""
        world = unified()
        for n in range(4):
            world.submit(submit(f"r{n}"))
        running = {node.dp_rank: tuple((rid, 1) for rid in world.work(node)) for node in U}
        world.now += 6.0
        world.gone = {peer_of(node) for node in U}
        world.feed(Tick())
        world.pass_time(2.5)
        assert not world.answers(Failed)
        for node in U:
            world.back(replace(node, running=running[node.dp_rank]), peer=f"{node.dp_rank} again")
        world.pass_time(0.5)
        assert world.core.counts["legs_lost"] == world.core.counts["ranks_lost"] == 0
        assert len(world.core.life.requests) == 4

    def test_but_no_longer(self) -> None:
        world = unified()
        world.now += 6.0
        world.gone = {peer_of(node) for node in U}
        world.feed(Tick())
        world.pass_time(3.2)
        assert world.core.counts["ranks_lost"] == 2


class TestGoodbyes:
    """A rank that leaves closes its connection right behind its goodbye: a ping may find out first."""

    def states(self, world: World) -> list[str]:
        world.feed(FromClient("op", DrainRank(1, "u", 0), ()))
        return [rank.state for rank in world.answers(Status, "op")[-1].ranks if rank.dp_rank == 0]

    def test_one_that_says_goodbye_is_gone_and_was_never_lost(self) -> None:
        world = unified()
        assert self.states(world) == ["draining"]
        world.feed(Unreachable(peer_of(U[0])))
        assert self.states(world) == ["draining"]
        world.pass_time(0.3)
        assert self.states(world) == ["draining"]
        world.feed(FromNode(peer_of(U[0]), Bye("u", 0, 1)))
        assert self.states(world) == ["gone"]
        world.pass_time(4.0, alive=[U[1]])
        assert self.states(world) == ["gone"]
        assert (world.core.counts["ranks_lost"], world.core.counts["ranks_gone"]) == (0, 1)
        assert "lost" not in {note.fields.get("new") for note in world.notes}

    def test_one_that_drained_without_being_asked_here_likewise(self) -> None:
        world = unified()
        world.join(replace(U[0], state="draining"))
        world.feed(Unreachable(peer_of(U[0])))
        world.feed(FromNode(peer_of(U[0]), Bye("u", 0, 1)))
        world.pass_time(1.0, alive=[U[1]])
        assert (world.core.counts["ranks_lost"], world.core.counts["ranks_gone"]) == (0, 1)

    def test_one_that_drained_and_died_is_lost_a_moment_later(self) -> None:
        world = unified()
        world.submit(submit("r"))
        self.states(world)
        world.cut(U[0])
        assert self.states(world) == ["lost"]
        assert [d.attempt for d in world.dispatches(U[1])] == [2]

    def test_a_goodbye_is_no_death_of_what_it_left_behind(self) -> None:
        world = unified()
        world.submit(submit("r"))
        world.feed(FromNode(peer_of(U[0]), Bye("u", 0, 1)))
        assert world.core.life.requests["r"].losses == 0
        assert [d.attempt for d in world.dispatches(U[1])] == [2]


class TestFirstMoments:
    """A controller that was started again knows some ranks sooner than others."""

    X, Y = hello("x", dp_size=1, model="X"), hello("y", dp_size=1, model="Y")
    SMALL = hello("s", dp_size=1)
    LARGE = hello("l", dp_size=1, max_context=100_000, kv_capacity=100_000)
    KNOWS = replace(hello("k", dp_size=1), params=("json_schema",))

    @pytest.mark.parametrize(
        ("there", "late", "wish"),
        [
            (Y, X, {"model": "X"}),
            (Y, X, {"instance": "x"}),
            (SMALL, LARGE, {"prompt_tokens": 5000}),
            (SMALL, KNOWS, {"needs": ("json_schema",)}),
            (SMALL, large("s", 2)[1], {"instance": "s", "routed_dp_rank": 1}),
        ],
    )
    def test_what_rests_on_who_is_there_is_refused_for_good_only_after_a_lease(
        self, there: Hello, late: Hello, wish: dict[str, Any]
    ) -> None:
        world = World(settle_s=0.5)
        world.join(there)
        world.pass_time(0.7, alive=[there])
        world.submit(submit("r", **wish))
        failed = failure(world)
        assert (failed.code, failed.retryable) == ("no_rank", True)
        assert failed.retry_after_s > 0
        world.pass_time(3.0, alive=[there])
        world.submit(submit("r", **wish))
        assert world.answers(Failed)[-1].code in ("bad_request", "bad_rank", "too_long")

    def test_what_is_wrong_whoever_is_there_is_refused_at_once(self) -> None:
        world = World(settle_s=0.5)
        world.join(self.X)
        world.pass_time(0.7, alive=[self.X])
        world.submit(submit("r", prompt_tokens=0))
        assert failure(world).code == "empty_prompt"

    def test_a_rank_that_is_started_again_gets_one_request_until_it_reports(self) -> None:
        world = unified(hello("u", max_running=64))
        world.report(hello("u"))
        again = hello("u", epoch=2, max_running=64)
        world.join(again)
        for n in range(10):
            world.submit(submit(f"r{n}"))
        assert len(world.dispatches(again)) == 1
        world.report(again)
        assert len(world.dispatches(again)) == 10

    def test_a_rank_that_is_new_gets_all_at_once(self) -> None:
        node = hello("u", max_running=64)
        world = unified(node)
        for n in range(10):
            world.submit(submit(f"r{n}"))
        assert len(world.dispatches(node)) == 10


class TestReadiness:
    def test_a_cluster_of_mixed_roles_serves_as_long_as_some_of_them_can(self) -> None:
        world = pd()
        world.join(U[0])
        world.cut(*D)
        assert not world.core.unready
        world.cut(U[0])
        assert world.core.unready == "no decode and unified rank is ready"

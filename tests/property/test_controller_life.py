"""Requests under random failures: every accepted one ends exactly once, and nothing of it stays.

Nodes start, end, fail, vanish, restart, reconnect, fall silent and drain; clients cancel, resubmit and reconnect; time
passes, at times so much that ranks are forgotten. The core's own books are checked after every event (`World.feed`).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from controller_world import World, hello, peer_of, submit
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bus.wire.codes import Code
from bus.wire.hashing import pack_hashes
from bus.wire.messages import Accepted, Bye, Cancel, Dispatch, Done, DrainRank, Failed, Hello, Role, StatusQuery
from controller.events import FromClient, FromNode, ToClient, ToNode, Undelivered, Unreachable
from controller.policies import POLICIES

ROLES: dict[str, Role] = {"p": "prefill", "d": "decode", "u": "unified"}
SLO = {"queue_order": "slo"}
KEYS = [(name, n) for name in ROLES for n in range(2)]
CODES: list[Code] = ["kv_failed", "unknown_room", "engine_failed", "too_long", "cancelled", "draining", "fenced"]
keys = st.sampled_from(KEYS)


class Life(RuleBasedStateMachine):
    @initialize(prefill=st.sampled_from([*POLICIES]), decode=st.sampled_from([*POLICIES]),
                order=st.sampled_from([{}, SLO, SLO | {"shed": "hopeless"}]))  # fmt: skip
    def begin(self, prefill: str, decode: str, order: dict[str, str]) -> None:
        self.world = World(
            prefill_method=prefill, decode_method=decode, unified_method="odd_policies:Erratic",
            queue_requests=4, client_requests=12, request_overcommit=1.0, forget_s=3.5, late_tokens=60,
            overtake_tokens=100, **order,
        )  # fmt: skip
        self.nodes: dict[tuple[str, int], Hello] = {}
        self.peers: dict[tuple[str, int], str] = {}
        self.cut: set[str] = set()  # connections that are gone
        self.legs: dict[tuple[str, int], list[Dispatch]] = {key: [] for key in KEYS}  # what each node has
        self.expected: Counter[str] = Counter()  # ends due, by rid
        self.attempts: Counter[str] = Counter()
        self.submitted: dict[str, Any] = {}
        self.owner: dict[str, str] = {}  # by rid: the client that submitted it last
        self.seen_clients = self.seen_nodes = 0
        self.ends: Counter[str] = Counter()
        self.dispatched: set[tuple[str, int, str]] = set()
        self.numbers: Counter[tuple[tuple[str, int], int]] = Counter()  # the last, by rank and its epoch
        self.serial = 0
        self.world.after = self.read
        self.world.gone = self.cut
        for key in KEYS:
            self.join(key, epoch=1)

    def join(self, key: tuple[str, int], epoch: int, running: tuple[tuple[str, int], ...] = ()) -> None:
        self.serial += 1
        self.peers[key] = f"peer{self.serial}"
        node = hello(key[0], key[1], role=ROLES[key[0]], epoch=epoch, max_running=2, running=running)
        self.nodes[key] = node
        self.world.join(node, peer=self.peers[key])

    def read(self) -> None:
        """Take in what the core asked for."""
        world = self.world
        for action in world.to_nodes[self.seen_nodes :]:
            self.node_got(action)
        self.seen_nodes = len(world.to_nodes)
        for answer in world.to_clients[self.seen_clients :]:
            self.client_got(answer)
        self.seen_clients = len(world.to_clients)

    def node_got(self, action: ToNode) -> None:
        message = action.message
        if not isinstance(message, Dispatch):
            return
        (key,) = (key for key, peer in self.peers.items() if peer == action.peer)
        assert action.peer not in self.cut, f"dispatched to {key} over a connection that is gone"
        rank = self.world.core.table.ranks[key]
        assert rank.ready, f"dispatched to {key}, which is {self.world.core.members.state(rank)}"
        name = (message.rid, message.attempt, message.leg)
        assert name not in self.dispatched, f"{name} was dispatched twice"
        self.dispatched.add(name)
        start = key, self.nodes[key].epoch
        assert message.number > self.numbers[start], "its node takes it for a repeat"
        self.numbers[start] = message.number
        assert len(action.frames) == (1 if message.leg == "decode" else 2)
        self.legs[key].append(message)

    def client_got(self, action: ToClient) -> None:
        message = action.message
        if action.peer == "stranger":
            assert isinstance(message, Failed)
            assert message.code == "cancelled"
        elif isinstance(message, Done | Failed):
            assert action.peer == self.owner[message.rid], "somebody else heard the end"
            self.ends[message.rid] += 1
            if isinstance(message, Done):
                assert {leg.attempt for leg in message.legs} == {message.attempt}, "an old attempt gave the answer"
        elif isinstance(message, Accepted):
            assert message.attempt >= self.attempts[message.rid]
            self.attempts[message.rid] = message.attempt

    # --- clients ----------------------------------------------------------------------------------------------

    @rule(leg=st.sampled_from(["pair", "pair", "unified", "prefill", "decode"]), room=st.integers(0, 9),
          priority=st.integers(-1, 1), deadline_s=st.sampled_from([0.0, 0.0, 1.5]),
          pinned=st.sampled_from([None, None, None, 0, 1, 5]))  # fmt: skip
    def submit(self, leg: str, room: int, priority: int, deadline_s: float, pinned: int | None) -> None:
        self.serial += 1
        rid = f"r{self.serial}"
        request = submit(
            rid, leg, 40, bootstrap_room=room, priority=priority, deadline_s=deadline_s, routed_dp_rank=pinned,
            block_hashes=pack_hashes((room // 3, room)), block_tokens=16,
        )  # fmt: skip
        self.submitted[rid] = request
        self.expected[rid] += 1
        self.owner[rid] = "client"
        self.world.submit(request)

    @precondition(lambda self: self.submitted)
    @rule(data=st.data(), peer=st.sampled_from(["client", "client again"]))
    def say_again(self, data: st.DataObject, peer: str) -> None:
        """The client reconnected and repeats itself, or, if it was answered, resumes under the next attempt."""
        rid = data.draw(st.sampled_from(sorted(self.submitted)))
        live = self.world.core.life.requests.get(rid)
        request = self.submitted[rid]
        if live is None:
            self.expected[rid] += 1
            request = submit(
                rid, request.leg, bootstrap_room=request.bootstrap_room, attempt=max(1, self.attempts[rid]) + 3
            )
            self.submitted[rid] = request
        self.owner[rid] = peer
        self.world.submit(request, peer=peer)

    @precondition(lambda self: self.world.core.life.requests)
    @rule(data=st.data())
    def supersede(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.world.core.life.requests)))
        live = self.world.core.life.requests[rid]
        old = self.submitted[rid]
        request = submit(rid, old.leg, bootstrap_room=old.bootstrap_room, attempt=live.attempt + 1)
        self.submitted[rid] = request
        self.world.submit(request, peer=live.peer)

    @precondition(lambda self: self.submitted)
    @rule(data=st.data(), by_owner=st.booleans())
    def cancel(self, data: st.DataObject, by_owner: bool) -> None:
        rid = data.draw(st.sampled_from(sorted(self.submitted)))
        self.world.feed(FromClient(self.owner[rid] if by_owner else "stranger", Cancel(rid), ()))

    @rule(key=keys)
    def drain(self, key: tuple[str, int]) -> None:
        self.world.feed(FromClient("operator", DrainRank(1, *key), ()))
        self.world.feed(FromClient("operator", StatusQuery(2), ()))

    # --- nodes ------------------------------------------------------------------------------------------------

    @rule(key=keys, which=st.integers(0, 99), how=st.sampled_from(["start", "ok", "ok", "fail"]),
          code=st.sampled_from(CODES))  # fmt: skip
    def step(self, key: tuple[str, int], which: int, how: str, code: Code) -> None:
        """A leg the node was given begins, ends, or ends badly, whether the controller still wants it or not."""
        if not self.legs[key]:
            return
        leg = self.legs[key][which % len(self.legs[key])]
        node, peer = self.nodes[key], self.peers[key]
        if how == "start":
            self.world.progress(node, started=[leg], peer=peer)
        else:
            self.legs[key].remove(leg)
            self.world.progress(node, ended=[leg], code="ok" if how == "ok" else code, peer=peer)

    @rule(key=keys)
    def report(self, key: tuple[str, int]) -> None:
        legs = self.legs[key]
        self.world.report(self.nodes[key], running=len(legs), kv_tokens=sum(leg.charge for leg in legs))

    @rule(key=keys, keep=st.integers(0, 3))
    def reconnect(self, key: tuple[str, int], keep: int) -> None:
        self.legs[key] = self.legs[key][:keep]
        running = tuple((leg.rid, leg.attempt) for leg in self.legs[key])
        self.join(key, self.nodes[key].epoch, running)

    @rule(key=keys)
    def be_stopped(self, key: tuple[str, int]) -> None:
        """For so long that the controller forgets the rank; then the same process goes on."""
        self.pass_time(4.5, {key})
        assert key not in self.world.core.table.ranks
        self.reconnect(key, 0)

    @rule(key=keys)
    def restart(self, key: tuple[str, int]) -> None:
        self.legs[key] = []
        self.join(key, self.nodes[key].epoch + 1)

    @rule(key=keys, how=st.sampled_from(["cut", "found out", "bye"]))
    def leave(self, key: tuple[str, int], how: str) -> None:
        """Its connection is gone, which the controller finds out by what it sends there, or it says goodbye before."""
        node = self.nodes[key]
        self.cut.add(self.peers[key])
        if how == "bye":
            self.world.feed(FromNode(self.peers[key], Bye(*key, node.epoch)))
        elif how == "found out":
            self.world.feed(Unreachable(self.peers[key]))

    @rule(key=keys)
    def answer_pings(self, key: tuple[str, int]) -> None:
        self.world.pongs(self.peers[key])

    @rule(key=keys)
    def refuse_last(self, key: tuple[str, int]) -> None:
        """The node's queue was full: its last dispatch never left."""
        if self.legs[key]:
            self.world.feed(Undelivered(self.peers[key], self.legs[key].pop()))

    @rule(seconds=st.sampled_from([0.1, 0.6, 3.5]), silent=st.sets(keys, max_size=2))
    def pass_time(self, seconds: float, silent: set[tuple[str, int]]) -> None:
        step = 0.5
        while seconds > 0:
            for key in KEYS:
                if key not in silent:
                    self.world.progress(self.nodes[key], peer=self.peers[key])
            self.world.pass_time(min(step, seconds), dozes=True)
            seconds -= step

    # --- what must hold ---------------------------------------------------------------------------------------

    @invariant()
    def no_more_ends_than_requests(self) -> None:
        live = self.world.core.life.requests
        for rid, expected in self.expected.items():
            assert self.ends[rid] == expected - (rid in live), rid

    @invariant()
    def what_waits_is_bounded(self) -> None:
        life = self.world.core.life
        assert len(life.queue) <= 4
        assert len(life.requests) <= 36

    @invariant()
    def no_work_of_mine_counts_as_a_former_controllers(self) -> None:
        assert not len(self.world.core.life.table.orphans)

    @invariant()
    def a_policy_knows_of_each_leg_that_runs_whatever_it_breaks(self) -> None:
        policy = self.world.core.policies["unified"].policy  # type: ignore[attr-defined]
        ranks = self.world.core.members.ranks.values()
        assert sorted(policy.running) == sorted(
            (rid, rank.key) for rank in ranks for rid in rank.work if rank.key[0] == "u"
        )

    def teardown(self) -> None:
        """All clients give up: nothing is left."""
        for rid in list(self.world.core.life.requests):
            self.world.feed(FromClient("stranger", Cancel(rid), ()))
        self.world.assert_empty()
        assert self.ends == self.expected
        for key in KEYS:
            assert peer_of(self.nodes[key])
            rank = self.world.core.table.ranks.get(key)  # None: forgotten
            assert rank is None or rank.outstanding == 0


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=120, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

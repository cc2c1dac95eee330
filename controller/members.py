"""The nodes' connections: which connection is which rank (one copy of the model, at a node), and what its state means
for the work there. An epoch is the number of a rank's start.

This module owns the connections and turns the verdicts of `controller.health` into readiness in the load table and into
`Loss`es, which `controller.requests.losses` handles. Pure: messages to send are appended to `out`. It decides nothing
about requests.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable
from typing import Any, NamedTuple, TypeAlias

from bus.actions import Note
from bus.wire.codes import Code
from bus.wire.messages import Bye, Hello, MemberKey, Ping, Pong, RankState, Refused, Welcome
from bus.wire.starts import is_later
from controller.balancer import Balancer
from controller.config import ControllerConfig
from controller.event_log import EventLog, counted
from controller.events import Action, ToNode
from controller.health import DEAD, Change, Health
from controller.load.rank import RankLoad
from controller.load.table import info_key
from controller.rank import Asked, Rank, Work
from controller.wanted import Wanted

FENCED_EPOCHS = 8
AT_ONCE_S = 1.0
DIED: dict[RankState, bool | None] = {"lost": None, "hung": True, "gone": False}  # of a `Loss`
Kind: TypeAlias = tuple[str, str, int]  # role, model, dp_size: what all ranks of an instance share


class Loss(NamedTuple):
    """All work at `rank` is lost, or only the part of it in `work`. With `cancel`, it may still run there and must be
    cancelled. `died` is true if the rank itself is gone, possibly because of one of the requests; None: not known
    yet, because it has only fallen silent or lost its connection. `hung`: it alone, while its process lives."""

    rank: Rank
    why: str
    work: Work | None = None
    cancel: bool = False
    died: bool | None = True
    hung: bool = False

    @property
    def of(self) -> Hashable:
        """Name what has died: the process, or the rank that hung."""
        return (self.rank, self.rank.returns) if self.hung else self.rank.process


class Doubt:
    """Work that may be lost: `work` was dispatched over a connection that is gone, and the rank does not list it as
    running, so it was lost on the way or has ended. The rank reports the ended legs after the `welcome`. What is
    still open when a ping is answered that was sent after the answer to ping `number`, is lost."""

    __slots__ = ("answered", "number", "work")

    def __init__(self, work: Work) -> None:
        self.work = work
        self.number = 0
        self.answered = False


class Members:
    """The connections. `ranks` are the known ranks by their load. `peers` maps a connection to the rank that said hello
    over it: one connection belongs to one rank. `suspects` are the ranks whose connections are gone and which may come
    back soon: nothing new goes there, and nothing that runs there is given up. Methods append messages and log lines to
    `out`, and return what is lost."""

    def __init__(
        self, config: ControllerConfig, epoch: int, balancer: Balancer, health: Health, counts: Counter[str],
        events: EventLog,
    ) -> None:  # fmt: skip
        self._config = config
        self._events = events
        self._epoch = epoch
        self._balancer = balancer
        self._table = balancer.table
        self._health = health
        self._counts = counts
        self._fenced: dict[MemberKey, deque[int]] = {}  # epochs that a later start replaced
        self._kinds: dict[str, Counter[Kind]] = {}  # by instance, of its ranks that are not dead
        self._pings = 0
        self._doubts: dict[RankLoad, Doubt] = {}
        self._unclear: dict[RankLoad, None] = {}  # given up, and not known to be dead
        self.ranks: dict[RankLoad, Rank] = {}
        self.peers: dict[Any, Rank] = {}
        self.suspects: dict[RankLoad, None] = {}
        self.wanted = Wanted(config.expect)

    def hello(self, peer: Any, hello: Hello, now: float, out: list[Action]) -> list[Loss]:
        """Take a node's hello for one of its ranks, also a repeated one: register, welcome, or refuse it. Return the
        work of an earlier start; what the same start no longer lists is lost a little later (`pong`)."""
        key = info_key(hello)
        refusal = self._refusal(peer, key, hello)
        if refusal is not None:
            self._counts[f"hello_{refusal.code}"] += 1
            out.append(ToNode(peer, refusal))
            return []
        losses: list[Loss] = []
        load = self._table.ranks.get(key)
        if load is None or load.epoch != hello.epoch:
            earlier = None if load is None else self.ranks[load]
            if earlier is not None:
                losses.append(Loss(earlier, f"rank {key[0]}/{key[1]} was restarted"))
                self._replace(earlier, peer, hello, now, out)
            load = self._balancer.opened(hello)
            rank = self.ranks[load] = Rank(hello, load, peer, earlier)
            self._count(load, 1)
            pulse = self._health.hello(key, hello.epoch, hello.state, idle=not hello.running, now=now)
            pulse.returning = earlier is not None
            self.wanted.changed(load, "starting")
            what = "joined" if earlier is None else "restarted"
            self._events.add(now, what, key, phrase=f"{hello.role} of {hello.model}", bad=earlier is not None)
            out.append(Note("node.registered", fields=_name(load) | {"epoch": load.epoch}))
        else:
            rank = self.ranks[load]
            if rank.peer != peer:
                self._reconnected(rank, hello)
            self._table.revise(load, hello)
            self._health.hello(key, hello.epoch, hello.state, idle=not hello.running, now=now)
        rank.peer = peer
        self.peers[peer] = rank
        follow = self._config.methods[hello.role] == "follow_bootstrap_room"
        welcome = Welcome(self._config.name, self._epoch, follow, self._config.lease_s, hello.dp_rank)
        out.append(ToNode(peer, welcome))
        if (doubt := self._doubts.get(load)) is not None and not doubt.number:
            doubt.number = self.ping(rank, now, out)
        return losses + self.assess(load, now, out, "hello")

    def _replace(self, earlier: Rank, peer: Any, hello: Hello, now: float, out: list[Action]) -> None:
        """Give up the connection of a rank's `earlier` start, which `hello` over `peer` replaces, and fence that start,
        because it may live."""
        load = earlier.load
        if self.state(load) not in DEAD:
            self._count(load, -1)
            if load not in self.suspects:
                self._suspect_siblings(load, hello, now, out)
        self._let_go(load)
        self._fenced.setdefault(load.key, deque(maxlen=FENCED_EPOCHS)).append(load.epoch)
        known = self.peers.pop(earlier.peer, None) is not None and earlier.peer != peer
        if known and not is_later(load.info, hello):
            out.append(ToNode(earlier.peer, _fence(hello)))

    def _reconnected(self, rank: Rank, hello: Hello) -> None:
        """Give up the former connection of the same start: what `hello` does not list as running may be lost."""
        self._table.reconnected(rank.load)
        rank.probe = None  # what was sent before may never be acknowledged
        self.peers.pop(rank.peer, None)
        self._let_go(rank.load)
        running = frozenset(hello.running)
        work = {rid: work for rid, work in rank.work.items() if (rid, work[0].attempt) not in running}
        if work:
            self._doubts[rank.load] = Doubt(work)

    def bye(self, rank: Rank, bye: Bye, now: float, out: list[Action]) -> list[Loss]:
        """Take a rank's goodbye: it is gone. A goodbye of another start is counted and ignored."""
        if (bye.instance, bye.dp_rank, bye.epoch) != (*rank.key, rank.epoch):
            self._counts["rejected_bad_identity"] += 1
            return []
        self._health.bye(rank.key)
        return self.assess(rank.load, now, out, "bye")

    def ping(self, rank: Rank, now: float, out: list[Action]) -> int:
        """Ask the rank whether it lives and how many steps it has made, since another peer may have published in its
        name. Where KV events were missed, also ask it to name its cached blocks again. Return the ping's number."""
        self._pings += 1
        load = rank.load
        seq = 0 if load.load is None or load.load_from_engine else load.load.seq
        rank.asked = Asked(self._pings, seq, self._health.liveness[rank.key].step, now)
        follower = rank.follower
        restate = follower is not None and follower.missed and self.state(load) not in DEAD
        if follower is not None and restate:
            follower.missed = False
        out.append(ToNode(rank.peer, Ping(self._pings, restate)))
        return self._pings

    def filled(self, load: RankLoad, now: float, out: list[Action]) -> None:
        """Ping a rank whose report took away its credit, to learn whether the report was its own; not if a ping is on
        its way."""
        rank = self.ranks[load]
        if rank.asked is None:
            self.ping(rank, now, out)

    def ping_all(self, now: float, out: list[Action]) -> None:
        """Ping all ranks with a connection, except suspects."""
        for rank in self.peers.values():
            if rank.load not in self.suspects:
                self.ping(rank, now, out)

    def pong(self, rank: Rank, pong: Pong, now: float, out: list[Action]) -> list[Loss]:
        """Take the answer to a ping: the rank lives, and the numbers in it show whether its last report was forged.
        Return the work that has been lost with an earlier connection, if that is clear now."""
        asked = rank.asked
        if asked is not None and pong.n == asked.n:
            rank.asked = None
            if pong.at_us:
                rank.clock.add(asked.at, now, pong.at_us)
            if 0 < pong.load_seq < asked.load_seq:
                self._table.disbelieve(rank.load)
            if pong.load_seq and pong.step < asked.step:
                self._health.set_back(rank.key)
        self._health.moved(rank.key, pong.step, pong.busy, now)
        doubt = self._doubts.get(rank.load)
        if doubt is None or pong.n < doubt.number:
            return []
        if not doubt.answered:
            doubt.answered, doubt.number = True, self.ping(rank, now, out)
            return []
        del self._doubts[rank.load]
        return [Loss(rank, f"rank {rank.key[0]}/{rank.key[1]} lost its connection", doubt.work, died=False)]

    def unreachable(self, peer: Any, now: float, out: list[Action]) -> None:
        """Note that a send failed because the connection is gone: the rank is a suspect from now on. What came over it
        before may still be read."""
        rank = self.peers.get(peer)
        if rank is None or rank.load in self.suspects:
            return
        self._health.unreachable(rank.key, now)
        if self.state(rank.load) in DEAD:
            del self.peers[peer]
            return
        self.suspects[rank.load] = None
        self.assess(rank.load, now, out, "unreachable")

    def give_up(self, now: float, out: list[Action]) -> list[Loss]:
        """Give up the ranks whose connections have been gone for a moment: all that ran there is lost."""
        gone = [rank for rank in self.suspects if not self._health.may_return(self._health.liveness[rank.key], now)]
        losses = []
        for rank in gone:
            loss = self.assess(rank, now, out, "unreachable")  # one that drained is lost by now
            if not loss:
                self._events.add(
                    now, "lost", rank.key, "unreachable", self._cost(rank, "it did not connect again"), bad=True
                )
            losses += loss or [self._lost(rank, "lost", None)]
        return losses

    def assess(self, rank: RankLoad, now: float, out: list[Action], sign: str) -> list[Loss]:
        """Get one rank's verdict and act on it if it changed; `sign` is the reason to look, for the log."""
        change = self._health.assess(rank.key, now)
        return [loss for loss in (self._act(change, now, out, sign),) if loss] if change else []

    def sweep(self, now: float, out: list[Action]) -> list[Loss]:
        """Act on all ranks whose state time has changed; call it several times a lease. Forget those gone for long
        (also a `Loss`: everyone that keeps something of a rank must drop it)."""
        changes = self._health.sweep(now)
        changes += self._silent_siblings(changes, now)
        losses = [loss for change in changes if (loss := self._act(change, now, out, "time"))]
        for rank in [rank for rank in self._unclear if self._health.is_dead(self._health.liveness[rank.key], now)]:
            del self._unclear[rank]
            losses.append(Loss(self.ranks[rank], "it did not come back", {}))
        for rank in list(self._table.ranks.values()):
            if self.state(rank) in DEAD and self._health.quiet_s(rank.key, now) > self._config.forget_s:
                gone = self.ranks[rank]
                self.peers.pop(gone.peer, None)
                self._let_go(rank)
                self._balancer.closed(rank)
                self._health.forget(rank.key)
                self._fenced.pop(rank.key, None)
                self._events.add(now, "forgotten", rank.key, phrase="it has been gone for long")
                losses.append(Loss(gone, f"rank {rank.key[0]}/{rank.key[1]} is forgotten"))
        return losses

    def left(self, rank: Rank) -> None:
        """Drop the record of a rank that has left the load table, once its losses are handled."""
        self.ranks.pop(rank.load, None)

    def known(self, key: MemberKey) -> Rank | None:
        """Return the present start of the rank `(instance, dp_rank)`; None: unknown."""
        load = self._table.ranks.get(key)
        return None if load is None else self.ranks[load]

    def state(self, rank: RankLoad) -> RankState:
        """Return the last verdict on the rank."""
        return self._health.liveness[rank.key].state

    def validate(self) -> None:
        """Check that connections and counts agree with the ranks (for tests)."""
        kinds: dict[str, dict[Kind, int]] = {}
        for rank in self._table.ranks.values():
            if self.state(rank) not in DEAD:
                of_instance, kind = kinds.setdefault(rank.info.instance, {}), _kind(rank.info)
                of_instance[kind] = of_instance.get(kind, 0) + 1
        assert self._kinds == kinds
        assert self.ranks.keys() == set(self._table.ranks.values())
        assert all(rank.load is load for load, rank in self.ranks.items())
        suspects = [self.ranks[load] for load in self.suspects]
        assert all(self.peers.get(rank.peer) is rank and not rank.load.ready for rank in suspects)
        assert all(self._table.ranks.get(rank.key) is rank for rank in (*self._doubts, *self._unclear))
        for peer, one in self.peers.items():
            assert one.peer == peer, one
            assert self._table.ranks[one.key] is one.load, one

    # --- inside -----------------------------------------------------------------------------------------------

    def _suspect_siblings(self, rank: RankLoad, hello: Hello, now: float, out: list[Action]) -> None:
        """Suspect the other ranks of the process that had `rank`, because a later start of `rank` said hello: that
        process is gone or leaves. Their own later starts may say hello at any moment."""
        for other in list(self._table.ranks.values()):
            if other is not rank and other.info.endpoint == rank.info.endpoint and is_later(hello, other.info):
                self.unreachable(self.ranks[other].peer, now, out)

    def _silent_siblings(self, changes: list[Change], now: float) -> list[Change]:
        """Return the further ranks that are lost, because one of their process has fallen silent: no request is to go
        from it to another of the same process that has only spoken a little later."""
        silent = {
            self._table.ranks[change.key].info.endpoint: change.key
            for change in changes
            if change.new == "lost" and self._health.liveness[change.key].cut_at is None
        }
        found = []
        for rank in self._table.ranks.values() if silent else ():
            other = silent.get(rank.info.endpoint, rank.key)
            if other != rank.key:
                self._health.silent_with(rank.key, other, now)
                found.append(self._health.assess(rank.key, now))
        return [change for change in found if change is not None]

    def _act(self, change: Change, now: float, out: list[Action], sign: str) -> Loss | None:
        rank = self._table.ranks[change.key]
        pulse = self._health.liveness[change.key]
        self._table.set_ready(rank, change.new == "ready", slow=pulse.returning)
        self.wanted.changed(rank, change.new)
        level = "warning" if change.new in ("lost", "hung", "silent") else "info"
        states = {"old": change.old, "new": change.new, "sign": sign}
        out.append(Note("rank.state_changed", level, _name(rank) | states))
        self._note(rank, change, now, sign)
        if change.new == "ready":
            pulse.returning = False
        if change.new not in DEAD:
            self._unclear.pop(rank, None)
        if (change.new in DEAD) != (change.old in DEAD):
            self._count(rank, -1 if change.new in DEAD else 1)
        elif rank not in self.suspects:
            return None
        if change.new not in DEAD:
            return None
        pulse.returning = True
        if change.new == "lost" and self._health.may_return(pulse, now):
            return None
        return self._lost(rank, change.new, DIED[change.new])

    def _note(self, rank: RankLoad, change: Change, now: float, sign: str) -> None:
        """Add the event of a change of state. That a new rank is ready at once goes without saying."""
        pulse, what = self._health.liveness[rank.key], str(change.new)
        if change.old == "starting" and what == "ready" and not pulse.returning and now - pulse.hello_at < AT_ONCE_S:
            return
        why = f"it was {change.old}"
        if what == "lost":
            why = "nothing came over its connection for a lease" if pulse.cut_at is None else "its connection is gone"
            if self._health.may_return(pulse, now):
                what, why = "suspect", f"{why}; it may come back"
        elif what == "hung":
            why = f"it is busy, and has made no step for {now - pulse.step_at:.0f} s"
        elif what == "silent":
            why = "the bus carries no load report of it"
        elif what == "draining":
            why = "an operator's order" if pulse.drain else "by its own word"
        elif what == "gone":
            why = "it said goodbye"
        bad = change.new in DEAD - {"gone"} or what == "silent"
        self._events.add(now, what, rank.key, sign, self._cost(rank, why) if change.new in DEAD else why, bad)

    def _cost(self, rank: RankLoad, why: str) -> str:
        """Return the phrase of a loss, with the number of this controller's requests that ran there."""
        ran = len(self.ranks[rank].work)
        return f"{why}; {counted(ran, 'request')} ran there" if ran else why

    def _lost(self, rank: RankLoad, state: RankState, died: bool | None) -> Loss:
        self._counts[f"ranks_{state}"] += 1
        if rank in self.suspects:
            self.peers.pop(self.ranks[rank].peer, None)
        self._let_go(rank)
        if died is None:
            self._unclear[rank] = None
        may_run = state != "gone" and self._health.liveness[rank.key].cut_at is None
        why = f"rank {rank.key[0]}/{rank.key[1]} is {state}"
        return Loss(self.ranks[rank], why, cancel=may_run, died=died, hung=state == "hung")

    def _let_go(self, rank: RankLoad) -> None:
        """Expect nothing more of a rank than what it has already reported."""
        self.suspects.pop(rank, None)
        self._doubts.pop(rank, None)
        self._unclear.pop(rank, None)

    def _refusal(self, peer: Any, key: MemberKey, hello: Hello) -> Refused | None:
        def refuse(code: Code, sentence: str) -> Refused:
            return Refused(code, sentence)

        claimed = self.peers.get(peer)
        if claimed is not None and claimed.key != key:
            return refuse("bad_identity", f"this connection speaks for {claimed.key[0]}/{claimed.key[1]}")
        if self._config.instances and hello.instance not in self._config.instances:
            return refuse("bad_identity", f"this controller serves {', '.join(self._config.instances)} only")
        if hello.dp_rank >= hello.dp_size:
            return refuse("bad_identity", f"dp_rank {hello.dp_rank} is outside 0..{hello.dp_size - 1}")
        if (later := self._later(key, hello)) is not None:
            return _fence(later)
        if key not in self._table.ranks and len(self._table.ranks) >= self._config.max_ranks:
            return refuse("too_many", f"{self._config.max_ranks} ranks have joined")
        for role, model, dp_size in self._others(key, hello):
            if (role, model, dp_size) != _kind(hello):
                sentence = f"instance {hello.instance} is {role} of {model} with dp_size {dp_size} here"
                return refuse("bad_identity", sentence)
        return None

    def _later(self, key: MemberKey, hello: Hello) -> Hello | None:
        """Return the start that keeps the place of this rank against that of `hello`, if there is one.

        Where both state when they began, the later one keeps the place while it lives, in whichever order their
        hellos come: so all controllers agree, and the last start is never fenced. Else the one that came first is
        taken for the earlier. A start that was replaced stays out, also when the later one is lost; not where that one
        has said goodbye, or was replaced itself: then a clock went back, and what it says came late.
        """
        rank = self._table.ranks.get(key)
        if rank is None or rank.epoch == hello.epoch or is_later(hello, rank.info):
            return None
        fenced = self._fenced.get(key, ())
        replaced = hello.epoch in fenced and rank.epoch not in fenced and self.state(rank) != "gone"
        kept = is_later(rank.info, hello) and self.state(rank) not in DEAD
        return rank.info if replaced or kept else None

    def _others(self, key: MemberKey, hello: Hello) -> list[Kind]:
        """Return the kinds that `hello` must agree with: those of its instance's ranks that are not dead, and of its
        own start."""
        kinds = self._kinds.get(hello.instance) or Counter()
        rank = self._table.ranks.get(key)
        if rank is None:
            return list(kinds)
        own = _kind(rank.info)
        if rank.epoch == hello.epoch:
            return [own, *kinds]
        alone = self.state(rank) not in DEAD and kinds[own] == 1  # another start of a rank may be another thing
        return [kind for kind in kinds if not (alone and kind == own)]

    def _count(self, rank: RankLoad, change: int) -> None:
        """Count that `rank` is no longer dead (1), or is dead or gone (-1)."""
        kinds = self._kinds.setdefault(rank.info.instance, Counter())
        kind = _kind(rank.info)
        kinds[kind] += change
        if not kinds[kind]:
            del kinds[kind]
            if not kinds:
                del self._kinds[rank.info.instance]


def _fence(later: Hello) -> Refused:
    where = f"{later.instance}/{later.dp_rank}"
    return Refused("fenced", f"{where} was started again elsewhere (epoch {later.epoch})")


def _kind(info: Hello) -> Kind:
    return info.role, info.model, info.dp_size


def _name(rank: RankLoad) -> dict[str, Any]:
    return {"instance": rank.key[0], "dp_rank": rank.key[1], "role": rank.info.role}

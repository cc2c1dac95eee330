"""The controller's pure core: `handle(event, now) -> actions`. It connects the parts, which decide.

`controller.load.table` counts, `controller.health` judges, `controller.members` knows the connections,
`controller.requests.life` the requests. No sockets, clocks, threads or randomness, so the core that runs live runs in
property tests as well. The replay lab has its balancer, not this core.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from msgspec.structs import replace

from bus.actions import Note, Publish
from bus.rights import key_of, may
from bus.runtime.metrics import Metric
from bus.wire.messages import (
    MAX_DP_SIZE,
    Beacon,
    Bye,
    Cancel,
    CancelLeg,
    Dispatch,
    Drain,
    DrainRank,
    DrainRole,
    Hello,
    HistoryReply,
    Load,
    LoadReport,
    Member,
    Message,
    Pong,
    Progress,
    RecordQuery,
    RecordReply,
    Refused,
    Role,
    Rooms,
    Scraped,
    Sent,
    Status,
    StatusQuery,
    Submit,
    TraceQuery,
    WantedRole,
    Who,
)
from bus.wire.status import targets
from controller import decisions
from controller.balancer import Balancer
from controller.config import ControllerConfig
from controller.event_log import EventLog
from controller.events import (
    Action,
    CacheChanged,
    ClientGone,
    EngineLoad,
    Event,
    FromClient,
    FromNode,
    NextPart,
    Published,
    Tick,
    ToClient,
    ToNode,
    Undelivered,
    Unreachable,
)
from controller.health import DEAD, Health, Liveness
from controller.inquiries import Inquiries
from controller.late import LateBinding
from controller.load.rank import RankLoad
from controller.load.table import LoadTable
from controller.members import Loss, Members
from controller.observe import Regret, Scrapes, collect, end_probe, rank_status
from controller.policies import Policy, PolicySettings, make_policy
from controller.policies.prefix_index import PrefixIndex
from controller.policies.registry import guarded
from controller.rank import Rank
from controller.recordings import Recordings
from controller.requests.life import RequestLifecycle
from controller.statuses import StatusAnswers

MEASURE_S = 0.5
SENT_AT_LEAST_S = 1.0
BROKER_SILENT_S = 4.0


class ControllerCore:
    """One controller, from `now` (seconds, monotonic) on; `epoch` is the number of its start. `wall_s` plus that clock
    gives seconds since 1970. `policies` replaces methods by policies of your own. With `trace` each request has log
    lines, with `spans` each traced one gives an `Over` at its end. `dropped` returns the caller's counts, of
    connections that it did not take, for the status. For one thread. Arguments are not checked here
    (`controller.checked` does)."""

    def __init__(
        self, config: ControllerConfig, epoch: int, now: float, policies: Mapping[Role, Policy] | None = None,
        wall_s: float = 0.0, *, trace: bool = False, spans: bool = False, dropped: Callable[[], dict[str, int]] = dict,
    ) -> None:  # fmt: skip
        self.config = config
        self.epoch = epoch
        self.counts: Counter[str] = Counter()
        self.events = EventLog(wall_s)
        self.table = LoadTable(
            epoch,
            stale_s=config.stale_s,
            request_overcommit=config.request_overcommit,
            kv_overcommit=config.kv_overcommit,
            prefill_overcommit=config.prefill_overcommit,
        )
        self.health = Health(lease_s=config.lease_s, hang_s=config.hang_s, settle_s=config.settle_s, now=now)
        self.regret = Regret()
        self._faults: dict[tuple[Role, str], Note | None] = {}  # of policies, by role and hook; None: told already
        self.policies = {role: self._policy(role, (policies or {}).get(role)) for role in config.methods}
        self.uses_hashes = tuple(role for role, policy in self.policies.items() if policy.uses_hashes)
        self.late = LateBinding(config.late_tokens, config.tpot_slo_s) if config.queue_order == "slo" else None
        self.balancer = Balancer(self.table, self.policies, self.late, now, prefill_at=config.prefill_at)
        self.balancer.decisions.explain(config.explain, config.methods)
        self.members = Members(config, epoch, self.balancer, self.health, self.counts, self.events)
        self.balancer.settled, self.balancer.young = False, self.health.young(now)
        self.balancer.suspects = self.members.suspects
        ranks = self.members.ranks
        self.life = RequestLifecycle(config, epoch, self.balancer, ranks, self.counts, now, wall_s, spans=spans)
        self.life.trace = trace
        self.scrapes = Scrapes(Scraped("controller", config.name, config.metrics))
        self.statuses = StatusAnswers(self._summary, self._known, self.events, self.life)
        self.events.add(now, "started", phrase=f"{config.name}, epoch {epoch}")
        self._changed = ""  # settings that were reloaded since the last tick
        self._beacon: Beacon | None = None
        self._beacon_at: float | None = now  # None: no broker is heard any more
        self.inquiries = Inquiries(config.name, self.members, self.life.table, wall_s)
        self.recordings = Recordings(self.members, wall_s)
        self._dropped = dropped
        self._started_at = now
        self._ping_at = now
        self._sweep_at = now
        self._measure_at = now + MEASURE_S
        self._sent_at = self._shared_at = now
        self._sent_seq = 0
        self._sent_turn = -1
        self._handlers: dict[type[Message], Callable[[Any, Any, float, list[Action]], None]] = {
            Cancel: lambda peer, message, now, out: self.life.cancel(peer, message, now, out),
            StatusQuery: self._on_status_query,
            DrainRank: self._on_drain_rank,
            DrainRole: self._on_drain_role,
            TraceQuery: self.inquiries.asked,
            RecordQuery: self.recordings.asked,
        }

    def handle(self, event: Event, now: float) -> list[Action]:
        """Return the actions for `event`, in order; the caller carries them out."""
        out: list[Action] = []
        if type(event) is Published:
            self._on_published(event.message, now, out)
        elif type(event) is FromNode:
            self._on_node(event.peer, event.message, now, out)
        elif type(event) is FromClient:
            message = event.message
            if type(message) is Submit:
                if not self.balancer.settled:
                    self._settle(now)
                if self.late is not None:
                    self.life.by_tick = self._by_tick
                self.life.submit(event.peer, message, event.frames, now, out)
                return out
            self._handlers[type(message)](event.peer, message, now, out)
        elif type(event) is Tick:
            self._on_tick(now, out)
        elif type(event) is NextPart:
            self.statuses.advance(now, out)
        elif type(event) is CacheChanged:
            self._on_cache(event)
        elif type(event) is EngineLoad:
            self._on_engine_load(event, now, out)
        elif type(event) is Undelivered:
            rank = self.members.peers.get(event.peer)
            if rank is not None and isinstance(event.message, Dispatch):
                self.life.losses.undelivered(rank, event.message, now, out)
            elif isinstance(event.message, CancelLeg):
                self.life.losses.unqueued(event.peer, event.message)
        elif type(event) is ClientGone:
            self.life.client_gone(event.peer, event.rid, now, out)
        elif type(event) is Unreachable:
            self._on_unreachable(event, now, out)
        if self.life.queue.requests and (type(event) is Tick or not self._by_tick):
            self._settle(now)
            self.life.drain(now, out)
        return out

    def reconfigure(self, config: ControllerConfig) -> None:
        """Apply new settings, as far as they can change while requests live (`RELOADS` of the command line)."""
        changed = [
            field.name for field in fields(config) if getattr(config, field.name) != getattr(self.config, field.name)
        ]
        self._changed = f"settings changed: {', '.join(changed) or 'none'}"
        self.config = config
        self.life.reconfigure(config)
        self.health.hang_s = config.hang_s
        self.balancer.decisions.explain(config.explain, config.methods)
        if self.late is not None:
            self.late.reconfigure(config.late_tokens, config.tpot_slo_s)

    def log_requests(self, on: bool) -> None:
        """Switch the log lines of each request on or off."""
        self.life.trace = on

    @property
    def _by_tick(self) -> bool:
        """True if waiting requests are dispatched with ticks only. Controllers that share ranks and bind late would
        otherwise all fill the same rank after one report; their ticks come at different times."""
        return self.late is not None and self.table.shared

    @property
    def needs_ticks(self) -> bool:
        """True if a tick is needed every few tens of milliseconds; if false, a few times a second is enough."""
        return bool(self.life.requests or self.members.suspects) or not self.balancer.settled or self.table.shared

    @property
    def unfinished(self) -> bool:
        """True if something is done a part at a time and goes on with the next `NextPart`, soon (or with a `Tick`)."""
        return bool(self.statuses)

    @property
    def waiting(self) -> bool:
        """True if a publication may cause something at once; if false, it only matters for the next decision, so it may
        wait."""
        return bool(self.life.queue.requests) or not self.balancer.settled

    @property
    def unready(self) -> str:
        """The reason why requests would not be served now; empty if they would. Each role of a model that ranks have,
        or had, must have a ready rank, unless that model has enough of them: unified, or prefill and decode. A role
        that the configuration declares needs a ready rank in any case."""
        if not self.balancer.settled:
            return "waiting for the ranks' first reports"
        ready: dict[str, bool] = {}
        for rank in self.table.ranks.values():
            if self.members.state(rank) != "gone":
                ready[rank.info.role] = ready.get(rank.info.role, False) or rank.ready
        if not ready:
            return "no rank has joined"
        models = {rank.info.model for rank in self.table.ranks.values()}
        whole = {model for model in models if self._is_served(model)}
        missing = set() if whole else {str(role) for role, one in ready.items() if not one}
        for each in self.wanted:
            if not each.ready and each.role not in missing and (each.declared or each.model not in whole):
                missing.add(f"{each.role} ({each.model})" if ready.get(each.role) else each.role)
        return f"no {' and '.join(sorted(missing))} rank is ready" if missing else ""

    def _is_served(self, model: str) -> bool:
        roles = {rank.info.role for rank in self.table.ranks.values() if rank.ready and rank.info.model == model}
        return "unified" in roles or roles >= {"prefill", "decode"}

    def shutdown(self, now: float) -> list[Action]:
        """End every live request, because this controller leaves; return the actions that say so to clients, which send
        them elsewhere."""
        out: list[Action] = []
        self.life.shutdown(now, out)
        return out

    def status(self, id: int, now: float) -> Status:
        """Return everything that an operator may want to see; `id` is the question's number in the answer."""
        ranks = tuple(rank_status(rank, pulse, now) for rank, pulse in self._known())
        return replace(
            self._summary(id, now), ranks=ranks, events=self.events.since(0), queue=self.life.queue.status(now),
            requests=self.life.listed.lists(now),
        )  # fmt: skip

    def _summary(self, id: int, now: float) -> Status:
        """Return a status without ranks, events and queue."""
        methods = {str(role): method for role, method in self.config.methods.items()}
        slos = (self.config.ttft_slo_s, self.config.tpot_slo_s) if self.late is not None else (0.0, 0.0)
        return Status(
            id, self.config.name, self.epoch, max(0.0, now - self._started_at), methods,
            self.tally() | self._dropped(), (), uses_hashes=self.uses_hashes, scraped=self.scrapes.known(now),
            wanted=self.wanted, ttft_slo_s=slos[0], tpot_slo_s=slos[1],
        )  # fmt: skip

    def targets(self, now: float) -> Callable[[], list[dict[str, Any]]]:
        """Return what makes the list of all parts' metrics (`bus.wire.status.targets`), of now; any thread may call
        it."""
        liveness = self.health.liveness
        here = [rank.info for key, rank in self.table.ranks.items() if liveness[key].state != "gone"]
        return partial(targets, self.scrapes.known(now), here)

    def _known(self) -> list[tuple[Rank, Liveness]]:
        ranks, liveness, of = self.table.ranks, self.health.liveness, self.members.ranks
        return [(of[ranks[key]], liveness[key]) for key in sorted(ranks)]

    @property
    def wanted(self) -> tuple[WantedRole, ...]:
        """The roles that should be served, with the number of ready ranks for each."""
        return tuple(self.members.wanted.now(self.table.ranks.values()))

    @property
    def prefixes(self) -> dict[Role, PrefixIndex]:
        """The cache indexes of the policies that keep one."""
        return {role: policy.prefixes for role, policy in self.policies.items() if policy.prefixes is not None}

    def happened(self) -> dict[str, int]:
        """Return the number of each event so far, by name. These numbers only grow."""
        return {**self.counts, **self.table.counts}

    def alive(self) -> dict[str, int]:
        """Return what there is now, by name."""
        return self.life.alive() | {"prefix_blocks": sum(len(index) for index in self.prefixes.values())}

    def tally(self) -> dict[str, int]:
        """Return counts by name: what happened so far, and what is alive (`requests`, `queue_*`, `payload_bytes`)."""
        return {
            **self.happened(),
            **self.alive(),
            "regret_tokens": self.regret.tokens.total(),
            "regret_dispatches": self.regret.dispatches.total(),
        }

    def metrics(self, now: float) -> Sequence[Metric]:
        """Return the Prometheus metrics of this controller and its ranks."""
        return collect(
            self.happened(), self.alive(), self.members.ranks.values(), self.health.liveness, self.config.methods,
            self.regret, now, self.wanted,
        )  # fmt: skip

    def validate(self) -> None:
        """Assert that all parts agree (tests call this after every event)."""
        self.table.validate()
        self.life.validate()
        for role, index in self.prefixes.items():
            index.validate({rank.slot for rank in self.table.ranks.values() if rank.info.role == role})
        assert set(self.health.liveness) == set(self.table.ranks)
        for key, rank in self.table.ranks.items():
            assert rank.ready == (self.health.liveness[key].state == "ready"), rank
        self.members.validate()

    # --- policies ---------------------------------------------------------------------------------------------

    def _policy(self, role: Role, given: Policy | None) -> Policy:
        method = self.config.methods[role]

        def on_fault(hook: str, why: str) -> None:
            """Count a policy's fault and log it once: it may come with every request."""
            self.counts["policy_faults"] += 1
            if (role, hook) not in self._faults:
                fields = {"role": role, "method": method, "hook": hook, "why": why}
                self._faults[(role, hook)] = Note("policy.failed", "error", fields)

        if given is not None:
            return guarded(given, type(given).__name__, on_fault)
        return make_policy(method, PolicySettings(role, self.config.cache_weight, self.epoch), on_fault)

    # --- from clients -----------------------------------------------------------------------------------------

    def _on_status_query(self, peer: Any, query: StatusQuery, now: float, out: list[Action]) -> None:
        self.statuses.asked(peer, query.id, now, out, query)

    def _may_drain(self, peer: Any, id: int, out: list[Action]) -> bool:
        if may(peer, "admins"):
            return True
        self.counts["rejected_not_yours"] += 1
        out.append(ToClient(peer, Refused("bad_identity", "to drain a rank takes an admin's key", id)))
        return False

    def _on_drain_rank(self, peer: Any, order: DrainRank, now: float, out: list[Action]) -> None:
        name = f"{order.instance}/{order.dp_rank}"
        if not self._may_drain(peer, order.id, out):
            return
        rank = self.table.ranks.get((order.instance, order.dp_rank))
        if rank is None:
            refused = Refused("bad_rank", f"no rank {name} is known here", order.id)
            out.append(ToClient(peer, refused))
            return
        out.append(Note("drain.ordered", fields={"rank": name, "key": key_of(peer)}))
        self.events.add(now, "drain_ordered", rank.key, phrase=_by(peer))
        self._drain(rank, now, out)
        self.statuses.asked(peer, order.id, now, out)

    def _on_drain_role(self, peer: Any, order: DrainRole, now: float, out: list[Action]) -> None:
        if not self._may_drain(peer, order.id, out):
            return
        out.append(Note("drain.ordered", fields={"role": order.role, "model": order.model, "key": key_of(peer)}))
        of = f"all {order.role} ranks{f' of {order.model}' if order.model else ''}"
        self.events.add(now, "drain_ordered", phrase=f"{of}, {_by(peer)}")
        for rank in list(self.table.ranks.values()):
            meant = rank.info.role == order.role and order.model in ("", rank.info.model)
            if meant and self.members.state(rank) not in DEAD:
                self._drain(rank, now, out)
        self.members.wanted.drained(order.role, order.model)
        self.statuses.asked(peer, order.id, now, out)

    def _drain(self, rank: RankLoad, now: float, out: list[Action]) -> None:
        self.health.drain(rank.key)
        self._lose(self.members.assess(rank, now, out, "drain"), now, out)
        out.append(ToNode(self.members.ranks[rank].peer, Drain(rank.key[1])))

    # --- from nodes -------------------------------------------------------------------------------------------

    def _on_unreachable(self, event: Unreachable, now: float, out: list[Action]) -> None:
        rank = self.members.peers.get(event.peer)
        self.members.unreachable(event.peer, now, out)
        if rank is not None and isinstance(event.message, Dispatch):
            self.life.losses.unsent(rank, event.message, now, out)

    def _on_node(self, peer: Any, message: Message, now: float, out: list[Action]) -> None:
        if isinstance(message, Hello):
            self._lose(self.members.hello(peer, message, now, out), now, out)
            rank = self.members.peers.get(peer)
            if rank is not None and rank.epoch == message.epoch:
                self.life.losses.returned(rank, message.running, now, out)
            return
        rank = self.members.peers.get(peer)
        if rank is None:
            out.append(ToNode(peer, Who()))
            return
        self.health.seen(rank.key, now)
        if isinstance(message, Progress):
            if (message.instance, message.dp_rank) != rank.key or message.epoch != rank.epoch:
                self.counts["rejected_bad_identity"] += 1
                return
            self.life.progress(rank, message, now, out)
        elif isinstance(message, Pong):
            self._lose(self.members.pong(rank, message, now, out), now, out)
        elif isinstance(message, HistoryReply):
            self.inquiries.recalled(rank, message, now, out)
        elif isinstance(message, RecordReply):
            self.recordings.answered(rank, message, now, out)
        elif isinstance(message, Bye):
            self._lose(self.members.bye(rank, message, now, out), now, out)
        if not rank.load.ready:
            self._lose(self.members.assess(rank.load, now, out, "heard"), now, out)
            self.life.losses.rank_lives(rank)

    def _lose(self, losses: list[Loss], now: float, out: list[Action]) -> None:
        for loss in losses:
            rank = loss.rank
            here = self.table.ranks.get(rank.key) is rank.load
            dead = here and self.members.state(rank.load) in DEAD
            if dead:
                self.balancer.emptied(rank.load)
            if dead or not here:
                if rank.follower is not None:
                    rank.follower.missed = True  # should the same start come back
                self.life.losses.forget(rank)
            self.life.losses.lost(loss, now, out)
            if not here:
                self.members.left(rank)

    # --- from the bus -----------------------------------------------------------------------------------------

    def _on_published(self, message: Message, now: float, out: list[Action]) -> None:
        if type(message) is LoadReport:
            self._on_load(message, message.load, now, out)
        elif type(message) is Member or type(message) is Rooms:
            if type(message) is Member:
                self.table.declare((message.instance, message.dp_rank), message.epoch, message.interval_s)
            if message.load is not None:
                self._on_load(message, message.load, now, out)
        elif type(message) is Sent:
            self.table.apply_sent(message, now)
            self.scrapes.seen(Scraped("controller", message.controller, message.metrics), now)
        elif type(message) is Beacon:
            self._on_beacon(message, now)
            self.scrapes.seen(Scraped("broker", "", message.metrics), now)
        self.health.bus_seen(now)

    def _on_beacon(self, beacon: Beacon, now: float) -> None:
        if self._beacon_at is None:
            self.events.add(now, "broker_heard", phrase="a broker is heard again")
        if self._beacon is not None and self._beacon.epoch != beacon.epoch:
            self.events.add(now, "broker_restarted", phrase=f"epoch {beacon.epoch}", bad=True)
        self._beacon, self._beacon_at = beacon, now

    def _on_load(self, message: LoadReport | Rooms | Member, load: Load, now: float, out: list[Action]) -> None:
        key = message.instance, message.dp_rank
        rank = self.balancer.report(key, message.epoch, load, now)
        if rank is not None:
            if not rank.candidate and rank.was_candidate:  # rare: dispatches fill it sooner
                self.members.filled(rank, now, out)
            if rank.newly_acked:
                member = self.members.ranks[rank]
                end_probe(member, now)
                if member.explained:
                    decisions.acknowledged(member, self.table.ranks.values(), now)
                if now >= self.regret.due:
                    self.regret.acknowledged(rank, self.table.ranks.values(), now)
            self.health.report(rank.key, load, now, rank.interval_s)
            self.health.loads_at = now
            if not rank.ready:
                self._lose(self.members.assess(rank, now, out, "report"), now, out)

    # --- from engines that are followed, and caches -----------------------------------------------------------

    def _on_cache(self, event: CacheChanged) -> None:
        rank = self.table.ranks.get(event.key)
        if rank is None:
            self.counts["cache_unknown"] += 1
            return
        self.balancer.cache(rank, event.changes)

    def _on_engine_load(self, event: EngineLoad, now: float, out: list[Action]) -> None:
        rank = self.table.ranks.get(event.key)
        if rank is None:
            self.counts["report_unknown"] += 1
            return
        load = self.balancer.overwrite(rank, event.load, now)
        self.health.report(rank.key, load, now, rank.interval_s)
        if not rank.ready:
            self._lose(self.members.assess(rank, now, out, "report"), now, out)

    # --- time -------------------------------------------------------------------------------------------------

    def _settle(self, now: float) -> None:
        if not self.balancer.settled:
            self.balancer.settled = self.health.settled(now)

    def _on_tick(self, now: float, out: list[Action]) -> None:
        self._settle(now)
        self.balancer.tick(now)
        self.life.expire(now, out)
        self.inquiries.tick(now, out)
        self.recordings.tick(now, out)
        self.life.losses.remind(out)
        if self.config.shed == "hopeless" and self.life.queue.requests:
            self.life.shed(now, out)
        if now >= self._sweep_at:
            self._sweep_at = now + self.config.lease_s / 12
            self.balancer.young = self.health.young(now)
            self._lose(self.members.sweep(now, out), now, out)
        if self.members.suspects:
            self._lose(self.members.give_up(now, out), now, out)
        if now >= self._ping_at:
            self._ping_at = now + self.config.lease_s / 3
            self.members.ping_all(now, out)
        self.statuses.advance(now, out)
        if self._changed:
            self.events.add(now, "reloaded", phrase=self._changed)
            self._changed = ""
        if now >= self._measure_at:
            self._note_counts(now)
            self.life.measure(now - self._measure_at + MEASURE_S, out)
            self.life.listed.turn(now)
            self._measure_at = now + MEASURE_S
        for fault, note in self._faults.items():
            if note is not None:
                out.append(note)
                hook, why = str(note.fields["hook"]), f"{note.fields['method']}: {note.fields['why']}"
                self.events.add(now, "policy_failed", code=hook, phrase=why, bad=True)
                self._faults[fault] = None
        self._publish_sent(now, out)

    def _note_counts(self, now: float) -> None:
        """Make events of counts that have grown, and of a broker that is heard no more."""
        self.events.count(now, {**self.happened(), **self._dropped()})
        interval_s = self._beacon.interval_s if self._beacon is not None else 0.0
        awake = now - self._measure_at < BROKER_SILENT_S / 2  # else it was this process that stood still
        if self._beacon_at is not None and awake and now - self._beacon_at > max(BROKER_SILENT_S, 3 * interval_s):
            self._beacon_at = None
            self.events.add(now, "broker_silent", phrase="the bus carries no beacon of a broker", bad=True)

    def _publish_sent(self, now: float, out: list[Action]) -> None:
        """Publish all counters each SENT_AT_LEAST_S; where controllers share ranks, large changes much sooner."""
        turn, since = self.table.turn, -1
        if now - self._sent_at < SENT_AT_LEAST_S:
            if not self.table.shared or turn == self._sent_turn or now - self._shared_at < self.config.sent_interval_s:
                return
            since = self._sent_turn
        else:
            self._sent_at = now
        self._shared_at, self._sent_turn = now, turn
        counters = self.table.counters(since)
        for at in range(0, len(counters), MAX_DP_SIZE):
            self._sent_seq += 1
            some = counters[at : at + MAX_DP_SIZE]
            out.append(Publish(Sent(self.config.name, self.epoch, self._sent_seq, some, self.config.metrics)))


def _by(peer: Any) -> str:
    return f"ordered by {key_of(peer) or 'a peer without a key'}"

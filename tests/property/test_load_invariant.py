"""The invariant of the load table under any order of messages: each request counts exactly once.

Simulated nodes ingest in order and report at one point after ingest; reports and counters are delivered late,
repeatedly, out of order, or never. The oracle follows every single request, not counters.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from controller_world import hello
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bus.wire.messages import Ack, Load, Sent
from controller.load import checked as checking
from controller.load.groups import Metric
from controller.load.table import LoadTable

RANKS = range(3)
CONTROLLERS = (11, 12)


@dataclass(eq=False)
class Request:
    controller: int
    tokens: int
    ingested_at: int | None = None
    running: bool = False
    ended_at: int | None = None


@dataclass
class Report:
    epoch: int
    at: int
    load: Load


@dataclass
class Node:
    epoch: int = 1
    inbox: list[Request] = field(default_factory=list)
    taken: list[Request] = field(default_factory=list)
    seq: int = 0

    def live(self) -> list[Request]:
        return [r for r in self.taken if r.ended_at is None]


class Loads(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = 0
        self.nodes = {r: Node() for r in RANKS}
        mine, checked = CONTROLLERS  # which one of them uses makes no difference
        self.tables = {mine: LoadTable(mine, stale_s=1e9), checked: checking.LoadTable(checked, stale_s=1e9)}
        self.mail: dict[int, list[tuple[int, Report]]] = {c: [] for c in CONTROLLERS}
        self.sents: dict[int, list[Sent]] = {c: [] for c in CONTROLLERS}
        self.latest: dict[tuple[int, int], Report] = {}  # applied, by (controller, rank)
        self.heard: dict[tuple[int, int], dict[int, tuple[int, int]]] = {}  # others' counters by (controller, rank)
        self.heard_seq = dict.fromkeys(CONTROLLERS, 0)  # of the newest counters delivered, by their sender
        self.sent_seq = 0
        for rank in RANKS:
            self.open(rank)

    def open(self, rank: int) -> None:
        for controller, table in self.tables.items():
            table.set_ready(table.open(hello("i", rank, dp_size=3, epoch=self.nodes[rank].epoch)), True)
            self.latest.pop((controller, rank), None)
            self.heard.pop((controller, rank), None)

    # --- what happens -----------------------------------------------------------------------------------------

    @rule(controller=st.sampled_from(CONTROLLERS), tokens=st.integers(0, 500), metric=st.sampled_from(list(Metric)))
    def dispatch(self, controller: int, tokens: int, metric: Metric) -> None:
        table = self.tables[controller]
        rank = table.group("unified").least(metric)
        if rank is None:
            return
        if metric is not Metric.TURN:  # nobody is less loaded
            amounts = [
                (r.requests if metric is Metric.REQUESTS else r.tokens) for r in table.ranks.values() if r.candidate
            ]
            assert (rank.requests if metric is Metric.REQUESTS else rank.tokens) == min(amounts)
        before = rank.requests
        table.charge(rank, tokens)
        assert rank.requests == before + 1
        self.nodes[rank.key[1]].inbox.append(Request(controller, tokens))

    @rule(controller=st.sampled_from(CONTROLLERS), rank=st.sampled_from(RANKS))
    def cut(self, controller: int, rank: int) -> None:
        """The rank comes back over another connection: what was under way to it is lost, as the next report tells."""
        node, table = self.nodes[rank], self.tables[controller]
        record = table.ranks[("i", rank)]
        for request in [r for r in node.inbox if r.controller == controller]:
            node.inbox.remove(request)
            table.end(record, request.tokens, ok=False)
        table.reconnected(record)
        self.report(rank)
        report = self.mail[controller].pop()[1]
        assert table.apply(("i", rank), report.epoch, report.load, 0.0) is record
        self.latest[(controller, rank)] = report

    @rule(rank=st.sampled_from(RANKS), count=st.integers(1, 4))
    def ingest(self, rank: int, count: int) -> None:
        self.clock += 1
        node = self.nodes[rank]
        for request in node.inbox[:count]:
            request.ingested_at = self.clock
            node.taken.append(request)
        del node.inbox[:count]

    @rule(rank=st.sampled_from(RANKS), which=st.integers(0, 99), end=st.booleans())
    def work(self, rank: int, which: int, end: bool) -> None:
        self.clock += 1
        live = self.nodes[rank].live()
        if not live:
            return
        request = live[which % len(live)]
        request.running = True
        if end:
            request.ended_at = self.clock
            table = self.tables[request.controller]
            table.end(table.ranks[("i", rank)], request.tokens)

    @rule(rank=st.sampled_from(RANKS))
    def report(self, rank: int) -> None:
        self.clock += 1
        node = self.nodes[rank]
        node.seq += 1
        live = node.live()
        running = [r for r in live if r.running]
        acks = tuple(
            Ack(c, len(mine), sum(r.tokens for r in mine))  # of all that have welcomed it
            for c in CONTROLLERS
            for mine in [[r for r in node.taken if r.controller == c]]
        )
        waiting_tokens = sum(r.tokens for r in live if not r.running)
        kv_tokens = sum(r.tokens for r in running)
        load = Load(
            seq=node.seq, step=0, running=len(running), waiting=len(live) - len(running),
            waiting_tokens=waiting_tokens, kv_tokens=kv_tokens, kv_capacity=0, max_running=0, acks=acks,
        )  # fmt: skip
        for controller in CONTROLLERS:
            self.mail[controller].append((rank, Report(node.epoch, self.clock, load)))

    @precondition(lambda self: any(self.mail.values()))
    @rule(data=st.data(), keep=st.booleans(), deliver=st.booleans())
    def deliver_report(self, data: st.DataObject, keep: bool, deliver: bool) -> None:
        """Any report, in any order, perhaps again later, perhaps never."""
        controller = data.draw(st.sampled_from([c for c in CONTROLLERS if self.mail[c]]))
        letters = self.mail[controller]
        at = data.draw(st.integers(0, len(letters) - 1))
        rank, report = letters[at]
        if not keep:
            del letters[at]
        if not deliver:
            return
        applied = self.tables[controller].apply(("i", rank), report.epoch, report.load, 0.0)
        last = self.latest.get((controller, rank))
        fresh = report.epoch == self.nodes[rank].epoch and (last is None or report.load.seq > last.load.seq)
        assert (applied is not None) == fresh
        if fresh:
            self.latest[(controller, rank)] = report

    @rule(controller=st.sampled_from(CONTROLLERS))
    def publish_counters(self, controller: int) -> None:
        self.sent_seq += 1
        table = self.tables[controller]
        self.sents[controller].append(Sent(f"c{controller}", controller, self.sent_seq, table.counters()))

    @precondition(lambda self: any(self.sents.values()))
    @rule(data=st.data(), keep=st.booleans())
    def deliver_counters(self, data: st.DataObject, keep: bool) -> None:
        sender = data.draw(st.sampled_from([c for c in CONTROLLERS if self.sents[c]]))
        letters = self.sents[sender]
        at = data.draw(st.integers(0, len(letters) - 1))
        sent = letters[at]
        if not keep:
            del letters[at]
        (receiver,) = (c for c in CONTROLLERS if c != sender)
        fresh = sent.seq > self.heard_seq[sender]
        assert self.tables[receiver].apply_sent(sent, 0.0) == fresh
        if fresh:
            self.heard_seq[sender] = sent.seq
            for counter in sent.counters:
                if counter.epoch == self.nodes[counter.dp_rank].epoch:
                    heard = self.heard.setdefault((receiver, counter.dp_rank), {})
                    heard[sender] = (counter.dispatches, counter.tokens)

    @rule(rank=st.sampled_from(RANKS))
    def restart(self, rank: int) -> None:
        """A new epoch: its inbox and its work are gone with it."""
        self.nodes[rank] = Node(epoch=self.nodes[rank].epoch + 1)
        self.open(rank)

    # --- what must hold ---------------------------------------------------------------------------------------

    @invariant()
    def every_request_counts_once(self) -> None:
        for controller, table in self.tables.items():
            table.validate()
            for number, node in self.nodes.items():
                rank = table.ranks[("i", number)]
                mine = [r for r in node.taken + node.inbox if r.controller == controller]
                report = self.latest.get((controller, number))
                if report is None:  # never heard of: my own work in flight
                    outstanding = [r for r in mine if r.ended_at is None]
                    assert (rank.requests, rank.tokens) == (len(outstanding), sum(r.tokens for r in outstanding))
                    continue
                at = report.at
                there = [r for r in node.taken if r.ingested_at is not None and r.ingested_at <= at]
                reported = [r for r in there if r.ended_at is None or r.ended_at > at]
                under_way = [r for r in mine if r.ingested_at is None or r.ingested_at > at]
                assert not set(reported) & set(under_way)
                requests = len(reported) + len(under_way)
                tokens = sum(r.tokens for r in reported + under_way)
                for other, (sent, sent_tokens) in self.heard.get((controller, number), {}).items():
                    theirs = [r for r in there if r.controller == other]
                    requests += max(0, sent - len(theirs))
                    tokens += max(0, sent_tokens - sum(r.tokens for r in theirs))
                assert (rank.requests, rank.tokens) == (requests, tokens), (controller, number)

    def teardown(self) -> None:
        """Once everything has arrived, both controllers know the truth."""
        for rank in RANKS:
            self.ingest(rank, 10**6)
            self.report(rank)
            self.publish_counters(CONTROLLERS[0])
            self.publish_counters(CONTROLLERS[1])
            for controller, table in self.tables.items():
                other = next(c for c in CONTROLLERS if c != controller)
                table.apply_sent(self.sents[other][-1], 0.0)
                _, report = self.mail[controller][-1]
                table.apply(("i", rank), report.epoch, report.load, 0.0)
                live = self.nodes[rank].live()
                record = table.ranks[("i", rank)]
                assert (record.requests, record.tokens) == (len(live), sum(r.tokens for r in live))
                assert record.in_flight == record.in_flight_tokens == 0


TestLoads = Loads.TestCase
TestLoads.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

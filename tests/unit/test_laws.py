"""Every counter of the product stands in a law (`support/laws.py`), each law's names are counters, and a controller
and its ranks, joined, obey them together."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import laws
import pytest
from controller_world import EPOCH, World, hello, prompt, submit
from legs_world import Rank
from legs_world import World as Legs
from msgspec.structs import replace

from bus.broker.core import BrokerCore, BrokerLimits
from bus.embed.publications import PublisherCore
from bus.embed.resolution import ResolverCore
from bus.wire.codec import encode
from bus.wire.messages import Cancel, CancelLeg, Dispatch, Done, Load, Params, Progress, Role
from controller.events import FromClient, FromNode, ToNode, Undelivered
from controller.observe import EVENTS, collect
from pdbus.edge.metrics import Counts
from pdbus.fleet.figures import Figures, Sample
from pdbus.fleet.history import History

ROOT = Path(__file__).parents[2]
of_sources = pytest.mark.skipif(
    not (ROOT / "bus").is_dir(), reason="beside compiled cores there are no sources to read"
)
# Where counts are kept, whose they are, and how their names are shown there.
PLACES = (
    ("bus/broker/rooms.py", "broker", "rooms_"), ("bus/broker/topology.py", "broker", "members_"),
    ("bus/broker", "broker", ""), ("bus/runtime/security.py", "broker", ""),
    ("bus/embed/publications.py", "publisher", ""), ("bus/embed/publisher.py", "publisher", ""),
    ("bus/embed", "resolver", ""), ("bus/wire/kv_names.py", "controller", ""), ("controller", "controller", ""),
    ("nodes/link/puller.py", "node", ""), ("nodes/link/sender.py", "node", ""), ("nodes/link/core.py", "node", "core."),
    ("nodes/link/data.py", "cluster", "kv_"), ("nodes/link/embed.py", "publisher", ""),
    ("nodes/link", "node", ""), ("nodes/vllm", "controller", ""), ("nodes", "node", ""), ("pdbus/edge", "edge", ""),
)  # fmt: skip
DICTS = {"counts": "", "_counts": "", "rejected": "rejected_", "refused": "peers_refused_", "errors": "errors_",
         "requests": "requests_"}  # fmt: skip
# Keys that are no literals, and the names that they can have.
OPEN = {
    ("bus/broker/rooms.py", "outcome"): ("refreshed", "replaced"),
    ("bus/broker/topology.py", "reason"): tuple(f"members_{name}" for name in ("bad_rank",)),
    ("bus/embed/resolution.py", "resolved.found_by or 'lost'"): ("told", "computed", "asked", "lost"),
    ("controller/feeds/follower.py", "name"): ("kv_blocks_elsewhere", "kv_gaps"),
    ("nodes/link/core.py", "code"): ("legs_ended_*",),
    ("nodes/link/core.py", "f'dispatch_{counted}'"): ("dispatch_gap", "dispatch_repeated"),
    ("nodes/link/core.py", "refusal.code"): ("legs_ended_*",),
    ("nodes/vllm/events.py", "why"): ("kv_gaps", "kv_unreadable"),
}
# Numbers that are attributes, and the names under which they are shown.
SHOWN = {
    "invalid": "invalid", "overflows": "overflows", "step": "steps", "busy_us_total": "busy_seconds",
    "unsent": "unsent_messages_controller",
    "unsent_blocks": "unsent_messages_kv_block", "resent_total": "unsent_messages_tokens",
    "sent_bytes": "kv_sent_bytes", "received_bytes": "kv_received_bytes",
    "unsent_publications": "unsent_publications", "pending_dropped_total": "attaches_dropped",
}  # fmt: skip
NOT_COUNTERS = {
    "kv_tokens": "a gauge", "waiting_tokens": "a gauge", "running": "a gauge", "waiting": "a gauge",
    "requests": "a gauge", "to_fetch_tokens": "a gauge", "size": "a gauge", "alive": "a gauge",
    "turn": "the load table's clock", "dropped": "of spans, which the log tells of",
}  # fmt: skip


def names_of(key: ast.expr, path: str) -> tuple[str, ...]:
    """Those that a key can be; a part that is not known is `*`."""
    if isinstance(key, ast.Constant) and isinstance(key.value, str):
        return (key.value,)
    if isinstance(key, ast.IfExp):
        return names_of(key.body, path) + names_of(key.orelse, path)
    if isinstance(key, ast.JoinedStr) and (path, ast.unparse(key)) not in OPEN:
        return ("".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in key.values),)
    return OPEN.get((path, ast.unparse(key)), ("*",))


COUNTS = re.compile(rf"({'|'.join(DICTS)})\[.*\] \+=|\bself\.[a-z]\w+ \+=|\bRejections\(")
COUNTS_FOR_OTHERS = (
    "bus/runtime/intake.py",  # in the dict that each part hands to its Rejections
    "controller/load/checked.py",  # for a program that embeds the table; a controller's reports come over the wire
)


@cache
def counted() -> list[tuple[str, str, str]]:
    """Part, name and file of each number that the code counts up."""
    return list(_counted())


def _counted() -> Iterator[tuple[str, str, str]]:
    for top in ("bus", "controller", "nodes", "pdbus/edge"):
        for file in sorted((ROOT / top).rglob("*.py")):
            path = str(file.relative_to(ROOT))
            place = next((each for each in PLACES if path.startswith(each[0])), None)
            text = file.read_text(encoding="utf-8")
            if path in COUNTS_FOR_OTHERS or not COUNTS.search(text):
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "Rejections":
                    assert place is not None, f"{path} counts, and is no part of PLACES"
                    kept = DICTS[ast.unparse(node.args[1]).rpartition(".")[2]]
                    prefix = next((each.value for each in node.keywords if each.arg == "prefix"), ast.Constant(""))
                    for name in names_of(prefix, path):
                        yield place[1], _shown(f"{kept}{name}*", place[2]), path
                if not isinstance(node, ast.AugAssign):
                    continue
                target = node.target
                if not isinstance(node.op, ast.Add):
                    kept = ast.unparse(target.value) if isinstance(target, ast.Subscript) else ""
                    falls = kept.endswith(("counts", "rejected"))
                    assert not falls, f"{path}: {ast.unparse(target)} falls; count what was undone by itself"
                    continue
                if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Attribute):
                    if (kept := DICTS.get(target.value.attr)) is None:
                        continue
                    assert place is not None, f"{path} counts, and is no part of PLACES"
                    for name in names_of(target.slice, path):
                        assert kept or name != "*", f"{path}: which names does {ast.unparse(target)} have (OPEN)?"
                        yield place[1], _shown(kept + name, place[2]), path
                elif isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    name = target.attr
                    one = isinstance(node.value, ast.Constant) or name.endswith(("_total", "_tokens", "_bytes"))
                    if place and one and not name.startswith("_") and name not in NOT_COUNTERS:
                        yield place[1], SHOWN.get(name, name.removesuffix("_total")), path


def _shown(name: str, prefix: str) -> str:
    """As the page of the part has it."""
    if prefix == "core.":
        return name if name.startswith("legs_ended") else f"dispatch_anomalies_{name}"
    return {"kv_block_damaged": "kv_checksum_errors"}.get(name, name if name.startswith(prefix) else prefix + name)


@of_sources
def test_every_counter_is_in_a_law() -> None:
    found = set(counted())
    assert len(found) > 90
    lawless = sorted(f"{path}: {name} of a {part}" for part, name, path in found if not laws.is_bound(part, name))
    assert not lawless, "put them into a law of tests/support/laws.py, or say there why they are free"


def pages() -> Iterator[tuple[str, set[str]]]:
    """All that parts say which have just begun, by part."""
    world = World(queue_order="slo")
    world.join(hello("u"))
    for part, seen in laws.of_controller(world.core, world.now):
        yield part, set(seen)
    yield "broker", set(BrokerCore(BrokerLimits(), 1, 0.0).tally())
    yield "resolver", set(ResolverCore().counts)
    publisher = PublisherCore(
        instance="i", dp_rank=0, epoch=1, role="prefill", model="m", dp_size=1, endpoint="ipc:///x"
    )
    yield "publisher", set(publisher.counts)
    yield "edge", set(laws.of_edge(Counts())[0][1])
    rank = Rank(Legs(), "unified", "u")
    ((_, seen),) = laws.of_node_rank(rank.core, rank.runner, publisher=publisher)
    yield "node", set(seen)


GAUGES = {
    "running", "waiting", "waiting_tokens", "kv_tokens", "kv_capacity_tokens", "max_running", "elapsed_s",
}  # fmt: skip


def test_all_that_a_part_shows_is_in_a_law() -> None:
    lawless = [f"{part}: {name}" for part, names in pages() for name in names - GAUGES if not laws.is_bound(part, name)]
    assert not lawless


@of_sources
def test_an_event_of_a_controller_is_shown_before_it_happens() -> None:
    """Prometheus sees no increase in a series that begins with a count."""
    # `ttft_slo`: where deadlines are kept
    shown_elsewhere = ("failed_", "rejected_", "first_token_us_", "ttft_slo", "payload_bytes")
    names = {name for part, name, _ in counted() if part == "controller" and not name.endswith("*")}
    assert {name for name in names if not name.startswith(shown_elsewhere)} == set(EVENTS)
    core = World().core
    page = collect(core.happened(), core.alive(), (), {}, core.config.methods, core.regret, 0.0)
    (events,) = [metric.samples for metric in page if metric.name == "pdbus_controller_events_total"]
    assert {sample.labels["event"] for sample in events} == set(EVENTS)
    assert not any(sample.value for sample in events)


@of_sources
def test_every_law_is_about_counters_that_there_are() -> None:
    there: dict[str, set[str]] = {}
    for part, name, _ in counted():
        there.setdefault(part, set()).add(name)
    for part, names in pages():
        there.setdefault(part, set()).update(names)
    there["controller"] |= {"legs_dispatched", "legs_failed"}
    there["rank"] |= {"dispatches_*"}
    for part, names in there.items():
        unknown = {
            known for known in laws.bound(part)
            if not any(_meets(known, name) for name in names) and known not in ("query_batch_rooms", "dispatches")
        }  # fmt: skip
        assert not unknown - FROM_SHELLS, part


FROM_SHELLS = {  # which the snapshot of a core alone does not have
    "rooms_located_*", "legs", "live_rooms", "pending", "peers_refused*",
    "kv_blocks_*", "kv_gaps", "kv_unreadable",
}  # fmt: skip


def _meets(one: str, other: str) -> bool:
    if "*" not in one + other:
        return one == other
    a, b = one.rstrip("*"), other.rstrip("*")
    return (a.startswith(b) and "*" in other) or (b.startswith(a) and "*" in one)


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.says)
def test_each_law_is_broken_by_numbers_that_break_it(law: laws.Law) -> None:
    """And says which numbers."""
    first, last = re.split(r" == | <= ", law.sums)[0], law.sums.split(" ")[-1].split("*")[-1]
    name = first.split(" + ")[0].rstrip("*")
    seen = {law.given: 0, name: 999, last: 3} if law.given else {name: 999, last: 3}
    assert any(law.says in line and f"{name} 999" in line for line in laws.broken(law.part, seen, rest=True))


def untrue(figures: Figures | None) -> list[str]:
    """Rates below 0 and shares above 1, of a whole window."""
    assert figures is not None
    rates = {"done_s": figures.done_s} | {
        f"{name} of {each.rank.instance}": getattr(each, name)
        for each in figures.ranks
        for name in ("requests_s", "prompt_s", "cached_s", "computed_s", "output_s")
    }
    shares = {"hits": figures.hits} | {
        f"{name} of {each.rank.instance}": getattr(each, name)
        for each in figures.ranks
        for name in ("hits", "kv", "busy")
    }
    low = [name for name, rate in rates.items() if rate is not None and rate < 0]
    return low + [name for name, share in shares.items() if share is not None and not 0 <= share <= 1]


class Joined:
    """A controller and ranks that run, whose messages may be lost."""

    def __init__(self, **settings: str) -> None:
        self.world, self.legs = World(**settings), Legs()
        self.legs.now = self.world.now
        self.ranks: dict[str, Rank] = {}
        self.lost: set[int] = set()
        self.seen = 0
        self.history = History()
        for role in ("prefill", "decode"):
            self.add(role, role[0])  # type: ignore[arg-type]

    def add(self, role: Role, name: str) -> None:
        rank = self.ranks[name] = Rank(self.legs, role, name)
        rank.core.reports.welcomed(0, EPOCH)
        info = hello(name, role=role, dp_size=1, epoch=rank.epoch, kv_capacity=256, max_running=4)
        self.world.feed(FromNode(name, replace(info, endpoint=name)))

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.05)):
            self.carry()
            self.history.add(Sample(self.world.now, 0.0, self.world.core.status(0, self.world.now)))
            self.legs.run(0.05)
            self.world.now = self.legs.now
            for name, rank in self.ranks.items():
                ended = [end for ends in rank.ended.values() for end in ends]
                self.world.feed(FromNode(name, Progress(name, 0, rank.epoch, tuple(rank.started), tuple(ended))))
                load = rank.core.load()
                self.world.report(hello(name, epoch=rank.epoch), **{
                    field: getattr(load, field)
                    for field in Load.__struct_fields__ if field not in ("seq", "acks", "kv_capacity", "max_running")
                }, acks=[(ack.controller_epoch, ack.dispatches, ack.tokens) for ack in load.acks])  # fmt: skip

    def carry(self) -> None:
        """What the controller sends reaches its rank, but for what is `lost`: those are told to have been full."""
        while self.seen < len(self.world.to_nodes):
            action = self.world.to_nodes[self.seen]
            self.seen += 1
            self.take(action)

    def take(self, action: ToNode) -> None:
        rank, message = self.ranks[action.peer], action.message
        if isinstance(message, Dispatch):
            if self.seen in self.lost:
                self.world.feed(Undelivered(action.peer, message))
                return
            if rank.core.role == "decode":
                rank.read(message.rid, message.attempt)
            rank.do(rank.core.ingest(0, message, list(action.frames), self.legs.now))
        elif isinstance(message, CancelLeg):
            rank.do(rank.core.cancel(0, message, self.legs.now))

    def submit(self, rid: str, **fields: Any) -> None:
        request = submit(rid, "pair", 10, **fields)
        self.world.submit(request, frames=(prompt(10), encode(Params())))
        self.carry()

    def pairs(self) -> list[tuple[str, laws.Snapshot]]:
        found = []
        for (name, _), rank in self.world.core.table.ranks.items():
            acks = self.ranks[name].core.reports.acks
            received = sum(ack.dispatches for ack in acks if ack.controller_epoch == EPOCH)
            found.append(("pair", {"received": received, "sent": rank.sent, "unbroken": 1}))
        return found


def test_at_rest_a_rank_has_counted_what_its_controller_sent() -> None:
    """Through a queue, with messages that could not be sent, ends and cancels; all laws hold on the way, too."""
    joined = Joined(queue_order="slo")
    joined.lost = {3, 8, 9}
    for number in range(20):
        joined.submit(f"r{number}", deadline_s=0.05 if number == 7 else 0.0)
        if number in (4, 11):
            joined.world.feed(FromClient("client", Cancel(f"r{number}"), ()))
        joined.run(0.05)
        laws.check(joined.pairs())
        assert not untrue(joined.history.figures())
    joined.run(3.0)
    counts = joined.world.core.counts
    assert not joined.world.core.life.requests
    assert counts["undelivered"] == 3
    assert (counts["submitted"], counts["done"] + counts["failed"], counts["failed_cancelled"]) == (20, 20, 2)
    assert len(joined.world.answers(Done)) == counts["done"] > 10
    laws.check(joined.pairs(), rest=True)
    assert all(snapshot["received"] > 10 for _, snapshot in joined.pairs())

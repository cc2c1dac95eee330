"""A fleet in virtual time, to be looked at: a real controller core, and ranks that are a few lines each. Prefill ranks
compute prompts one after the other, links carry KV caches one after the other, decode ranks step in batches. As a
process, its page: python tests/support/fleet_sim.py SITUATION RANKS SEED [PORT].
"""

from __future__ import annotations

import heapq
import itertools
import random
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from bus.wire.messages import (
    Ack,
    Beacon,
    BrokerStatus,
    CancelLeg,
    Dispatch,
    Ended,
    Hello,
    Load,
    LoadReport,
    Message,
    Ping,
    Pong,
    Progress,
    Role,
    Submit,
)
from controller.config import ControllerConfig
from controller.core import ControllerCore
from controller.events import FromClient, FromNode, Published, Tick, ToNode, Unreachable
from pdbus.edge.fleet_server import serve
from pdbus.fleet.feed import Feed
from pdbus.fleet.figures import Sample
from pdbus.fleet.frames import Frames

SITUATIONS = (
    "slow rank", "full rank", "slow link", "queue", "cold cache", "prefill death", "all well", "busy but well",
)  # fmt: skip
EPOCH, TICK_S, KV_BYTES = 77, 0.05, 131_072  # of a token
KV, SLOTS, CHUNK = 90_000, 64, 512
LOAD = {"busy but well": 0.8, "queue": 1.2}  # of what decode ranks can do
USUAL_LOAD = 0.4
GROUPS = 3_000  # of prompts with one beginning
SHOWN_AFTER_S = 45.0
FRAME = memoryview(bytes(4 * 40_000))


@dataclass(eq=False)
class Rank:
    """A rank. `slow` and `link` are times what its steps and what comes over its link take usually."""

    role: Role
    instance: str
    number: int
    host: str
    began: int = 1
    slow: float = 1.0
    link: float = 1.0
    dead: bool = False
    leak: int = 0  # KV tokens that never become free
    waiting: deque[tuple[str, int]] = field(default_factory=deque)
    running: dict[tuple[str, int], int] = field(default_factory=dict)  # legs, and the step of their last token
    held: int = 0
    busy: bool = False
    linked: bool = False
    cache: set[int] = field(default_factory=set)
    acks: list[int] = field(default_factory=lambda: [0, 0])
    totals: dict[str, int] = field(default_factory=dict)
    seq: int = 0

    @property
    def peer(self) -> str:
        return f"{self.instance}/{self.number}#{self.began}"

    def add(self, **more: float) -> None:
        for name, value in more.items():
            self.totals[name] = self.totals.get(name, 0) + round(value)


class Fleet:
    """`ranks` ranks, half of each role, in one of SITUATIONS from `before_s` on; a source of samples for a page's feed:
    each `ask` is a second later."""

    def __init__(self, situation: str, ranks: int, seed: int) -> None:
        assert situation in SITUATIONS
        self.situation, self.rng, self.now = situation, random.Random(seed), 0.0
        self.long = 1 if ranks < 100 else 4  # times longer requests, of which there are fewer
        self.kv = KV * self.long
        self.before_s = 120.0 if ranks < 100 else 60.0
        self.wall = time.time() - self.before_s - SHOWN_AFTER_S  # at 0
        config = ControllerConfig(
            bus="ipc:///x/bus", controller="ipc:///x/c", prefill_method="total_tokens", decode_method="total_requests",
            settle_s=0.0, explain=16, max_ranks=4096, max_requests=1_000_000, client_requests=1_000_000,
            queue_requests=1_000_000, queue_bytes=1 << 40, payload_bytes=1 << 40,
        )  # fmt: skip
        self.core = ControllerCore(config, EPOCH, 0.0, wall_s=self.wall)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._requests: dict[str, tuple[int, int, int]] = {}  # prompt, output, group
        self._legs: dict[tuple[str, int], dict[Role, Rank]] = {}
        self.ranks: dict[str, Rank] = {}
        self.odd: Rank | None = None  # the one that the situation is of
        per = 1 if ranks < 100 else 8
        for role in ("prefill", "decode"):
            for place in range(ranks // 2):
                at = place // per
                host = f"10.0.{0 if role == 'prefill' else 1}.{at}"
                self._join(Rank(role, f"{role}-{at}", place % per, host))  # type: ignore[arg-type]
        for rank in self.ranks.values():
            rank.cache.update(range(GROUPS) if rank.role == "prefill" else ())
        self._report_s = 0.25 if ranks < 100 else 1.0
        a_request_s = 120 * self.long * 0.0176  # at a decode rank, some 64 at once
        self._can_s = ranks // 2 * SLOTS / a_request_s
        self._every(TICK_S, lambda: self._feed(Tick()))
        self._every(1.0, lambda: self._feed(Published(Beacon(1, round(self.now), 1.0))))
        self._every(self._report_s, self._report)
        self._arrive()
        self._at(self.before_s, self._begin)

    # --- what happens -----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """The situation begins."""
        of = {role: [rank for rank in self.ranks.values() if rank.role == role] for role in ("prefill", "decode")}
        prefill, decode = self.rng.choice(of["prefill"]), self.rng.choice(of["decode"])
        if self.situation == "slow rank":
            self.odd = self.rng.choice((prefill, decode))
            self.odd.slow = self.rng.uniform(3.0, 5.0)
        elif self.situation == "full rank":
            self.odd, decode.leak = decode, round(0.93 * self.kv)
        elif self.situation == "slow link":
            self.odd, decode.link = decode, self.rng.uniform(15.0, 30.0)
        elif self.situation == "cold cache":
            self.odd = prefill
            self._later(15.0, lambda: self._die(prefill, again=True))
        elif self.situation == "prefill death":
            self.odd = prefill
            self._die(prefill)

    def _die(self, rank: Rank, *, again: bool = False) -> None:
        rank.dead = True
        del self.ranks[rank.peer]
        self._feed(Unreachable(rank.peer))
        if again:
            fresh = Rank(rank.role, rank.instance, rank.number, rank.host, rank.began + 1)
            self._later(6.0, lambda: self._join(fresh))

    def _arrive(self) -> None:
        load = LOAD.get(self.situation, USUAL_LOAD) + (0.3 if self.situation == "queue" and self.long > 1 else 0.0)
        if self.situation == "queue" and self.now < self.before_s:
            load = USUAL_LOAD
        self._later(self.rng.expovariate(load * self._can_s), self._arrive)
        prompt = min(30_000, round(1_200 * self.long * self.rng.lognormvariate(-0.1, 0.45)))
        output = max(2, round(120 * self.long * self.rng.lognormvariate(-0.1, 0.45)))
        rid = f"{self.rng.getrandbits(64):016x}"
        self._requests[rid] = prompt, output, self.rng.randrange(GROUPS)
        submit = Submit(rid, "pair", prompt, output, self.rng.getrandbits(62))
        self._feed(FromClient("an edge", submit, (FRAME[: 4 * prompt], b"{}")))

    def _join(self, rank: Rank) -> None:
        self.ranks[rank.peer] = rank
        self._feed(FromNode(rank.peer, Hello(
            instance=rank.instance, dp_rank=rank.number, epoch=rank.began, role=rank.role, model="llama-8b",
            dp_size=8, state="ready", endpoint=f"tcp://{rank.host}:5700", max_context=131_072, kv_capacity=self.kv,
            max_running=SLOTS, block_tokens=16, started_us=rank.began,
        )))  # fmt: skip
        self._report_of(rank)

    # --- ranks ------------------------------------------------------------------------------------------------------

    def _dispatched(self, rank: Rank, message: Dispatch) -> None:
        leg = message.rid, message.attempt
        rank.acks[0] += 1
        rank.acks[1] += message.charge
        self._legs.setdefault(leg, {})[message.leg] = rank
        if rank.role == "prefill":
            rank.waiting.append(leg)
            self._compute(rank)

    def _compute(self, rank: Rank) -> None:
        """Begin the next prompt of a prefill rank."""
        if rank.busy or not rank.waiting or rank.dead:
            return
        leg = rank.waiting.popleft()
        prompt, _, group = self._requests[leg[0]]
        cached = prompt // 2 if group in rank.cache else 0
        rank.cache.add(group)
        steps = ceil((prompt - cached) / CHUNK)
        took_s = rank.slow * (0.004 * steps + 2.5e-5 * (prompt - cached))
        rank.busy, rank.held, rank.running[leg] = True, rank.held + prompt, 0
        rank.add(admitted_tokens_total=prompt, prompt_tokens_total=prompt, cached_tokens_total=cached)

        def over() -> None:
            rank.busy = False
            rank.add(step=steps, busy_us_total=1e6 * took_s, computed_tokens_total=prompt - cached)
            if leg in rank.running and not rank.dead and (to := self._legs[leg].get("decode")) is not None:
                self._say(to, started=(leg,))
                to.waiting.append(leg)
                self._fetch(to)
            self._compute(rank)

        self._later(took_s, over)

    def _fetch(self, rank: Rank) -> None:
        """Begin the next transfer to a decode rank, once it has a slot and memory."""
        if rank.linked or not rank.waiting or len(rank.running) >= SLOTS:
            return
        prompt, output, _ = self._requests[rank.waiting[0][0]]
        if rank.held + prompt + output > self.kv - rank.leak:
            return
        leg = rank.waiting.popleft()
        rank.linked, rank.held = True, rank.held + prompt + output
        rank.running[leg] = 1 << 60
        took_s = rank.link * (0.003 + 5e-6 * prompt)

        def over() -> None:
            rank.linked = False
            rank.add(fetches_total=1, fetch_us_total=1e6 * took_s, fetched_tokens_total=prompt,
                     kv_received_bytes_total=prompt * KV_BYTES, admitted_tokens_total=prompt)  # fmt: skip
            at = self._legs.get(leg, {}).get("prefill")
            if at is not None and at.running.pop(leg, None) is not None and not at.dead:
                at.held -= prompt
                at.add(kv_sent_bytes_total=prompt * KV_BYTES)
                self._say(at, ended=(Ended(*leg, "prefill", "ok", output_tokens=1, first_token_s=0.05),))
            if leg in rank.running:
                rank.running[leg] = rank.totals.get("step", 0) + output
                self._step(rank)
            self._fetch(rank)

        self._later(took_s, over)

    def _step(self, rank: Rank) -> None:
        batch = sum(last < 1 << 60 for last in rank.running.values())
        if rank.busy or not batch:
            return
        took_s = rank.slow * (0.008 + 0.00015 * batch)
        rank.busy = True

        def over() -> None:
            rank.busy = False
            rank.add(step=1, busy_us_total=1e6 * took_s, output_tokens_total=batch)
            step = rank.totals["step"]
            done = [leg for leg, last in rank.running.items() if last <= step]
            for leg in done:
                del rank.running[leg]
                del self._legs[leg]
                prompt, output, _ = self._requests.pop(leg[0])
                rank.held -= prompt + output
                self._say(rank, ended=(Ended(*leg, "decode", "ok", output_tokens=output),))
            if done:
                self._fetch(rank)
            self._step(rank)

        self._later(took_s, over)

    def _cancelled(self, rank: Rank, message: CancelLeg) -> None:
        leg = message.rid, message.attempt
        prompt, output, _ = self._requests.get(message.rid, (0, 0, 0))
        if rank.running.pop(leg, None) is not None:
            rank.held -= prompt + (output if rank.role == "decode" else 0)
        if leg in rank.waiting:
            rank.waiting.remove(leg)

    # --- messages ---------------------------------------------------------------------------------------------------

    def _say(self, rank: Rank, **what: Any) -> None:
        self._feed(FromNode(rank.peer, Progress(rank.instance, rank.number, rank.began, **what)))

    def _report(self) -> None:
        for rank in list(self.ranks.values()):
            self._report_of(rank)

    def _report_of(self, rank: Rank) -> None:
        rank.seq += 1
        prefill, held = rank.role == "prefill", min(self.kv, rank.held + rank.leak)
        load = Load(
            seq=rank.seq, running=len(rank.running), waiting=len(rank.waiting),
            waiting_tokens=sum(self._requests[rid][0] for rid, _ in rank.waiting if rid in self._requests),
            kv_tokens=held, kv_capacity=self.kv, max_running=SLOTS, acks=(Ack(EPOCH, *rank.acks),),
            kv_cached=(min(self.kv - held, 20 * len(rank.cache)) if prefill else (self.kv - held) // 4),
            kv_pinned=held if prefill else 0, **{"step": 0} | rank.totals,
        )  # fmt: skip
        self._feed(Published(LoadReport(rank.instance, rank.number, rank.began, rank.seq, load)))

    def _feed(self, event: Any) -> None:
        events = deque([event])
        while events:
            for action in self.core.handle(events.popleft(), self.now):
                if isinstance(action, ToNode) and (rank := self.ranks.get(action.peer)) is not None:
                    answer = self._answer(rank, action.message)
                    events.extend([FromNode(rank.peer, answer)] if answer is not None else ())

    def _answer(self, rank: Rank, message: Message) -> Message | None:
        if isinstance(message, Dispatch):
            self._dispatched(rank, message)
        elif isinstance(message, CancelLeg):
            self._cancelled(rank, message)
        elif isinstance(message, Ping):
            return Pong(message.n, rank.totals.get("step", 0), rank.busy, rank.seq)
        return None

    # --- time -------------------------------------------------------------------------------------------------------

    def _at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when, next(self._number), what))

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        self._at(self.now + seconds, what)

    def _every(self, seconds: float, what: Callable[[], None]) -> None:
        def again() -> None:
            what()
            self._later(seconds, again)

        self._later(seconds, again)

    def ask(self) -> Sample:
        """A second passes; return what a page server would have seen then."""
        until = self.now + 1.0
        while self._due[0][0] <= until:
            self.now, _, what = heapq.heappop(self._due)
            what()
        self.now = until
        broker = BrokerStatus(1, 2, until, {"rooms_alive": 9})
        return Sample(until, self.wall + until, self.core.status(1, until), broker)


def main(situation: str, ranks: str, seed: str, port: str = "0") -> None:
    """Serve the page until SIGTERM, once the situation is there for SHOWN_AFTER_S; the URL is the first line."""
    fleet, frames = Fleet(situation, int(ranks), int(seed)), Frames()
    for _ in range(round(fleet.before_s + SHOWN_AFTER_S)):
        frames.add(fleet.ask())

    def feed(publish: Callable[[bytes], None], failed: Callable[[Exception], None]) -> Feed:
        return Feed(lambda: nullcontext(fleet), frames, publish, failed)  # type: ignore[arg-type]

    serve(port, feed, lambda url: print(url, flush=True))


if __name__ == "__main__":
    main(*sys.argv[1:])

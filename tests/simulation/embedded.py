"""What others embed, as processes of a simulated cluster: a `Dispatcher`, engines behind a `RankLink`, a `Resolver`.

Each has a scheduler's loop of its own, as its program would: the world calls it every few milliseconds.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from bus.embed.resolution import TOPOLOGY_OLD_S, Resolved
from bus.embed.resolver import Resolver
from bus.errors import Replaced
from bus.wire.codec import encode
from bus.wire.messages import Accepted, Done, Failed, Params
from controller.config import ControllerConfig
from controller.dispatcher import Dispatcher
from controller.shell import Controller
from nodes.link.actions import Start
from nodes.link.embed import Draining, RankLink
from nodes.link.facts import RankFacts
from nodes.link.leg import Leg
from nodes.own.engines.sim import SPECIALS, feed, next_token
from simulation import inner_laws
from simulation.broken import Broken
from simulation.process import ControllerProcess, Process, RankProcess
from simulation.spec import VOCAB

if TYPE_CHECKING:
    from simulation.world import Asked, World

TURN_S = 0.01  # of an embedder's own loop
WAIT_S = 8.0  # an embedder waits so long for its link to be joined
KNOWN_S = 1.0  # until what one part of the bus says is known at the others
_STATE = struct.Struct("<I")


def every(process: Process, interval_s: float, function: Callable[[], None]) -> None:
    """Have `process` call `function` each `interval_s` while this start of it lives and is not paused."""
    world, start = process.world, process.starts

    def again() -> None:
        if not process.alive or process.starts != start:
            return
        if process.paused_until > world.now:
            world.at(process.paused_until, again)
            return
        with world.runs(process):
            function()
        world.at(world.now + interval_s, again)

    world.at(world.now + interval_s, again)


class DispatcherProcess(ControllerProcess):
    """An engine's process that dispatches to the ranks by a controller of its own."""

    def __init__(self, world: World, name: str, host: str, base: str, settings: dict[str, Any]) -> None:
        super().__init__(world, name, host, base, settings)
        self.dispatched: dict[str, Asked] = {}  # not over

    def _open(self, exits: ExitStack) -> None:
        super()._open(exits)
        self.dispatched.clear()
        every(self, TURN_S, self._poll)

    def _controller(self, config: ControllerConfig) -> Controller:
        self.dispatcher = Dispatcher(config)
        return self.dispatcher.controller

    def ask(self, asked: Asked, leg: str) -> None:
        spec = asked.spec
        room = asked.room = self.world.rng.getrandbits(63)
        frames = (struct.pack(f"<{len(spec.prompt)}i", *spec.prompt), encode(Params(ignore_eos=True)))
        with self.world.runs(self):
            taken = self.dispatcher.dispatch(
                asked.rid, frames, leg=leg, max_tokens=spec.max_tokens, bootstrap_room=room,  # type: ignore[arg-type]
                deadline_s=spec.deadline_s, continue_on_disconnect=True,
            )  # fmt: skip
        if taken == (asked.rid in self.dispatched):
            raise Broken(
                "each dispatch ends once", f"{asked.rid}: taken {taken}, live {list(self.dispatched)}", asked.rid
            )
        if taken:
            self.dispatched[asked.rid] = asked
        else:
            asked.abandoned = True

    def cancel(self, asked: Asked) -> None:
        with self.world.runs(self):
            self.dispatcher.cancel(asked.rid)

    def _poll(self) -> None:
        for answer in self.dispatcher.poll():
            asked = self.dispatched.get(answer.rid)
            if asked is None:
                raise Broken("each dispatch ends once", f"{answer} of what is over or never was", answer.rid)
            if not isinstance(answer, Accepted):
                del self.dispatched[answer.rid]
                self._end(asked, answer)

    def _end(self, asked: Asked, answer: Done | Failed) -> None:
        if isinstance(answer, Failed):
            inner_laws.refused(self.world, self, asked.rid, answer.code)
        asked.end("ok" if isinstance(answer, Done) else answer.code)

    def left_over(self) -> str:
        return f"dispatches {list(self.dispatched)}" if self.dispatched else ""

    def validate(self) -> None:
        super().validate()
        if len(self.dispatcher._live) != len(self.dispatched):
            raise Broken("each dispatch ends once", f"slots {self.dispatcher._live}, live {list(self.dispatched)}")


class LinkedEngine:
    """One rank of an engine with a scheduler of its own. Its tokens are a function of prompt and position, as those of
    the sim engine; a prefill leg's handle is the state behind the prompt."""

    def __init__(self, link: RankLink, number: int, max_running: int, salt: int) -> None:
        self.link = link
        self.number = number
        self.salt = salt
        self.hangs = False
        self.fails = 0
        self.waiting: list[Leg] = []
        self.running: dict[Leg, list[int]] = {}  # its state, and how many tokens it has
        self.held: set[Leg] = set()
        self._max_running = max_running
        self._steps = 0

    @property
    def legs(self) -> int:
        return len(self.waiting) + len(self.running) + len(self.held)

    def hang(self) -> None:
        self.hangs = True

    def start(self, leg: Leg) -> None:
        self.waiting.append(leg)

    def drop(self, leg: Leg) -> None:
        self.running.pop(leg, None)
        self.held.discard(leg)
        if leg in self.waiting:
            self.waiting.remove(leg)

    def step(self) -> None:
        if self.hangs:
            return
        while self.waiting and len(self.running) < self._max_running:
            self._admit(self.waiting.pop(0))
        for leg, run in list(self.running.items()):
            if self.fails:
                self.fails -= 1
                del self.running[leg]
                self.link.fail(leg, "engine_failed", "a fault of the trial")
                continue
            self._give(leg, run, self._next(run[0]))
        self._steps += 1
        waiting_tokens = sum(leg.prompt_tokens for leg in self.waiting)
        self.link.report(
            self.number, running=len(self.running) + len(self.held), waiting=len(self.waiting),
            waiting_tokens=waiting_tokens, step=self._steps, busy=bool(self.legs),
        )  # fmt: skip

    def _admit(self, leg: Leg) -> None:
        if leg.role == "decode":
            assert leg.handle is not None
            self.link.fetched(leg)
            run = self.running[leg] = [_STATE.unpack(leg.handle.data)[0], 0]
            self._give(leg, run, leg.handle.first_token)
            return
        self.link.began(leg)
        state = feed(leg.prompt)[-1]
        if leg.role == "prefill":
            self.held.add(leg)
            self.link.held(leg, self._next(state), _STATE.pack(state))
        else:
            self.running[leg] = [state, 0]

    def _give(self, leg: Leg, run: list[int], token: int) -> None:
        self.link.output(leg, [token])
        run[0], run[1] = feed((token,), run[0])[0], run[1] + 1
        if run[1] == leg.max_tokens:
            del self.running[leg]
            self.link.finish(leg)

    def _next(self, state: int) -> int:
        return SPECIALS + (next_token(state, VOCAB) - SPECIALS + self.salt) % (VOCAB - SPECIALS)


class LinkProcess(RankProcess):
    """An engine's process whose ranks are linked by a `RankLink`."""

    def _open(self, exits: ExitStack) -> None:
        config, spec = self.config, self.world.spec
        facts = RankFacts(
            model="sim", max_context=4096, kv_capacity=spec.kv_tokens, max_running=spec.max_running, vocab_size=VOCAB,
            kv_layout="linked", kv_transfer="linked",
        )  # fmt: skip
        self.link = RankLink(
            config.bus, controllers=config.controllers, role=config.role, instance=config.instance, facts=facts,
            data=config.data, dp_ranks=config.dp_ranks, dp_size=config.dp_size, limits=config.limits,
            keys=config.keys,
        )  # fmt: skip
        self.link.open()
        self.loop = self.link.loop  # type: ignore[assignment]
        exits.callback(self.link.close)
        self.part = SimpleNamespace(host=self.link._host)  # as a node of ours has it
        self.by_rank = {
            rank: LinkedEngine(self.link, rank, spec.max_running, self.world.salt()) for rank in config.dp_ranks
        }
        self.engines = list(self.by_rank.values())
        self.ready, self._began = False, self.world.now
        every(self, max(TURN_S, spec.step_s), self._step)

    def held(self, number: int) -> tuple[int, ...]:
        return (self.by_rank[number].legs,)

    def _drain(self) -> None:
        self.link._drain("drain")

    def _step(self) -> None:
        self.ready = self.ready or self.link._joined.is_set()
        for order in self.link.poll():
            if isinstance(order, Draining):
                continue
            engine = self.by_rank[order.leg.dp_rank]
            engine.start(order.leg) if isinstance(order, Start) else engine.drop(order.leg)
        for engine in self.engines:
            engine.step()
        if not self.ready and self.world.now - self._began > WAIT_S and not self.link.drained:
            fenced = self.part.host.fenced()
            self.failure = Replaced(fenced) if fenced else None
            self.link._leave()
        elif self.link.drained:
            self.failure = self.link.left
            self.world.at(self.world.now, partial(self._leave, self.starts))

    def _leave(self, start: int) -> None:
        if self.alive and self.starts == start:
            self._left()


@dataclass
class _Wanted:
    until: float
    told: bool


class ResolverProcess(Process):
    """A decode engine's process that finds rooms by a `Resolver`."""

    kind = "resolver"
    slack_s = 1.0

    def _open(self, exits: ExitStack) -> None:
        self.resolver = Resolver(self.world.bus, keys=self.world.keys)
        self.resolver.open()
        self.loop = self.resolver.loop  # type: ignore[assignment]
        exits.callback(self.resolver.close)
        self.wanted: dict[int, _Wanted] = {}
        self._do, self.resolver._do = self.resolver._do, self._look  # type: ignore[method-assign]
        every(self, TURN_S, self._poll)

    def want(self, room: int, dp_rank: int | None, deadline_s: float) -> None:
        if not self.alive or room in self.wanted:
            return
        began = max(self.world.now, self.paused_until)  # a process that is paused wants nothing before it goes on
        self.wanted[room] = _Wanted(began + deadline_s, dp_rank is not None)
        with self.world.runs(self):
            self.resolver.want(room, deadline_s=deadline_s, prefill_instance="prefill", dp_rank=dp_rank)

    def _poll(self) -> None:
        for room in (*self.resolver.poll(), *self.resolver.lost()):
            if self.wanted.pop(room, None) is None:
                raise Broken("each want ends once", f"{self.name}: room {room}")
            self.world.counts["resolved"] += 1

    def _look(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, Resolved) and action.at is not None:
                self._check(action)
        self._do(actions)

    def _check(self, found: Resolved) -> None:
        """Nothing older than TOPOLOGY_OLD_S where the broker answers, and no rank that has said goodbye before."""
        world, at = self.world, found.at
        assert at is not None
        if world.felt("broker") or world.felt(self.name):
            return
        if found.found_by in ("told", "computed") and found.age_s > TOPOLOGY_OLD_S:
            raise Broken("no old topology", f"{self.name}: {found} of {found.age_s:.3f} s ago")
        left_at = world.goodbyes.get((at.instance, at.dp_rank, at.epoch), world.now)
        if world.now - left_at > TOPOLOGY_OLD_S + KNOWN_S:
            raise Broken("no rank that has left", f"{self.name}: {found}, which left at {left_at:.3f}")

    def left_over(self) -> str:
        return f"wants {list(self.wanted)}" if self.wanted else ""

    def validate(self) -> None:
        for room, want in self.wanted.items():
            if self.world.now > max(want.until, self.paused_until) + self.slack_s:
                raise Broken("each want ends once", f"{self.name}: room {room} is wanted since its deadline")

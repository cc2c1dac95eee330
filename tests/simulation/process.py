"""The processes of a simulated cluster: each runs a part's own shell, can be paused, crash, and be started again."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from bus.broker.shell import Broker, BrokerConfig
from controller.config import ControllerConfig
from controller.shell import Controller
from nodes.config import NodeConfig
from nodes.link.rank import LinkedRank
from nodes.node import Node
from nodes.own.engines.base import Row, StepPlan, StepResult
from nodes.own.engines.factory import EngineConfig
from nodes.own.engines.sim import SPECIALS, SimEngine
from nodes.own.kinds import own_runner
from pdbus.client.core import Patience
from pdbus.client.traffic import TICK_S, Traffic
from simulation.network import SimSocket
from simulation.runtime import SimLoop, SimSockets, send

if TYPE_CHECKING:
    from simulation.world import World

WAKE_S = (5e-6, 5e-5)  # from a message that comes until the thread that sleeps turns


class Process:
    """A name and a host, and while it is alive a loop that the world turns."""

    kind = ""

    def __init__(self, world: World, name: str, host: str) -> None:
        self.world = world
        self.name = name
        self.host = host
        self.key = ""  # its name; empty: there are none
        self.alive = False
        self.starts = 0
        self.began = 0.0  # this start of it
        self.paused_since = self.paused_until = 0.0
        self.failure: BaseException | None = None
        self.sockets: list[SimSockets] = []
        self.loop: SimLoop
        self._turn_at = float("inf")
        self._exits = ExitStack()

    # --- what each kind does ------------------------------------------------------------------------------------

    def _open(self, exits: ExitStack) -> None:
        """Make `loop` and the part on it."""
        raise NotImplementedError

    def _left(self) -> None:
        """The loop has stopped by itself."""
        self.stop()

    def validate(self) -> None:
        """AssertionError where its cores contradict themselves."""

    def left_over(self) -> str:
        """Return what it has though all is over."""
        return ""

    # --- life ---------------------------------------------------------------------------------------------------

    def clock(self) -> float:
        return self.world.now

    def start(self) -> None:
        assert not self.alive, f"{self.name} lives"
        self.starts += 1
        self.alive, self.paused_until, self.began = True, 0.0, self.world.now
        with self.world.runs(self), ExitStack() as exits:
            self._open(exits)
            self._exits = exits.pop_all()
        self._plan()

    def stop(self) -> None:
        """Close all, as at the end of its main."""
        if self.alive:
            with self.world.runs(self):
                self._exits.close()
            self._gone()

    def crash(self) -> None:
        """Nothing is said; the kernel closes its connections."""
        if self.alive:
            self.world.network.vanish(self.open_sockets)
            self._exits = ExitStack()
            self._gone()

    def pause(self, seconds: float) -> None:
        if self.paused_until <= self.world.now:
            self.paused_since = self.world.now
        self.paused_until = max(self.paused_until, self.world.now + seconds)

    @property
    def open_sockets(self) -> list[SimSocket]:
        return [socket for each in self.sockets for socket in each.open if not socket.closed]

    def _gone(self) -> None:
        self.alive = False
        self.sockets.clear()
        self._turn_at = float("inf")

    # --- turns --------------------------------------------------------------------------------------------------

    def readable(self, socket: SimSocket) -> None:
        if self.alive and self.loop.awake(socket):
            self.woken()

    def woken(self) -> None:
        if self.alive and self._turn_at > self.world.now + WAKE_S[1]:
            low, high = WAKE_S
            self._turn_in(self.world.now + low + (high - low) * self.world.rng.random())

    def _turn_in(self, at: float) -> None:
        self._turn_at = at
        self.world.at(at, lambda start=self.starts: self._turn(at, start))  # type: ignore[misc]

    def _turn(self, at: float, start: int) -> None:
        if not self.alive or at != self._turn_at or start != self.starts:
            return  # another turn was due sooner
        if self.paused_until > self.world.now:
            self._turn_in(self.paused_until)
            return
        self._turn_at = float("inf")
        world = self.world
        before, world.running = world.running, self  # `World.runs`, without what a context manager costs a turn
        try:
            self.loop.turn()
        finally:
            world.running = before
        self._plan()

    def _plan(self) -> None:
        if not self.alive:
            return
        if self.loop.stopping:
            self._left()
            return
        due = self.loop.due
        if due < self._turn_at:
            self._turn_in(max(due, self.world.now + WAKE_S[0]))


class BrokerProcess(Process):
    kind = "broker"

    def _open(self, exits: ExitStack) -> None:
        self.part = Broker(BrokerConfig(self.world.bus, keys=self.world.keys))
        self.part.open()
        self.loop = self.part.loop  # type: ignore[assignment]
        exits.callback(self.part.close)


class ControllerProcess(Process):
    kind = "controller"

    def __init__(self, world: World, name: str, host: str, base: str, settings: dict[str, Any]) -> None:
        super().__init__(world, name, host)
        self.base = base
        self._settings = settings
        self.waits: dict[Any, float] = {}  # lanes whose head waits beside ranks that would take it, and since when

    def _open(self, exits: ExitStack) -> None:
        config = ControllerConfig(
            name=self.name, bus=self.world.bus, controller=self.base, keys=self.world.keys, **self._settings
        )  # fmt: skip
        self.part = self._controller(config)
        self.part.open()
        self.loop = self.part.loop  # type: ignore[assignment]
        exits.callback(self.part.close)

    def _controller(self, config: ControllerConfig) -> Controller:
        return Controller(config)

    def leave(self) -> None:
        """SIGTERM: what lives here ends, for its clients to send elsewhere."""
        self.stop()

    def validate(self) -> None:
        self.part.core.validate()


class RankProcess(Process):
    """A process that has ranks."""

    kind = "node"

    def __init__(self, world: World, name: str, host: str, config: NodeConfig) -> None:
        super().__init__(world, name, host)
        self.config = config
        self.ready = False
        self.replaced = False  # by a later start of its ranks: it stays away

    def drain(self) -> None:
        """SIGTERM: it finishes what it has and leaves."""
        with self.world.runs(self):
            self._drain()
        self._plan()

    def _drain(self) -> None:
        raise NotImplementedError

    def _left(self) -> None:
        self.stop()
        self.world.node_left(self)


class NodeProcess(RankProcess):
    def __init__(self, world: World, name: str, host: str, config: NodeConfig) -> None:
        super().__init__(world, name, host, config)
        self._validated: dict[int, tuple[int, ...]] = {}  # a scheduler without sequences is looked at once

    def _open(self, exits: ExitStack) -> None:
        self.loop = SimLoop(self)
        config, engine = self.config, self.config.engine
        self.engines = [_engine(self.loop, engine) for _ in config.dp_ranks]
        for each in self.engines:
            each.salt = self.world.salt()
            exits.callback(each.close)
        pairs = zip(config.dp_ranks, self.engines, strict=True)
        runners = {rank: own_runner(config, rank, each) for rank, each in pairs}
        self._validated.clear()
        self.part = Node(config, self.loop, runners)
        self.part._on_ready = self._on_ready
        self.ready = False
        exits.callback(self.part.close)
        if any(each.kills_at >= 0 for each in self.world.spec.requests):
            for rank, each in zip(config.dp_ranks, self.engines, strict=True):
                each.deadly = partial(self._dies_of, self.part.host.ranks[rank])  # type: ignore[method-assign]

    def _dies_of(self, rank: LinkedRank, plan: StepPlan) -> bool:
        legs = {leg.seq: leg for leg in rank.core.legs}
        for row in plan.rows:
            leg = legs.get(row.seq)
            if leg is not None and self.world.kills(self, leg, row.output_index):
                return True
        return False

    def _on_ready(self, node: Node) -> None:
        self.ready = True

    def _drain(self) -> None:
        self.part.drain("drain")

    def _left(self) -> None:
        self.failure = self.part.failure or self.part.host.failure
        super()._left()

    def held(self, number: int) -> tuple[int, ...]:
        """Return what a rank has of requests: sequences, and blocks."""
        scheduler = self.part.host.ranks[number].runner.scheduler  # type: ignore[attr-defined]
        return len(scheduler), scheduler.pool.held

    def validate(self) -> None:
        for number, rank in self.part.host.ranks.items():
            scheduler = rank.runner.scheduler  # type: ignore[attr-defined]
            was = scheduler.step, len(scheduler), scheduler.pool.held
            if self._validated.get(number) != was or was[1]:
                scheduler.validate()
                self._validated[number] = was
        self.part.host.streams.validate()


class ClientProcess(Process):
    """A client library's thread; `updates(rid)` gets what its caller would."""

    kind = "client"

    def __init__(self, world: World, name: str, host: str, controllers: tuple[str, ...], patience: Patience) -> None:
        super().__init__(world, name, host)
        self.controllers = controllers
        self._patience = patience

    def _open(self, exits: ExitStack) -> None:
        self.loop = SimLoop(self)
        self.rng = random.Random(f"{self.world.spec.seed} {self.name} {self.starts}")
        sockets: Any = SimSockets(self)
        loop: Any = self.loop
        self.traffic = Traffic(
            self.controllers, self._patience, self.rng, sockets, loop.clock, loop.add, loop.remove, send
        )  # type: ignore[arg-type]
        self.loop.call_every(TICK_S, self.traffic.tick)
        self.loop.after_turn(self.traffic.flush)
        exits.callback(self.traffic.leave)

    def call(self, function: Callable[[], None]) -> None:
        """On its thread, soon."""
        if self.alive:
            self.loop.call_threadsafe(function)


class TrialEngine(SimEngine):
    """One whose tokens another run need not repeat (`salt`: added to each), and that can be told to hang or to fail."""

    salt = 0
    hangs = False
    fails = 0  # so many steps from now on

    def deadly(self, plan: StepPlan) -> bool:
        """Kill the process if it dies of the step, and return whether it does."""
        return False

    def submit(self, plan: StepPlan, done: Callable[[StepResult], None]) -> None:
        if self.hangs or self.deadly(plan):
            return
        if self.fails:
            self.fails -= 1
            result = StepResult(plan.number, (), 0.0, "a fault of the trial")
            self._pending = self._loop.call_later(0.0, lambda: self._failed(done, result))
            return
        super().submit(plan, done)

    def hang(self) -> None:
        self.hangs = True
        self.close()

    def _failed(self, done: Callable[[StepResult], None], result: StepResult) -> None:
        self._pending = None
        done(result)

    def _run(self, row: Row) -> int:
        return SPECIALS + (super()._run(row) - SPECIALS + self.salt) % (self.spec.vocab_size - SPECIALS)


def _engine(loop: SimLoop, engine: EngineConfig) -> TrialEngine:
    return TrialEngine(
        loop, model=engine.model, blocks=engine.blocks(4096), block_tokens=engine.block_tokens,
        max_context=engine.max_context, vocab_size=engine.vocab_size, timing=engine.timing,
    )  # fmt: skip

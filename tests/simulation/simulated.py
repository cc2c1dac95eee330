"""A stage for scenarios: the simulated cluster, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from pdbus.client.options import Controllers, Options, make_request
from simulation import laws
from simulation.broken import Broken
from simulation.runtime import installed
from simulation.scenario import STEP_S, WAIT_S, Asked, Shape
from simulation.spec import Fault, NodeSpec, Spec
from simulation.world import CHECK_S, World

LOOK_S = 0.005
AGAIN_S = 0.05  # what lasts until it is ended goes on for so long at a time
REST_S = 30.0


def spec_of(shape: Shape, seed: int) -> Spec:
    told = enumerate(shape.nodes().items())
    nodes = [NodeSpec(name, f"h{n}", role, name, ranks, 0, ranks) for n, (name, (role, ranks)) in told]
    return Spec(
        seed=seed, tcp=True, hosts=len(nodes), nodes=tuple(nodes), controllers=shape.controllers, clients=1,
        paired=shape.leg == "pair", settings=tuple(shape.settings.items()), kv_tokens=4096, max_running=8,
        chunk_tokens=256, step_s=STEP_S, hwm=10_000, retries=10, fickle=False, requests=(), faults=(), busy_s=1.0,
    )  # fmt: skip


class SimulatedStage:
    """`with simulated(shape) as stage:`."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        self.shape = shape
        self.world = World(spec_of(shape, seed))
        self.world.knows_all_faults = False
        self._lasting: set[tuple[str, ...]] = set()

    def start(self, joined: bool) -> None:
        world = self.world
        for process in world.processes:
            process.start()
        world.at(CHECK_S, world._check)
        self.until(self._whole, "all ranks are ready")
        if joined:
            self.until(lambda: all(node.ready for node in world.nodes), "all nodes have heard the bus")

    def stop(self) -> None:
        for process in self.world.processes:
            process.crash()

    def _whole(self) -> bool:
        nodes, controllers = self.shape.nodes(), self.shape.controller_names()
        return all(self.ready(controller, node) for controller in controllers for node in nodes)

    # --- as a Stage ---------------------------------------------------------------------------------------------

    def begin(self, name: str, prompt: tuple[int, ...], options: Options, at: int, prefill_at: int | None) -> Asked:
        client = self.world.clients[0]
        apart = None if prefill_at is None else client.controllers[prefill_at]
        leg: Any = self.shape.leg
        request = make_request(prompt, options, Controllers(client.controllers[at], apart), client.rng, leg=leg)
        asked = Asked(name, prompt, options["max_tokens"], request)
        asked_of_world: Any = asked
        self.world.asked.append(asked_of_world)
        client.call(lambda: client.traffic.begin(request, asked.update))
        return asked

    def cancel(self, asked: Asked) -> None:
        client = self.world.clients[0]
        client.call(lambda: client.traffic.cancel(asked.rid, asked.update))

    def until(self, true: Callable[[], bool], what: str) -> None:
        end = self.world.now + WAIT_S
        while not true():
            assert self.world.now < end, f"{what}: not within {WAIT_S:g} s"
            self.world._until(self.world.now + LOOK_S)

    def ready(self, controller: str, node: str) -> bool:
        process: Any = self.world.by_name[controller]
        if not process.alive:
            return False
        table = process.part.core.table.ranks
        ranks = self.shape.nodes()[node][1]
        return all((node, n) in table and table[node, n].ready for n in range(ranks))

    def kill(self, name: str) -> None:
        self._befall("crash", name)

    def drain(self, name: str) -> None:
        self._befall("leave" if name.startswith("controller") else "drain", name)

    def pause(self, name: str) -> None:
        process = self.world.by_name[name]
        self._last(("pause", name), lambda: process.pause(2 * AGAIN_S))
        self.world._silent(lambda: process.paused_until, [(process, None)])

    def resume(self, name: str) -> None:
        self._lasting.discard(("pause", name))
        self.world.unsteady[name] = self.world.now + 4 * AGAIN_S

    def reset(self, name: str, other: str) -> None:
        for pipe in self.world._between(self.world.by_name[name], other):
            self.world.network.reset(pipe)

    def hold(self, name: str, other: str) -> None:
        cut = self.world.network.cut

        def both() -> None:
            cut[name, other] = cut[other, name] = self.world.now + 2 * AGAIN_S

        self._last(("hold", name, other), both)
        pair = self.world.by_name[name], self.world.by_name[other]
        self.world._silent(lambda: cut[name, other], [pair])

    def free(self, name: str, other: str) -> None:
        self._lasting.discard(("hold", name, other))
        for each in (name, other):
            self.world.unsteady[each] = self.world.now + 4 * AGAIN_S

    def slow(self, name: str, other: str, late_s: float) -> None:
        self.world.network.slow[name] = late_s, float("inf") if late_s else 0.0

    def at_rest(self) -> str:
        """Return what is not as it must be once all is over; empty: nothing."""
        end, why = self.world.now + REST_S, ""
        while self.world.now < end:
            self.world._until(self.world.now + 0.5)
            try:
                laws.at_rest(self.world)
            except Broken as error:
                why = str(error)
            else:
                return ""
        return why

    # --- inside -------------------------------------------------------------------------------------------------

    def _befall(self, kind: Any, name: str) -> None:
        self.world._befall(Fault(self.world.now, kind, name))

    def _last(self, what: tuple[str, ...], function: Callable[[], None]) -> None:
        """Do it over and over, until `what` is over."""
        self._lasting.add(what)

        def again() -> None:
            if what in self._lasting:
                for name in what[1:]:
                    self.world.unsteady[name] = float("inf")
                function()
                self.world.at(self.world.now + AGAIN_S, again)

        again()


@contextmanager
def simulated(shape: Shape, seed: int = 0, joined: bool = True) -> Iterator[SimulatedStage]:
    """Play in a cluster whose ranks are ready at all controllers and, if `joined`, have heard the bus."""
    stage = SimulatedStage(shape, seed)
    with installed(stage.world):
        try:
            stage.start(joined)
            yield stage
        finally:
            with suppress(Exception):
                stage.stop()

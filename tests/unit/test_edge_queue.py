"""What a key pays while its requests wait in a controller's queue: a real edge, client core and controller core, joined
in memory, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import controller_world
import edge_world
import pytest
from controller_world import hello, submit

from bus.actions import Send
from bus.wire.messages import Dispatch, Failed, Submit, Tokens
from pdbus.client import AsyncStream, Options
from pdbus.client.core import ClientCore, Patience
from pdbus.client.options import controllers_of, make_request
from pdbus.client.output import Deliver, Ended
from pdbus.client.traffic import Sink
from pdbus.edge.client import EdgeClient

CONTROLLER = "ipc:///c.clients"
RANK = hello("u", dp_size=1, max_running=1, model="sim")
PROMPT = 9  # tokens
STEP_S = 0.05


class QueueClient(edge_world.ScriptedClient):
    """What an edge uses of AsyncClient, before a controller with one rank, which runs one request at a time."""

    def __init__(self, patience: Patience, **settings: Any) -> None:
        super().__init__(lambda ids, options: (), edge_world.status(edge_world.rank("u", "unified")))
        self.channel = self  # type: ignore[assignment]
        self.core = ClientCore(patience, random.Random(1))
        self.controller = controller_world.unified(RANK, request_overcommit=1.0, **settings)
        self.submits: list[Submit] = []
        self._sinks: dict[str, Sink] = {}
        self._answered = 0

    async def generate_tokens(self, ids: Sequence[int], **options: Any) -> AsyncStream:
        request = make_request(ids, Options(**options), controllers_of("ipc:///c", None, None), random.Random(2))  # type: ignore[typeddict-item]
        stream = AsyncStream(self, request, None, dict)  # type: ignore[arg-type]
        self._sinks[request.rid] = stream._sink
        self._take(self.core.begin(request, self.controller.now))
        return stream

    def cancel(self, rid: str, sink: Any = None) -> None:
        self._take(self.core.cancel(rid, self.controller.now))

    def drop(self, rid: str, sink: Any) -> None: ...

    def step(self) -> None:
        """Let 50 ms pass."""
        self.controller.pass_time(STEP_S, alive=[RANK])
        self._take(self.core.tick(self.controller.now))

    def dispatch(self) -> Dispatch:
        """What the rank was given last."""
        return self.controller.dispatches()[-1]

    def finish(self, dispatch: Dispatch, *ids: int) -> None:
        """The rank has run it, and answers with `ids`."""
        self.controller.progress(RANK, started=[dispatch])
        self._hear()
        tokens = Tokens(dispatch.rid, dispatch.attempt, 0, ids, "stop" if ids else "")
        self._take(self.core.received(RANK.endpoint, tokens, self.controller.now))
        self.controller.progress(RANK, ended=[dispatch])
        self._hear()

    def _take(self, actions: Sequence[object]) -> None:
        for action in actions:
            if isinstance(action, Deliver):
                self._sinks[action.rid](action.ids)
            elif isinstance(action, Ended):
                self._sinks.pop(action.rid)(action.result)
            elif isinstance(action, Send) and action.peer == CONTROLLER:
                if isinstance(action.message, Submit):
                    self.submits.append(action.message)
                self.controller.feed(
                    controller_world.FromClient("edge", action.message, tuple(bytes(each) for each in action.frames))  # type: ignore[arg-type]
                )
        self._hear()

    def _hear(self) -> None:
        while self._answered < len(self.controller.to_clients):
            answer = self.controller.to_clients[self._answered]
            self._answered += 1
            if answer.peer == "edge":
                self._take(self.core.received(CONTROLLER, answer.message, self.controller.now))


class World(edge_world.World):
    """An edge with one key, `a`, before such a client. `busy` occupies the rank by another client's request."""

    def __init__(self, path: Path, limits: str, patience: Patience, *, busy: bool = True, **settings: Any) -> None:
        path.write_text(f'[a]\nkey = "sk-12345"\n{limits}\n')
        path.chmod(0o600)
        super().__init__(api_keys=str(path))
        self.cluster = QueueClient(patience, **settings)
        self.edge._client = self.cluster  # type: ignore[assignment]
        (self.key,) = self.edge._keys._keys.values()  # type: ignore[union-attr]
        self.other: Dispatch | None = None
        if busy:
            self.cluster.controller.submit(submit("other"), peer="another client")
            self.other = self.cluster.dispatch()

    def begin(self, **more: Any) -> asyncio.Task[edge_world.Response]:
        said = {"authorization": "Bearer sk-12345"}
        return asyncio.create_task(self.post("/v1/completions", {"prompt": "x" * PROMPT} | more, headers=said))

    async def pass_time(self) -> None:
        """50 ms, and whatever the edge does then."""
        self.cluster.step()
        await self.turn()

    async def turn(self) -> None:
        self.now = 100.0 + self.cluster.controller.now
        for _ in range(50):
            await asyncio.sleep(0)

    @property
    def paid(self) -> float:
        return self.key.tokens_per_minute - self.key._tokens.left


def test_what_is_shed_after_it_waited_costs_nothing(tmp_path: Path) -> None:
    """It counts while it waits; the controller gives it up when it can't keep its SLO any more."""
    world = World(
        tmp_path / "keys", "tokens_per_minute = 1000", Patience(6, 10.0, overloaded_s=1.0),
        queue_order="slo", ttft_slo_s=3.0, shed="hopeless",
    )  # fmt: skip

    async def run() -> edge_world.Response:
        asked = world.begin()
        await world.turn()
        began = world.cluster.controller.now
        while not asked.done():
            assert (world.paid, world.key.in_flight) == (PROMPT, 1)
            await world.pass_time()
        assert 2.5 < world.cluster.controller.now - began < 3.5
        return await asked

    answer = asyncio.run(run())
    assert (answer.status, answer.error["code"]) == (429, "overloaded")
    assert ({each.attempt for each in world.cluster.submits}, world.paid, world.key.in_flight) == ({1}, 0, 0)


@pytest.mark.parametrize(("code", "status", "least", "most"), [("overloaded", 429, 0, 1), ("no_rank", 503, 2, 5)])
def test_an_edge_waits_for_a_cluster_no_longer_than_its_page_says(
    tmp_path: Path, code: str, status: int, least: float, most: float
) -> None:
    """E8"""
    patience = EdgeClient("ipc:///c")._patience
    world = World(tmp_path / "keys", "tokens_per_minute = 1000", patience, queue_requests=1)
    controller = world.cluster.controller
    if code == "overloaded":
        controller.submit(submit("waits"), peer="another client")
    else:
        controller.cut(RANK)
    began = controller.now
    answer = asyncio.run(_tried_again(world, runs=False))
    assert (answer.status, answer.error["code"]) == (status, code)
    assert least <= controller.now - began <= most + STEP_S


def test_a_prompt_is_paid_once_whatever_is_tried_again(tmp_path: Path) -> None:
    """A full queue turns it away 12 times; then nothing is paid, or, where the rank has it at last, one prompt."""
    for runs in (False, True):
        world = World(tmp_path / "keys", "tokens_per_minute = 1000", Patience(12, 10.0), queue_requests=1)
        world.cluster.controller.submit(submit("waits"), peer="another client")
        answer = asyncio.run(_tried_again(world, runs=runs))
        assert ([each.attempt for each in world.cluster.submits], world.key.in_flight) == ([*range(1, 14)], 0)
        if runs:
            assert (answer.status, world.paid) == (200, PROMPT + 2)
        else:
            assert (answer.status, answer.error["code"], world.paid) == (429, "overloaded", 0)
            assert len(world.cluster.controller.answers(Failed, "edge")) == 13


async def _tried_again(world: World, *, runs: bool) -> edge_world.Response:
    asked = world.begin()
    await world.turn()
    while not asked.done():
        assert (world.paid, world.key.in_flight) == (PROMPT, 1)
        if runs and len(world.cluster.controller.answers(Failed, "edge")) == 12 and world.other is not None:
            world.cluster.finish(world.other)  # there is room
            world.cluster.finish(world.cluster.dispatch())
            world.other = None
        if world.other is None and (mine := world.cluster.dispatch()).rid == world.cluster.submits[0].rid:
            world.cluster.finish(mine, 5, 6)
            await world.turn()
            break
        await world.pass_time()
    return await asked


def test_more_answers_than_a_key_may_ever_have_are_not_submitted(tmp_path: Path) -> None:
    world = World(tmp_path / "keys", "requests_in_flight = 4", Patience())

    async def run() -> None:
        refused = await world.begin(n=5)
        assert (refused.status, refused.error["code"], refused.error["param"]) == (400, "quota_exceeded", "n")
        assert not world.cluster.submits
        four = world.begin(n=4)
        await world.turn()
        assert (len(world.cluster.submits), world.key.in_flight) == (4, 4)
        assert (await world.begin()).status == 429
        assert world.other is not None
        world.cluster.finish(world.other)
        for _ in range(4):
            world.cluster.finish(world.cluster.dispatch(), 5)
        assert (await four).status == 200
        assert world.key.in_flight == 0
        one = world.begin()
        await world.turn()
        world.cluster.finish(world.cluster.dispatch(), 5)
        assert (await one).status == 200

    asyncio.run(run())

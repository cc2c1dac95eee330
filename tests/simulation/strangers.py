"""Others that ask a simulated cluster for something: an edge, a client of another make, and one that wants what is not
its own. The last two speak the wire by themselves."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import zmq

from bus.errors import BusError
from bus.wire.codec import decode, encode
from bus.wire.messages import (
    CONTROLLER_TO_CLIENT,
    FROM_NODE_DATA,
    Accepted,
    Attach,
    Cancel,
    Detach,
    Failed,
    KvDone,
    KvPull,
    Location,
    Message,
    Params,
    Status,
    StatusQuery,
    Submit,
    Tokens,
)
from pdbus.edge.cluster import View
from simulation.broken import Broken
from simulation.embedded import every
from simulation.process import ClientProcess, Process
from simulation.runtime import SimLoop, SimSockets, send

if TYPE_CHECKING:
    from simulation.world import Asked, World

LOOK_S = 1.0  # an edge asks for the status so often
RESEND_S = 1.0
SILENT_S = 6.0  # of a stream or a controller: the foreign client gives the try up
ANSWER_S = 10.0  # a cancel is answered within so long
TRIES = 8


class EdgeProcess(ClientProcess):
    """An edge's use of the client's core: it asks for the status, and drops streams whose HTTP client has gone."""

    def _open(self, exits: ExitStack) -> None:
        super()._open(exits)
        self.view = View()
        self._answer: Future[Status] | None = None
        every(self, LOOK_S, self._look)

    def drop(self, asked: Asked) -> None:
        """Its HTTP client has gone: nobody reads what comes."""
        asked.abandoned = asked.cancelled = True
        self.traffic.dropped.append((asked.rid, asked.update))

    def left_over(self) -> str:
        return self.view.unready(self.world.now)

    def _look(self) -> None:
        if self._answer is not None and self._answer.done():
            with suppress(BusError):
                self.view = self.view.followed_by(self._answer.result(), self.world.now)
            self._answer = None
        if self._answer is None:
            self._answer = Future()
            self.traffic.ask(self.controllers[0], StatusQuery, Status, self._answer, LOOK_S, None, 0.3)


class RawProcess(Process):
    """A process of somebody else's make: a DEALER to each address it speaks with, and the wire's messages."""

    def __init__(self, world: World, name: str, host: str, controllers: Sequence[str]) -> None:
        super().__init__(world, name, host)
        self.controllers = controllers

    def _open(self, exits: ExitStack) -> None:
        self.loop = SimLoop(self)
        self._sockets: Any = SimSockets(self)
        self._dealers: dict[str, Any] = {}
        exits.callback(self._sockets.close)

    def say(self, endpoint: str, message: Message, frames: Sequence[bytes] = ()) -> None:
        dealer = self._dealers.get(endpoint)
        if dealer is None:
            dealer = self._dealers[endpoint] = self._sockets.dealer(endpoint)
            self.loop.add(dealer, partial(self._came, endpoint))
        with suppress(zmq.Again):
            send(dealer, [encode(message), *frames])

    def heard(self, endpoint: str, message: Message) -> None:
        raise NotImplementedError

    def _came(self, endpoint: str, frames: list[bytes]) -> None:
        table = CONTROLLER_TO_CLIENT if endpoint in self.controllers else FROM_NODE_DATA
        self.heard(endpoint, decode(frames[0], table))


class _Try:
    """What a foreign client knows of a request."""

    def __init__(self, asked: Asked, endpoint: str, room: int, now: float) -> None:
        self.asked = asked
        self.endpoint = endpoint
        self.room = room
        self.attempt = 1
        self.offset = 0
        self.tries = 1
        self.decode: Location | None = None
        self.heard_at = self.said_at = now
        self.withdrawn_at = float("-inf")  # when it sent a cancel of a try


class ForeignProcess(RawProcess):
    """A client of another make, which says less than ours: no room in `attach` and `cancel`, nothing of gaps, no ranks
    to avoid. After silence or a failure it submits again as the next attempt."""

    kind = "client"

    def _open(self, exits: ExitStack) -> None:
        super()._open(exits)
        self._tries: dict[str, _Try] = {}
        every(self, 0.1, self._tick)

    def ask(self, asked: Asked) -> None:
        room = asked.room = self.world.rng.getrandbits(63)
        endpoint = self.controllers[asked.spec.controller]
        mine = self._tries[asked.rid] = _Try(asked, endpoint, room, self.world.now)
        with self.world.runs(self):
            self._submit(mine)

    def cancel(self, asked: Asked) -> None:
        mine = self._tries.get(asked.rid)
        if mine is not None:
            with self.world.runs(self):
                self.say(mine.endpoint, Cancel(asked.rid))
            self._over(mine, "cancelled")

    def heard(self, endpoint: str, message: Message) -> None:
        mine = self._tries.get(getattr(message, "rid", ""))
        if mine is None:
            return
        if isinstance(message, Accepted) and message.attempt >= mine.attempt and endpoint == mine.endpoint:
            again = mine.decode is not None and message.attempt > mine.attempt
            mine.attempt, mine.heard_at = message.attempt, self.world.now
            if again and len(mine.asked.output.ids) > mine.offset:
                self._again(mine)  # it was begun again from where this try began
            elif message.decode is not None:
                mine.decode = message.decode
                self.say(message.decode.endpoint, Attach(message.rid, mine.attempt, len(mine.asked.output.ids)))
        elif isinstance(message, Failed) and message.attempt >= mine.attempt and endpoint == mine.endpoint:
            if message.code == "cancelled" and self.world.now - mine.withdrawn_at < ANSWER_S:
                return  # the answer to its own, with the number that it has given to the next try meanwhile
            self._again(mine, message.code) if message.retryable else self._over(mine, message.code)
        elif isinstance(message, Tokens) and mine.decode is not None and endpoint == mine.decode.endpoint:
            self._tokens(mine, message)

    def _tokens(self, mine: _Try, message: Tokens) -> None:
        have = len(mine.asked.output.ids)
        if message.attempt != mine.attempt or message.start > have:
            return
        mine.heard_at = self.world.now
        if new := message.ids[have - message.start :]:
            mine.asked.update(new)
        if message.finish in ("stop", "length"):
            self._over(mine, "ok")
        elif message.finish:
            self._again(mine)

    def _tick(self) -> None:
        now = self.world.now
        for mine in list(self._tries.values()):
            if now - mine.heard_at > SILENT_S:
                self._again(mine)
            elif mine.decode is None and now - mine.said_at > RESEND_S:
                self._submit(mine)
            elif mine.decode is not None and now - max(mine.heard_at, mine.said_at) > RESEND_S:
                mine.said_at = now
                have = len(mine.asked.output.ids)
                self.say(mine.decode.endpoint, Attach(mine.asked.rid, mine.attempt, have))

    def _again(self, mine: _Try, code: str = "peer_lost") -> None:
        asked = mine.asked
        if len(asked.output.ids) == asked.spec.max_tokens:
            self._over(mine, "ok")
        elif mine.tries == TRIES:
            self._over(mine, code)
        else:
            if mine.decode is not None:
                self.say(mine.decode.endpoint, Detach(asked.rid, mine.attempt))
            self.say(mine.endpoint, Cancel(asked.rid))
            mine.withdrawn_at = self.world.now
            mine.attempt, mine.tries, mine.decode = mine.attempt + 1, mine.tries + 1, None
            mine.offset = len(asked.output.ids)
            mine.heard_at = self.world.now
            mine.said_at = self.world.now - RESEND_S + 0.3  # submitted again at a tick soon

    def _submit(self, mine: _Try) -> None:
        asked, spec = mine.asked, mine.asked.spec
        ids = (*spec.prompt, *asked.output.ids[: mine.offset])
        mine.said_at = self.world.now
        submit = Submit(
            asked.rid, "pair" if self.world.spec.paired else "unified", len(ids), spec.max_tokens - mine.offset,
            bootstrap_room=mine.room, attempt=mine.attempt, offset=mine.offset,
        )  # fmt: skip
        self.say(mine.endpoint, submit, (struct.pack(f"<{len(ids)}i", *ids), encode(Params(ignore_eos=True))))

    def _over(self, mine: _Try, code: str) -> None:
        del self._tries[mine.asked.rid]
        if mine.decode is not None and self.alive:
            with self.world.runs(self):
                self.say(mine.decode.endpoint, Detach(mine.asked.rid, mine.attempt))
        if code == "ok" and len(mine.asked.output.ids) != mine.asked.spec.max_tokens:
            raise Broken("it is whole", f"{mine.asked.rid} at {self.name}: {mine.asked.output.ids}", mine.asked.rid)
        mine.asked.end(code)

    def left_over(self) -> str:
        return f"requests {list(self._tries)}" if self._tries else ""


class IntruderProcess(RawProcess):
    """A client with a key of its own, which says what it likes of others' rids and rooms."""

    kind = "client"

    def _open(self, exits: ExitStack) -> None:
        super()._open(exits)
        every(self, 0.05, self._meddle)

    def heard(self, endpoint: str, message: Message) -> None:
        if isinstance(message, Tokens) and (message.ids or message.others):
            raise Broken("no client reads another key's tokens", f"{self.name} from {endpoint}: {message}", message.rid)
        self.world.counts[f"intruder told {type(message).__name__}"] += 1

    def _meddle(self) -> None:
        world, rng = self.world, self.world.rng
        # a dispatcher's requests are no key's, and so anybody's
        alive = [
            asked
            for asked in world.asked
            if asked.lives and asked.room is not None and asked.process and asked.process.key.startswith("clients/")
        ]
        if not alive:
            return
        asked = rng.choice(alive)
        nodes = [node for node in world.nodes if node.alive]
        room = rng.choice((asked.room, None))
        assert asked.room is not None
        if rng.random() < 0.4 or not nodes:
            self.say(rng.choice(self.controllers), Cancel(asked.rid, room))
            return
        node = rng.choice(nodes).part.host
        rank = rng.choice(list(node.ranks.values()))
        attempt = rng.randint(1, 3)
        said: Message = rng.choice(
            (
                Attach(asked.rid, attempt, 0, False, room),
                Detach(asked.rid, attempt),
                KvPull(asked.room, attempt, rank.epoch, 0, 1),
                KvDone(asked.room, attempt),
            )
        )
        self.say(node.endpoint, said)

"""A controller core joined to simulated clients and nodes in memory, validated after every event."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import laws

from bus.actions import Note, Publish
from bus.wire.codes import Code
from bus.wire.messages import (
    Ack,
    CancelLeg,
    Dispatch,
    Ended,
    Failed,
    Hello,
    Load,
    LoadReport,
    Message,
    NodeState,
    Ping,
    Pong,
    Progress,
    Role,
    Submit,
)
from controller.config import ControllerConfig
from controller.core import ControllerCore
from controller.events import Event, FromClient, FromNode, Over, Published, Tick, ToClient, ToNode, Unreachable
from controller.shell import IDLE_TICK_S, TICK_S

M = TypeVar("M", bound=Message)
EPOCH = 77
PARAMS = b"params"


def hello(
    instance: str,
    dp_rank: int = 0,
    *,
    role: Role = "unified",
    dp_size: int = 2,
    epoch: int = 1,
    state: NodeState = "ready",
    max_context: int = 1000,
    kv_capacity: int = 1000,
    max_running: int = 4,
    model: str = "m",
    running: tuple[tuple[str, int], ...] = (),
    started_us: int = 0,
    clients: tuple[tuple[str, int], ...] = (),
) -> Hello:
    return Hello(
        instance=instance, dp_rank=dp_rank, epoch=epoch, role=role, model=model, dp_size=dp_size, state=state,
        endpoint=f"ipc:///{instance}.{dp_rank}", max_context=max_context, kv_capacity=kv_capacity,
        max_running=max_running, block_tokens=16, running=running, started_us=started_us, clients=clients,
    )  # fmt: skip


def load(seq: int, *, running: int = 0, waiting: int = 0, waiting_tokens: int = 0, kv_tokens: int = 0, step: int = 0,
         acks: Iterable[tuple[int, int, int]] = (), **totals: int) -> Load:  # fmt: skip
    return Load(
        seq=seq, step=step, running=running, waiting=waiting, waiting_tokens=waiting_tokens, kv_tokens=kv_tokens,
        kv_capacity=1000, max_running=4, acks=tuple(Ack(*ack) for ack in acks), **totals,
    )  # fmt: skip


def submit(rid: str = "r", leg: str = "unified", prompt_tokens: int = 10, max_tokens: int = 5, **rest: Any) -> Submit:
    if leg != "unified" and "bootstrap_room" not in rest:
        rest["bootstrap_room"] = sum(rid.encode())
    return Submit(rid, leg, prompt_tokens, max_tokens, **rest)  # type: ignore[arg-type]


def prompt(tokens: int) -> bytes:
    return b"\0\0\0\0" * max(0, tokens)


class World:
    """Feeds events, keeps every action by receiver."""

    def __init__(self, *, now: float = 0.0, spans: bool = False, **settings: Any) -> None:
        settings.setdefault("settle_s", 0.0)
        self.core = ControllerCore(
            ControllerConfig(bus="ipc:///x/bus", controller="ipc:///x/c", **settings), EPOCH, now, spans=spans
        )
        self.now = now
        self.to_clients: list[ToClient] = []
        self.to_nodes: list[ToNode] = []
        self.published: list[Message] = []
        self.notes: list[Note] = []
        self.over: list[Over] = []
        self.seqs: dict[tuple[str, int, int], int] = {}
        self.after: Callable[[], None] = lambda: None  # called after every event
        self.answered: dict[str, int] = {}  # by node's connection: how many of `to_nodes` were looked at for pings
        self.gone: set[Any] = set()  # connections of nodes that are gone: what is sent there meets that
        self._rising = laws.Rising()
        laws.watch(self.obey)

    # --- events -------------------------------------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        outbox = self.core.handle(event, self.now)
        for action in outbox:  # what a failed send leads to joins the end of the list, as in controller.traffic
            if isinstance(action, ToNode) and action.peer in self.gone:
                outbox += self.core.handle(Unreachable(action.peer, action.message), self.now)
            elif isinstance(action, ToClient):
                self.to_clients.append(action)
            elif isinstance(action, ToNode):
                self.to_nodes.append(action)
            elif isinstance(action, Publish):
                self.published.append(action.message)
            elif isinstance(action, Over):
                self.over.append(action)
            else:
                self.notes.append(action)
        self.core.validate()
        self._rising.step(self.core.table.ranks)
        self.after()

    def obey(self) -> None:
        """The laws of what it has counted."""
        seen = laws.of_controller(self.core, self.now, complete=self._rising.complete)
        laws.check(seen, rest=not self.core.life.requests)

    def pass_time(self, seconds: float, *, alive: Iterable[Hello] = (), dozes: bool = False) -> None:
        """Tick by tick; the nodes of `alive` stay heard over their connections. `dozes`: ticks are as rare as those of
        the process where the core needs none."""
        until, idle_s = self.now + seconds, min(IDLE_TICK_S, self.core.config.lease_s / 12)
        while self.now < until:
            self.now = min(until, self.now + (idle_s if dozes and not self.core.needs_ticks else TICK_S))
            for node in alive:
                self.feed(FromNode(peer_of(node), Pong(0, 0, False)))
            self.feed(Tick())

    def join(self, node: Hello, *, peer: str = "") -> None:
        self.feed(FromNode(peer or peer_of(node), node))

    def cut(self, *nodes: Hello) -> None:
        """Their connections are gone, and they do not come back within a moment: what they ran is given up."""
        for node in nodes:
            self.feed(Unreachable(peer_of(node)))
        self.pass_time(0.55)

    def back(self, node: Hello, *, peer: str) -> None:
        """The same start says hello over another connection, and then all that it has to say."""
        self.join(node, peer=peer)
        self.pongs(peer)

    def pongs(self, peer: str) -> None:
        """Answer every ping to `peer` that has no answer yet, and those that follow from it."""
        answered = self.answered.get(peer, 0)
        while answered < len(self.to_nodes):
            action = self.to_nodes[answered]
            answered = self.answered[peer] = answered + 1
            if action.peer == peer and isinstance(action.message, Ping):
                self.feed(FromNode(peer, Pong(action.message.n, 0, False)))

    def submit(self, request: Submit, *, peer: str = "client", frames: tuple[bytes, ...] | None = None) -> None:
        payload = (prompt(request.prompt_tokens), PARAMS) if frames is None else frames
        self.feed(FromClient(peer, request, payload))

    def progress(self, node: Hello, *, started: Iterable[Dispatch] = (), ended: Iterable[Dispatch] = (),
                 code: Code = "ok", peer: str = "", **said: Any) -> None:  # fmt: skip
        message = Progress(
            node.instance,
            node.dp_rank,
            node.epoch,
            tuple((d.rid, d.attempt) for d in started),
            tuple(Ended(d.rid, d.attempt, d.leg, code, **said) for d in ended),
        )
        self.feed(FromNode(peer or peer_of(node), message))

    def report(self, node: Hello, **fields: Any) -> None:
        key = (node.instance, node.dp_rank, node.epoch)
        self.seqs[key] = self.seqs.get(key, 0) + 1
        seq = self.seqs[key]
        self.feed(Published(LoadReport(node.instance, node.dp_rank, node.epoch, seq, load(seq, **fields))))

    # --- what came of it ----------------------------------------------------------------------------------------

    def answers(self, kind: type[M], peer: str | None = None) -> list[M]:
        return [a.message for a in self.to_clients if isinstance(a.message, kind) and peer in (None, a.peer)]

    def sent(self, kind: type[M], node: Hello | None = None) -> list[M]:
        return [
            a.message
            for a in self.to_nodes
            if isinstance(a.message, kind) and (node is None or a.peer == peer_of(node))
        ]

    def dispatches(self, node: Hello | None = None) -> list[Dispatch]:
        return self.sent(Dispatch, node)

    def cancels(self, node: Hello | None = None) -> list[CancelLeg]:
        return self.sent(CancelLeg, node)

    def known(self, node: Hello) -> Any:
        """The controller's record of the rank."""
        return self.core.members.known((node.instance, node.dp_rank))

    def work(self, node: Hello) -> Any:
        """The live legs at the rank, by rid."""
        return self.known(node).work

    def rank(self, node: Hello) -> Any:
        """The load of the rank."""
        return self.core.table.ranks[(node.instance, node.dp_rank)]

    def assert_empty(self) -> None:
        """Nothing lives, nothing is outstanding, nothing is kept."""
        life = self.core.life
        assert not life.requests
        assert (life.queue.requests, life.queue.bytes, life.table.payload_bytes) == (0, 0, 0)
        self.core.validate()  # so nothing is kept of requests, of which there are none
        assert not any(rank.work for rank in self.core.members.ranks.values())
        assert not any(load.outstanding or load.outstanding_tokens for load in self.core.table.ranks.values())


def peer_of(node: Hello) -> str:
    return f"{node.instance}/{node.dp_rank}@{node.epoch}"


P = [hello("p", n, role="prefill") for n in range(2)]
D = [hello("d", n, role="decode") for n in range(2)]
U = [hello("u", n) for n in range(2)]


def pd(**settings: Any) -> World:
    """A controller whose two prefill and two decode ranks have joined."""
    settings = {"prefill_method": "total_tokens", "decode_method": "total_requests", **settings}
    world = World(**settings)
    for node in (*P, *D):
        world.join(node)
    return world


def unified(*nodes: Any, **settings: Any) -> World:
    """One that `nodes` have joined, or two unified ranks."""
    world = World(**settings)
    for node in nodes or U:
        world.join(node)
    return world


def failure(world: World) -> Failed:
    """The only one that clients were told of."""
    failures = world.answers(Failed)
    assert len(failures) == 1, failures
    return failures[0]

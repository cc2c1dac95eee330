"""Prefill, decode and unified cores with sim engines, joined in memory: no socket, virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import laws
from virtual_time import VirtualTime

from bus.actions import Note, Send
from bus.wire.codec import encode
from bus.wire.codes import Code
from bus.wire.hashing import block_crc32, token_bytes
from bus.wire.messages import (
    Attach,
    Dispatch,
    Ended,
    FoundBy,
    KvBlock,
    KvDone,
    KvPull,
    Location,
    Params,
    ReadBack,
    Role,
    Tokens,
)
from nodes.link.actions import (
    Action,
    Leave,
    Locate,
    Over,
    Register,
    SendBlock,
    Unlocate,
    Unregister,
)
from nodes.link.config import Limits
from nodes.link.core import RankCore
from nodes.link.driver import RankDriver
from nodes.link.runner import Runner
from nodes.link.streams import Streams
from nodes.own.blocks import BlockPool
from nodes.own.engines.sim import SimEngine
from nodes.own.runner import OwnRunner
from nodes.own.scheduler import Scheduler

VOCAB = 512


class World(VirtualTime):
    """Virtual time, and delivery that a test can tamper with (`tamper(message, data) -> data | None` to lose it)."""

    def __init__(self) -> None:
        super().__init__(100.0)
        self.ranks: dict[str, Rank] = {}
        self.rooms: dict[int, tuple[Location, int]] = {}
        self.tamper: Callable[[Any, bytes], bytes | None] = lambda message, data: data
        self.jitter: Callable[[], float] = lambda: 0.0  # seconds added to a message's way: reorders
        self.copies: Callable[[], int] = lambda: 1

    def run(self, seconds: float, tick_s: float = 0.1) -> None:
        end = self.now + seconds
        next_tick = self.now
        while True:
            due = min(next_tick, self.next_due)
            if due >= end:
                self.now = end
                return
            self.now = max(self.now, due)
            if self.next_due <= self.now:
                self.fire()
                for rank in self.ranks.values():
                    if rank.driver.dirty and not rank.dead:
                        rank.turn()
            else:
                next_tick += tick_s
                for rank in self.ranks.values():
                    if not rank.dead:
                        rank.runner.tick(self.now)
                        rank.do(rank.core.tick(self.now))
                        rank.streams.tick(self.now)


class Rank:
    """One rank's shell, in memory."""

    def __init__(
        self, world: World, role: Role, name: str, blocks: int = 64, limits: Limits | None = None,
        runner: Runner | None = None, decode_cache: bool = False, reads_back: bool = False,
    ) -> None:  # fmt: skip
        self.world = world
        self.name = name
        self.epoch = 1000 + len(world.ranks)
        self.engine = SimEngine(world, blocks=blocks, block_tokens=4, vocab_size=VOCAB)
        self.pool = BlockPool(blocks, 4)
        self.scheduler = Scheduler(self.pool, max_running=4, chunk_tokens=8)
        self.streams = Streams()
        self.runner: Any = runner or OwnRunner(
            self.engine, self.scheduler, decode_cache=decode_cache, reads_back=reads_back
        )
        self.core = RankCore(role, 0, self.runner.facts, self.streams, self.runner.load, limits)
        if hasattr(self.runner, "record_steps"):
            self.runner.record_steps(self.core.recorder)
        self.driver = RankDriver(self.core, self.runner, self._do, world.clock)
        self.tokens: dict[str, list[int]] = {}
        self.finishes: dict[str, Tokens] = {}
        self.ended: dict[tuple[str, int], list[Ended]] = {}
        self.started: list[tuple[str, int]] = []
        self.dropped: list[Unregister] = []
        self.left: list[str] = []  # why the process should leave
        self.notes: list[Note] = []
        self.over: list[Over] = []
        self.wanted: dict[tuple[int, str], tuple[float, int]] = {}  # until when, and from which attempt on
        self.dead = False
        self.sent: Counter[str] = Counter()
        world.ranks[name] = self
        self._began_at = world.now
        laws.watch(self.obey)

    @property
    def location(self) -> Location:
        return Location(self.name, 0, self.epoch, self.name)

    def dispatch(self, rid: str, prompt: list[int], params: Params | None = None, **changes: Any) -> None:
        self.number = getattr(self, "number", 0) + 1
        fields: dict[str, Any] = {
            "rid": rid, "attempt": 1, "leg": self.core.role, "dp_rank": 0, "controller_epoch": 7,
            "number": self.number, "charge": len(prompt), "prompt_tokens": len(prompt), "max_tokens": 6,
            "bootstrap_room": 5,
        } | changes  # fmt: skip
        bare = self.core.role == "decode" and not self.core.facts.wants_prompt
        sampling = encode(params or Params())
        frames = [sampling] if bare else [token_bytes(prompt), sampling]
        self.do(self.core.ingest(0, Dispatch(**fields), frames, self.world.now))

    def read(self, rid: str, attempt: int = 1, have: int = 0) -> None:
        self.tokens.setdefault(rid, [])
        self.streams.attach(b"client", Attach(rid, attempt, have), self.world.now)

    def do(self, actions: list[Action]) -> None:
        self.driver.apply(actions)
        self.turn()

    def turn(self) -> None:
        """As the host's, after each turn of the loop."""
        self.driver.dirty = False
        self.runner.turn(self.world.now)
        self._report()

    def _do(self, action: Action) -> None:
        world = self.world
        match action:
            case Send(peer=peer, message=message) if isinstance(message, KvPull | KvDone):
                self.sent[type(message).__name__] += 1
                self._deliver(peer, message, b"")
            case Send(peer=peer, message=message):
                self._deliver(peer.decode(), message, b"".join(action.frames))
            case SendBlock():
                leg = action.leg
                data = bytes(self.runner.export(leg, action.index))
                self.core.kv_sent(len(data))
                crc = block_crc32(leg.room, leg.attempt, action.index, data)
                self._deliver(
                    action.peer.decode(),
                    KvBlock(leg.room, leg.attempt, action.index, action.tokens, crc, leg.client),
                    data,
                )
            case Register(room=room, attempt=attempt):
                world.rooms[room] = (self.location, attempt)
                for rank in world.ranks.values():
                    rank._answer(room)
            case Unregister():
                self.dropped.append(action)
                world.rooms.pop(action.room, None)
            case Locate(room=room, client=client):
                self.wanted[room, client] = action.deadline, action.attempt
                self._answer(room)
                world.call_later(action.deadline - world.now, lambda: self._give_up(room, client))
            case Unlocate(room=room, client=client):
                self.wanted.pop((room, client), None)
            case Leave(reason=reason):
                self.left.append(reason)
            case Note():
                self.notes.append(action)
            case Over():
                self.over.append(action)

    # as the resolver and the broker would
    def _answer(self, room: int) -> None:
        found = self.world.rooms.get(room)
        if found is None:
            return
        location, attempt = found
        for wanted, client in [
            each for each, (_, least) in self.wanted.items() if each[0] == room and attempt >= least
        ]:
            del self.wanted[wanted, client]
            self.world.call_later(0.001, partial(self._located, room, location, attempt, "ok", client))

    def _give_up(self, room: int, client: str) -> None:
        if self.wanted.get((room, client), (float("inf"), 0))[0] <= self.world.now:
            del self.wanted[room, client]
            self._located(room, None, 0, "unknown_room", client)

    def _located(self, room: int, location: Location | None, attempt: int, code: Code, client: str) -> None:
        if not self.dead:
            found_by: FoundBy = "asked" if location else ""
            self.do(self.core.located(room, location, attempt, code, found_by, self.world.now, client))

    def _deliver(self, to: str, message: Any, data: bytes) -> None:
        changed = self.world.tamper(message, data)
        if changed is None:
            return
        target = self.world.ranks[to]

        def arrive() -> None:
            if target.dead:
                return
            if isinstance(message, KvPull | KvDone):
                target.do(target.core.pulled(self.name.encode(), message, self.world.now))
            else:
                target.do(target.core.kv_message(message, changed, self.world.now))

        for _ in range(self.world.copies()):
            self.world.call_later(0.0005 + self.world.jitter(), arrive)

    def _report(self) -> None:
        for report in self.core.reports.take().values():
            self.started += report.started
            for end in report.ended:
                self.ended.setdefault((end.rid, end.attempt), []).append(end)
        for send in self.streams.flush(self.world.now):
            message = send.message
            assert isinstance(message, Tokens)
            mine = self.tokens.setdefault(message.rid, [])
            assert message.start <= len(mine)
            mine[message.start :] = message.ids
            if message.finish:
                self.finishes[message.rid] = message
        self.scheduler.validate()
        self.streams.validate()

    def obey(self) -> None:
        """The laws of what it has counted."""
        elapsed_s = self.world.now - self._began_at + 1e-6
        laws.check(laws.of_node_rank(self.core, self.runner, elapsed_s))

    def idle(self) -> bool:
        return not len(self.core) and not len(self.scheduler) and self.pool.held == 0 and not len(self.core.sender)

    def code(self, rid: str, attempt: int = 1) -> str:
        assert (rid, attempt) in self.ended, "it has not ended"
        ends = set(self.ended[rid, attempt])  # a late cancel or a repeated dispatch is told the same end again
        assert len(ends) == 1, ends
        return ends.pop().code


PROMPT = [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]


def start(pair: tuple[Rank, Rank], rid: str = "r", prompt: list[int] = PROMPT, **changes: Any) -> None:
    """Dispatch a pair. `read_tokens` is the prefill leg's alone: it reads back."""
    prefill, decode = pair
    tokens = changes.pop("read_tokens", None)
    read = {} if tokens is None else {"read_back": ReadBack(decode.location, tokens)}
    decode.read(rid, changes.get("attempt", 1))
    decode.dispatch(rid, prompt, prefill=prefill.location, **changes)
    prefill.dispatch(rid, prompt, **changes, **read)

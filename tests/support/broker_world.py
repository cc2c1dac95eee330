"""A broker core and those who publish to it and ask it, in memory."""

from __future__ import annotations

from typing import Any

import laws

from bus.actions import Publish, Send
from bus.broker.core import Action, BrokerCore, BrokerLimits
from bus.broker.events import Asked, Published, Tick
from bus.wire import topics
from bus.wire.messages import Answer, Drop, Location, Member, Message, Query, Registration, Rooms

EPOCH = 77


def where(dp_rank: int = 0, epoch: int = 1) -> Location:
    return Location("prefill-0", dp_rank, epoch, f"tcp://10.0.0.7:{7000 + dp_rank}")


def member(dp_rank: int = 0, epoch: int = 1, **fields: Any) -> Member:
    given: dict[str, Any] = {
        "instance": "prefill-0", "dp_rank": dp_rank, "epoch": epoch, "seq": 1, "load": None, "role": "prefill",
        "model": "tiny", "dp_size": 2, "state": "ready", "endpoint": where(dp_rank).endpoint,
        "follow_bootstrap_room": False, "rooms_seq": 0, "interval_s": 1.0,
    }  # fmt: skip
    return Member(**(given | fields))


class Rank:
    """A publisher as the broker sees it; what it publishes and nobody handles is lost."""

    def __init__(self, dp_rank: int = 0, epoch: int = 1) -> None:
        self.dp_rank = dp_rank
        self.epoch = epoch
        self.rooms_seq = 0

    @property
    def location(self) -> Location:
        return where(self.dp_rank, self.epoch)

    def member(self, **fields: Any) -> Published:
        return published(member(self.dp_rank, self.epoch, **({"rooms_seq": self.rooms_seq} | fields)))

    def rooms(self, *register: int, attempt: int = 1, drop: tuple[Drop, ...] = (), snapshot: bool = False) -> Published:
        self.rooms_seq += 1
        claims = tuple(Registration(room, attempt) for room in register)
        at = self.location.endpoint
        return published(Rooms("prefill-0", self.dp_rank, self.epoch, self.rooms_seq, None, at, claims, drop, snapshot))


def published(message: Message) -> Published:
    return Published(topics.of(message), message)


def broker(now: float = 0.0, **limits: Any) -> BrokerCore:
    core = laws.watched(BrokerCore(BrokerLimits(**limits), EPOCH, now))
    core.handle(Tick(), now)
    return core


def ask(core: BrokerCore, peer: bytes, rooms: tuple[int, ...], now: float, watch_s: float = 0.0, id: int = 1) -> Answer:
    (send,) = core.handle(Asked(peer, Query(id, rooms, watch_s)), now)
    assert isinstance(send, Send)
    assert isinstance(send.message, Answer)
    assert send.peer == peer
    return send.message


def sent(actions: list[Action]) -> list[tuple[Any, Message]]:
    return [(action.peer, action.message) for action in actions if isinstance(action, Send)]


def publications(actions: list[Action], kind: type[Message]) -> list[Message]:
    return [each.message for each in actions if isinstance(each, Publish) and isinstance(each.message, kind)]

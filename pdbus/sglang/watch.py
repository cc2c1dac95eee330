"""A subscriber to the bus on a thread of its own: it passes on the messages, and a regular tick. Decides nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeAlias

from bus.endpoints import BusAddress
from bus.errors import RemoteProtocolError
from bus.runtime.intake import Rejections
from bus.runtime.keys import load_keys
from bus.runtime.logs import get_logger
from bus.runtime.loop import Loop
from bus.runtime.peer_keys import LOOK_S
from bus.runtime.service import Service
from bus.runtime.sockets import Sockets
from bus.wire import topics
from bus.wire.messages import Message

TICK_S = 0.25

More: TypeAlias = Callable[[Loop, ExitStack], None]

log = get_logger("sglang")


class Watch(Service):
    """Calls `on_message(message, now)` for each publication under `topics`, and `on_tick(now)` every TICK_S, both on
    this thread, with the time in seconds; `start` and `stop` are those of Service. Messages that cannot be read are
    counted and logged. `more(loop, exits)` may add other sockets to this thread's loop, and closes them at the end by
    `exits`. `keys` is the directory of keys (empty: none), `instance` names the key."""

    part = "sglang-watch"

    def __init__(
        self,
        bus: str,
        topics: tuple[bytes, ...],
        on_message: Callable[[Message, float], None],
        on_tick: Callable[[float], None],
        *,
        keys: str = "",
        instance: str = "",
        more: More | None = None,
    ) -> None:
        self.address = BusAddress(bus)
        self.rejected: Counter[str] = Counter()
        self._rejections = Rejections(log, self.rejected, event="pdbus.message.rejected")
        self._topics = topics
        self._on_message = on_message
        self._on_tick = on_tick
        self._keys = load_keys(keys, "nodes", name=instance) if keys else None
        self._more = more

    def _open(self, exits: ExitStack) -> None:
        sockets = exits.enter_context(Sockets(keys=self._keys))
        self.loop.add(sockets.sub(self.address.subscribe, self._topics), self._received, budget=512)
        if sockets.keyed:
            self.loop.call_every(LOOK_S, sockets.look)
        self.loop.call_every(TICK_S, lambda: self._on_tick(self.loop.clock()))
        if self._more is not None:
            self._more(self.loop, exits)

    def _received(self, frames: list[bytes]) -> None:
        try:
            message = topics.read(frames)
        except RemoteProtocolError as error:
            self._rejections.note(self.address.subscribe, error)
            return
        self._on_message(message, self.loop.clock())

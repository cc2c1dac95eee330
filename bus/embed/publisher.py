"""A rank's publications from an engine's process: its load, its state and the rooms that it prefills. They leave on a
thread of their own, and no call blocks the engine's thread.

`Publisher` puts the scheduler's calls into a bounded queue for a thread that owns the sockets. `PublisherCore`
(`bus.embed.publications`) decides what to publish.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from contextlib import ExitStack
from functools import partial
from typing import Literal, TypeAlias

from msgspec import convert, to_builtins

from bus.actions import Publish
from bus.defaults import REPORT_INTERVAL_S, ROOM_TTL_S
from bus.embed.checked import check
from bus.embed.publications import PublisherCore, integer
from bus.endpoints import BusAddress
from bus.errors import LocalProtocolError, RemoteProtocolError
from bus.runtime.epochs import new_epoch
from bus.runtime.frames import send
from bus.runtime.intake import Mailbox, Rejections
from bus.runtime.keys import load_keys
from bus.runtime.logs import get_logger
from bus.runtime.peer_keys import LOOK_S
from bus.runtime.service import Service
from bus.runtime.sockets import Sockets
from bus.wire import codec, topics
from bus.wire.codes import Code
from bus.wire.messages import Conflict, Load, NodeState, Role

__all__ = ["Publisher"]

MIN_TICK_S = 0.02
FAREWELL_MS = 500  # for the goodbye to leave, where the broker is there
QUEUE_MAX = 65_536
_Command: TypeAlias = (
    tuple[Literal["register"], int | None, int | None]
    | tuple[Literal["drop"], int | None, int | None, Code]
    | tuple[Literal["state"], NodeState]
    | tuple[Literal["follow"], bool]
)

log = get_logger("publisher")


class Publisher(Service):
    """A rank's publisher: `with Publisher(bus, instance="prefill-0", dp_rank=0, role="prefill") as publisher:
    publisher.register(room)`.

    ConfigError for an invalid argument. `interval_s` is the time between load reports, `room_ttl_s` the broker's TTL of
    a room, `epoch` 0 draws one, `keys` is a directory of keys (empty: none). `counts` has what could not be queued and
    what was invalid. When another process publishes for the same rank later, the broker ignores this one, without
    notice to it. Only one exception reaches the engine: PartFailed, from every call once the thread has failed
    (`failure`). Then the bus finds no room of this rank and knows no load of it. An engine that can work without the
    bus catches it.
    """

    part = "publisher"

    def __init__(
        self,
        bus: str | BusAddress,
        *,
        instance: str,
        dp_rank: int,
        role: Role,
        model: str = "",
        dp_size: int = 1,
        endpoint: str = "",
        interval_s: float = REPORT_INTERVAL_S,
        room_ttl_s: float = ROOM_TTL_S,
        follow_bootstrap_room: bool = False,
        state: NodeState = "ready",
        epoch: int = 0,
        keys: str = "",
        queue_max: int = QUEUE_MAX,
    ) -> None:
        self.address = BusAddress(bus) if isinstance(bus, str) else bus
        self.epoch = epoch or new_epoch()
        self.overflows = 0
        self.invalid = 0
        self.rejected: Counter[str] = Counter()
        self._make_core = partial(
            PublisherCore, instance=instance, dp_rank=dp_rank, role=role, model=model, dp_size=dp_size,
            endpoint=endpoint, interval_s=interval_s, room_ttl_s=room_ttl_s, state=state,
            follow_bootstrap_room=follow_bootstrap_room,
        )  # fmt: skip
        self._core = self._make_core(epoch=self.epoch)
        check(self._core)
        self._keys = load_keys(keys, "nodes", name=instance) if keys else None
        self._rejections = Rejections(log, self.rejected)
        self._mailbox: Mailbox[_Command] = Mailbox(queue_max)
        self._newest: Load | None = None
        self._connected = threading.Event()
        self._last_seen_at = -math.inf

    # --- life -------------------------------------------------------------------------------------------------------

    def _open(self, exits: ExitStack) -> None:
        core = self._core
        self._sockets = exits.enter_context(Sockets(keys=self._keys))
        self._pub = self._sockets.pub(self.address.publish)
        exits.callback(self._sockets.close_socket, self._pub, linger_ms=FAREWELL_MS)
        mine = topics.for_rank(topics.TO, core.instance, core.dp_rank)
        self.loop.add(self._sockets.sub(self.address.subscribe, (topics.BEACON, mine)), self._on_frames)
        if self._sockets.keyed:
            self.loop.call_every(LOOK_S, self._sockets.look)
        self._mailbox.open(lambda: self.loop.call_threadsafe(self._drain))
        exits.callback(self._mailbox.close)
        self._timer = self.loop.call_later(0.0, self._tick)

    def _renew(self) -> None:
        counts, self.epoch = self._core.counts, new_epoch()
        self._core = self._make_core(epoch=self.epoch)
        self._core.counts = counts
        self._mailbox.clear()
        self._newest, self._last_seen_at = None, -math.inf
        self._connected.clear()

    def _leave(self) -> None:
        """Publish the goodbye, after which the rank has no rooms, and stop."""
        self._drain()
        self._publish(self._core.goodbye(self.loop.clock()))
        self.loop.stop()

    def _failed(self) -> None:
        self._connected.set()

    _ended = _failed

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the broker's first message has come, or `timeout_s` has passed: then return false. It blocks, so
        it is for start-up only."""
        self.raise_if_failed()
        connected = self._connected.wait(timeout_s)
        self.raise_if_failed()
        return connected

    # --- for the scheduler's loop: nothing here blocks; PartFailed once the thread has failed, and nothing else -------

    def register(self, room: int, attempt: int = 1) -> None:
        """Register `room`: it is or will be prefilled here, and decode ranks may find it until `drop`. `attempt` is
        higher if the request was dispatched again. A value that is no integer or out of range counts as `invalid`."""
        self._hand_over(("register", integer(room), integer(attempt)))

    def drop(self, room: int, attempt: int = 1, code: Code = "ok") -> None:
        """End the registration of `room`, when its KV cache was fetched or will not come. A `code` other than ok says
        why, and is sent to each rank that waits for it."""
        self._hand_over(("drop", integer(room), integer(attempt), code))

    def report(self, load: Load) -> None:
        """Publish the scheduler's load (its `seq` is set on the way). It is a gauge: only the newest is published, and
        it is repeated each interval. Call it after each step."""
        self.raise_if_failed()
        self._newest = load
        self._mailbox.ring()

    def set_state(self, state: NodeState) -> None:
        """Publish the rank's state. Only a `ready` rank gets work."""
        self._hand_over(("state", state))

    def set_follow(self, flag: bool) -> None:
        """Publish whether `bootstrap_room % dp_size` gives the rank of every room of this instance."""
        self._hand_over(("follow", flag))

    def take_conflicts(self) -> list[Conflict]:
        """Return the rooms that another rank claimed too since the last call, the last 1024 at most."""
        self.raise_if_failed()
        taken: list[Conflict] = []
        while self._core.conflicts:
            taken.append(self._core.conflicts.popleft())
        return taken

    @property
    def silent_s(self) -> float:
        """The seconds since the broker's last message; infinite before the first."""
        return math.inf if self._last_seen_at == -math.inf else self.loop.clock() - self._last_seen_at

    @property
    def counts(self) -> dict[str, int]:
        """The counts so far, by name: rooms `registered`, `dropped`, `refreshed`, `restated`, `evicted` (never
        dropped); calls that were not taken (`overflows`: the queue was full) or were `invalid`; messages of others that
        were dropped, by reason (`rejected_*`); and the rooms registered now (`live_rooms`)."""
        core = self._core
        return {
            **core.counts,
            "invalid": core.counts["invalid"] + self.invalid,
            "overflows": self.overflows,
            "live_rooms": core.live_rooms,
            **{f"rejected_{reason}": count for reason, count in self.rejected.copy().items()},
        }

    def _hand_over(self, command: _Command) -> None:
        self.raise_if_failed()
        if not self._mailbox.put(command):
            self.overflows += 1

    # --- its own thread ---------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        commands = self._mailbox.take()
        now = self.loop.clock()
        load, self._newest = self._newest, None
        if load is not None:
            try:
                self._core.report(convert(to_builtins(load), Load), now)
            except (ValueError, TypeError) as error:  # raised by msgspec, and for text that is not Unicode
                self._refuse(f"load: {error}")
        for command in commands:
            try:
                self._publish(self._carry_out(command, now))
            except (ValueError, TypeError) as error:  # raised by msgspec, and for text that is not Unicode
                self._refuse(f"{command}: {error}")
        self._publish(self._core.flush(now))
        self._pace()

    def _carry_out(self, command: _Command, now: float) -> list[Publish]:
        if command[0] == "register":
            return self._core.register(command[1], command[2], now)
        if command[0] == "drop":
            return self._core.drop(command[1], command[2], convert(command[3], Code), now)
        if command[0] == "state":
            return self._core.set_state(convert(command[1], NodeState), now)
        return self._core.set_follow(bool(command[1]), now)

    def _refuse(self, why: str) -> None:
        self.invalid += 1
        if self.invalid == 1:
            log.warning("publication.refused", why=why[:200])

    def _tick(self) -> None:
        """Publish what is due, and set the timer to the next due time: this thread runs in the engine's process."""
        self._publish(self._core.tick(self.loop.clock()))
        self._timer = self.loop.call_later(self._due_s(), self._tick)

    def _pace(self) -> None:
        """Set the next tick again: after a change something may be due sooner."""
        due_s = self._due_s()
        if self.loop.clock() + due_s < self._timer.due:
            self._timer.cancel()
            self._timer = self.loop.call_later(due_s, self._tick)

    def _due_s(self) -> float:
        return max(MIN_TICK_S, self._core.due_s(self.loop.clock()))

    def _on_frames(self, frames: list[bytes]) -> None:
        try:
            message = topics.read(frames)
        except RemoteProtocolError as error:
            self._rejections.note(self.address.subscribe, error)
            return
        now = self._last_seen_at = self.loop.clock()  # only the broker's messages come here
        self._publish(self._core.on_message(message, now))
        if self._core.broker_epoch:
            self._connected.set()
        self._pace()

    def _publish(self, publications: list[Publish]) -> None:
        for publication in publications:
            try:
                frame = codec.encode(publication.message)
            except (LocalProtocolError, TypeError, ValueError, OverflowError) as error:
                self._refuse(f"{type(publication.message).__name__}: {error}")
            else:
                send(self._pub, (topics.of(publication.message), frame))

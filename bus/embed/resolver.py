"""The look-up of rooms (which prefill rank has a request's KV cache) from a decode engine's process: a thread of its
own, and no call that blocks the engine's thread.

`Resolver` puts wants into a bounded queue for a thread that owns the sockets and collects the results for `poll`.
`ResolverCore` (`bus.embed.resolution`) finds the rooms.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from operator import index
from typing import Any

import zmq

from bus.actions import Send
from bus.arguments import instance_name
from bus.embed.publications import integer
from bus.embed.resolution import Action, ResolverCore
from bus.endpoints import BusAddress
from bus.errors import LocalProtocolError, RemoteProtocolError
from bus.runtime.frames import send
from bus.runtime.intake import Mailbox, Rejections
from bus.runtime.keys import load_keys
from bus.runtime.logs import get_logger
from bus.runtime.peer_keys import LOOK_S
from bus.runtime.service import Service
from bus.runtime.sockets import Sockets
from bus.wire import codec, topics
from bus.wire.codes import Code
from bus.wire.messages import FROM_BROKER, Location, Message

__all__ = ["Resolver"]

TICK_S = 0.02
WANTS_MAX = 65_536

log = get_logger("resolver")


class Resolver(Service):
    """A resolver: `with Resolver(bus) as resolver: resolver.want(room); ...; for room, at in resolver.poll().items():
    ...`.

    Every room wanted appears once, in `poll` or in `lost`. If the thread fails (`failure`), earlier results are still
    returned; then every call raises PartFailed. At a stop, open wants are lost as `shutting_down`. `instance` names the
    key to use where the directory `keys` has keys of several nodes.
    """

    part = "resolver"

    def __init__(
        self, bus: str | BusAddress, *, keys: str = "", instance: str = "", wants_max: int = WANTS_MAX
    ) -> None:
        self.address = BusAddress(bus) if isinstance(bus, str) else bus
        self.invalid = 0  # rooms that cannot be reported, because they are no keys of a dict
        self.overflows = 0  # wants dropped because results are not collected
        self.rejected: Counter[str] = Counter()
        self._core = ResolverCore(max_wants=wants_max)
        self._keys = load_keys(keys, "nodes", name=instance) if keys else None
        self._rejections = Rejections(log, self.rejected)
        self._mailbox: Mailbox[tuple[int, dict[str, Any]]] = Mailbox(wants_max)
        self._wants_max = wants_max
        self._found: dict[int, Location] = {}
        self._lost: dict[int, Code] = {}
        self._lock = threading.Lock()  # of the queue and the two dicts above; held for moments only
        self._settled = threading.Event()
        self._connected = threading.Event()
        self._ticking = False

    # --- life -------------------------------------------------------------------------------------------------------

    def _open(self, exits: ExitStack) -> None:
        self._sockets = exits.enter_context(Sockets(keys=self._keys))
        self._dealer = self._sockets.dealer(self.address.bootstrap)
        self.loop.add(self._dealer, partial(self._on_frames, self.address.bootstrap, _read_answer))
        sub = self._sockets.sub(self.address.subscribe, (topics.BEACON,))
        self.loop.add(sub, partial(self._on_frames, self.address.subscribe, topics.read))
        if self._sockets.keyed:
            self.loop.call_every(LOOK_S, self._sockets.look)
        self._mailbox.open(lambda: self.loop.call_threadsafe(self._drain))
        exits.callback(self._mailbox.close)
        self.loop.after_turn(self._pace)

    def _renew(self) -> None:
        counts, self._core = self._core.counts, ResolverCore(max_wants=self._wants_max)
        self._core.counts = counts
        self._ticking = False
        self._connected.clear()
        self._settled.clear()

    def _leave(self) -> None:
        """Lose every open want, and stop."""
        self._drain()
        self._do(self._core.abandon("shutting_down"))
        self.loop.stop()

    def _failed(self) -> None:
        self._connected.set()
        self._settled.set()

    def _ended(self) -> None:
        with self._lock:
            for room, _ in self._mailbox.take():
                self._lost[room] = "shutting_down"
        self._failed()

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the broker's first message has come, or `timeout_s` has passed: then return false. It blocks, so
        it is for start-up only."""
        self.raise_if_failed()
        connected = self._connected.wait(timeout_s)
        self.raise_if_failed()
        return connected

    # --- for the scheduler's loop: nothing here blocks; PartFailed once the thread has failed, and nothing else -------

    def want(
        self,
        *rooms: int,
        deadline_s: float = 30.0,
        attempt: int = 0,
        prefill_instance: str = "",
        dp_rank: int | None = None,
        max_age_s: float = math.inf,
    ) -> None:
        """Find the prefill ranks of `rooms` within `deadline_s` seconds, with this `attempt` or a newer one (0: any);
        `poll` and `lost` have the results. With `dp_rank` the caller knows the rank of `prefill_instance` (empty: of
        the only instance), and only its address is looked up. While the broker is silent, its last topology is used, if
        it is not older than `max_age_s`.

        Rooms that are no integers from 0 to 2^63-1 are lost as `bad_room`; an invalid argument loses all rooms of the
        call as `bad_request`; what the queue cannot take is lost as `too_many`.
        """
        try:
            how = _arguments(attempt, prefill_instance, dp_rank, deadline_s, max_age_s)
        except (TypeError, ValueError, OverflowError):
            how = None
        self.raise_if_inherited()
        with self._lock:
            self.raise_if_failed()  # so that nothing is queued after the thread has ended
            for room in rooms:
                number = integer(room)
                if len(self._found) + len(self._lost) >= 2 * self._wants_max:
                    self.overflows += 1  # the results are not collected
                elif number is None or how is None:
                    self._lose(room, "bad_room" if number is None else "bad_request")
                elif not self._mailbox.put((number, how)):
                    self._lose(number, "too_many")

    def _lose(self, room: Any, code: Code) -> None:
        try:
            self._lost[room] = code
            self._settled.set()
        except TypeError:  # unhashable
            self.invalid += 1

    def poll(self) -> dict[int, Location]:
        """Return the locations of the rooms found since the last call; empty if there are none."""
        if self.inherited or not self._found:
            self.raise_if_failed()
            return {}
        with self._lock:
            found, self._found = self._found, {}
        return found

    def lost(self) -> dict[int, Code]:
        """Return the rooms given up since the last call, with codes (`unknown_room`: it was not registered in time)."""
        if self.inherited or not self._lost:
            self.raise_if_failed()
            return {}
        with self._lock:
            lost, self._lost = self._lost, {}
        return lost

    @property
    def silent_s(self) -> float:
        """The seconds since the broker's last message; infinite before the first."""
        last_seen_at = self._core.broker_seen_at
        return float("inf") if last_seen_at is None else self.loop.clock() - last_seen_at

    @property
    def counts(self) -> dict[str, int]:
        """The counts so far, by name: rooms found, by how (`told`, `computed`, `asked`), or `lost`; queries sent
        (`queries`, `topology_queries`; `stale`: answers about an older attempt); wants whose result was not collected
        (`overflows`) or that are `invalid`; messages dropped, by reason (`rejected_*`)."""
        return {
            **self._core.counts,
            "overflows": self.overflows,
            "invalid": self.invalid,
            **{f"rejected_{reason}": count for reason, count in self.rejected.copy().items()},
        }

    def wait(self, timeout_s: float) -> bool:
        """Block until a result waits for `poll` or `lost`, or `timeout_s` has passed: then return false. For tests, and
        for programs that have nothing else to do."""
        self.raise_if_inherited()
        if self.failure is None and not self.stopped and self._settled.wait(timeout_s):
            self._settled.clear()
        if self._found or self._lost:
            return True
        self.raise_if_failed()
        return False

    # --- its own thread ---------------------------------------------------------------------------------------------

    def _pace(self) -> None:
        """Run ticks while a room is wanted; without one this thread sleeps, because it runs in the engine's process."""
        if not self._ticking and not self._core.idle:
            self._ticking = True
            self.loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._ticking = False
        self._do(self._core.tick(self.loop.clock()))

    def _drain(self) -> None:
        now = self.loop.clock()
        for room, how in self._mailbox.take():
            self._do(self._core.want(room, now, **how))
        self._do(self._core.flush(now))

    def _on_frames(self, peer: str, read: Callable[[Sequence[bytes]], Message], frames: list[bytes]) -> None:
        try:
            message = read(frames)
        except RemoteProtocolError as error:
            self._rejections.note(peer, error)
            return
        self._do(self._core.on_message(message, self.loop.clock()))
        if self._core.broker_epoch:
            self._connected.set()

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._send(action.message)
            else:
                with self._lock:
                    if action.at is not None:
                        self._found[action.room] = action.at
                    else:
                        self._lost[action.room] = action.code
                self._settled.set()

    def _send(self, message: Message) -> None:
        try:
            send(self._dealer, (b"", codec.encode(message)))
        except zmq.Again:
            pass  # the broker is away and the queue full: asked again later
        except LocalProtocolError as error:
            log.warning("query.refused", why=str(error))


def _read_answer(frames: Sequence[bytes]) -> Message:
    if len(frames) != 2 or frames[0]:
        raise RemoteProtocolError("frames", f"{len(frames)} frames")
    return codec.decode(frames[1], FROM_BROKER)


def _arguments(
    attempt: int, prefill_instance: str, dp_rank: int | None, deadline_s: float, max_age_s: float
) -> dict[str, Any]:
    """Return the arguments as the core takes them; TypeError, ValueError or OverflowError where they are invalid."""
    return {
        "attempt": index(attempt),
        "prefill_instance": instance_name(prefill_instance, "prefill_instance"),
        "dp_rank": None if dp_rank is None else index(dp_rank),
        "deadline_s": float(deadline_s),
        "max_age_s": float(max_age_s),
    }

"""The cores of publisher and resolver for a program that runs them on a loop of its own. Each method checks its
arguments, then calls the core in `bus.embed.publications` or `bus.embed.resolution`; our own shells call those
directly."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable
from operator import index
from typing import Any

from msgspec import convert

from bus.actions import Publish
from bus.arguments import count, instance_name, message, number, positive, seconds
from bus.defaults import REPORT_INTERVAL_S, ROOM_TTL_S
from bus.embed import publications, resolution
from bus.embed.publications import REPORT_GAP_S, integer
from bus.embed.resolution import Action
from bus.errors import ConfigError, RemoteProtocolError
from bus.wire import codec
from bus.wire.codes import Code
from bus.wire.messages import (
    PUBLICATIONS,
    Answer,
    Beacon,
    Conflict,
    Endpoint,
    Load,
    Member,
    Message,
    NodeState,
    Resync,
    Role,
    Topology,
)


class PublisherCore:
    """The publications of one rank. Each method returns the publications to send now, in order; the program sends them
    and calls `tick` every few tens of milliseconds. `now` is seconds on a monotonic clock.

    `on_conflict` is called for each room that another rank claims too. ConfigError, TypeError and ValueError say what
    is wrong with an argument; nothing has changed then.
    """

    def __init__(
        self,
        *,
        instance: str,
        dp_rank: int,
        epoch: int,
        role: Role,
        model: str,
        dp_size: int,
        endpoint: Endpoint,
        interval_s: float = REPORT_INTERVAL_S,
        report_gap_s: float = REPORT_GAP_S,
        room_ttl_s: float = ROOM_TTL_S,
        max_rooms: int = 100_000,
        state: NodeState = "starting",
        follow_bootstrap_room: bool = False,
        on_conflict: Callable[[Conflict], None] | None = None,
    ) -> None:
        self._core = publications.PublisherCore(
            instance=instance, dp_rank=dp_rank, epoch=epoch, role=role, model=model, dp_size=dp_size,
            endpoint=endpoint, interval_s=positive(interval_s, "interval_s"),
            report_gap_s=positive(report_gap_s, "report_gap_s"), room_ttl_s=positive(room_ttl_s, "room_ttl_s"),
            max_rooms=max(1, count(max_rooms, "max_rooms")), state=state, follow_bootstrap_room=follow_bootstrap_room,
            on_conflict=on_conflict,
        )  # fmt: skip
        check(self._core)

    @property
    def load_seq(self) -> int:
        """The `seq` of the newest load: no load was published with a higher one. 0 before the first `report`."""
        return self._core.load_seq

    @property
    def live_rooms(self) -> int:
        """The number of rooms that are registered and not dropped."""
        return self._core.live_rooms

    @property
    def counts(self) -> dict[str, int]:
        """The counts so far, by name: `registered`, `dropped`, `refreshed`, `restated`, `evicted`, `invalid`."""
        return self._core.counts

    @property
    def conflicts(self) -> deque[Conflict]:
        """The latest rooms that another rank claims too."""
        return self._core.conflicts

    # --- what the scheduler says --------------------------------------------------------------------------------

    def register(self, room: Any, attempt: Any, now: float) -> list[Publish]:
        """Register `room`: it is or will be prefilled here, as `attempt` (1 or more; a request that is dispatched again
        has a higher one). The registration leaves at the next flush and is refreshed until `drop`. A room or attempt
        out of range is counted as `invalid`; an attempt older than the registered one changes nothing."""
        return self._core.register(integer(room), integer(attempt), seconds(now))

    def drop(self, room: Any, attempt: Any, code: Code, now: float) -> list[Publish]:
        """End the registration of `room` (this attempt and older ones): `ok`, or the code that says why no KV cache
        will come, which ranks that wait for the room get. It leaves at the next flush."""
        return self._core.drop(integer(room), integer(attempt), _one_of(code, Code, "code"), seconds(now))

    def report(self, load: Load, now: float) -> list[Publish]:
        """Replace the load that is published; `seq` is set here. It leaves with the next message, or alone at a flush:
        after `report_gap_s` if it differs from the last one, at once if the last one had work and this has none, else
        after `interval_s`."""
        return self._core.report(message(load, Load), seconds(now))

    def set_state(self, state: NodeState, now: float) -> list[Publish]:
        """Publish the rank's state, if it has changed, at once. `gone` is the last state, after which the rank has no
        rooms."""
        return self._core.set_state(_one_of(state, NodeState, "state"), seconds(now))

    def set_follow(self, flag: bool, now: float) -> list[Publish]:
        """Set and publish whether `bootstrap_room % dp_size` gives the rank of every room of this instance."""
        return self._core.set_follow(bool(flag), seconds(now))

    def goodbye(self, now: float) -> list[Publish]:
        """Publish that the rank leaves (state `gone`). It has no rooms from here on."""
        return self._core.goodbye(seconds(now))

    # --- what the broker says -----------------------------------------------------------------------------------

    def on_message(self, message: Message, now: float) -> list[Publish]:
        """Handle a message from the broker: a new broker's beacon or a resync makes the rank publish all its rooms
        again, a conflict is recorded. Any other message, or one for another rank, is ignored."""
        now = seconds(now)
        return self._core.on_message(_one_that(message, Beacon, Resync, Conflict), now)

    # --- time -----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Publish]:
        """Return everything that is due at `now`: restatement, refreshes, membership, and `flush`."""
        return self._core.tick(seconds(now))

    def due_s(self, now: float) -> float:
        """Return the seconds until `tick` has anything to do; 0: now."""
        return self._core.due_s(seconds(now))

    def flush(self, now: float) -> list[Publish]:
        """Return what this turn collected: messages with registrations and drops (and the load), or the load alone if
        it is due. Call it at the end of each turn of the loop."""
        return self._core.flush(seconds(now))


class ResolverCore:
    """The look-up of rooms without sockets. Each method returns actions: `Send` for the broker, and exactly one
    `Resolved` for each want. `now` is seconds on a monotonic clock. TypeError and ValueError say what is wrong with an
    argument; nothing has changed then.

    It computes the rank where an instance follows bootstrap rooms; else it asks the broker, for all rooms of a turn in
    one query. It handles lost answers, a restarted broker and a restarted rank by itself. Beyond `max_wants` open wants
    a new one is lost at once (`too_many`).
    """

    def __init__(self, *, max_wants: int = 65_536) -> None:
        self._core = resolution.ResolverCore(max_wants=count(max_wants, "max_wants"))

    @property
    def pending(self) -> int:
        """The number of wants without an end so far."""
        return self._core.pending

    @property
    def idle(self) -> bool:
        """True while `tick` has nothing to wait for."""
        return self._core.idle

    @property
    def counts(self) -> dict[str, int]:
        """The counts so far, by name: rooms `wanted`, of these `told`, `computed`, `asked`, `lost`, `cancelled`."""
        return self._core.counts

    # --- what the scheduler says --------------------------------------------------------------------------------

    def want(
        self,
        room: int,
        now: float,
        *,
        deadline_s: float,
        attempt: int = 0,
        prefill_instance: str = "",
        dp_rank: int | None = None,
        asker: Hashable = 0,
        max_age_s: float = math.inf,
    ) -> list[Action]:
        """Find the prefill rank of `room`, with this `attempt` or a newer one (0: any), within `deadline_s` seconds (an
        hour at most). A room that the same asker wants again replaces its earlier want. What is no room is lost at once
        (`bad_room`).

        `dp_rank`: the caller knows the rank of `prefill_instance` (of the only instance, if that is empty), and only
        its address is looked up. `max_age_s`: while the broker is silent, use no topology that is older; by default,
        use the last one. `asker`: any name that tells the wants of several users apart.
        """
        known = integer(room)
        prefill_instance = instance_name(prefill_instance, "prefill_instance")
        _same(asker)
        return self._core.want(
            room if known is None else known, seconds(now), deadline_s=number(deadline_s, "deadline_s"),
            attempt=count(attempt, "attempt"), prefill_instance=prefill_instance,
            dp_rank=None if dp_rank is None else int(index(dp_rank)), asker=asker,
            max_age_s=number(max_age_s, "max_age_s"),
        )  # fmt: skip

    def cancel(self, room: int, asker: Hashable = 0) -> None:
        """Cancel the asker's want of `room`; it gets no `Resolved`."""
        known = integer(room)
        _same(asker)
        if known is not None:
            self._core.cancel(known, asker)

    def abandon(self, code: Code) -> list[Action]:
        """End every want with `code` and return their results, because no later one will be collected. Call it at the
        end."""
        return self._core.abandon(_one_of(code, Code, "code"))

    def forget(self, instance: str) -> None:
        """Drop the cached topology of `instance` after it proved wrong (a restarted rank). It is fetched again before
        use."""
        self._core.forget(instance)

    # --- what the broker says -----------------------------------------------------------------------------------

    def on_message(self, message: Message, now: float) -> list[Action]:
        """Handle a message from the broker (an answer, a topology or a beacon) and return the wants that it ends; any
        other message is ignored."""
        now = seconds(now)
        return self._core.on_message(_one_that(message, Beacon, Answer, Topology), now)

    # --- time -----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Action]:
        """End the wants past their deadline (`unknown_room`), repeat the queries that are due, and `flush`. Call it
        every few tens of milliseconds while not `idle`."""
        return self._core.tick(seconds(now))

    def flush(self, now: float) -> list[Action]:
        """Return the messages that this turn collected: topology queries, rooms no longer watched, one query of all
        rooms wanted. Call it at the end of each turn of the loop."""
        return self._core.flush(seconds(now))


def check(core: publications.PublisherCore) -> None:
    """Check this rank's own description by encoding it. ConfigError if a subscriber would reject it."""
    try:
        member = Member(
            core.instance, core.dp_rank, core.epoch, 1, None, core.role, core.model, core.dp_size, core.state,
            core.endpoint, core.follow_bootstrap_room, 0, core.interval_s,
        )  # fmt: skip
        codec.decode(codec.encode(member), PUBLICATIONS)
    except (RemoteProtocolError, TypeError, ValueError) as error:
        raise ConfigError(f"publisher of {core.instance!r}/{core.dp_rank!r}: {error}") from None
    if core.dp_rank >= core.dp_size:
        raise ConfigError(f"dp_rank {core.dp_rank} is not below dp_size {core.dp_size}")


def _one_of(value: Any, kind: Any, name: str) -> Any:
    """Return `value` if it is one of the words of the Literal `kind`."""
    try:
        return convert(value, kind)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None


def _one_that(value: Message, *kinds: type[Message]) -> Message:
    """Return `value`, checked if it is of one of these kinds."""
    if not isinstance(value, Message):
        raise TypeError(f"a message expected, not {type(value).__name__}")
    return message(value, type(value)) if type(value) in kinds else value


def _same(asker: Hashable) -> None:
    """Raise unless `asker` can be told from others."""
    hash(asker)
    if (asker == asker) is not True:  # an array compares by its items, not-a-number with nothing
        raise ValueError("asker must be equal to itself")

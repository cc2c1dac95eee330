"""The cores of publisher and resolver for a program that runs them on a loop of its own: check each argument, then ask
`bus.embed.publications` and `bus.embed.resolution`, whose own shells call these directly.
"""

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
    """The publications of one rank. `on_conflict` is called for each room that another rank claims too. ConfigError,
    TypeError and ValueError say what is wrong with an argument; nothing has changed then."""

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
        """The number of the newest load: no load was published with a higher one."""
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
        """Register `room`, as `attempt`; a value that is no integer is counted as `invalid`. The registration leaves at
        the next flush and is refreshed until it is dropped."""
        return self._core.register(integer(room), integer(attempt), seconds(now))

    def drop(self, room: Any, attempt: Any, code: Code, now: float) -> list[Publish]:
        """Drop `room` with `ok`, or with the code that says why no KV cache will come. It leaves at the next flush."""
        return self._core.drop(integer(room), integer(attempt), _one_of(code, Code, "code"), seconds(now))

    def report(self, load: Load, now: float) -> list[Publish]:
        """Replace the load that is published. It leaves with the next message, or alone when due; its `seq` is set
        here."""
        return self._core.report(message(load, Load), seconds(now))

    def set_state(self, state: NodeState, now: float) -> list[Publish]:
        """Publish a changed state at once. `gone` is the last state, after which the rank has no rooms."""
        return self._core.set_state(_one_of(state, NodeState, "state"), seconds(now))

    def set_follow(self, flag: bool, now: float) -> list[Publish]:
        """Set and publish whether `bootstrap_room % dp_size` gives the rank of every room of this instance."""
        return self._core.set_follow(bool(flag), seconds(now))

    def goodbye(self, now: float) -> list[Publish]:
        """Publish that the rank leaves. It has no rooms from here on."""
        return self._core.goodbye(seconds(now))

    # --- what the broker says -----------------------------------------------------------------------------------

    def on_message(self, message: Message, now: float) -> list[Publish]:
        """Handle a beacon or a message that is addressed to this rank; any other message is ignored."""
        now = seconds(now)
        return self._core.on_message(_one_that(message, Beacon, Resync, Conflict), now)

    # --- time -----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Publish]:
        """Return everything that is due: restatement, refreshes, membership, and `flush`."""
        return self._core.tick(seconds(now))

    def due_s(self, now: float) -> float:
        """Return the seconds until `tick` has anything to do."""
        return self._core.due_s(seconds(now))

    def flush(self, now: float) -> list[Publish]:
        """Send what this turn collected: one Rooms message (with the load), or the load alone when it is due."""
        return self._core.flush(seconds(now))


class ResolverCore:
    """The look-up of rooms without sockets: it returns Send actions, and one `Resolved` for each want.
    TypeError and ValueError say what is wrong with an argument; nothing has changed then.

    It computes the rank where an instance follows bootstrap rooms; else it asks the broker, for all rooms of a turn in
    one query. It handles lost answers, a restarted broker and a restarted rank by itself.
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
        """Find `room`, as `attempt` or newer, within `deadline_s` (an hour at most). A room that the same asker wants
        again replaces its earlier want. What is no room is lost at once (`bad_room`).

        `dp_rank`: the caller told which rank of `prefill_instance` it is (of the only one, if that is empty).
        `max_age_s`: while the broker is silent, use no topology that is older; without it, use the last one.
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
        """End every want with `code`, because no result will be collected any more."""
        return self._core.abandon(_one_of(code, Code, "code"))

    def forget(self, instance: str) -> None:
        """Drop the cached topology of `instance` after it proved wrong (a restarted rank). It is fetched again before
        use."""
        self._core.forget(instance)

    # --- what the broker says -----------------------------------------------------------------------------------

    def on_message(self, message: Message, now: float) -> list[Action]:
        """Handle an answer, a topology or a beacon; any other message is ignored."""
        now = seconds(now)
        return self._core.on_message(_one_that(message, Beacon, Answer, Topology), now)

    # --- time -----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Action]:
        """End the wants past their deadline, repeat the queries that are due, and `flush`. Call it every few tens of
        milliseconds."""
        return self._core.tick(seconds(now))

    def flush(self, now: float) -> list[Action]:
        """Send what this turn collected: topology queries, rooms no longer watched, one query of all rooms wanted."""
        return self._core.flush(seconds(now))


def check(core: publications.PublisherCore) -> None:
    """Check this rank's own description by encoding it; ConfigError if subscribers would reject it."""
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

"""The controller's core for a program that runs it on a loop of its own (events in, actions out). It checks each
argument and then calls `controller.core`. `controller.shell` needs no such checks: the wire's decoder has made them."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from typing import Any

from bus.arguments import count, message, seconds
from bus.wire.kv_names import Cleared, Removed, Stored
from bus.wire.messages import (
    CLIENT_TO_CONTROLLER,
    NODE_TO_CONTROLLER,
    PUBLICATIONS,
    Load,
    Message,
    Role,
    Status,
    WantedRole,
)
from controller import core
from controller.config import ControllerConfig
from controller.events import (
    Action,
    CacheChanged,
    ClientGone,
    EngineLoad,
    Event,
    FromClient,
    FromNode,
    Published,
    Tick,
    Undelivered,
    Unreachable,
)
from controller.policies import Policy
from controller.policies.prefix_index import PrefixIndex


class ControllerCore:
    """One controller, from `now` (seconds, monotonic) on; `wall_s` plus that clock gives seconds since 1970. `epoch` is
    the number of this start. `policies`: by role, a policy in place of the load balancing method of `config`. A call
    with invalid arguments raises ConfigError, TypeError or ValueError and changes nothing. For one thread."""

    def __init__(
        self, config: ControllerConfig, epoch: int, now: float, policies: Mapping[Role, Policy] | None = None,
        wall_s: float = 0.0,
    ) -> None:  # fmt: skip
        if policies is not None and not isinstance(policies, Mapping):
            raise TypeError(f"policies are a mapping by role, not {type(policies).__name__}")
        self._core = core.ControllerCore(
            _config(config), count(epoch, "epoch"), seconds(now), policies, seconds(wall_s, "wall_s")
        )

    def handle(self, event: Event, now: float) -> list[Action]:
        """Return the actions that `event` calls for, in order; the caller carries them out."""
        _check(event)
        return self._core.handle(event, seconds(now))

    def reconfigure(self, config: ControllerConfig) -> None:
        """Apply those settings of another configuration that may change while requests live (the command line's
        `RELOADS`); the others stay as they are."""
        self._core.reconfigure(_config(config))

    @property
    def needs_ticks(self) -> bool:
        """True while a tick is wanted each few tens of milliseconds; else a few times a second will do."""
        return self._core.needs_ticks

    @property
    def waiting(self) -> bool:
        """True while requests wait: then hand each publication over at once, since it may let one go. If false,
        publications may be collected and handed over before the next event."""
        return self._core.waiting

    @property
    def unready(self) -> str:
        """The reason why requests would not be served now; empty if they would. Each role of a model that ranks have,
        or had, must have a ready rank, unless that model has enough of them: unified, or prefill and decode. A role
        that the configuration declares needs a ready rank in any case."""
        return self._core.unready

    def shutdown(self, now: float) -> list[Action]:
        """End every live request, because this controller leaves. Return the messages that say this to clients and
        ranks; clients then submit elsewhere."""
        return self._core.shutdown(seconds(now))

    def status(self, id: int, now: float) -> Status:
        """Return everything that an operator may want to see; `id` is the question's number in the answer."""
        return self._core.status(count(id, "id"), seconds(now))

    @property
    def wanted(self) -> tuple[WantedRole, ...]:
        """The roles that should be served, because ranks had them or the configuration declares them, each with the
        number of ranks that are ready now."""
        return self._core.wanted

    @property
    def prefixes(self) -> dict[Role, PrefixIndex]:
        """The index of cached prefixes of each policy that keeps one."""
        return self._core.prefixes

    def tally(self) -> dict[str, int]:
        """Return counts by name: of events so far, and of what is alive (`requests`, `queue_*`, `payload_bytes`)."""
        return self._core.tally()

    def validate(self) -> None:
        """Assert that all parts agree (tests call this after every event)."""
        self._core.validate()


def _config(config: ControllerConfig) -> ControllerConfig:
    if not isinstance(config, ControllerConfig):
        raise TypeError(f"a ControllerConfig expected, not {type(config).__name__}")
    return config


def _check(event: Event) -> None:
    """Raise unless `event` is one, with a message of those that its sender has."""
    if isinstance(event, FromClient):
        hash(event.peer)
        _message(event.message, CLIENT_TO_CONTROLLER.values())
        for frame in event.frames:
            len(frame)
    elif isinstance(event, FromNode):
        hash(event.peer)
        _message(event.message, NODE_TO_CONTROLLER.values())
    elif isinstance(event, Published):
        _message(event.message, PUBLICATIONS.values())
    elif isinstance(event, Unreachable | Undelivered):
        hash(event.peer)
        if event.message is not None and not isinstance(event.message, Message):
            raise TypeError(f"a message expected, not {type(event.message).__name__}")
    elif isinstance(event, ClientGone):
        hash((event.peer, event.rid))
    elif isinstance(event, CacheChanged):
        hash(event.key)
        for change in event.changes:
            if isinstance(change, Stored | Removed):
                for name in change.hashes:
                    index(name)
            elif not isinstance(change, Cleared):
                raise TypeError(f"a change of a cache expected, not {type(change).__name__}")
    elif isinstance(event, EngineLoad):
        hash(event.key)
        message(event.load, Load)
    elif not isinstance(event, Tick):
        raise TypeError(f"an event expected, not {type(event).__name__}")


def _message(value: Any, kinds: Any) -> None:
    if type(value) not in kinds:
        raise TypeError(f"{type(value).__name__} is no message that comes this way")
    message(value, type(value))

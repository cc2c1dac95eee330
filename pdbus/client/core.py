"""All requests of one client: who a message is for, and what asks for which connection. Pure, like `request`.

`handle(event, now) -> actions`. A peer is an endpoint: `Send.peer` is where to connect, `Received.peer` where a message
came from. Every request that began ends with exactly one `Ended`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from bus.wire.messages import Accepted, Done, Failed, Message, Tokens
from pdbus.client.request import Action, Ended, LegRun, Patience, Request, RequestPlan


@dataclass(frozen=True, slots=True)
class Begin:
    """Submit this request under a rid that no live one has."""

    rid: str
    plan: RequestPlan


@dataclass(frozen=True, slots=True)
class Received:
    """`message` came from the controller or node at `peer`."""

    peer: str
    message: Message


@dataclass(frozen=True, slots=True)
class CancelAsked:
    rid: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed: deadlines, silence, back-off. Several a second while there are requests."""


Event = Begin | Received | CancelAsked | Tick


class ClientCore:
    def __init__(self, patience: Patience, rng: random.Random) -> None:
        self._patience = patience
        self._rng = rng
        self._requests: dict[str, Request] = {}
        self._legs: dict[tuple[str, str], tuple[Request, LegRun]] = {}  # (controller, rid of the leg)

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def endpoints(self) -> set[str]:
        """Where requests are attached."""
        return {request.endpoint for request in self._requests.values() if request.endpoint}

    def handle(self, event: Event, now: float) -> list[Action]:
        if isinstance(event, Received):
            return self._received(event.peer, event.message, now)
        if isinstance(event, Begin):
            assert event.rid not in self._requests, f"{event.rid} is live already"
            request = Request(event.rid, event.plan, self._patience, self._rng, now)
            self._requests[event.rid] = request
            self._legs.update(((leg.plan.controller, leg.rid), (request, leg)) for leg in request.legs)
            return request.begin(now)
        if isinstance(event, CancelAsked):
            cancelled = self._requests.get(event.rid)
            return self._forget_ended(cancelled.cancel(now)) if cancelled is not None else []
        actions: list[Action] = []
        for request in list(self._requests.values()):
            actions += self._forget_ended(request.tick(now))
        return actions

    def _received(self, peer: str, message: Message, now: float) -> list[Action]:
        if isinstance(message, Tokens):
            request = self._requests.get(message.rid)
            if request is not None:
                return self._forget_ended(request.tokens(peer, message, now))
        elif isinstance(message, Accepted | Failed | Done):
            found = self._legs.get((peer, message.rid))
            if found is not None:
                request, leg = found
                if isinstance(message, Accepted):
                    return self._forget_ended(request.accepted(leg, message, now))
                if isinstance(message, Failed):
                    return self._forget_ended(request.failed(leg, message, now))
                return self._forget_ended(request.done(leg, message, now))
        return []  # about a request that has ended, or never was

    def _forget_ended(self, actions: list[Action]) -> list[Action]:
        if actions and isinstance(ended := actions[-1], Ended):
            request = self._requests.pop(ended.rid)
            for leg in request.legs:
                del self._legs[leg.plan.controller, leg.rid]
        return actions

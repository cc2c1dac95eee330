"""Lanes of the central queue: requests of one lane wait for the same ranks, so none of them overtakes another. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from bus.wire.messages import Model, Role


class Lane(NamedTuple):
    """Of a model and the roles of its legs; `ranks` tells apart which of these ranks are waited for. `pinned`: all are
    the caller's choice."""

    model: Model
    roles: tuple[Role, ...]
    ranks: Hashable
    pinned: bool = False

    def competes(self, other: Lane) -> bool:
        """Whether what waits in one may want a rank that the other wants. What is pinned waits for nobody else's."""
        return (
            self.model == other.model
            and not (self.pinned or other.pinned)
            and not set(self.roles).isdisjoint(other.roles)
        )

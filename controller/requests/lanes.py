"""The lanes of the central queue: requests of one lane wait for the same ranks, so none of them overtakes another.
Pure.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from bus.wire.messages import Model, Role


class Lane(NamedTuple):
    """A lane, of a model and the roles of its legs (a rank's shares of a request); `ranks` states which of these ranks
    are waited for. `pinned`: all are the caller's choice; `apart`: for requests that may not run beside each other."""

    model: Model
    roles: tuple[Role, ...]
    ranks: Hashable
    pinned: bool = False
    apart: bool = False

    def competes(self, other: Lane) -> bool:
        """Return true if requests in `other` may want a rank that requests in this lane want. Pinned requests want
        only the rank that their caller chose, and requests that wait apart may refuse a rank that has credit."""
        return (
            self.model == other.model
            and not (self.pinned or other.pinned or other.apart)
            and not set(self.roles).isdisjoint(other.roles)
        )

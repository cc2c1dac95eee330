"""What a policy is: a small pure object that gets candidates and a request's header and returns a rank.

To add one: a file beside this one, and a line in the table of `controller.policies`.
"""

from __future__ import annotations

from typing import Protocol

from bus.wire.messages import Submit
from controller.load.groups import View
from controller.load.rank import RankLoad


class Policy(Protocol):
    """`fixed` says that the request alone determines the rank: such a request does not wait in the central queue for
    a rank to free up (no other would do), but goes to its rank's own queue."""

    fixed: bool

    def pick(self, view: View, request: Submit, tokens: int) -> RankLoad | None:
        """One of `view`'s candidates for `request`, which will charge `tokens`; None when none will do. A `fixed`
        policy may return a rank without credit, but only one that is ready."""

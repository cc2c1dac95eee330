"""The costs that a policy may weigh: queues, speeds and cached tokens of ranks. Read-only. This module owns
nothing and computes nothing before it is asked; speeds are learnt from the first question on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from bus.wire.hashing import unpack_hashes
from bus.wire.messages import OVER_THE_BUS, Model, Role, Submit
from controller.load.groups import Subset, View
from controller.load.rank import RankLoad
from controller.load.table import LoadTable
from controller.speeds import Speeds, queued_tokens

if TYPE_CHECKING:
    from controller.policies.prefix_index import PrefixIndex

Choice: TypeAlias = Callable[[Submit], RankLoad | None]  # the rank that a request's leg would go to now


class _Known(NamedTuple):
    table: LoadTable
    prefixes: PrefixIndex | None
    speeds: Callable[[], Speeds]
    choice: Choice


class Costs:
    """The costs at the ranks of all roles, as one controller knows them: tokens and seconds. A figure is 0 where
    nothing is known. `link_s_per_token`: the seconds that a KV token takes between two ranks. `undecided`: the pair
    whose decode rank is picked now, together with the rank that computes its prompt; None: these are settled."""

    def __init__(self, link_s_per_token: float = 0.0) -> None:
        self.undecided: Submit | None = None
        self._link_s_per_token = link_s_per_token
        self._of: dict[Role, _Known] = {}

    def add(
        self, role: Role, table: LoadTable, prefixes: PrefixIndex | None, speeds: Callable[[], Speeds], choice: Choice
    ) -> None:
        """Set where the figures of a role's ranks come from. Policies do not call it."""
        self._of[role] = _Known(table, prefixes, speeds, choice)

    def view(self, role: Role, model: Model = "") -> View:
        """Return the ranks of a role, of one model where that is named."""
        known = self._of.get(role)
        return Subset(()) if known is None else known.table.group(role, model)

    def choice(self, role: Role, request: Submit) -> RankLoad | None:
        """Return the rank of `role` that its policy chooses for the request now; None: it would wait, or no rank of
        that role is there. In `prefill_here` of a pair, `choice("prefill", request)` is the prefill rank that the pair
        would have."""
        known = self._of.get(role)
        return None if known is None else known.choice(request)

    def queued(self, rank: RankLoad) -> int:
        """Return the prompt tokens that wait at `rank` or are on their way there."""
        return queued_tokens(rank)

    def queued_by(self, role: Role, model: Model = "") -> int:
        """Return the sum of `queued` over the candidates of a role. O(ranks)."""
        return sum(queued_tokens(rank) for rank in self.view(role, model))

    def cached(self, rank: RankLoad, request: Submit) -> int:
        """Return the tokens of the request's prompt that `rank` caches, by the index of its role's policy
        (`PrefixPolicy`), without the last one, which is always computed; of a request without hashes, as its session
        was there. O(blocks)."""
        known, size = self._of.get(rank.info.role), request.block_tokens
        prefixes = None if known is None else known.prefixes
        if prefixes is None:
            return 0
        if not request.block_hashes:
            tokens = prefixes.sessions.tokens(request.session, rank.slot) if request.session else 0
        elif rank.info.block_tokens == size:
            tokens = prefixes.depth(rank.slot, unpack_hashes(request.block_hashes)) * size
        else:
            return 0
        return min(tokens, request.prompt_tokens - 1)

    def readable(self, rank: RankLoad, request: Submit) -> int:
        """Return the tokens of the request's prompt that another rank can read from `rank` now: what it caches, as far
        as it has stated so itself, without the last one. Where an engine's own connector reads, no more than the rank
        pins, for whichever requests: what is merely cached can't be read there. O(blocks)."""
        known, size = self._of.get(rank.info.role), request.block_tokens
        prefixes = None if known is None else known.prefixes
        if prefixes is None or not request.block_hashes or rank.info.block_tokens != size:
            return 0
        most = request.prompt_tokens - 1
        if rank.info.kv_transfer != OVER_THE_BUS:
            most = min(most, (rank.load.kv_pinned if rank.load else 0) or 0)
        return min(prefixes.stated(rank.slot, unpack_hashes(request.block_hashes)) * size, most) if most else 0

    def pace(self, rank: RankLoad) -> float:
        """Return the seconds of a rank's time for each prompt token that it computes, as reports of prefill and unified
        ranks of its role and model show."""
        known = self._of.get(rank.info.role)
        return 0.0 if known is None else known.speeds().pace(rank)

    def step_s(self, rank: RankLoad, tokens: int = 0) -> float:
        """Return the seconds of a step of `rank` with what it has and one more request that holds `tokens`, by a model
        fitted to the steps of its role and model."""
        known = self._of.get(rank.info.role)
        if known is None:
            return 0.0
        speeds = known.speeds()
        speeds.learn_steps(rank.info.role)
        return speeds.step_s(rank, rank.requests + 1, rank.tokens + rank.held_tokens + tokens)

    def link_s(self, source: RankLoad, target: RankLoad) -> float:
        """Return the seconds that a KV token takes from `source` to `target`, with nothing else under way. Live it is
        what a token took in the fetches that `target` and its like report; 0 before one has."""
        if source is target or self._link_s_per_token:
            return 0.0 if source is target else self._link_s_per_token
        known = self._of.get(target.info.role)
        return 0.0 if known is None else known.speeds().fetch_s(target)

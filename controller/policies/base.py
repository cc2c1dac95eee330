"""What a policy is: an object that gets candidates and a request's header and returns a rank, and may learn.

Owns the contract; `docs/own-policy.md` shows it with an example. Policies run on the controller's
thread and in the lab's virtual time: they take time from their arguments and randomness from their seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from bus.wire.hashing import unpack_hashes
from bus.wire.messages import Ended, Role, Submit
from controller.load.groups import View
from controller.load.rank import RankLoad
from controller.policies.prefix_index import PrefixIndex


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """What a policy is made with."""

    role: Role = "unified"  # of the ranks it picks
    cache_weight: float = 1.0  # worth of a token to compute, in tokens queued
    seed: int | str = 0  # for `random.Random`; another one for each controller


@runtime_checkable
class Policy(Protocol):
    """Picks ranks of one role for one controller. A subclass overrides `pick` and whatever else it needs; what it is
    given it must not change. `rank` is the same object for as long as the rank's process lives."""

    fixed: bool = False
    """The request's `bootstrap_room` alone determines the rank: such a request is refused without one, and does not
    wait in the central queue for a rank to free up (no other would do), but goes to its rank's own queue."""

    uses_hashes: bool = False
    """It looks at block hashes: clients are told to send them (`Submit.block_hashes`), and the ranks' KV events come
    to `stored`, `removed` and `forgotten`."""

    prefixes: PrefixIndex | None = None
    """What it knows of caches, where it keeps an index (`pdbus_controller_prefix_blocks` counts the entries)."""

    def __init__(self, settings: PolicySettings | None = None) -> None:
        """A policy class is its own factory: called with the settings, when the controller starts."""

    def pick(self, view: View, request: Submit, tokens: int) -> RankLoad | None:
        """One of `view`'s candidates for `request`, a prompt of `tokens`; None when there is no candidate. A `fixed`
        policy may return a rank without credit, but only one that is ready, and None besides."""

    def work(self, request: Submit) -> int:
        """Prompt tokens of `request` that its rank will have to compute, as far as is known now: by this the queue's
        order `slo` goes."""
        return request.prompt_tokens

    def charge(self, rank: RankLoad, request: Submit) -> int:
        """Tokens that the estimate of `rank` rises by for `request`, until a report has it: what the report is going to
        say. Comes before `dispatched`."""
        return request.prompt_tokens

    def dispatched(self, rank: RankLoad, request: Submit, now: float) -> None:
        """A leg of `request` went to `rank`, by this policy's choice or the caller's. Comes before its `ended`."""
        return

    def ended(self, rank: RankLoad, request: Submit, end: Ended | None, took_s: float) -> None:
        """That leg is over, `took_s` seconds after its dispatch: `end` is what the rank said of it (code, output and
        cached tokens). None, and 0 s, when it was given up: cancelled, too late, superseded, or lost with its rank.
        Under SGLang a leg ends with the report that acknowledges it: `ok`, and no tokens."""
        return

    def stored(self, rank: RankLoad, hashes: Sequence[int]) -> None:
        """`rank` caches these blocks (`bus.wire.hashing`) from now on."""
        return

    def removed(self, rank: RankLoad, hashes: Sequence[int]) -> None:
        """It caches them no more."""
        return

    def forgotten(self, rank: RankLoad) -> None:
        """It cleared its cache, restarted or is gone: nothing that was known of its cache holds. Its seat may be
        another rank's soon."""
        return

    def tick(self, now: float) -> None:
        """Time goes on (seconds, monotonic): each 50 to 250 ms live, before each pick in the lab."""
        return


class PrefixPolicy(Policy):
    """A policy that knows who caches what: keeps `prefixes` from KV events and from dispatches. Add a `pick`."""

    uses_hashes = True
    prefixes: PrefixIndex

    def __init__(self, settings: PolicySettings | None = None) -> None:
        self.prefixes = PrefixIndex()

    def work(self, request: Submit) -> int:
        """What the rank that caches most of it would compute."""
        if not request.block_hashes:
            return request.prompt_tokens
        depth = 0
        for depth, _ in self.prefixes.runs(unpack_hashes(request.block_hashes)):  # noqa: B007
            pass
        return max(1, request.prompt_tokens - depth * request.block_tokens)

    def charge(self, rank: RankLoad, request: Submit) -> int:
        """At a prefill rank what it has to compute: else a rank looked busy, until it reported, with what it caches,
        and the next prompt with the same prefix went elsewhere. The others are charged what they will hold."""
        if not request.block_hashes or not rank.counts_queue_only:
            return request.prompt_tokens
        depth = self.prefixes.depth(rank.seat, unpack_hashes(request.block_hashes))
        return max(1, request.prompt_tokens - depth * request.block_tokens)

    def dispatched(self, rank: RankLoad, request: Submit, now: float) -> None:
        """The rank will soon hold the prompt's prefix."""
        if request.block_hashes and rank.info.block_tokens == request.block_tokens:
            self.prefixes.expected(rank.seat, unpack_hashes(request.block_hashes))

    def stored(self, rank: RankLoad, hashes: Sequence[int]) -> None:
        """Into `prefixes`."""
        self.prefixes.stored(rank.seat, hashes)

    def removed(self, rank: RankLoad, hashes: Sequence[int]) -> None:
        """Out of `prefixes`."""
        self.prefixes.removed(rank.seat, hashes)

    def forgotten(self, rank: RankLoad) -> None:
        """All of the rank's blocks out of `prefixes`."""
        self.prefixes.forget(rank.seat)

    def tick(self, now: float) -> None:
        """What was expected of a dispatch and never stored is forgotten in time."""
        self.prefixes.advance(now)

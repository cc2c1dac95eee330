"""The contract of a policy: an object that gets candidates and a request's header and returns a rank, and may learn.

`docs/own-policy.md` shows it with an example. Policies run on the controller's thread and in the lab's virtual time:
they take time from their arguments and randomness from their seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from bus.wire.hashing import unpack_hashes
from bus.wire.messages import Ended, Role, Submit
from controller.costs import Costs
from controller.load.groups import View
from controller.load.rank import RankLoad
from controller.policies.prefix_index import PrefixIndex


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """The settings with which a policy is made, one for each role and controller."""

    role: Role = "unified"  # of the ranks it picks
    cache_weight: float = 1.0  # worth of a token to compute, in tokens queued
    seed: int | str = 0  # for `random.Random`; another one for each controller


@runtime_checkable
class Policy(Protocol):
    """A policy that picks ranks of one role for one controller. A subclass overrides `pick` and the other methods
    that it needs; it must not change its arguments. `rank` is the same object as long as the rank's process lives."""

    fixed: bool = False
    """The request's `bootstrap_room` alone determines the rank: such a request is refused without one, and does not
    wait in the central queue for a rank to free up (no other would do), but goes to its rank's own queue."""

    uses_hashes: bool = False
    """It looks at block hashes: clients are told to send them (`Submit.block_hashes`), and the ranks' KV events come
    to `stored`, `removed` and `forgotten`."""

    counts_queue_only: bool = False
    """For unified ranks, and decode ranks that compute prompts: `tokens` of a rank are the prompt tokens that wait, as
    at prefill ranks, without those that it holds for requests that decode (of a decode rank a small part counts)."""

    prefixes: PrefixIndex | None = None
    """What it knows of caches, where it keeps an index (`pdbus_controller_prefix_blocks` counts the entries)."""

    predicted: tuple[float, float] | None = None
    """What it predicted in its last `prefill_here`: the seconds until the first token where that rank does both, and as
    a pair. None: it predicts nothing. `pdbus trace` shows it."""

    unit: str = ""
    """What `cost` counts, in the plural: `tokens`."""

    costs: Costs = Costs()
    """Queues, speeds and cached tokens of the ranks of all roles; empty until `begin`."""

    def __init__(self, settings: PolicySettings | None = None) -> None:
        """Store the settings. A policy class is its own factory: it is called with the settings when the controller
        starts."""

    def begin(self, costs: Costs) -> None:
        """Keep the view of costs. It is called once, before the other methods."""
        self.costs = costs

    def pick(self, view: View, request: Submit, tokens: int) -> RankLoad | None:
        """Return one of `view`'s candidates for `request`, a prompt of `tokens`; None when there is no candidate: the
        request waits. A `fixed` policy may return a rank without credit, but only one that is ready; else None."""

    def cost(self, rank: RankLoad, request: Submit) -> float | None:
        """Return what `pick` compares, for `rank`, in `unit`: it picks a candidate with the least. None: it compares no
        costs. `pdbus trace --why` shows it for some requests; nothing else depends on it."""
        return None

    def admit(self, rank: RankLoad, request: Submit) -> bool:
        """Return true if `request` may go now to `rank`, the one picked; false: it waits at the controller, and those
        behind it, and both methods are called again. An idle rank (`requests` is 0) takes requests without a call, so
        every request goes some time."""
        return True

    def order(self, request: Submit, work: int, now: float) -> int:
        """Return a number for a request that begins to wait at `now` (seconds, monotonic): of a client's requests of
        one priority the one with the least goes first. It has `work` prompt tokens to compute. Without an override the
        configured order holds. The policy of its first leg's role is asked."""
        return 0

    def prefill_here(self, rank: RankLoad, request: Submit) -> bool:
        """Return true if `rank`, which it has picked, computes the prompt of `request` and decodes it too; false: a
        prefill and a decode rank share it. It is called for a pair whose caller names no ranks, where `rank` could do
        both."""
        return False

    def read_back(self, rank: RankLoad, prefill: RankLoad, request: Submit) -> bool:
        """Return true if `prefill`, before it computes the prompt of `request`, reads what `rank` caches of it and
        `prefill` lacks; false: it computes that itself. The policy of decode ranks is asked, after both ranks were
        picked, where `rank` has more to read (`costs.readable`) than `prefill` caches, and both can do it (`reads_back`
        of their `info`)."""
        return False

    def work(self, request: Submit) -> int:
        """Return the prompt tokens of `request` that its rank must compute, as far as is known now. The queue's
        orders use this."""
        return request.prompt_tokens

    def charge(self, rank: RankLoad, request: Submit) -> int:
        """Return the tokens by which the estimate of `rank` rises for `request` until a report includes it: the same
        number as the report will have. It is called before `dispatched`."""
        return request.prompt_tokens

    def dispatched(self, rank: RankLoad, request: Submit, now: float) -> None:
        """Note that a leg of `request` went to `rank`, by this policy's choice or the caller's. It is called before
        the leg's `ended`."""
        return

    def ended(self, rank: RankLoad, request: Submit, end: Ended | None, took_s: float) -> None:
        """Note that the leg is over, `took_s` seconds after its dispatch: `end` is the rank's report of it (code,
        output and cached tokens). None, and 0 s, when it was given up: cancelled, too late, superseded, or lost with
        its rank. Under SGLang a leg ends with the report that acknowledges it: `ok`, and no tokens."""
        return

    def stored(self, rank: RankLoad, hashes: Sequence[int]) -> None:
        """Note that `rank` caches these blocks (`bus.wire.hashing`) from now on."""
        return

    def removed(self, rank: RankLoad, hashes: Sequence[int]) -> None:
        """Note that `rank` no longer caches these blocks."""
        return

    def forgotten(self, rank: RankLoad) -> None:
        """Note that `rank` cleared its cache, restarted or is gone: nothing known of its cache holds any more.
        Another rank may get its slot soon."""
        return

    def tick(self, now: float) -> None:
        """Let time pass (seconds, monotonic): each 50 to 250 ms live, before each pick in the lab."""
        return


class PrefixPolicy(Policy):
    """A policy that knows which rank caches what: it keeps `prefixes` from KV events and from dispatches. Add a
    `pick`."""

    uses_hashes = True
    prefixes: PrefixIndex

    def __init__(self, settings: PolicySettings | None = None) -> None:
        self.prefixes = PrefixIndex()

    def work(self, request: Submit) -> int:
        """Return what the rank that caches most of the request would compute."""
        if not request.block_hashes:
            place = self.prefixes.sessions.place(request.session) if request.session else None
            return request.prompt_tokens if place is None else max(1, request.prompt_tokens - place[1])
        depth = 0
        for depth, _ in self.prefixes.runs(unpack_hashes(request.block_hashes)):  # noqa: B007
            pass
        return max(1, request.prompt_tokens - depth * request.block_tokens)

    def charge(self, rank: RankLoad, request: Submit) -> int:
        """Return what the rank must compute, where its tokens are those that wait. (With the whole prompt, a rank
        looked busy until it reported, with what it caches, and the next prompt with the same prefix went elsewhere.)
        Return what the request will hold at other ranks."""
        if not rank.counts_queue_only or not (request.block_hashes or request.session):
            return request.prompt_tokens
        if not request.block_hashes:
            return max(1, request.prompt_tokens - self.prefixes.sessions.tokens(request.session, rank.slot))
        depth = self.prefixes.depth(rank.slot, unpack_hashes(request.block_hashes))
        return max(1, request.prompt_tokens - depth * request.block_tokens)

    def dispatched(self, rank: RankLoad, request: Submit, now: float) -> None:
        """Expect that the rank will soon hold the prompt's prefix, if its blocks have the request's size; or, without
        hashes, that it holds the request's session."""
        if request.session and not request.block_hashes:
            self.prefixes.sessions.went(request.session, rank.slot, request.prompt_tokens)
        elif request.block_hashes and rank.info.block_tokens == request.block_tokens:
            self.prefixes.expected(rank.slot, unpack_hashes(request.block_hashes))

    def stored(self, rank: RankLoad, hashes: Sequence[int]) -> None:
        """Add the blocks to `prefixes`."""
        self.prefixes.stored(rank.slot, hashes)

    def removed(self, rank: RankLoad, hashes: Sequence[int]) -> None:
        """Remove the blocks from `prefixes`."""
        self.prefixes.removed(rank.slot, hashes)

    def forgotten(self, rank: RankLoad) -> None:
        """Remove all of the rank's blocks from `prefixes`."""
        self.prefixes.forget(rank.slot)

    def tick(self, now: float) -> None:
        """Let expected blocks expire that were never stored."""
        self.prefixes.advance(now)

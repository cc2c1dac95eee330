"""Chooses the rank of an SGLang server for each request, in its DP controller: a balancer, and the liveness of ranks.
Pure; time is an argument in seconds.

The ranks are known from the start: they share a nonce (the number of the server's start) with the DP controller, so no
message is needed before the first dispatch. What they publish later overwrites what was assumed of them. This
controller never learns that a request has ended, only that a rank has acknowledged it; from then on the rank's own
reports count it. So for the policy (`Policy.ended`) a request ends with its acknowledgement: with the code `ok`, no
output tokens, and the seconds from its dispatch to the report that acknowledged it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from bus.defaults import LEASE_S
from bus.wire.hashing import packed_hashes, token_bytes
from bus.wire.kv_names import Changes
from bus.wire.messages import Ack, Beacon, Ended, Hello, Load, LoadReport, Member, Message, Role, Rooms, Submit
from controller.balancer import Balancer
from controller.health import Health
from controller.load.rank import RankLoad
from controller.load.table import LoadTable
from controller.policies import Policy
from controller.requests.request import LegRun
from pdbus.sglang.rank import charge_of, fits

NEVER_S = 1e9  # a forward step may take as long as it likes
MAX_SENT = 4096  # dispatches to one rank that are remembered until it acknowledges them


class _Sent(NamedTuple):
    """A dispatch. `tokens` is what its rank was charged for all dispatches up to this one."""

    leg: LegRun
    tokens: int
    submit: Submit


class Chooser:
    """Chooses among the `dp_size` ranks of one server (`instance`). `block_tokens` is the size of their KV pages (0:
    unknown, prefixes are not hashed). A rank without publications for `lease_s` seconds is silent and not picked.
    `left` has the ranks that have left the bus. For one thread at a time."""

    def __init__(
        self,
        policy: Policy,
        *,
        instance: str,
        role: Role,
        dp_size: int,
        nonce: int,
        now: float,
        block_tokens: int = 0,
        lease_s: float = LEASE_S,
    ) -> None:
        self.table = LoadTable(nonce)
        self._balancer = Balancer(self.table, {role: policy}, now=now)
        self._role: Role = role
        self._uses_hashes = policy.uses_hashes
        self._instance = instance
        self._nonce = nonce
        self._block_tokens = block_tokens
        self._health = Health(lease_s=lease_s, hang_s=NEVER_S, settle_s=0.0, now=now)
        self.left: set[int] = set()  # ranks that said goodbye: something of ours failed there, and SGLang goes on
        self._silent: set[int] = set()
        self._inactive: frozenset[int] = frozenset()  # ranks that SGLang does not count as active
        self._sent: list[deque[_Sent]] = [deque() for _ in range(dp_size)]  # by rank: what it has not acknowledged
        self.ranks: list[RankLoad] = []
        for dp_rank in range(dp_size):
            hello = Hello(
                instance=instance, dp_rank=dp_rank, epoch=nonce, role=role, model="", dp_size=dp_size, state="ready",
                endpoint="", max_context=0, kv_capacity=0, max_running=0, block_tokens=block_tokens,
            )  # fmt: skip
            rank = self._balancer.opened(hello, ready=True)
            self._health.hello(rank.key, nonce, "ready", idle=True, now=now)
            self.ranks.append(rank)

    # --- messages --------------------------------------------------------------------------------------------

    def on_message(self, message: Message, now: float) -> int | None:
        """Handle a publication of one of these ranks, or a beacon (sign of life) of the broker; ignore others. Return
        the number of the rank that leaves the bus with this message; None: none leaves. Once one has left, `pick`
        returns None for every request."""
        if isinstance(message, Beacon):
            self._note_bus(now)
            return None
        if not isinstance(message, LoadReport | Member | Rooms) or message.instance != self._instance:
            return None
        if message.epoch != self._nonce or message.dp_rank >= len(self.ranks):
            return None
        self._note_bus(now)
        rank = self.ranks[message.dp_rank]
        if isinstance(message, Member):
            self.table.declare(rank.key, rank.epoch, message.interval_s)
        if message.load is not None:
            self._report(rank, message.load, now)
        if isinstance(message, Member) and message.state == "gone" and message.dp_rank not in self.left:
            self.left.add(message.dp_rank)
            return message.dp_rank
        return None

    def _note_bus(self, now: float) -> None:
        """Note that the bus is alive. A beacon counts as much as a load report of another rank, because the broker runs
        beside the ranks. So a rank that publishes nothing is silent even if no other rank publishes anything."""
        self._health.bus_seen(now)
        self._health.loads_at = now

    def changed(self, dp_rank: int, changes: Changes) -> None:
        """Note changes of a rank's prefix cache."""
        self._balancer.cache(self.ranks[dp_rank], changes)

    def tick(self, now: float) -> list[tuple[int, bool]]:
        """Check which ranks are silent; call it several times a lease. Return the ranks that became silent (False) or
        are back (True) since the last call."""
        turned = []
        for rank in self.ranks:
            self._health.seen(rank.key, now)  # there is no connection of its own to be lost
        for change in self._health.sweep(now):
            dp_rank = change.key[1]
            alive = change.new != "silent"
            if alive == (dp_rank in self._silent):
                (self._silent.discard if alive else self._silent.add)(dp_rank)
                self._set_ready(dp_rank)
                turned.append((dp_rank, alive))
        self._balancer.tick(now)
        return turned

    # --- what is dispatched ---------------------------------------------------------------------------------------

    def pick(self, request: Any, able: Collection[int], now: float) -> int | None:
        """Pick a rank for SGLang's tokenized `request`, one of `able` (those that SGLang counts as active), and count
        the request there. Return None if none of these is known to be alive, or if a rank has left the bus: then
        SGLang picks itself."""
        if self.left:
            return None
        if self._inactive or len(able) < len(self.ranks):
            before, self._inactive = self._inactive, frozenset(range(len(self.ranks))).difference(able)
            for dp_rank in before ^ self._inactive:
                self._set_ready(dp_rank)
        submit = self._submit(request)
        placed = self._balancer.place(submit, now)
        return self._keep(submit, placed.legs) if placed.legs else None

    def chosen(self, request: Any, dp_rank: int, now: float) -> None:
        """Count a `request` that SGLang sends to `dp_rank` without a pick here."""
        submit = self._submit(request)
        self._keep(submit, self._balancer.charge(submit, now, ((self._role, self.ranks[dp_rank]),)))

    def _set_ready(self, dp_rank: int) -> None:
        self.table.set_ready(self.ranks[dp_rank], dp_rank not in self._silent and dp_rank not in self._inactive)

    def _keep(self, submit: Submit, legs: tuple[LegRun, ...]) -> int:
        """Keep a request until its rank acknowledges it; beyond MAX_SENT the oldest is given up. Return its rank."""
        (leg,) = legs
        dp_rank = leg.rank.info.dp_rank
        sent = self._sent[dp_rank]
        sent.append(_Sent(leg, leg.rank.sent_tokens, submit))
        if len(sent) > MAX_SENT:
            oldest = sent.popleft()
            self._balancer.ended(oldest.leg, oldest.submit)
        return dp_rank

    def _submit(self, request: Any) -> Submit:
        room = getattr(request, "bootstrap_room", None)
        tokens: Sequence[int] = request.input_ids or ()
        hashes = b""
        if self._uses_hashes and self._block_tokens:
            try:
                hashes = packed_hashes(token_bytes(tokens), self._block_tokens)
            except ValueError:  # ids that stand for images are not token ids
                pass
        return Submit(
            rid=request.rid or "",
            leg=self._role,
            prompt_tokens=charge_of(request),
            max_tokens=0,
            bootstrap_room=room if fits(room) else None,
            block_tokens=self._block_tokens,
            block_hashes=hashes,
        )

    def _report(self, rank: RankLoad, load: Load, now: float) -> None:
        sent = self._sent[rank.info.dp_rank]
        acks = tuple([self._as_charged(rank, ack) if ack.controller_epoch == self._nonce else ack for ack in load.acks])
        if self._balancer.report(rank.key, rank.epoch, replace(load, acks=acks), now) is None:
            return
        self._health.report(rank.key, load, now, rank.interval_s)
        while sent and sent[0].leg.number <= rank.acked:
            leg, _, submit = sent.popleft()
            self._balancer.ended(leg, submit, Ended(submit.rid, 1, self._role, "ok"), now)

    def _as_charged(self, rank: RankLoad, ack: Ack) -> Ack:
        """Return the acknowledgement with the tokens that were charged for its dispatches. The rank itself counts whole
        prompts."""
        tokens = rank.acked_tokens
        for sent in self._sent[rank.info.dp_rank]:
            if sent.leg.number > ack.dispatches - rank.skew:
                break
            tokens = sent.tokens
        return Ack(self._nonce, ack.dispatches, tokens + rank.skew_tokens)

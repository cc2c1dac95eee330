"""Which of a server's ranks gets a request: the load table, a policy, and who lives. Pure; time is an argument.

The ranks are opened at the start, by the nonce that they share with the DP controller, so nothing has to be heard
before the first dispatch. What they publish then overwrites what is believed of them. This controller never learns that
a request is over, only that it was taken in: from then on the rank's own reports count it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from bus.defaults import LEASE_S
from bus.wire.hashing import packed_hashes, token_bytes
from bus.wire.kv_names import Changes, Cleared, Removed, Stored
from bus.wire.messages import Beacon, Hello, Load, LoadReport, Member, Message, Role, Rooms, Submit
from controller.health import Health
from controller.load.groups import Subset, View
from controller.load.rank import RankLoad
from controller.load.table import LoadTable
from controller.policies import Policy
from pdbus.sglang.rank import charge_of, fits

NEVER_S = 1e9  # a forward step may take as long as it likes


class Chooser:
    """For the `dp_size` ranks of `instance`; `block_tokens` is the size of their KV pages."""

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
        self.policy = policy
        self.table = LoadTable(nonce)
        self._instance = instance
        self._nonce = nonce
        self._block_tokens = block_tokens
        self._health = Health(lease_s=lease_s, hang_s=NEVER_S, settle_s=0.0, now=now)
        self.left: set[int] = set()  # ranks that said goodbye: something of ours failed there, and SGLang goes on
        self.ranks: list[RankLoad] = []
        for dp_rank in range(dp_size):
            hello = Hello(
                instance=instance, dp_rank=dp_rank, epoch=nonce, role=role, model="", dp_size=dp_size, state="ready",
                endpoint="", max_context=0, kv_capacity=0, max_running=0, block_tokens=block_tokens,
            )  # fmt: skip
            rank = self.table.open(hello)
            self.table.set_ready(rank, True)
            self._health.hello(rank.key, nonce, "ready", idle=True, now=now)
            self.ranks.append(rank)
        self._group = self.table.group(role)

    # --- what is heard --------------------------------------------------------------------------------------------

    def on_message(self, message: Message, now: float) -> int | None:
        """A publication of one of these ranks, or a beacon of the broker. The rank that says goodbye by it: from then
        on nothing is picked here."""
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
        """A beacon says as much as another rank's load: the broker is beside them, so what it carries nothing of is
        silent, be it all of them."""
        self._health.bus_heard(now)
        self._health.loads_at = now

    def changed(self, dp_rank: int, changes: Changes) -> None:
        """A rank's KV events, by our names."""
        rank = self.ranks[dp_rank]
        for change in changes:
            if isinstance(change, Stored):
                self.policy.stored(rank, change.hashes)
            elif isinstance(change, Removed):
                self.policy.removed(rank, change.hashes)
            else:
                assert isinstance(change, Cleared)
                self.policy.forgotten(rank)

    def tick(self, now: float) -> list[tuple[int, bool]]:
        """Several times a lease. The ranks that turned silent (False) or are heard again (True)."""
        turned = []
        for rank in self.ranks:
            self._health.heard(rank.key, now)  # there is no connection of its own to be lost
        for change in self._health.sweep(now):
            rank = self.table.ranks[change.key]
            ready = change.new != "silent"
            if rank.ready != ready:
                self.table.set_ready(rank, ready)
                turned.append((rank.info.dp_rank, ready))
        self.table.age(now)
        self.policy.tick(now)
        return turned

    # --- what is dispatched ---------------------------------------------------------------------------------------

    def pick(self, request: Any, able: Collection[int], now: float) -> int | None:
        """The rank for SGLang's tokenized `request`, charged; one of `able` (those that SGLang counts as active). None
        where no rank of these lives, as far as is known, or one has left the bus: SGLang's own way is as good then."""
        if self.left:
            return None
        submit = self._submit(request)
        view: View = self._group
        if len(able) < len(self.ranks):
            view = Subset([rank for rank in self.ranks if rank.info.dp_rank in able])
        rank = self.policy.pick(view, submit, submit.prompt_tokens)
        if rank is None or not rank.ready:
            return None
        self._charge(rank, submit, now)
        return rank.info.dp_rank

    def chosen(self, request: Any, dp_rank: int, now: float) -> None:
        """Somebody else sent `request` to `dp_rank`: it counts all the same."""
        self._charge(self.ranks[dp_rank], self._submit(request), now)

    def _charge(self, rank: RankLoad, submit: Submit, now: float) -> None:
        self.table.charge(rank, submit.prompt_tokens)
        self.policy.dispatched(rank, submit, now)

    def _submit(self, request: Any) -> Submit:
        room = getattr(request, "bootstrap_room", None)
        tokens: Sequence[int] = request.input_ids or ()
        hashes = b""
        if self.policy.uses_hashes and self._block_tokens:
            try:
                hashes = packed_hashes(token_bytes(tokens), self._block_tokens)
            except ValueError:  # ids that stand for images are no token ids
                pass
        return Submit(
            rid=request.rid or "",
            leg="unified",
            prompt_tokens=charge_of(request),
            max_tokens=0,
            bootstrap_room=room if fits(room) else None,
            block_tokens=self._block_tokens,
            block_hashes=hashes,
        )

    def _report(self, rank: RankLoad, load: Load, now: float) -> None:
        if self.table.take_in(rank.key, rank.epoch, load, now) is None:
            return
        self._health.report(rank.key, load, now, rank.interval_s)
        tokens = rank.newly_acked_tokens
        for _ in range(rank.newly_acked):
            self.table.end(rank, tokens)
            tokens = 0

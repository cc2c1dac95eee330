"""The load table for a program that embeds it alone: each argument is checked before `controller.load.table` is
called.

The controller itself calls that table, with arguments that it has checked, so a dispatch pays for no check twice.
This module keeps what was charged and has not ended, so that nothing ends that was never charged; the counters and
estimates are the table's.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from operator import index
from typing import get_args

from msgspec import ValidationError, convert, to_builtins

from bus.arguments import count, message, positive, seconds
from bus.defaults import STALE_S
from bus.wire.messages import MAX_ROOM, Hello, Load, MemberKey, Role, Sent, SentTo
from controller.load import table
from controller.load.groups import Group
from controller.load.rank import RankLoad

MAX_GIVEN_UP = 4096  # of a rank: failed dispatches that may still turn out never to have left


class _Charged:
    """The dispatches charged to one start of a rank, as tokens: not ended yet, and ended as failed."""

    __slots__ = ("given_up", "live")

    def __init__(self) -> None:
        self.live: Counter[int] = Counter()
        self.given_up: deque[int] = deque(maxlen=MAX_GIVEN_UP)


class LoadTable:
    """The loads of all ranks, as one controller knows them. Public, and usable without a process, thread or socket of
    ours (examples/load_table.py). Its ranks count dispatches by `controller_epoch`: a number that no other controller,
    and no other start of this one, uses.

    `now` is in seconds of any clock that never goes back, the same for all methods; requests and tokens are counts.
    No report of a rank or another controller raises: invalid ones are dropped or bounded. For all other arguments
    TypeError and ValueError say what is wrong, and then nothing is changed. A record that has
    left the table (its rank was closed, or opened again) stays as it is.

    `request_overcommit` x `max_running` requests and `kv_overcommit` (prefill: `prefill_overcommit`) x `kv_capacity`
    tokens are a rank's credit; a capacity of 0 in its hello means "not stated" and does not limit. `counts` says what
    was dropped and why."""

    def __init__(
        self,
        controller_epoch: int,
        *,
        stale_s: float = STALE_S,
        request_overcommit: float = 2.0,
        kv_overcommit: float = 1.0,
        prefill_overcommit: float = 4.0,
        controller_ttl_s: float = 5.0,
    ) -> None:
        self._table = table.LoadTable(
            count(controller_epoch, "controller_epoch"),
            stale_s=positive(stale_s, "stale_s"),
            request_overcommit=positive(request_overcommit, "request_overcommit"),
            kv_overcommit=positive(kv_overcommit, "kv_overcommit"),
            prefill_overcommit=positive(prefill_overcommit, "prefill_overcommit"),
            controller_ttl_s=positive(controller_ttl_s, "controller_ttl_s"),
        )
        self._charged: dict[MemberKey, _Charged] = {}

    @property
    def controller_epoch(self) -> int:
        """The number under which ranks count my dispatches."""
        return self._table.controller_epoch

    @property
    def ranks(self) -> Mapping[MemberKey, RankLoad]:
        """The record of each rank, by `(instance, dp_rank)`."""
        return self._table.ranks

    @property
    def counts(self) -> Counter[str]:
        """The number of reports and counters that were dropped, by reason."""
        return self._table.counts

    @property
    def turn(self) -> int:
        """The number of dispatches charged so far."""
        return self._table.turn

    # --- ranks come and go ------------------------------------------------------------------------------------

    def open(self, info: Hello) -> RankLoad:
        """Add a rank and return its record for this epoch, not ready yet; its `requests` and `tokens` are the estimate.
        An earlier record of the rank is closed: what was in flight to it is void, its totals carry over. If the same
        epoch was closed before, its dispatch numbers go on: the rank would take lower numbers for repeats."""
        rank = self._table.open(message(info, Hello))
        self._charged[rank.key] = _Charged()
        return rank

    def revise(self, rank: RankLoad, info: Hello) -> None:
        """Take in the facts that the same start of a rank restates; only its capacities may have changed. Raises
        ValueError for another start. A record that has left the table is not changed."""
        message(info, Hello)
        if self._has(rank):
            if _start(info) != _start(rank.info):
                raise ValueError("another start of a rank is opened, not revised")
            self._table.revise(rank, info)

    def reconnected(self, rank: RankLoad) -> None:
        """Note that the same epoch came back over a new connection: what it had not ingested is lost. So the next
        report's acknowledgement counts as all that I sent (should it be early, the next one corrects it)."""
        if self._has(rank):
            self._table.reconnected(rank)

    def close(self, rank: RankLoad) -> None:
        """Remove a rank. Another rank may get its slot at once: users of the slot number must forget it too."""
        if self._has(rank):
            self._table.close(rank)
            del self._charged[rank.key]

    def set_ready(self, rank: RankLoad, ready: bool, *, slow: bool = False) -> None:
        """Set whether requests may go to the rank. `slow`: one at a time until its next report."""
        ready, slow = bool(ready), bool(slow)
        if self._has(rank):
            self._table.set_ready(rank, ready, slow=slow)

    # --- what comes in ----------------------------------------------------------------------------------------

    def apply(self, key: MemberKey, epoch: int, load: Load, now: float) -> RankLoad | None:
        """Replace the known load of the rank `(instance, dp_rank)` in its epoch `epoch`. `load.acks` has, for each
        controller epoch, how many dispatches with how many tokens had been ingested when the load was read;
        `load.seq` rises with each report. Return None (and count it) when the report is old, of an unknown epoch, or
        no `Load` that could come over the wire (a negative count, a number that is no integer)."""
        now, rank = seconds(now), self._named(key, epoch)
        if rank is None:
            self.counts["report_unknown"] += 1
            return None
        try:
            load = convert(to_builtins(load), Load)
        except (ValidationError, TypeError, ValueError, OverflowError):
            self.counts["report_invalid"] += 1
            return None
        return self._table.apply(rank.key, rank.epoch, load, now)

    def disbelieve(self, rank: RankLoad) -> None:
        """Drop the last report, which another peer had sent in the rank's name: my own count is used until the next
        one comes."""
        if self._has(rank):
            self._table.disbelieve(rank)

    def declare(self, key: MemberKey, epoch: int, interval_s: float) -> None:
        """Record that a rank reports at least each `interval_s` seconds, within bounds: its reports are believed
        longer. Invalid values and unknown ranks are ignored."""
        rank = self._named(key, epoch)
        with suppress(ValueError):  # no number of seconds: as if it had not been said
            interval_s = seconds(interval_s, "interval_s")
            if rank is not None:
                self._table.declare(rank.key, rank.epoch, interval_s)

    def apply_sent(self, sent: Sent, now: float) -> bool:
        """Apply another controller's cumulative counters; return true if they were applied. False, and counted, when
        they are old, of one controller too many, or no `Sent` that could come over the wire; false when they are
        mine."""
        now = seconds(now)
        try:
            message(sent, Sent)
        except (TypeError, ValueError):
            self.counts["sent_invalid"] += 1
            return False
        return self._table.apply_sent(sent, now)

    def age(self, now: float) -> list[RankLoad]:
        """Stop believing reports that are too old, and counters of silent controllers; call it about once a second.
        Return the ranks whose reports became too old."""
        return self._table.age(seconds(now))

    # --- what goes out ----------------------------------------------------------------------------------------

    def charge(self, rank: RankLoad, tokens: int) -> int:
        """Charge a dispatch of `tokens` (of its prompt) to `rank`: its estimate rises at once. Each charge must be
        undone or ended once, with the same `tokens`. Return the dispatch's number (1, 2, ... for this controller epoch
        and node epoch), which the dispatch carries. Raises ValueError for a record that has left the table."""
        tokens = count(tokens, "tokens")
        if not self._has(rank):
            raise ValueError(f"{rank} is not in this table")
        if rank.sent_tokens + tokens > MAX_ROOM:
            raise ValueError("the tokens charged to a rank must stay a count")
        self._charged[rank.key].live[tokens] += 1
        return self._table.charge(rank, tokens)

    def undo(self, rank: RankLoad, tokens: int, *, given_up: bool = False) -> None:
        """Take back a charged dispatch that never left this process: the estimate falls at once, and its number is not
        used again. `given_up`: it was ended before, with `ok` false. Totals do not fall. Raises ValueError for what was
        not charged."""
        tokens, given_up = count(tokens, "tokens"), bool(given_up)
        if not self._has(rank):
            return
        if given_up:
            try:
                self._charged[rank.key].given_up.remove(tokens)
            except ValueError:
                raise ValueError(f"no dispatch of {tokens} tokens to {rank} has failed") from None
        else:
            self._settle(rank, tokens)
        self._table.undo(rank, tokens, given_up=given_up)

    def end(self, rank: RankLoad, tokens: int, *, ok: bool = True) -> None:
        """End a dispatch of `tokens`: it is no longer outstanding; the estimate falls only with the rank's next report.
        `ok` false: it failed or was given up, and counts as failed. Raises ValueError for what was not charged."""
        tokens, ok = count(tokens, "tokens"), bool(ok)
        if not self._has(rank):
            return
        self._settle(rank, tokens)
        if not ok:
            self._charged[rank.key].given_up.append(tokens)
        self._table.end(rank, tokens, ok=ok)

    def counters(self, since: int = -1) -> tuple[SentTo, ...]:
        """Return my cumulative counters, to be published (`Sent`), of the ranks that got a dispatch after turn `since`
        (-1: of all). Each is what the rank will have counted once everything in flight has arrived. What was lost with
        a connection counts as not in flight, since no acknowledgement will come for it."""
        return self._table.counters(int(index(since)))

    @property
    def shared(self) -> bool:
        """True while counters of other controllers come in."""
        return self._table.shared

    def group(self, role: Role, model: str = "", instance: str = "") -> Group:
        """Return the ranks of a role (of one model or instance where named), which stays up to date. Its `least` picks
        the least loaded of those that are ready and have credit, or None. Raises ValueError for an unknown role."""
        if role not in get_args(Role):
            raise ValueError(f"role must be one of {', '.join(get_args(Role))}")
        if not isinstance(model, str) or not isinstance(instance, str):
            raise TypeError("model and instance must be text")
        return self._table.group(role, model, instance)

    def validate(self) -> None:
        """Check that every sum and index follows its definition (tests call this after each event)."""
        self._table.validate()
        assert self._charged.keys() == self.ranks.keys()
        for key, charged in self._charged.items():
            rank = self.ranks[key]
            assert rank.outstanding == charged.live.total(), rank
            assert rank.outstanding_tokens == sum(tokens * many for tokens, many in charged.live.items()), rank

    # --- inside -----------------------------------------------------------------------------------------------

    def _has(self, rank: RankLoad) -> bool:
        """Return whether it is a record of this table that has not left it."""
        if not isinstance(rank, RankLoad):
            raise TypeError(f"a record that `open` returned is expected, not {type(rank).__name__}")
        return self.ranks.get(rank.key) is rank

    def _named(self, key: MemberKey, epoch: int) -> RankLoad | None:
        """Return the record that a report is about; None when there is none."""
        try:
            instance, dp_rank = key
            rank = self.ranks.get((instance, index(dp_rank)))
            return rank if rank is not None and rank.epoch == index(epoch) else None
        except (TypeError, ValueError):
            return None

    def _settle(self, rank: RankLoad, tokens: int) -> None:
        """Remove one live dispatch of `tokens`, or raise ValueError."""
        live = self._charged[rank.key].live
        if tokens not in live:
            raise ValueError(f"no dispatch of {tokens} tokens to {rank} is outstanding")
        live[tokens] -= 1
        if not live[tokens]:
            del live[tokens]


def _start(info: Hello) -> tuple[object, ...]:
    """Return the facts that never change while a rank lives."""
    return info.instance, info.dp_rank, info.epoch, info.role, info.model

"""The load table: forced updates that never erase work in flight.

The invariant, kept by every method below:

    estimate(rank) = last report + (what I sent - what it acknowledges)
                                 + for each other controller that it names (what that one says it sent
                                                                             - what it acknowledges)

A report overwrites what was believed (nothing is planned ahead); what it had not ingested when it was read is added,
so each request counts exactly once whether reports are fresh, late, repeated, lost or overtaken. A report with an old
`(epoch, seq)` is dropped, and one whose seq the rank will never reach, but after one that is no longer believed (it may
have been forged: `disbelieve`); a new node epoch is a new record, so what the old one had not acknowledged is void. A
report older than `stale_s`, and than two of the intervals that its rank declares, is not believed: the estimate falls
back to my own dispatched-and-not-ended work.

Tokens are what a dispatch waits behind: for prefill the prompt tokens not computed yet (KV that only waits for its
transfer costs no time); for decode and unified the KV tokens held plus those still to be fetched or computed, since
each step reads the one and memory must take the other.

Owns counters and estimates; no sockets, no clock, and no idea of a request's life.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from bus.defaults import STALE_INTERVALS, STALE_S, bounded_interval_s
from bus.timer_slots import TimerSlots
from bus.wire.messages import MAX_ROOM, Ack, Hello, Load, MemberKey, Role, Sent, SentTo
from controller.load.groups import Group, group_names, key_of
from controller.load.index import NEVER
from controller.load.rank import UNLIMITED, RankLoad

MAX_CONTROLLERS = 64
MAX_CLOSED = 4096  # starts of ranks that have left, of which it is remembered how far their dispatches were numbered
SEQ_JUMP = 1 << 40  # a seq may be a time in nanoseconds; beyond, no later report of its rank would be believed
HELD_PART = 32  # of what a decode rank holds that computes prompts too, one in so many counts as queued: it slows steps
MAX_FETCHES = 4096  # in flight to a rank, that are known to be no work for it
HARD_FACTOR = 4  # what cannot go elsewhere may queue at its rank up to this many times the credit


class LoadTable:
    """The loads of all ranks, as one controller knows them, for callers that have checked the arguments. `now` is in
    seconds of any one clock. A program that embeds it alone uses `controller.load.checked.LoadTable`."""

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
        self.controller_epoch = controller_epoch
        self.ranks: dict[MemberKey, RankLoad] = {}
        self.counts: Counter[str] = Counter()
        self._stale_s = stale_s
        self._request_overcommit = request_overcommit
        self._token_overcommit = {
            "prefill": prefill_overcommit,
            "decode": kv_overcommit,
            "unified": kv_overcommit,
        }
        self._controller_ttl_s = controller_ttl_s
        self._queue_only: set[Role] = {"prefill"}
        self._groups: dict[tuple[str, str, str], Group] = {}
        self._closed: OrderedDict[tuple[MemberKey, int], tuple[int, int, int]] = OrderedDict()
        self._free_slots: list[int] = []
        self._slots = 0  # given out so far, free ones included
        self.turn = 0  # dispatches charged so far
        self._fresh: TimerSlots[RankLoad] = TimerSlots()  # when to look whether a rank has reported since
        self._controllers: dict[int, tuple[int, float]] = {}  # epoch -> (seq of its last Sent, when)

    def count_queue_only(self, role: Role) -> None:
        """Leave what ranks of `role` hold in their KV memory out of their estimates; call it before one is there. The
        KV memory still limits what they get. Of a decode rank a part counts (HELD_PART), and all of one that computes
        no prompts: it has no such queue."""
        self._queue_only.add(role)

    # --- ranks come and go ------------------------------------------------------------------------------------

    def open(self, info: Hello) -> RankLoad:
        """Add a rank and return its record for this epoch, not ready yet; its `requests` and `tokens` are the estimate.
        An earlier record of the rank is closed: what was in flight to it is void, its totals carry over. If the same
        epoch was closed before, its dispatch numbers go on: the rank would take lower numbers for repeats."""
        old = self.ranks.get(info_key(info))
        if old is not None:
            self.close(old)
        rank = RankLoad(info)
        rank.counts_queue_only = info.role in self._queue_only and (info.role != "decode" or info.prefills)
        rank.counts_fetches = rank.counts_queue_only and info.role == "decode"
        if old is not None:
            rank.dispatched_before, rank.routed_total = old.dispatched_total, old.routed_total
            rank.failed_total = old.failed_total + old.outstanding  # these end with it
            rank.last_turn = old.last_turn
            rank.restarts = old.restarts + 1
        closed = self._closed.pop((rank.key, rank.epoch), None)
        if closed is not None:
            rank.undone, rank.sent, rank.sent_tokens = closed
            rank.dispatched_before -= rank.sent + rank.undone
            rank.acked, rank.acked_tokens = rank.sent, rank.sent_tokens
            self.reconnected(rank)
        self._limit(rank)
        if self._free_slots:
            rank.slot = self._free_slots.pop()
        else:
            rank.slot, self._slots = self._slots, self._slots + 1
        self.ranks[rank.key] = rank
        for group in self._groups_of(rank):
            group.add(rank)
        _refresh(rank)
        return rank

    def revise(self, rank: RankLoad, info: Hello) -> None:
        """Apply restated facts of the same start of a rank; only its capacities may have changed."""
        before = rank.largest, rank.info.block_tokens
        rank.info = info
        self._limit(rank)
        if (rank.largest, info.block_tokens) != before:
            for group in self._groups_of(rank):
                group.changed()
        _refresh(rank)

    def reconnected(self, rank: RankLoad) -> None:
        """Note that the same epoch came back over a new connection. What it had not ingested is lost, so the next
        report's acknowledgement counts as all that I sent (if it is early, the next one corrects it)."""
        rank.rebase = True

    def close(self, rank: RankLoad) -> None:
        """Remove a rank; nothing if the record has left the table. Another rank may get its slot at once: users of the
        slot number must forget it too."""
        if self.ranks.get(rank.key) is not rank:
            return
        for group in self._groups_of(rank):
            group.remove(rank)
        rank.ready = rank.candidate = False
        del self.ranks[rank.key]
        self._free_slots.append(rank.slot)
        if rank.sent or rank.undone:
            self._closed[(rank.key, rank.epoch)] = rank.undone, rank.sent, rank.sent_tokens
            if len(self._closed) > MAX_CLOSED:
                self._closed.popitem(last=False)

    def set_ready(self, rank: RankLoad, ready: bool, *, slow: bool = False) -> None:
        """Set whether requests may go to the rank, as its health says. `slow`: one at a time until its next report."""
        if ready != rank.ready:
            rank.ready = ready
            for group in self._groups_of(rank):
                group.turned(rank)
        rank.slow = slow and ready
        _refresh(rank)

    # --- what comes in ----------------------------------------------------------------------------------------

    def apply(self, key: MemberKey, epoch: int, load: Load, now: float) -> RankLoad | None:
        """Replace the known load of the rank `(instance, dp_rank)` in its epoch `epoch`. `load.acks` has, for each
        controller epoch, how many dispatches with how many tokens had been ingested when the load was read;
        `load.seq` rises with each report. Return None (and count it) when the report is old or of an unknown epoch."""
        rank = self.ranks.get(key)
        if rank is None or rank.epoch != epoch:
            self.counts["report_unknown"] += 1
            return None
        last = rank.load
        if rank.stale or last is None:
            self._fresh.add(rank, now + self._stale_s)
            rank.stale = False
        elif load.seq <= last.seq:
            self.counts["report_old"] += 1
            return None
        elif load.seq - last.seq > SEQ_JUMP:
            self.counts["report_forged"] += 1
            return None
        rank.was_candidate = rank.candidate
        rank.load = load
        rank.reported_at = now
        rank.slow = False
        rank.base_requests = load.running + load.waiting
        rank.base_tokens = load.waiting_tokens + load.kv_tokens
        if rank.counts_queue_only:
            rank.held_tokens = apart = _apart(rank, load)
            rank.base_tokens -= apart
            if rank.counts_fetches:
                rank.base_idle = _idle(load)
            elif rank.info.role == "prefill":
                rank.held_tokens = 0
        self._acknowledge(rank, load.acks)
        _refresh(rank)
        return rank

    def disbelieve(self, rank: RankLoad) -> None:
        """Drop the last report, which was not the rank's own: my own count of outstanding work is the estimate until
        the next one comes."""
        if not rank.stale:
            self.counts["report_forged"] += 1
            self._fresh.discard(rank)
            rank.stale = True
            _refresh(rank)

    def declare(self, key: MemberKey, epoch: int, interval_s: float) -> None:
        """Record that a rank reports at least each `interval_s` seconds, within bounds: its reports are believed
        longer."""
        rank = self.ranks.get(key)
        if rank is not None and rank.epoch == epoch:
            rank.interval_s = bounded_interval_s(interval_s)

    def apply_sent(self, sent: Sent, now: float) -> bool:
        """Apply another controller's cumulative counters; return true if they were applied. False, and counted, when
        they are old or of one controller too many; false when they are mine."""
        if sent.epoch == self.controller_epoch:
            return False
        known = self._controllers.get(sent.epoch)
        if known is None and len(self._controllers) >= MAX_CONTROLLERS:
            self.counts["sent_too_many"] += 1
            return False
        if known is not None and sent.seq <= known[0]:
            self.counts["sent_old"] += 1
            return False
        self._controllers[sent.epoch] = (sent.seq, now)
        for counter in sent.counters:
            rank = self.ranks.get((counter.instance, counter.dp_rank))
            if rank is not None and rank.epoch == counter.epoch:
                rank.others[sent.epoch] = (counter.dispatches, counter.tokens)
                _sum_others(rank)
                _refresh(rank)
        return True

    def age(self, now: float) -> list[RankLoad]:
        """Stop believing reports that are too old, and counters of silent controllers; call it about once a second.
        Return the ranks whose reports became too old."""
        aged = []
        for rank in self._fresh.take(now):
            if self.ranks.get(rank.key) is not rank:
                continue
            assert rank.reported_at is not None
            believed_until = rank.reported_at + max(self._stale_s, STALE_INTERVALS * rank.interval_s)
            if believed_until >= now:  # looked at earlier too: its interval may have become shorter by then
                self._fresh.add(rank, min(believed_until, now + self._stale_s))
                continue
            rank.stale = True
            _refresh(rank)
            aged.append(rank)
        for epoch, (_, at) in list(self._controllers.items()):
            if now - at > self._controller_ttl_s:
                del self._controllers[epoch]
                for rank in self.ranks.values():
                    if rank.others.pop(epoch, None) is not None:
                        _sum_others(rank)
                        _refresh(rank)
        return aged

    # --- what goes out ----------------------------------------------------------------------------------------

    def charge(self, rank: RankLoad, tokens: int, *, fetches: bool = False) -> int:
        """Charge a dispatch of `tokens` (of its prompt) to `rank`: its estimate rises at once. `fetches`: the rank will
        fetch them, and computes none. Each charge must be undone or ended once, with the same arguments. Return the
        dispatch's number (1, 2, ... for this controller epoch and node epoch), which the dispatch carries."""
        rank.sent += 1
        rank.sent_tokens += tokens
        rank.outstanding += 1
        rank.outstanding_tokens += tokens
        rank.requests += 1
        rank.tokens += tokens
        self.turn += 1
        rank.last_turn = self.turn
        if fetches and rank.counts_fetches:
            rank.outstanding_fetches += tokens
            if len(rank.fetches) < MAX_FETCHES:
                rank.fetches.append((rank.sent, tokens))
                rank.fetching_tokens += tokens
            rank.idle_tokens = _idle_tokens(rank)
        _index(rank)
        return rank.sent + rank.undone

    def undo(self, rank: RankLoad, tokens: int, *, fetches: bool = False, given_up: bool = False) -> None:
        """Take back a charged dispatch that never left this process: the estimate falls at once, and its number is not
        used again. `given_up`: it was ended before, with `ok` false. Totals do not fall."""
        rank.undone += 1
        rank.sent -= 1
        rank.sent_tokens -= tokens
        rank.fetches.clear()  # it may be any of these: what is still on its way counts in full until a report has it
        rank.fetching_tokens = 0
        if not given_up:
            rank.outstanding -= 1
            rank.outstanding_tokens -= tokens
            if fetches and rank.counts_fetches:
                rank.outstanding_fetches -= tokens
        early = max(0, rank.acked - rank.sent)  # not ingested, but taken for it when the connection was new
        early_tokens = max(0, rank.acked_tokens - rank.sent_tokens)
        _shift(rank, early, early_tokens)
        rank.acked, rank.acked_tokens = rank.acked - early, rank.acked_tokens - early_tokens
        _refresh(rank)

    def end(self, rank: RankLoad, tokens: int, *, fetches: bool = False, ok: bool = True) -> None:
        """End a dispatch of `tokens`: it is no longer outstanding; the estimate falls only with the rank's next report.
        `ok` false: it failed or was given up, and counts as failed."""
        if not ok:
            rank.failed_total += 1
        rank.outstanding -= 1
        rank.outstanding_tokens -= tokens
        if fetches and rank.counts_fetches:
            rank.outstanding_fetches -= tokens
        if rank.stale or rank.slow:
            _refresh(rank)

    def counters(self, since: int = -1) -> tuple[SentTo, ...]:
        """Return my cumulative counters, to be published (`Sent`), of the ranks that got a dispatch after turn `since`
        (-1: of all). Each is what the rank will have counted once everything in flight has arrived. What was lost with
        a connection counts as not in flight, since no acknowledgement will come for it."""
        return tuple(
            SentTo(
                rank.key[0],
                rank.key[1],
                rank.epoch,
                min(MAX_ROOM, max(0, rank.sent + rank.skew)),  # a rank may claim to have taken in anything
                min(MAX_ROOM, max(0, rank.sent_tokens + rank.skew_tokens)),
            )
            for rank in self.ranks.values()
            if rank.last_turn > since
        )

    @property
    def shared(self) -> bool:
        """True while other controllers send counters."""
        return bool(self._controllers)

    def group(self, role: Role, model: str = "", instance: str = "") -> Group:
        """Return the ranks of a role (of one model or instance where named), which stays up to date; made at its first
        use. Its `least` picks the least loaded of those that are ready and have credit, or None."""
        group = self._groups.get((role, model, instance))
        if group is None:
            if len(self._groups) > 4 * len(self.ranks) + 64:  # names come from clients: keep only what has members
                self._prune()
            group = self._groups[(role, model, instance)] = Group(role, model, instance)
            for rank in self._of_names(role, model, instance):
                if group.takes(rank):
                    group.add(rank)
        return group

    def validate(self) -> None:
        """Check that every sum and index follows its definition (tests call this after each event)."""
        fresh = set(self._fresh)
        for rank in self.ranks.values():
            assert 0 <= rank.acked <= rank.sent, rank
            assert 0 <= rank.acked_tokens <= rank.sent_tokens, rank
            assert 0 <= rank.outstanding <= rank.sent, rank
            assert 0 <= rank.failed_total <= rank.ended_total, rank
            assert rank.requests >= 0 <= rank.tokens, rank
            assert rank.stale != (rank in fresh), rank
            want = _estimate(rank)
            assert (rank.requests, rank.tokens, rank.idle_tokens) == want, (rank, want)
            assert 0 <= rank.idle_tokens <= rank.tokens, rank
            apart = rank.counts_queue_only and rank.info.role != "prefill"
            held = _apart(rank, rank.load) if apart and rank.load is not None and not rank.stale else 0
            assert rank.held_tokens == held, rank
            assert not rank.candidate or rank.ready, rank
        slots = [*self._free_slots, *(rank.slot for rank in self.ranks.values())]
        assert sorted(slots) == list(range(self._slots)), "every slot is taken once, or free"
        keys: dict[tuple[str, str, str], set[MemberKey]] = {}
        for rank in self.ranks.values():
            for name in group_names(rank):
                keys.setdefault(name, set()).add(rank.key)
        for named, group in self._groups.items():
            assert {rank.key for rank in group.members if rank} == keys.get(named, set()), named
            group.validate()

    # --- inside -----------------------------------------------------------------------------------------------

    def _acknowledge(self, rank: RankLoad, acks: tuple[Ack, ...]) -> None:
        """Apply what a report acknowledges: of mine and of each other controller's."""
        mine = self.controller_epoch
        dispatches = tokens = others = 0
        for ack in acks:
            if ack.controller_epoch == mine:
                dispatches, tokens = ack.dispatches, ack.tokens
            else:
                others += 1
        if others or rank.other_acks:
            rank.other_acks = {
                ack.controller_epoch: (ack.dispatches, ack.tokens) for ack in acks if ack.controller_epoch != mine
            }
            _sum_others(rank)
        acked, acked_tokens = dispatches - rank.skew, tokens - rank.skew_tokens
        if rank.rebase or acked > rank.sent or acked_tokens > rank.sent_tokens:
            self.counts["ack_ahead"] += not rank.rebase
            rank.rebase = False
            _shift(rank, acked - rank.sent, acked_tokens - rank.sent_tokens)
            acked, acked_tokens = rank.sent, rank.sent_tokens
        elif acked < 0 or acked_tokens < 0:
            acked, acked_tokens = max(0, acked), max(0, acked_tokens)
        rank.newly_acked = acked - rank.acked
        rank.newly_acked_tokens = acked_tokens - rank.acked_tokens
        rank.acked = acked
        rank.acked_tokens = acked_tokens
        while rank.fetches and rank.fetches[0][0] <= acked:
            rank.fetching_tokens -= rank.fetches.popleft()[1]

    def _limit(self, rank: RankLoad) -> None:
        info = rank.info
        if info.max_running:
            rank.limit_requests = max(1, int(self._request_overcommit * info.max_running))
            rank.hard_requests = HARD_FACTOR * rank.limit_requests
        # the last token's KV is never needed
        rank.largest = min(info.max_context or UNLIMITED, info.kv_capacity + 1 if info.kv_capacity else UNLIMITED)
        if info.kv_capacity:
            rank.limit_tokens = max(1, int(self._token_overcommit[info.role] * info.kv_capacity))

    def _of_names(self, role: Role, model: str, instance: str) -> Iterable[RankLoad]:
        """Return all ranks if some rank has these names, else none. Clients may invent names: an unknown one must
        not cost a look at every rank."""
        if not (model or instance):
            return self.ranks.values()
        all_of_role = self.group(role)
        if instance:
            return all_of_role.ranks_of(instance).values()
        return filter(None, all_of_role.members) if model in all_of_role.facts().models else ()

    def _groups_of(self, rank: RankLoad) -> list[Group]:
        return [self._groups[name] for name in group_names(rank) if name in self._groups]

    def _prune(self) -> None:
        for name, group in list(self._groups.items()):
            if not any(group.members):
                del self._groups[name]


def _shift(rank: RankLoad, dispatches: int, tokens: int) -> None:
    """Change by this much the difference between what the rank counts as ingested and what I count as sent."""
    rank.skew += dispatches
    rank.skew_tokens += tokens


def _sum_others(rank: RankLoad) -> None:
    requests = tokens = 0
    for epoch, (acked, acked_tokens) in rank.other_acks.items():
        sent, sent_tokens = rank.others.get(epoch, (0, 0))
        requests += max(0, sent - acked)  # acknowledged more than published: its counters are the late ones
        tokens += max(0, sent_tokens - acked_tokens)
    rank.others_requests, rank.others_tokens = requests, tokens


def _refresh(rank: RankLoad) -> None:
    """Compute the estimate again, and what depends on it."""
    if rank.stale:
        rank.requests, rank.tokens, rank.held_tokens = rank.outstanding, rank.outstanding_tokens, 0
    else:
        rank.requests = rank.base_requests + rank.sent - rank.acked + rank.others_requests
        rank.tokens = rank.base_tokens + rank.sent_tokens - rank.acked_tokens + rank.others_tokens
    if rank.counts_fetches:
        rank.idle_tokens = _idle_tokens(rank)
    _index(rank)


def _index(rank: RankLoad) -> None:
    """Update what depends on the estimate. This is the hot path: one call a dispatch, one a report."""
    rank.candidate = can_take = (
        rank.ready
        and rank.requests < rank.limit_requests
        and rank.tokens + rank.held_tokens < rank.limit_tokens
        and not (rank.slow and rank.outstanding)
    )
    for index, leaf, metric in rank.leaves:
        index.update(leaf, key_of(rank, metric, leaf) if can_take else NEVER)


def _apart(rank: RankLoad, load: Load) -> int:
    """Return the KV tokens of `load` that the estimate leaves out at a rank whose queue alone counts."""
    return load.kv_tokens - load.kv_tokens // HELD_PART if rank.info.role == "decode" else load.kv_tokens


def _idle(load: Load) -> int:
    """Return the tokens that the estimate of a decode rank has of `load`, and that it need not compute: a part of those
    in its KV memory, and those that it is to fetch."""
    held = load.kv_tokens // HELD_PART
    return held if load.to_compute_tokens is None else held + max(0, load.waiting_tokens - load.to_compute_tokens)


def _idle_tokens(rank: RankLoad) -> int:
    """Return the same of its whole estimate: with legs that are on their way to it, or as these alone say."""
    if rank.stale:
        return rank.outstanding_fetches
    return rank.base_idle + min(rank.fetching_tokens, rank.in_flight_tokens)


def _estimate(rank: RankLoad) -> tuple[int, int, int]:
    """Return the invariant computed from the records alone: requests, tokens, and of these the ones that nothing has to
    compute; `validate` compares the counters with it."""
    if rank.stale or rank.load is None:
        return rank.outstanding, rank.outstanding_tokens, rank.outstanding_fetches
    work = rank.load.waiting_tokens + rank.load.kv_tokens - (_apart(rank, rank.load) if rank.counts_queue_only else 0)
    requests = rank.load.running + rank.load.waiting + rank.in_flight
    tokens = work + rank.in_flight_tokens
    for epoch, (acked, acked_tokens) in rank.other_acks.items():
        sent, sent_tokens = rank.others.get(epoch, (0, 0))
        requests += max(0, sent - acked)
        tokens += max(0, sent_tokens - acked_tokens)
    idle = _idle(rank.load) + min(sum(tokens for _, tokens in rank.fetches), rank.in_flight_tokens)
    return requests, tokens, idle if rank.counts_fetches else 0


def info_key(info: Hello) -> MemberKey:
    """Return `(instance, dp_rank)` of a hello."""
    return info.instance, info.dp_rank

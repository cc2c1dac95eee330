"""The order at a rank: which sequence (a request at our scheduler) is admitted next, and whose prompts a step computes.
Pure.

Clients take turns, by tokens (`bus.fair_queue`), so that a newcomer does not wait behind the backlog of another client.
A client is a key. Without keys, and wherever one client is alone, the order is priority, then arrival.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from bus.fair_queue import FairQueue
from nodes.own.sequence import Sequence

SHARES = 6  # one client gets at most this part (1/6) of a step's prompt tokens while others are here
SHARE_MIN = 128  # tokens: each step has a fixed cost, however short it is
RESERVE = 8  # it leaves this part (1/8) of run slots and KV memory to others meanwhile
HERE_STEPS = 100  # a client that left within this many steps counts as here


class AdmissionQueue:
    """The sequences that wait for a run slot and memory. The scheduler adds each, and removes it when it is admitted or
    ends. There are `lines` while one waits."""

    def __init__(self) -> None:
        self.lines: dict[str, dict[int, dict[int, Sequence]]] = {}  # by client, priority and id
        self._fair = FairQueue()

    def add(self, sequence: Sequence) -> None:
        """Add a sequence behind those of the same client and priority."""
        line = self.lines.get(sequence.client)
        if line is None:
            line = self.lines[sequence.client] = {}
            self._fair.enter(sequence.client)
        line.setdefault(sequence.priority, {})[sequence.id] = sequence

    def head(self, barred: Callable[[str], bool] | None = None) -> Sequence | None:
        """Return the next sequence, of the clients that are not `barred`; it stays. None if there is none."""
        clients = [client for client in self.lines if barred is None or not barred(client)]
        if not clients:
            return None
        line = self.lines[clients[0] if len(clients) == 1 else self._fair.next(clients)]
        return next(iter(line[max(line)].values()))

    def remove(self, sequence: Sequence, *, admitted: bool = False) -> None:
        """Remove a sequence; with `admitted` it got a slot and memory, which counts as its client's turn."""
        line = self.lines[sequence.client]
        if admitted:
            self._fair.serve(sequence.client, sequence.reserve_tokens)
        level = line[sequence.priority]
        del level[sequence.id]
        if not level:
            del line[sequence.priority]
            if not line:
                del self.lines[sequence.client]
                if not self.lines:
                    self._fair.clear()

    def validate(self, waiting: set[Sequence]) -> None:
        """Check that exactly the sequences in `waiting` are here; AssertionError if not (for tests)."""
        lines = self.lines.values()
        assert all(line and all(line.values()) for line in lines)
        assert {sequence for line in lines for level in line.values() for sequence in level.values()} == waiting


class ClientUsage:
    """The run slots and KV memory that each client uses now, made for one round of admissions. It shows which clients
    must wait until others had some."""

    def __init__(
        self, sequences: Iterable[Sequence], running: Iterable[Sequence], max_running: int, blocks: int
    ) -> None:
        self._slots = Counter(sequence.client for sequence in running)
        self._blocks: Counter[str] = Counter()
        for sequence in sequences:
            self._blocks[sequence.client] += len(sequence.table)
        self._most, self._most_blocks = max_running - max_running // RESERVE, blocks - blocks // RESERVE

    def add(self, sequence: Sequence) -> None:
        """Count a sequence that was admitted now."""
        self._slots[sequence.client] += 1
        self._blocks[sequence.client] += len(sequence.table)

    def a_part(self, client: str) -> bool:
        """Return true if the client uses all but the share that is reserved for others, of slots or of memory."""
        return self._slots[client] >= self._most or self._blocks[client] >= self._most_blocks

    def some_memory(self, client: str) -> bool:
        """Return true if the client holds any KV memory."""
        return self._blocks[client] > 0


class StepShares:
    """The division of a step's prompt tokens among clients. While several clients are here, none gets more than a part
    of each step: otherwise the next client would wait for a step that one client fills, and for another one beside it.
    """

    def __init__(self) -> None:
        self._here: Counter[str] = Counter()  # sequences, by client
        self._left: dict[str, int] = {}  # clients without sequences: the step at which the last one left
        self._fair = FairQueue()

    def came(self, client: str) -> None:
        """Count a sequence of `client` that came to the scheduler."""
        self._here[client] += 1
        self._fair.enter(client)

    def left(self, client: str, step: int) -> None:
        """Count a sequence of `client` that ended, at the step with this number."""
        self._here[client] -= 1
        if not self._here[client]:
            del self._here[client]
            self._left[client] = step
            if not self._here:
                self._fair.clear()

    def several(self, step: int) -> bool:
        """Return true if more than one client is here, or was within HERE_STEPS."""
        if self._left:
            recent = ((client, at) for client, at in self._left.items() if step - at < HERE_STEPS)
            self._left = {client: at for client, at in recent if client not in self._here}
        return len(self._here) + len(self._left) > 1

    def in_turn(self, prompts: Iterable[Sequence], step: int) -> Iterable[Sequence]:
        """Return `prompts` in the order in which a step computes them: those first whose client is least ahead."""
        if not self.several(step):
            return prompts
        return sorted(prompts, key=lambda sequence: self._fair.clock(sequence.client))

    def divide(self, prompts: Iterable[Sequence], budget: int, step: int, least: int) -> list[tuple[Sequence, int]]:
        """Return which prompts, which are `in_turn`, a step computes, and how many tokens of each, `budget` in all. A
        newcomer next to others gets at least `least`. What each client got is charged to its clock."""
        share = budget
        if self.several(step):
            share = max(SHARE_MIN, budget // SHARES)
        used: dict[str, int] = {}
        given = []
        for sequence in prompts:
            client = sequence.client
            if used and client not in used:  # one that is further ahead gets no more than those before it took
                share = min(share, max(least, *used.values()))
            tokens = min(budget, share - used.get(client, 0), len(sequence.prompt) - sequence.computed)
            if tokens > 0:
                budget -= tokens
                used[client] = used.get(client, 0) + tokens
                given.append((sequence, tokens))
                if not budget:
                    break
        least_charge = SHARE_MIN  # of the first, for which the step is short: a stream of tiny prompts has its price
        for client, tokens in used.items():
            self._fair.serve(client, max(least_charge, tokens))
            least_charge = 0
        return given

    def validate(self, sequences: Iterable[Sequence]) -> None:
        """Check that the counts are those of `sequences`; AssertionError if not (for tests)."""
        assert self._here == Counter(sequence.client for sequence in sequences)

"""Continuous batching of sequences (one for each leg of a request) over one engine: which sequences run, which wait,
and which blocks they hold.

Pure: no clock, sockets, messages or KV bytes. The same code runs in a node and, in virtual time, in the trace lab.
There a prompt may be a `range` (ids that do not matter) with its block hashes given.

Admission is strict first come, first served within a priority, by free run slots and KV blocks. A sequence reserves all
blocks it can ever need (prompt and output) when it is admitted: memory is used less tightly than with growth and
preemption, but an admitted sequence always finishes and nothing is ever computed twice. A step takes one token of every
decoding sequence, then prompt tokens in order of admission up to `chunk_tokens` in all (chunked prefill). Several
clients take turns in both, and none takes all (`nodes.own.admission`). A prompt looks into the prefix cache when it is
admitted, and again when its first tokens are computed: of prompts with one prefix that come together the first computes
it for all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq

from bus.wire.hashing import ROOT, block_hashes, hash_block, root_of, token_bytes
from nodes.own.admission import AdmissionQueue, ClientUsage, StepShares
from nodes.own.blocks import BlockPool
from nodes.own.engines.base import Row, StepPlan, StepResult
from nodes.own.sequence import SLOT_PHASES, Phase, Sequence

LENT_PART = 0.5  # of the blocks, at most


class Scheduler:
    """The scheduler of one rank; a sequence is named by its id. Calls may come in any order; `plan` and `complete`
    alternate. The module's docstring has the rules. `step` counts steps; the totals are counted since the start."""

    def __init__(self, pool: BlockPool, *, max_running: int, chunk_tokens: int) -> None:
        self.pool = pool
        self.max_running = max_running
        self.chunk_tokens = chunk_tokens
        self.step = 0
        self.busy_us_total = 0
        self.prompt_tokens_total = 0
        self.cached_tokens_total = 0
        self.admitted_tokens_total = 0
        self.computed_tokens_total = 0
        self._sequences: dict[int, Sequence] = {}
        self._queue = AdmissionQueue()  # in phase WAITING
        self._shares = StepShares()
        self._running: dict[int, Sequence] = {}  # holds a slot, in order of admission
        self._admitted: list[Sequence] = []
        self.begun: deque[Sequence] = deque(maxlen=max_running)  # prompts being computed; the owner takes them
        self._in_step: list[Sequence] = []  # in the order of the plan's rows
        self._held = 0  # sequences in phase HELD
        self._held_tokens = 0  # of their prompts
        self._lent: dict[int, list[int]] = {}  # blocks kept for another rank, by the id of a sequence to come
        self._coming: dict[int, int] = {}  # blocks of prompts, by hash: the sequence that is the first to compute it
        self._waiting_tokens = 0
        self._to_fetch = 0  # of these, of imported sequences
        self._kv_tokens = 0

    # --- load figures -------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """The number of sequences that hold a run slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """The number of sequences that wait for a slot, or are parked."""
        return len(self._sequences) - len(self._running) - self._held

    @property
    def waiting_tokens(self) -> int:
        """The prompt tokens not yet computed or fetched; without those that the prefix cache is expected to save."""
        return self._waiting_tokens

    @property
    def to_compute_tokens(self) -> int:
        """The part of `waiting_tokens` that this rank computes itself: not of prompts whose KV comes from elsewhere."""
        return self._waiting_tokens - self._to_fetch

    @property
    def kv_tokens(self) -> int:
        """The tokens in the KV memory of live sequences; never more than the blocks they hold (prefixes are shared)."""
        return min(self._kv_tokens, self.pool.held * self.pool.block_tokens)

    @property
    def kv_cached(self) -> int:
        """The tokens in blocks of the prefix cache that no sequence holds."""
        return self.pool.reclaimable * self.pool.block_tokens

    @property
    def kv_pinned(self) -> int:
        """The tokens kept for other ranks alone: of prompts that are held, which are in `kv_tokens`, and of lent
        blocks, which are not; with these never more than what is held."""
        if not self._lent:
            return min(self._held_tokens, self.kv_tokens) if self._held else 0
        size = self.pool.block_tokens
        lent = sum(len(table) for table in self._lent.values()) * size
        return min(self._held_tokens, self.kv_tokens) + min(lent, self.pool.held * size - self.kv_tokens)

    @property
    def busy(self) -> bool:
        """True while a step is computed: between `plan` and `complete`."""
        return bool(self._in_step)

    @property
    def in_step(self) -> Seq[Sequence]:
        """The sequences of the step under way: first those that decode, then those whose prompts are computed."""
        return self._in_step

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, seq: int) -> bool:
        return seq in self._sequences

    def sequence(self, seq: int) -> Sequence:
        """Return the sequence; KeyError when it is not here (any more)."""
        return self._sequences[seq]

    # --- sequences come and go ----------------------------------------------------------------------------------

    def add(self, sequence: Sequence, *, parked: bool = False) -> None:
        """Queue a new sequence, or park it until `unpark`. ValueError when it could never be admitted: it is too long
        for the KV memory, empty, or known already."""
        if self.pool.blocks_for(sequence.reserve_tokens) > self.pool.blocks:
            raise ValueError(f"{sequence.reserve_tokens} tokens exceed the KV capacity")
        if sequence.id in self._sequences or not len(sequence.prompt) or sequence.max_tokens < 1:
            raise ValueError(f"sequence {sequence.id} is empty or known already")
        if sequence.hashes is None:
            root = root_of(sequence.params.cache_salt)
            known = not isinstance(sequence.prompt, range)
            sequence.hashes = block_hashes(sequence.prompt, self.pool.block_tokens, root) if known else []
        self._sequences[sequence.id] = sequence
        self._shares.came(sequence.client)
        self.prompt_tokens_total += len(sequence.prompt)
        reusable = self._reusable(sequence)
        sequence.read = min(sequence.read, len(reusable))
        here = max(len(self.pool.match_prefix(reusable)), sequence.read)
        if not sequence.imported:
            while here < len(reusable) and reusable[here] in self._coming:
                here += 1
            sequence.first_of = reusable[here:]
            self._coming.update(dict.fromkeys(sequence.first_of, sequence.id))
        self._expect(sequence, len(sequence.prompt) - here * self.pool.block_tokens)
        sequence.phase = Phase.PARKED
        if not parked:
            self.unpark(sequence.id)

    def unpark(self, seq: int) -> None:
        """Queue a parked sequence."""
        sequence = self._sequences[seq]
        assert sequence.phase is Phase.PARKED, sequence
        sequence.phase = Phase.WAITING
        self._queue.add(sequence)

    def take_admitted(self) -> list[Sequence]:
        """Admit what there is space for, and return the sequences admitted since the last call whose KV comes from
        elsewhere: the caller fills their `table` with it, then calls `start` for imported ones, `has_read` for those
        that read a part."""
        self._admit()
        if not self._admitted:
            return []
        admitted, self._admitted = self._admitted, []
        return [s for s in admitted if s.phase is Phase.FETCHING]

    def start(self, seq: int, first_token: int) -> None:
        """Let an imported sequence decode, because its prompt's KV is in `table` now. Its output goes on from
        `first_token`, which is not reported again."""
        sequence = self._sequences[seq]
        assert sequence.phase is Phase.FETCHING, sequence
        self._hold(sequence, len(sequence.prompt) - sequence.computed)
        self._expect(sequence, 0)
        sequence.output.append(first_token)
        sequence.phase = Phase.DECODING
        if sequence.hashes:
            self._commit(sequence)

    def has_read(self, seq: int, blocks: int) -> int:
        """Let a sequence compute the rest of its prompt: its first `blocks` blocks are in `table` now. Return how many
        tokens that spares it."""
        sequence = self._sequences[seq]
        assert sequence.phase is Phase.FETCHING, sequence
        sequence.read = 0
        tokens = blocks * self.pool.block_tokens - sequence.computed
        self._cached(sequence, tokens)
        sequence.phase = Phase.PROMPT
        self._commit(sequence)
        return tokens

    def lend(self, seq: int, hashes: Seq[int]) -> int:
        """Keep the cached blocks of a prompt with these `hashes` until `reclaim`, and return how many: none if more
        than LENT_PART of the memory would be kept so. `seq` names them; its sequence may come meanwhile."""
        shared = self.pool.match_prefix(hashes)
        lent = sum(len(table) for table in self._lent.values())
        if seq in self._lent or lent + len(shared) > self.pool.blocks * LENT_PART:
            return 0
        taken = self.pool.take(len(shared), hashes)
        assert taken is not None, "cached blocks can always be held"
        self._lent[seq] = taken[0]
        return len(shared)

    def lent(self, seq: int) -> list[int] | None:
        """Return the blocks that `lend` keeps; None: there are none."""
        return self._lent.get(seq)

    def reclaim(self, seq: int) -> None:
        """Keep what was lent no longer."""
        self.pool.release(self._lent.pop(seq, []))

    def cancel(self, seq: int) -> bool:
        """Remove a sequence and free its blocks (after the running step, if it takes part). Return false when it is
        unknown."""
        sequence = self._sequences.get(seq)
        if sequence is None:
            return False
        if sequence.fed:
            sequence.doomed = True
        else:
            self._remove(sequence)
        return True

    release = cancel  # the holder of a HELD sequence's KV needs it no more

    # --- steps --------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """Admit what there is space for and return the next step, for the engine; None when there is nothing to compute
        or a step is running."""
        if self._in_step:
            return None
        self._admit()
        self._choose()
        rows: list[Row] = []
        for sequence in self._in_step:
            if sequence.phase is Phase.DECODING:
                index = len(sequence.output)
                row_at = len(sequence.prompt) + index - 1
                rows.append(
                    Row(sequence.id, (sequence.output[-1],), row_at, sequence.table, sequence.params,
                        sequence.offset + index)
                )  # fmt: skip
            else:
                end = sequence.computed + sequence.fed
                last = end == len(sequence.prompt)
                tokens = sequence.prompt[sequence.computed : end]
                rows.append(
                    Row(sequence.id, tokens, sequence.computed, sequence.table, sequence.params if last else None,
                        sequence.offset)
                )  # fmt: skip
        return StepPlan(self.step + 1, tuple(rows)) if rows else None

    def complete(self, result: StepResult) -> list[Sequence]:
        """Account for the step that ran. Return the sequences that are still wanted and have one more token in their
        `output`, or whose `finish` is `failed`, in the order of the plan's rows. A sequence with a `finish` is removed;
        one with `hold` keeps its KV until `release`."""
        tokens, logprobs = dict(result.tokens), dict(result.logprobs)
        stepped, self._in_step = self._in_step, []
        self.step += 1
        self.busy_us_total += round(result.duration_s * 1e6)
        outputs: list[Sequence] = []
        for sequence in stepped:
            fed, sequence.fed = sequence.fed, 0
            if sequence.doomed:
                self._remove(sequence)
            elif result.error or sequence.id in result.damaged:
                sequence.finish = "failed"
                self._remove(sequence)
                outputs.append(sequence)
            else:
                self._advance(sequence, fed)
                if sequence.phase is Phase.DECODING:
                    if logprobs:
                        sequence.logprobs = logprobs.get(sequence.id)
                    self._append(sequence, tokens[sequence.id])
                    outputs.append(sequence)
        return outputs

    # --- inside -------------------------------------------------------------------------------------------------

    def _choose(self) -> None:
        """Put the sequences of the next step into `_in_step`, and into `fed` how many tokens it takes of each."""
        fed, prompts = self._in_step, []
        for sequence in self._running.values():
            if sequence.phase is Phase.DECODING:
                sequence.fed = 1
                fed.append(sequence)
            elif sequence.phase is Phase.PROMPT:
                prompts.append(sequence)
        if prompts:
            size = self.pool.block_tokens
            budget = max(self.chunk_tokens - len(fed), size)  # prompts progress however many sequences decode
            looked_at = map(self._match, self._shares.in_turn(prompts, self.step))  # those alone that the step computes
            for sequence, count in self._shares.divide(looked_at, budget, self.step, size):
                self._note_begun(sequence)
                sequence.fed = count
                fed.append(sequence)

    def _match(self, sequence: Sequence) -> Sequence:
        """Return `sequence`, in phase PROMPT. One of which nothing is computed yet takes from the cache what has come
        there since it was admitted."""
        if sequence.computed > sequence.cached_tokens:
            return sequence
        hashes, known = sequence.hashes, sequence.committed
        assert hashes is not None
        if known < self._reusable_blocks(sequence) and self.pool.is_cached(hashes[known]):
            reusable = self._reusable(sequence)
            more = len(self.pool.match_prefix(reusable)) - known
            if more > 0:
                self.pool.release(sequence.table)
                taken = self.pool.take(self.pool.blocks_for(sequence.reserve_tokens), reusable)
                assert taken is not None, "it has just given back as much"
                sequence.table, sequence.committed = taken
                self._cached(sequence, more * self.pool.block_tokens)
        self._expect(sequence, len(sequence.prompt) - sequence.computed)
        return sequence

    def _note_begun(self, sequence: Sequence) -> None:
        if sequence.computed == sequence.cached_tokens:
            self.begun.append(sequence)

    def _cached(self, sequence: Sequence, tokens: int) -> None:
        """Account for `tokens` more of the prompt that need not be computed: they are in `table`."""
        sequence.cached_tokens += tokens
        self.cached_tokens_total += tokens
        self._hold(sequence, tokens)
        self._expect(sequence, len(sequence.prompt) - sequence.computed)

    def _no_more_first(self, sequence: Sequence) -> None:
        for block_hash in sequence.first_of:
            if self._coming.get(block_hash) == sequence.id:
                del self._coming[block_hash]
        sequence.first_of = ()

    def _advance(self, sequence: Sequence, fed: int) -> None:
        """Account for `fed` more tokens in the KV memory of a sequence. It decodes once its prompt is computed."""
        sequence.computed += fed
        self._kv_tokens += fed
        if sequence.phase is Phase.PROMPT:
            self.computed_tokens_total += fed
            self._expect(sequence, len(sequence.prompt) - sequence.computed)
            if sequence.computed == len(sequence.prompt):
                sequence.phase = Phase.DECODING
                self._no_more_first(sequence)
        if sequence.computed >= (sequence.committed + 1) * self.pool.block_tokens:
            self._commit(sequence)

    def _append(self, sequence: Sequence, token: int) -> None:
        sequence.output.append(token)
        if token in sequence.stop_ids:
            sequence.finish = "stop"
        elif len(sequence.output) >= sequence.max_tokens:
            sequence.finish = "length"
        if sequence.hold:
            sequence.phase = Phase.HELD
            self._held += 1
            self._held_tokens += sequence.computed
            del self._running[sequence.id]
        elif sequence.finish:
            self._remove(sequence)

    def _reusable(self, sequence: Sequence) -> Seq[int]:
        """Return the hashes of the blocks that may come from the cache. At least the last prompt token is always
        computed, since its output is wanted."""
        assert sequence.hashes is not None
        return sequence.hashes[: self._reusable_blocks(sequence)]

    def _reusable_blocks(self, sequence: Sequence) -> int:
        assert sequence.hashes is not None
        return min(len(sequence.hashes), (len(sequence.prompt) - 1) // self.pool.block_tokens)

    def _admit(self) -> None:
        if not self._queue.lines:
            return
        holdings, barred = None, None
        if self._shares.several(self.step):
            holdings = ClientUsage(self._sequences.values(), self._running.values(), self.max_running, self.pool.blocks)
            barred = holdings.a_part
        while len(self._running) < self.max_running and (sequence := self._queue.head(barred)) is not None:
            taken = self.pool.take(self.pool.blocks_for(sequence.reserve_tokens), self._reusable(sequence))
            if taken is None:
                if holdings is None or barred == holdings.some_memory:
                    return
                barred = holdings.some_memory  # a newcomer need not wait for memory for another's large request
                continue
            self._queue.remove(sequence, admitted=True)
            sequence.table, shared = taken
            sequence.committed = shared
            sequence.cached_tokens = shared * self.pool.block_tokens
            self.cached_tokens_total += sequence.cached_tokens
            self.admitted_tokens_total += len(sequence.prompt)
            self._hold(sequence, sequence.cached_tokens)
            reads = sequence.read > shared
            if not reads:
                lacks = len(sequence.prompt) - sequence.cached_tokens
                self._expect(sequence, lacks if sequence.imported else min(lacks, sequence.expected))
            sequence.phase = Phase.FETCHING if sequence.imported or reads else Phase.PROMPT
            self._running[sequence.id] = sequence
            if holdings is not None:
                holdings.add(sequence)
            if sequence.phase is Phase.FETCHING:
                self._admitted.append(sequence)

    def _commit(self, sequence: Sequence) -> None:
        """Name the blocks that became full; output blocks too, because the next turn of a conversation begins with
        them."""
        size = self.pool.block_tokens
        hashes = sequence.hashes
        assert hashes is not None
        while (sequence.committed + 1) * size <= sequence.computed:
            index = sequence.committed
            if index >= len(hashes):
                if isinstance(sequence.prompt, range):
                    return  # the ids before it are not known here
                block = self._tokens(sequence, index * size, size)
                last = hashes[-1] if hashes else root_of(sequence.params.cache_salt)
                hashes.append(hash_block(last, token_bytes(block)))
            parent = hashes[index - 1] if index else ROOT
            self.pool.commit(sequence.table[index], hashes[index], parent, self._tokens(sequence, index * size, size))
            sequence.committed += 1

    @staticmethod
    def _tokens(sequence: Sequence, start: int, count: int) -> list[int]:
        length = len(sequence.prompt)
        tokens = list(sequence.prompt[start : start + count])
        if start + count > length:
            tokens += sequence.output[max(0, start - length) : start + count - length]
        return tokens

    def _hold(self, sequence: Sequence, tokens: int) -> None:
        sequence.computed += tokens
        self._kv_tokens += tokens

    def _expect(self, sequence: Sequence, tokens: int) -> None:
        more = tokens - sequence.expected
        self._waiting_tokens += more
        if sequence.imported:
            self._to_fetch += more
        sequence.expected = tokens

    def _remove(self, sequence: Sequence) -> None:
        self._no_more_first(sequence)
        self._expect(sequence, 0)
        if sequence.phase is Phase.HELD:
            self._held -= 1
            self._held_tokens -= sequence.computed
        self._hold(sequence, -sequence.computed)
        self.pool.release(sequence.table)
        sequence.table = []
        if sequence.phase is Phase.WAITING:
            self._queue.remove(sequence)
        self._shares.left(sequence.client, self.step)
        sequence.phase = Phase.GONE
        self._running.pop(sequence.id, None)
        del self._sequences[sequence.id]

    def validate(self) -> None:
        """Check that the scheduler is consistent; AssertionError if not (for tests)."""
        self.pool.validate()
        live = self._sequences.values()
        self._queue.validate({s for s in live if s.phase is Phase.WAITING})
        self._shares.validate(live)
        assert self._waiting_tokens == sum(s.expected for s in live)
        assert self._to_fetch == sum(s.expected for s in live if s.imported)
        assert all(each in self._sequences[seq].first_of for each, seq in self._coming.items())
        assert self._kv_tokens == sum(s.computed for s in live)
        assert list(self._running) == [s.id for s in self._running.values()]
        assert {s.id for s in live if s.phase in SLOT_PHASES} == set(self._running)
        assert len(self._running) <= self.max_running
        held = [s.computed for s in live if s.phase is Phase.HELD]
        assert (self._held, self._held_tokens) == (len(held), sum(held))
        assert self.waiting == sum(s.phase in (Phase.PARKED, Phase.WAITING) for s in live)
        tables = [*(s.table for s in live), *self._lent.values()]
        assert len({block for table in tables for block in table}) == self.pool.held
        assert all(s.computed <= len(s.table) * self.pool.block_tokens for s in live)
        assert {s for s in live if s.fed} == set(self._in_step)

"""A timing model in place of an engine, without torch or numpy: for hundreds of ranks on one machine, and for tests
with known answers.

This module owns the token rule and the KV blocks. The state after a token is `crc32(int32-LE bytes of the token,
state before)`, 0 before the first. The next token is `3 + state % (vocab_size - 3)`, whatever the sampling
parameters are (ids 0 to 2 are special and never produced, so that generation ends by length). A block's bytes are
the state after each of its tokens, uint32-LE, then padding up to `kv_bytes_per_token` a token. A row that starts
past 0 reads its state from the KV block, so damaged or missing KV gives wrong tokens. This module must not touch
sockets or threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from struct import Struct, unpack_from
from typing import Any, Protocol
from zlib import crc32

from nodes.own.engines.base import EngineSpec, Row, StepPlan, StepResult
from nodes.own.engines.faults import NO_FAULTS, Faults
from nodes.own.engines.timing import SimTiming

SIM_VOCAB_SIZE = 512
SIM_MAX_CONTEXT = 131_072
SIM_KV_TOKENS = 400_000  # what an H100 has left beside an 8 B model
SPECIALS = 3
STATE_BYTES = 4
AT_ONCE_S = 0.005  # a step that is submitted so soon after the answer to the last one followed it without a pause

_pack_token = Struct("<i").pack


class Timers(Protocol):
    """The part of a `bus.runtime.loop.Loop` that the engine needs, times in seconds; the replay lab passes its virtual
    one."""

    clock: Callable[[], float]

    def call_later(self, delay_s: float, function: Callable[[], None], /) -> Any: ...


def next_token(state: int, vocab_size: int) -> int:
    """Return the token that follows a state, by the module's rule."""
    return SPECIALS + state % (vocab_size - SPECIALS)


def feed(tokens: Iterable[int], state: int = 0) -> list[int]:
    """Return the state after each of `tokens`, which follow the state `state`."""
    return [state := crc32(_pack_token(token), state) for token in tokens]


def sim_generate(prompt: Sequence[int], n: int, vocab_size: int = SIM_VOCAB_SIZE) -> list[int]:
    """Return the `n` tokens that any correct path through sim engines produces for `prompt`."""
    state = feed(prompt)[-1]
    output = []
    for _ in range(n):
        output.append(next_token(state, vocab_size))
        state = crc32(_pack_token(output[-1]), state)
    return output


class SimEngine:
    """An engine that computes at once and answers at the time of the timing model, on the loop's thread. Its methods
    are those of `nodes.own.engines.base.Engine`.

    A loop calls it late, by half a millisecond where nothing else runs. So a step that follows at once, and goes on
    with a sequence of the one before, is counted from the time at which that one was due: a late timer makes one answer
    late, and not all those after it. (What was asked for after the answer could not have begun before it.)"""

    def __init__(
        self,
        loop: Timers,
        *,
        model: str = "sim",
        blocks: int,
        block_tokens: int = 16,
        max_context: int = SIM_MAX_CONTEXT,
        vocab_size: int = SIM_VOCAB_SIZE,
        timing: SimTiming | None = None,
        kv_bytes_per_token: int = STATE_BYTES,
        faults: Faults = NO_FAULTS,
    ) -> None:
        bytes_per_token = max(STATE_BYTES, kv_bytes_per_token)
        self.spec = EngineSpec(
            model=model,
            layout=f"sim/{model}/{block_tokens}x{bytes_per_token}",
            max_context=max_context,
            block_tokens=block_tokens,
            blocks=blocks,
            block_bytes=block_tokens * bytes_per_token,
            vocab_size=vocab_size,
            eos_ids=(),
        )
        self._loop = loop
        self._timing = timing if timing is not None else SimTiming()
        self._faults = faults
        self._kv: dict[int, bytearray] = {}  # block -> bytes, made when first touched; at most `blocks` of them
        self._pending: Any = None
        self._answered_at = float("-inf")
        self._answered: set[int] = set()  # sequences of the last answer
        self._late_s = 0.0  # that answer, after it was due

    def submit(self, plan: StepPlan, done: Callable[[StepResult], None]) -> None:
        """Compute the plan now, and call `done` when its time by the timing model is over. After a hang fault it is
        never called."""
        assert self._pending is None, f"step {plan.number} submitted while another runs"
        began = self._loop.clock()
        duration_s = self._timing.rows_s(plan.rows)
        fault = self._faults.fed(plan.rows) if self._faults else ""
        if fault == "hang":
            return
        if fault == "fail":
            result = StepResult(plan.number, (), duration_s, "injected fault: a row fed the fail token")
        else:
            rows = [(row, self._run(row)) for row in plan.rows]
            result = StepResult(plan.number, tuple((r.seq, t) for r, t in rows if r.params is not None), duration_s)
        goes_on = began - self._answered_at < AT_ONCE_S and any(row.seq in self._answered for row in plan.rows)
        late_s = self._late_s if goes_on else 0.0
        due = began + max(0.0, duration_s - late_s)

        def answer() -> None:
            self._pending = None
            self._answered_at = self._loop.clock()
            self._answered = {row.seq for row in plan.rows}
            self._late_s = self._answered_at - due
            done(result)

        self._pending = self._loop.call_later(max(0.0, due - self._loop.clock()), answer)

    def export_block(self, block: int) -> memoryview:
        """Return the bytes of a block, which are zeros if it was never written. IndexError for a block that is not
        there."""
        return memoryview(self._block(block))

    def import_block(self, block: int, data: memoryview | bytes) -> None:
        """Copy `data` into a block. IndexError for a block that is not there, ValueError if the size is wrong."""
        if len(data) != self.spec.block_bytes:
            raise ValueError(f"a block of {self.spec.layout} has {self.spec.block_bytes} bytes, not {len(data)}")
        self._block(block)[:] = data

    def close(self) -> None:
        """Drop the result of the step that runs, if any."""
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None

    def _run(self, row: Row) -> int:
        """Feed the row, fill its blocks, and return the next token."""
        position, size = row.start, self.spec.block_tokens
        states = feed(row.tokens, self._state(row.table, position - 1) if position else 0)
        written = 0
        while written < len(states):
            slot = position % size
            count = min(size - slot, len(states) - written)
            block = self._block(row.table[position // size])
            Struct(f"<{count}I").pack_into(block, slot * STATE_BYTES, *states[written : written + count])
            written += count
            position += count
        return next_token(states[-1], self.spec.vocab_size)

    def _state(self, table: Sequence[int], position: int) -> int:
        block = self._block(table[position // self.spec.block_tokens])
        state: int = unpack_from("<I", block, position % self.spec.block_tokens * STATE_BYTES)[0]
        return state

    def _block(self, block: int) -> bytearray:
        data = self._kv.get(block)
        if data is None:
            if not 0 <= block < self.spec.blocks:
                raise IndexError(f"block {block} of {self.spec.blocks}")
            data = self._kv[block] = bytearray(self.spec.block_bytes)
        return data

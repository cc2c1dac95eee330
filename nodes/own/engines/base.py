"""The interface between a scheduler and an engine. This module owns the types and holds no logic.

KV memory is paged: an engine owns `blocks` blocks of `block_tokens` tokens, and the scheduler decides which sequence
has which block (`nodes.own.blocks`). A block's bytes are the same on every engine with an equal `layout`, so a block
exported by one rank can be imported by another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from bus.wire.messages import Params, TokenLogprobs


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The facts of an engine that a scheduler needs. Sizes are in tokens unless their names say otherwise."""

    model: str
    layout: str  # equal layouts exchange blocks
    max_context: int
    block_tokens: int
    blocks: int  # KV capacity is blocks * block_tokens
    block_bytes: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    params: tuple[str, ...] = ()  # sampling parameters it knows beyond those that every engine knows

    @property
    def kv_capacity(self) -> int:
        """The tokens that fit into the KV memory."""
        return self.blocks * self.block_tokens


class Row(Struct, frozen=True):
    """One sequence's part of a step: feed `tokens` at positions `start`, `start`+1, ...

    `table` lists the sequence's blocks: position p lives in `table[p // block_tokens]`. With `params` the engine
    returns the next token after the last one fed (sampled with a seed made of `params.seed` and `output_index`,
    so that the same output position gives the same draw on any rank); without, none (a chunk that isn't the last).
    A struct, not a dataclass: a step makes one for each sequence.
    """

    seq: int
    tokens: Sequence[int]
    start: int
    table: Sequence[int]
    params: Params | None
    output_index: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The rows that one step computes; `number` comes back with its result."""

    number: int
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step: the next token of each row that asked for one, and its log probabilities where its `params`
    want them. With `error`, the whole step failed and no token counts. Sequences in `damaged` have no token: their
    logits are not numbers."""

    number: int
    tokens: tuple[tuple[int, int], ...]  # (seq, token id)
    duration_s: float
    error: str = ""
    logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()  # (seq, of its token)
    damaged: tuple[int, ...] = ()


class Engine(Protocol):
    """An engine: it computes the steps that the scheduler plans, in KV memory of its own. All methods are called on the
    loop's thread; none blocks for a forward step."""

    spec: EngineSpec

    def submit(self, plan: StepPlan, done: Callable[[StepResult], None]) -> None:
        """Compute `plan` off this thread; call `done` exactly once, on the loop's thread. One plan at a time."""

    def export_block(self, block: int) -> memoryview:
        """Return the block's `block_bytes` bytes, without a copy where possible; stable until the block is reused."""

    def import_block(self, block: int, data: memoryview | bytes) -> None:
        """Fill a block that no running row uses with bytes exported elsewhere. ValueError if the size is wrong."""

    def close(self) -> None:
        """Stop the worker; a result that is still to come may be lost. Idempotent."""

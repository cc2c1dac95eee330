"""One leg at our runner: the record that its scheduler and its pull of KV blocks share. It decides nothing."""

from __future__ import annotations

import enum
from collections.abc import MutableSequence
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from bus.wire.messages import FinishReason, Params, TokenLogprobs
from nodes.link.leg import Leg


class Phase(enum.Enum):
    """The phase of a sequence at its scheduler. Imported ones fetch instead of computing their prompt."""

    PARKED = "parked"  # ingested, not ready to be admitted (its KV cache is not located yet)
    WAITING = "waiting"  # for a slot and blocks
    FETCHING = "fetching"  # admitted; its prompt's KV cache is being copied in
    PROMPT = "prompt"  # admitted; its prompt is being computed
    DECODING = "decoding"
    HELD = "held"  # finished prefill whose KV cache will be fetched; no slot
    GONE = "gone"


DEFAULTS = Params()
SLOT_PHASES = frozenset({Phase.FETCHING, Phase.PROMPT, Phase.DECODING})


@dataclass(slots=True, eq=False)
class Sequence:
    """One leg's computation: first what the runner asks for, then what scheduler and receiver keep of it. `imported`:
    the prompt's KV comes from elsewhere. `hold`: stop after the prompt's token and keep the KV. `offset` is the output
    index of the first token produced here. `hashes`: those of the prompt's blocks; None: compute them. `leg`: the
    link's leg; None in the lab."""

    id: int
    prompt: Seq[int]
    max_tokens: int
    params: Params = DEFAULTS
    stop_ids: frozenset[int] = frozenset()
    priority: int = 0
    imported: bool = False
    hold: bool = False
    offset: int = 0
    hashes: MutableSequence[int] | None = None
    leg: Leg | None = None
    read: int = 0  # blocks of the prompt that another rank has: those that are not here are read before it is computed

    # the scheduler's
    phase: Phase = Phase.WAITING
    table: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    computed: int = 0  # tokens whose KV is in `table`
    expected: int = 0  # prompt tokens still to compute or fetch, as counted in the load
    first_of: Seq[int] = ()  # hashes of the prompt's blocks that no sequence before it computes, until all are computed
    committed: int = 0  # full blocks named in the prefix cache
    output: list[int] = field(default_factory=list)
    finish: FinishReason = ""  # why the last token of `output` is the last; or `failed`, with its step
    logprobs: TokenLogprobs | None = None  # of the last token of `output`, where the leg asks for them
    fed: int = 0  # tokens of it in the step under way
    doomed: bool = False  # cancelled while in a step

    # the receiver's, while FETCHING
    missing: dict[int, None] = field(default_factory=dict)  # blocks asked for, not received intact; in order of asking
    unasked: range = range(0)  # blocks not asked for yet
    fetch_began: float = 0.0
    moved_at: float = 0.0  # when the last block came
    damaged: int = 0
    stalls: int = 0

    client: str = field(init=False)  # the key that owns the request; empty: there are no keys

    def __post_init__(self) -> None:
        self.client = "" if self.leg is None else self.leg.client

    @property
    def reserve_tokens(self) -> int:
        """The KV tokens that it can ever need; the last output token's KV is never computed."""
        return len(self.prompt) if self.hold else len(self.prompt) + max(0, self.max_tokens - 1)

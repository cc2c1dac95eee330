"""A rank's description of itself, and a KV cache's hand-over: the records of `nodes.link.runner` that legs need too.

This module owns the two records; it holds no logic.
"""

from __future__ import annotations

from dataclasses import dataclass

from bus.wire.messages import OVER_THE_BUS as OVER_THE_BUS
from bus.wire.messages import Location, TokenLogprobs

FOR_EVER = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """A rank's description in `hello`. Sizes are in tokens; 0: not stated, and not checked."""

    model: str  # its name; a request that names another goes elsewhere
    max_context: int  # prompt and output together
    kv_capacity: int = 0  # that it can hold at once
    max_running: int = 0  # run slots
    block_tokens: int = 0  # of a KV block, as its prefix cache counts
    vocab_size: int = 0  # prompts with larger ids are refused
    eos_ids: tuple[int, ...] = ()  # end the output, unless a request ignores them
    kv_layout: str = ""  # ranks exchange KV caches where this is equal: model revision, dtype, block shape ...
    kv_transfer: str = OVER_THE_BUS  # by a BlockRunner, or the name of the engine's own connector
    wants_prompt: bool = False  # decode legs come with the prompt's ids
    prefills: bool = False  # a decode rank takes unified legs too
    reads_back: bool = False  # a prefill rank can read what the decode rank caches, a decode rank lends it
    params: tuple[str, ...] = ()  # sampling parameters it knows beyond those that every rank knows
    handle_margin_s: float = 5.0  # a handle with less time left is refused: the fetch must be over before it lapses


@dataclass(frozen=True, slots=True)
class KvHandle:
    """A prompt's KV cache at the rank that computed it, for the decode leg that fetches it."""

    source: Location  # the rank that holds it
    attempt: int  # under which the room was registered
    first_token: int  # sampled by the prefill leg
    blocks: int  # of KV, where they travel over the bus
    data: bytes = b""  # the engine's own, as its prefill side gave it; empty where blocks travel over the bus
    valid_until: float = FOR_EVER  # on this process's monotonic clock
    first_logprobs: TokenLogprobs | None = None  # of `first_token`, where they were asked for

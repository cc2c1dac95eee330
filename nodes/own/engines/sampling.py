"""The choice of a token from logits: greedy, or temperature, top-k and top-p with a draw that (seed, output index)
fixes.

The draw depends on nothing else, so the token at an output position is the same on any rank, in any batch and after a
resume. Log probabilities are of the unchanged logits. This module must not know stop tokens or lengths: the scheduler
decides the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from struct import pack

import numpy
from numpy.typing import NDArray

from bus.wire.messages import Params, TokenLogprobs
from nodes.link.logprobs import token_logprobs

GREEDY_BELOW = 1e-5  # as in vLLM: logits divided by less are infinite for several tokens


def draw(seed: int, output_index: int) -> float:
    """Return a number in [0, 1) for one output position, equal on every machine and uniform over positions."""
    digest = blake2b(pack("<QQ", seed, output_index), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def are_numbers(logits: NDArray[numpy.float32]) -> NDArray[numpy.bool_]:
    """Return, for each row of `logits` [rows, vocab_size], true if a token can be sampled. Damaged weights or KV
    give a row without numbers, where any token would look like an answer."""
    good: NDArray[numpy.bool_] = numpy.isfinite(logits.max(axis=-1))
    return good


def sample(logits: NDArray[numpy.float32], wanted: Sequence[tuple[Params, int]]) -> list[int]:
    """Return one token for each row of `logits` [rows, vocab_size]; `wanted` holds each row's (params, output_index).
    Of `params`, only temperature, top_k, top_p and seed count; up to GREEDY_BELOW the temperature means greedy."""
    if not wanted:
        return []
    tokens: list[int] = numpy.argmax(logits, axis=-1).tolist()
    for row, (params, output_index) in enumerate(wanted):
        if params.temperature > GREEDY_BELOW:
            tokens[row] = _sampled(logits[row], params, draw(params.seed, output_index))
    return tokens


def logprobs(logits: NDArray[numpy.float32], token: int, top: int) -> TokenLogprobs:
    """Return the natural log probabilities of `token` and of the `top` most likely tokens, the likeliest first, under
    the unchanged `logits` [vocab_size]."""
    values = logits.astype(numpy.float64) - logits.max()
    values -= numpy.log(numpy.exp(values).sum())
    ids = numpy.argsort(-values, kind="stable")[:top]
    return token_logprobs(float(values[token]), zip(ids.tolist(), values[ids].tolist(), strict=True))


def _sampled(logits: NDArray[numpy.float32], params: Params, u: float) -> int:
    """Sample by inverse transform over the tokens from the most likely down, cut by top-k, then by top-p."""
    scaled = logits.astype(numpy.float64) / params.temperature
    ids = numpy.argsort(-scaled, kind="stable")
    if 0 < params.top_k < len(ids):
        ids = ids[: params.top_k]
    weights = numpy.exp(scaled[ids] - scaled[ids[0]])
    reached = (weights / weights.sum()).cumsum()
    # top-p keeps the smallest set that reaches p: all tokens before which less than p has been reached
    kept = 1 + int((reached[:-1] < params.top_p).sum())
    total = reached[kept - 1]
    chosen = int(numpy.searchsorted(reached[:kept], u * total, side="right"))
    return int(ids[min(chosen, kept - 1)])

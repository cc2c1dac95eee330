"""Logits to one token: greedy, or temperature, top-k and top-p with a draw fixed by (seed, output index).

The draw depends on nothing else, so the token at an output position is the same on any rank, in any batch and after a
resume. Log probabilities are of the logits as they are. Must not know of stop tokens or lengths: ending is the
scheduler's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from struct import pack

import torch
from torch import Tensor

from bus.wire.messages import Params, TokenLogprobs
from nodes.link.logprobs import token_logprobs


def draw(seed: int, output_index: int) -> float:
    """A number in [0, 1) that is uniform over output indices and equal on every machine."""
    digest = blake2b(pack("<QQ", seed, output_index), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample(logits: Tensor, wanted: Sequence[tuple[Params, int]]) -> list[int]:
    """One token a row of `logits` [rows, vocab_size]; `wanted` holds each row's (params, output_index)."""
    if not wanted:
        return []
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    for row, (params, output_index) in enumerate(wanted):
        if params.temperature > 0:
            tokens[row] = _sampled(logits[row], params, draw(params.seed, output_index))
    return tokens


def logprobs(logits: Tensor, token: int, top: int) -> TokenLogprobs:
    """Of `token` under `logits` [vocab_size] as they are, and of the `top` likeliest ones."""
    values = torch.log_softmax(logits, dim=-1)
    likeliest, ids = torch.topk(values, min(top, len(values)))
    return token_logprobs(float(values[token]), zip(ids.tolist(), likeliest.tolist(), strict=True))


def _sampled(logits: Tensor, params: Params, u: float) -> int:
    """Inverse transform over the tokens from the most likely down, cut by top-k, then by top-p."""
    ordered, ids = torch.sort(logits.double() / params.temperature, descending=True, stable=True)
    if 0 < params.top_k < len(ids):
        ordered = ordered[: params.top_k]
    reached = torch.softmax(ordered, dim=-1).cumsum(dim=-1)
    # top-p keeps the smallest set that reaches p: all tokens before which less than p has been reached
    kept = 1 + int((reached[:-1] < params.top_p).sum())
    total = reached[kept - 1]
    chosen = int(torch.searchsorted(reached[:kept], u * total, right=True))
    return int(ids[min(chosen, kept - 1)])

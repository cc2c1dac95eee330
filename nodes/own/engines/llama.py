"""A Llama in torch over a paged KV pool, fp32. This module owns the forward pass; it knows no threads, requests or
sampling.

The pool is one contiguous tensor [blocks, layers, 2 (K, V), block_tokens, kv_heads, head_dim], so that a block is
one run of bytes that can be sent unchanged. A step feeds all rows' tokens through the linear layers at once;
attention runs once for each prompt chunk and once for each group of decode rows of about equal length.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor
from torch.nn import functional as F

from nodes.own.engines.base import Row
from nodes.own.engines.llama_config import LlamaConfig


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that attend together: one prompt chunk of `count` tokens, or several decode rows of one token each."""

    tokens: slice  # in the step's flat list of tokens
    rows: int
    count: int  # tokens a row
    blocks: Tensor  # [rows * blocks a row], padded with the row's own last block
    length: int  # KV tokens to attend to; the longest row's
    mask: Tensor | None  # broadcasts to [rows, 1, count, length]; None: causal from position 0, or all of it


@dataclass(frozen=True, slots=True)
class _Batch:
    token_ids: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    blocks: Tensor  # [tokens] where each token's K and V go
    slots: Tensor  # [tokens]
    groups: list[_Group]
    last: Tensor  # [rows that want an answer]: index of their last token
    fresh: Tensor  # blocks that this step is the first to write


class Llama:
    """The model. `weights` are named as in `LlamaConfig.shapes` and used in place, so they may be mapped from a file
    and shared."""

    def __init__(self, config: LlamaConfig, weights: Mapping[str, Tensor]) -> None:
        for name, shape in config.shapes().items():
            assert tuple(weights[name].shape) == shape, f"{name} is {tuple(weights[name].shape)}, not {shape}"
        self.config = config
        self._embed = weights["embed"]
        self._out_norm = weights["out_norm"]
        self._layers = [
            [weights[f"{index}.{name}"] for name in ("attn_norm", "qkv", "attn_out", "ffn_norm", "gate_up", "down")]
            for index in range(config.layers)
        ]
        pair = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        angles = torch.arange(config.max_context, dtype=torch.float64)[:, None] / config.rope_theta**pair
        self._rotations = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)  # [max_context, head_dim/2]

    def new_pool(self, blocks: int, block_tokens: int) -> Tensor:
        """Return a KV pool of zeros. Memory is only taken when a block is first written."""
        c = self.config
        shape = (blocks, c.layers, 2, block_tokens, c.kv_heads, c.head_dim)
        return torch.from_numpy(numpy.zeros(shape, dtype=numpy.float32))

    @torch.inference_mode()
    def forward(self, pool: Tensor, rows: Sequence[Row]) -> Tensor:
        """Feed the tokens of every row and write their K and V into `pool`. Return logits [rows with params,
        vocab_size], in the order of `rows`.

        IndexError or ValueError for a token, position or block out of range.
        """
        batch = self._batch(rows, pool.shape[3])
        if len(batch.fresh):
            pool[batch.fresh] = 0.0  # nothing of a former owner is left to attend to or to export
        eps = self.config.norm_eps
        x = F.embedding(batch.token_ids, self._embed)
        rotations = self._rotations[batch.positions][:, None]
        for layer, (attn_norm, qkv, attn_out, ffn_norm, gate_up, down) in enumerate(self._layers):
            h = F.linear(F.rms_norm(x, attn_norm.shape, attn_norm, eps), qkv)
            x = x + F.linear(self._attend(pool[:, layer], h, rotations, batch), attn_out)
            h = F.linear(F.rms_norm(x, ffn_norm.shape, ffn_norm, eps), gate_up)
            gate, up = h.chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate).mul_(up), down)
        return F.linear(F.rms_norm(x[batch.last], self._out_norm.shape, self._out_norm, eps), self._embed)

    def _attend(self, pool: Tensor, qkv: Tensor, rotations: Tensor, batch: _Batch) -> Tensor:
        """Attend over `pool` [blocks, 2, block_tokens, kv_heads, head_dim] of this layer. Return [tokens, width]."""
        c = self.config
        heads = qkv.view(len(qkv), c.heads + 2 * c.kv_heads, c.head_dim)
        pairs = heads[:, : c.heads + c.kv_heads].reshape(len(qkv), -1, c.head_dim // 2, 2)
        rotated = torch.view_as_real(torch.view_as_complex(pairs) * rotations).flatten(-2)
        queries = rotated[:, : c.heads].reshape(len(qkv), c.kv_heads, -1, c.head_dim)  # query heads by their KV head
        keys, values = pool[:, 0], pool[:, 1]
        keys[batch.blocks, batch.slots] = rotated[:, c.heads :]
        values[batch.blocks, batch.slots] = heads[:, c.heads + c.kv_heads :]

        output = torch.empty(len(qkv), c.kv_heads, c.heads // c.kv_heads, c.head_dim)
        for group in batch.groups:
            held = (group.rows, -1, c.kv_heads, c.head_dim)
            k = keys.index_select(0, group.blocks).view(held)[:, : group.length].transpose(1, 2)
            v = values.index_select(0, group.blocks).view(held)[:, : group.length].transpose(1, 2)
            q = queries[group.tokens]
            if group.count == 1:  # the query heads of one KV head stand where a chunk has its tokens
                output[group.tokens] = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask)
            else:
                q = q.permute(1, 2, 0, 3)  # [kv_heads, group, count, head_dim]
                shared = (c.kv_heads, q.shape[1], group.length, c.head_dim)
                k, v = k.transpose(0, 1).expand(shared), v.transpose(0, 1).expand(shared)
                causal = group.mask is None
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, is_causal=causal)
                output[group.tokens] = out.permute(2, 0, 1, 3)
        return output.view(len(qkv), c.width)

    def _batch(self, rows: Sequence[Row], block_tokens: int) -> _Batch:
        by_size: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, row in enumerate(rows):
            end = row.start + len(row.tokens)
            if not row.tokens or row.start < 0 or end > self.config.max_context or len(row.table) * block_tokens < end:
                raise ValueError(f"row of {len(row.tokens)} tokens from {row.start} over {len(row.table)} blocks")
            # decode rows whose lengths lie within a factor of two attend together; every chunk attends alone
            by_size[(0, end.bit_length()) if len(row.tokens) == 1 else (1, index)].append(index)

        token_ids: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        fresh: list[int] = []
        groups: list[_Group] = []
        last: dict[int, int] = {}
        for members in by_size.values():
            first = len(token_ids)
            for index in members:
                row = rows[index]
                span = range(row.start, row.start + len(row.tokens))
                token_ids += row.tokens
                positions += span
                blocks += [row.table[position // block_tokens] for position in span]
                fresh += [row.table[position // block_tokens] for position in span if position % block_tokens == 0]
                last[index] = len(token_ids) - 1
            groups.append(_group(slice(first, len(token_ids)), [rows[index] for index in members], block_tokens))
        where = torch.tensor(positions)
        return _Batch(
            token_ids=torch.tensor(token_ids),
            positions=where,
            blocks=torch.tensor(blocks),
            slots=where % block_tokens,
            groups=groups,
            last=torch.tensor(
                [last[index] for index, row in enumerate(rows) if row.params is not None], dtype=torch.long
            ),
            fresh=torch.tensor(fresh, dtype=torch.long),
        )


def _group(tokens: slice, rows: Sequence[Row], block_tokens: int) -> _Group:
    count = len(rows[0].tokens)
    ends = [row.start + count for row in rows]
    length = max(ends)
    tables: list[int] = []
    for row, end in zip(rows, ends, strict=True):
        used = list(row.table[: -(-end // block_tokens)])
        tables += used + used[-1:] * (-(-length // block_tokens) - len(used))
    mask = None
    if count > 1 and rows[0].start > 0:
        mask = torch.arange(length) <= torch.arange(rows[0].start, length)[:, None]
    elif count == 1 and min(ends) < length:
        mask = (torch.arange(length) < torch.tensor(ends)[:, None])[:, None, None]
    return _Group(tokens, len(rows), count, torch.tensor(tables), length, mask)

"""The Llama of `llama` in numpy: the same weights, pool and answers, for machines without torch.

The linear layers take all rows' tokens of a step at once. Each row attends alone, so that invalid numbers in one
sequence do not reach the others. This module knows no threads, requests or sampling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy
from numpy.typing import NDArray

from nodes.own.engines.base import Row
from nodes.own.engines.llama_config import LlamaConfig

Array = NDArray[numpy.float32]


class NumpyLlama:
    """The model. `weights` are named as in `LlamaConfig.shapes` and used in place, so they may be mapped from a file
    and shared."""

    def __init__(self, config: LlamaConfig, weights: Mapping[str, Array]) -> None:
        for name, shape in config.shapes().items():
            assert weights[name].shape == shape, f"{name} is {weights[name].shape}, not {shape}"
        self.config = config
        self._embed = weights["embed"]
        self._out_norm = weights["out_norm"]
        self._layers = [
            [weights[f"{index}.{name}"] for name in ("attn_norm", "qkv", "attn_out", "ffn_norm", "gate_up", "down")]
            for index in range(config.layers)
        ]
        pair = numpy.arange(0, config.head_dim, 2) / config.head_dim
        angles = numpy.arange(config.max_context)[:, None] / config.rope_theta**pair
        self._rotations = numpy.exp(1j * angles).astype(numpy.complex64)  # [max_context, head_dim/2]

    def new_pool(self, blocks: int, block_tokens: int) -> Array:
        """Return a KV pool of zeros [blocks, layers, 2 (K, V), block_tokens, kv_heads, head_dim]; memory is only taken
        when it is written."""
        c = self.config
        return numpy.zeros((blocks, c.layers, 2, block_tokens, c.kv_heads, c.head_dim), numpy.float32)

    def forward(self, pool: Array, rows: Sequence[Row]) -> Array:
        """Feed the tokens of every row and write their K and V into `pool`. Return logits [rows with params,
        vocab_size], in the order of `rows`.

        IndexError or ValueError for a token, position or block out of range.
        """
        token_ids, positions, blocks, last = self._batch(rows, len(pool), pool.shape[3])
        slots = positions % pool.shape[3]
        with numpy.errstate(all="ignore"):  # damaged KV is no number: that row's logits tell of it
            pool[blocks[slots == 0]] = 0.0  # nothing of a former owner is left to attend to or to export
            x = self._embed[token_ids]
            rotations = self._rotations[positions][:, None]
            for layer, (attn_norm, qkv, attn_out, ffn_norm, gate_up, down) in enumerate(self._layers):
                h = self._norm(x, attn_norm) @ qkv.T
                x = x + self._attend(pool[:, layer], h, rotations, blocks, slots, rows) @ attn_out.T
                gate, up = numpy.split(self._norm(x, ffn_norm) @ gate_up.T, 2, axis=-1)
                x = x + (gate / (1.0 + numpy.exp(-gate)) * up) @ down.T
            logits: Array = self._norm(x[last], self._out_norm) @ self._embed.T
        return logits

    def _norm(self, x: Array, weight: Array) -> Array:
        scaled: Array = x / numpy.sqrt(numpy.square(x).mean(-1, keepdims=True) + numpy.float32(self.config.norm_eps))
        return scaled * weight

    def _attend(
        self, pool: Array, qkv: Array, rotations: NDArray[numpy.complex64], blocks: NDArray[numpy.intp],
        slots: NDArray[numpy.intp], rows: Sequence[Row],
    ) -> Array:  # fmt: skip
        """Attend over `pool` [blocks, 2, block_tokens, kv_heads, head_dim] of this layer. Return [tokens, width]."""
        c = self.config
        count = len(qkv)
        heads = qkv.reshape(count, c.heads + 2 * c.kv_heads, c.head_dim)
        turned = numpy.ascontiguousarray(heads[:, : c.heads + c.kv_heads]).view(numpy.complex64) * rotations
        rotated = turned.view(numpy.float32)
        pool[blocks, 0, slots] = rotated[:, c.heads :]
        pool[blocks, 1, slots] = heads[:, c.heads + c.kv_heads :]
        queries = rotated[:, : c.heads].reshape(count, c.kv_heads, -1, c.head_dim) * numpy.float32(c.head_dim**-0.5)

        output = numpy.empty((count, c.kv_heads, c.heads // c.kv_heads, c.head_dim), numpy.float32)
        first = 0
        for row in rows:
            fed = len(row.tokens)
            end = row.start + fed
            held = pool[list(row.table[: -(-end // pool.shape[2])])]  # [blocks, 2, block_tokens, kv_heads, head_dim]
            k, v = held.transpose(1, 3, 0, 2, 4).reshape(2, c.kv_heads, -1, c.head_dim)[:, :, :end]
            q = queries[first : first + fed].transpose(1, 2, 0, 3).reshape(c.kv_heads, -1, c.head_dim)
            scores = (q @ k.transpose(0, 2, 1)).reshape(c.kv_heads, -1, fed, end)
            if fed > 1:
                later = numpy.arange(end) > numpy.arange(row.start, end)[:, None]
                scores[:, :, later] = -numpy.inf
            weights = numpy.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            attended = (weights.reshape(c.kv_heads, -1, end) @ v).reshape(c.kv_heads, -1, fed, c.head_dim)
            output[first : first + fed] = attended.transpose(2, 0, 1, 3)
            first += fed
        return output.reshape(count, c.width)

    def _batch(
        self, rows: Sequence[Row], pool_blocks: int, block_tokens: int
    ) -> tuple[NDArray[numpy.intp], NDArray[numpy.intp], NDArray[numpy.intp], list[int]]:
        """Return each token's id, position and block, and the last token of each row that wants an answer."""
        token_ids: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        last: list[int] = []
        for row in rows:
            end = row.start + len(row.tokens)
            if not row.tokens or row.start < 0 or end > self.config.max_context or len(row.table) * block_tokens < end:
                raise ValueError(f"row of {len(row.tokens)} tokens from {row.start} over {len(row.table)} blocks")
            used = row.table[: -(-end // block_tokens)]
            if not 0 <= min(used) <= max(used) < pool_blocks:
                raise IndexError(f"blocks {min(used)} to {max(used)} of {pool_blocks}")
            if not 0 <= min(row.tokens) <= max(row.tokens) < self.config.vocab_size:
                raise IndexError(f"tokens {min(row.tokens)} to {max(row.tokens)} of {self.config.vocab_size}")
            token_ids += row.tokens
            positions += range(row.start, end)
            blocks += [row.table[position // block_tokens] for position in range(row.start, end)]
            if row.params is not None:
                last.append(len(token_ids) - 1)
        return numpy.array(token_ids), numpy.array(positions), numpy.array(blocks), last

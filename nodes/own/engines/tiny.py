"""A seeded random model of about one million parameters with SmolLM2's architecture, for fast tests of real torch.

Its standard deviation is 0.08. With a smaller one it echoes its last token, and equal outputs prove nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nodes.own.engines.llama import Llama
from nodes.own.engines.llama_config import LlamaConfig

TINY = LlamaConfig(
    name="tiny",
    layers=4,
    width=128,
    heads=4,
    kv_heads=2,
    ffn_width=448,
    vocab_size=512,
    max_context=2048,
    rope_theta=10_000.0,
    norm_eps=1e-5,
    eos_ids=(2,),
)
STANDARD_DEVIATION = 0.08
SEED = 1


def tiny_weights(config: LlamaConfig = TINY, seed: int = SEED) -> dict[str, Tensor]:
    """Return weights that are the same in every process: one CPU generator, drawn in the order of
    `LlamaConfig.shapes`."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * STANDARD_DEVIATION if len(shape) > 1 else torch.ones(shape)
        for name, shape in config.shapes().items()
    }


def load_tiny(config: LlamaConfig = TINY, seed: int = SEED) -> Llama:
    """Return the model, with the same weights in every process."""
    return Llama(config, tiny_weights(config, seed))

"""A random model of a few hundred kilobytes whose layers look at a sliding window, but for every other one."""

from __future__ import annotations

import sys
from pathlib import Path

WINDOW = 64
VOCABULARY = 256


def make(folder: Path) -> None:
    """Gemma 3's code with layers of a toy; the same weights each time."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(11)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        query_pre_attn_scalar=64,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        max_position_embeddings=2048,
        eos_token_id=1,
        bos_token_id=2,
        pad_token_id=0,
    )
    Gemma3ForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))

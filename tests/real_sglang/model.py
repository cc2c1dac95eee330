"""A tiny random Llama as a Hugging Face directory: `model.py DIRECTORY`. Its greedy answers wander over the vocabulary.

Random weights with tied embeddings answer with the last token for ever, which would make any two answers equal. So the
head has weights of its own, and attention is loud enough that every token of the prompt changes what comes out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

VOCABULARY = 512
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD = 64, 128, 2, 4, 2, 16


def make(directory: Path) -> None:
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD,
        "vocab_size": VOCABULARY, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "hidden_act": "silu", "bos_token_id": 1,
        "eos_token_id": 2, "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, scale: float = 0.12) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(torch.bfloat16)

    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    weights = {
        "model.embed_tokens.weight": random(VOCABULARY, HIDDEN, scale=0.05),
        "lm_head.weight": random(VOCABULARY, HIDDEN),
        "model.norm.weight": ones.clone(),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        weights |= {
            f"{at}.self_attn.q_proj.weight": random(HEADS * HEAD, HIDDEN, scale=0.3),
            f"{at}.self_attn.k_proj.weight": random(KV_HEADS * HEAD, HIDDEN, scale=0.3),
            f"{at}.self_attn.v_proj.weight": random(KV_HEADS * HEAD, HIDDEN, scale=0.3),
            f"{at}.self_attn.o_proj.weight": random(HIDDEN, HEADS * HEAD, scale=0.3),
            f"{at}.mlp.gate_proj.weight": random(INNER, HIDDEN),
            f"{at}.mlp.up_proj.weight": random(INNER, HIDDEN),
            f"{at}.mlp.down_proj.weight": random(HIDDEN, INNER),
            f"{at}.input_layernorm.weight": ones.clone(),
            f"{at}.post_attention_layernorm.weight": ones.clone(),
        }
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})


if __name__ == "__main__":
    make(Path(sys.argv[1]))

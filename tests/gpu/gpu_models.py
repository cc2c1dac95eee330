"""Tiny models with random weights, as Hugging Face directories: for each row that needs no answer with a meaning.

A dense one, one with a sliding window beside full attention, one with experts. All have SmolLM2's vocabulary, so that
grammars work, and weights wide enough for outputs that do not repeat one token.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from nodes.vllm.smollm2 import hugging_face

WIDTH, FFN, LAYERS, HEADS, KV_HEADS, HEAD, VOCABULARY = 64, 128, 2, 4, 2, 64, 49152
WINDOW, EXPERTS = 64, 4
SPREAD = 0.3
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")

KINDS: dict[str, dict[str, Any]] = {
    "dense": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "hybrid": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": HEAD,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": EXPERTS,
        "num_experts_per_tok": 2, "moe_intermediate_size": FFN, "decoder_sparse_step": 1, "norm_topk_prob": True,
    },
}  # fmt: skip
COMMON = {
    "hidden_size": WIDTH, "intermediate_size": FFN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "vocab_size": VOCABULARY, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": True,
    "torch_dtype": "float32", "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip


def tiny(kind: str, folder: Path) -> Path:
    """The directory of that model, made in `folder`. ConfigError when SmolLM2's package is missing."""
    made, tokenizer = folder / kind, hugging_face()
    made.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER:
        shutil.copy(tokenizer / name, made / name)
    rng = np.random.default_rng(1)
    tensors = {
        f"model.{name}.weight": np.ones(shape, np.float32)
        if len(shape) == 1
        else rng.standard_normal(shape, np.float32) * np.float32(SPREAD)
        for name, shape in _shapes(kind).items()
    }
    save_file(tensors, str(made / "model.safetensors"), metadata={"format": "pt"})
    (made / "config.json").write_text(json.dumps(COMMON | KINDS[kind], indent=1))
    return made


def _shapes(kind: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (VOCABULARY, WIDTH), "norm": (WIDTH,)}
    norms = ["input_layernorm", "post_attention_layernorm"]
    if kind == "hybrid":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for layer in (f"layers.{number}" for number in range(LAYERS)):
        shapes |= {f"{layer}.{norm}": (WIDTH,) for norm in norms}
        shapes |= {
            f"{layer}.self_attn.q_proj": (HEADS * HEAD, WIDTH),
            f"{layer}.self_attn.k_proj": (KV_HEADS * HEAD, WIDTH),
            f"{layer}.self_attn.v_proj": (KV_HEADS * HEAD, WIDTH),
            f"{layer}.self_attn.o_proj": (WIDTH, HEADS * HEAD),
        }
        if kind != "dense":
            shapes |= {f"{layer}.self_attn.{each}_norm": (HEAD,) for each in "qk"}
        if kind == "moe":
            shapes[f"{layer}.mlp.gate"] = (EXPERTS, WIDTH)
        for part in [f"experts.{number}." for number in range(EXPERTS)] if kind == "moe" else [""]:
            shapes |= {f"{layer}.mlp.{part}{each}_proj": (FFN, WIDTH) for each in ("gate", "up")}
            shapes[f"{layer}.mlp.{part}down_proj"] = (WIDTH, FFN)
    return shapes

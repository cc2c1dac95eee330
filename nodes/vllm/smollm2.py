"""SmolLM2 as a Hugging Face directory, made once from our own files: a small real model to try vLLM with.

This module owns the conversion. Our files keep the rows of q and k in the order of interleaved rotary embeddings;
Hugging Face's have the two halves of a head apart.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from nodes.own.engines import smollm2
from nodes.own.engines.cache import Progress, made_once, no_progress
from nodes.own.engines.llama_config import LlamaConfig
from nodes.own.engines.needs import needed_by

CHAT_TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\n" + smollm2.DEFAULT_SYSTEM + "<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
CONVERTER = 1  # part of the cache's name: raise it when the files written here change


def hugging_face(progress: Progress = no_progress) -> Path:
    """Return the directory; the first call on a machine makes it, and blocks for some seconds. ConfigError when the
    model's package is missing."""
    ours = smollm2.converted(progress)
    return made_once(f"{ours.name}-hf{CONVERTER}", partial(_convert, ours), progress)


def _convert(ours: Path, directory: Path, progress: Progress) -> None:
    with needed_by("converting SmolLM2 for vLLM"):
        from safetensors import safe_open
        from safetensors.numpy import save_file
    tensors = {}
    with safe_open(str(ours / smollm2.WEIGHTS_FILE), framework="numpy") as weights:
        config = smollm2.read_config(weights.metadata())
        for number, name in enumerate(config.shapes()):
            tensors.update(_renamed(name, weights.get_tensor(name), config))
            progress("converting SmolLM2 for vLLM (once on this machine)", number / len(config.shapes()))
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    tokenizer = (ours / smollm2.TOKENIZER_FILE).read_text(encoding="utf-8")
    (directory / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    for file, content in _settings(config).items():
        (directory / file).write_text(json.dumps(content, indent=1), encoding="utf-8")


def _renamed(name: str, tensor: Any, config: LlamaConfig) -> dict[str, Any]:
    """Return one of `LlamaConfig.shapes` under Hugging Face's names of its parts."""
    if name in ("embed", "out_norm"):
        return {"model.embed_tokens.weight" if name == "embed" else "model.norm.weight": tensor}
    layer, _, part = name.partition(".")
    q, kv = config.width, config.kv_heads * config.head_dim
    parts: dict[str, Any]
    match part:
        case "qkv":
            parts = {
                "self_attn.q_proj": _halves_apart(tensor[:q], config.heads),
                "self_attn.k_proj": _halves_apart(tensor[q : q + kv], config.kv_heads),
                "self_attn.v_proj": tensor[q + kv :],
            }
        case "gate_up":
            parts = {"mlp.gate_proj": tensor[: config.ffn_width], "mlp.up_proj": tensor[config.ffn_width :]}
        case _:
            theirs = {
                "attn_norm": "input_layernorm", "attn_out": "self_attn.o_proj",
                "ffn_norm": "post_attention_layernorm", "down": "mlp.down_proj",
            }  # fmt: skip
            parts = {theirs[part]: tensor}
    return {f"model.layers.{layer}.{each}.weight": value.copy() for each, value in parts.items()}


def _halves_apart(rows: Any, heads: int) -> Any:
    """Return rows 0, 2, 4 ... of each head, then 1, 3, 5 ..."""
    width = rows.shape[1]
    return rows.reshape(heads, -1, 2, width).swapaxes(1, 2).reshape(-1, width)


def _settings(config: LlamaConfig) -> dict[str, Any]:
    end, text = config.eos_ids
    return {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": config.width,
            "intermediate_size": config.ffn_width,
            "num_hidden_layers": config.layers,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_dim,
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.max_context,
            "rms_norm_eps": config.norm_eps,
            "rope_theta": config.rope_theta,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "eos_token_id": end,
            "torch_dtype": "float32",
        },
        "generation_config.json": {"eos_token_id": [end, text]},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": smollm2.END_TOKENS[0],
            "pad_token": smollm2.END_TOKENS[0],
            "unk_token": smollm2.END_TOKENS[1],
            "model_max_length": config.max_context,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    }

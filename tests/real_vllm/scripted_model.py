"""A model in name alone, for vLLM's server over scripted ranks: SmolLM2's tokenizer with tokens for the marks that tool
and reasoning parsers look for, and a template that knows no tools. It has no weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from nodes.vllm.smollm2 import hugging_face

END = "<|im_end|>"
MARKS = (  # of the parsers' models, each one token
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<tool_calls>", "</tool_calls>", "<think>", "</think>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
)  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def model_folder(folder: Path, context: int = 0) -> Path:
    """Write the model's files, and return their folder. `context` is the most tokens of prompt and answer (0:
    SmolLM2's)."""
    source = hugging_face()
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((source / "config.json").read_text()) | {"vocab_size": tokenizer.get_vocab_size()}
    settings = json.loads((source / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    if context:
        config["max_position_embeddings"] = settings["model_max_length"] = context
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text((source / "generation_config.json").read_text())
    return folder


def ids_of(model: Path) -> tuple[Callable[[str], tuple[int, ...]], tuple[int, int]]:
    """A function that makes token ids of a text, the id of END, and how many ids there are."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    end = tokenizer.token_to_id(END)
    assert end is not None
    return ids, (end, tokenizer.get_vocab_size())

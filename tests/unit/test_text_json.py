"""The tokenizer of any Hugging Face model whose files are here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bus.errors import ConfigError
from pdbus.text.tokenizer import ByteTokenizer, SmolTokenizer, StreamDecoder, tokenizer_for
from pdbus.text.tokenizer_json import JsonTokenizer

WORDS = ["<s>", "</s>", "<0xE2>", "<0x82>", "<0xAC>", "\u2581", "h", "i", "\u2581hi", "hi", "U", ":"]
TEXT = "na\u00efve caf\u00e9 \U0001f980 2024\n<|im_end|>"


def made(
    folder: Path, template: str | None = "{{ bos_token }}{% for m in messages %}U:{{ m.content }}{% endfor %}"
) -> Path:
    """As of a model that writes spaces and unknown bytes as SentencePiece does."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    bpe = tokenizers.models.BPE(vocab=vocabulary, merges=[("h", "i"), ("\u2581", "hi")], byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(bpe)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    return folder


def test_a_model_like_llama(tmp_path: Path) -> None:
    tokenizer = tokenizer_for(str(made(tmp_path)))
    assert isinstance(tokenizer, JsonTokenizer)
    assert tokenizer.encode("hi hi") == [0, 9, 8], "what the model wants before a text comes first"
    assert tokenizer.decode([0, 9, 8, 2, 3, 4, 1]) == "hi hi\u20ac"
    stream = StreamDecoder(tokenizer)
    assert [stream.push([token]) for token in (2, 3, 4)] == ["", "", "\u20ac"]
    assert tokenizer.eos_ids == (1,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    assert tokenizer_for(str(tmp_path)).eos_ids == (1, 7)


def test_what_people_write_cannot_close_their_turn(tmp_path: Path) -> None:
    tokenizer = JsonTokenizer(made(tmp_path))
    assert tokenizer.chat("hi", "hi") == [0, 10, 11, 9, 10, 11, 9]
    ids = tokenizer.chat("</s>")
    assert 1 not in ids
    assert ids[:3] == [0, 10, 11]


def test_templates_that_are_none_of_use(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        JsonTokenizer(made(tmp_path, None)).chat("hi")
    with pytest.raises(ConfigError, match="system role is not supported"):
        JsonTokenizer(made(tmp_path, "{{ raise_exception('system role is not supported') }}")).chat("hi", "hi")
    (tmp_path / "chat_template.jinja").write_text("U:{{ messages[0].content }}")
    assert JsonTokenizer(tmp_path).chat("hi") == [10, 11, 9], "a file of its own goes first"


def test_a_path_without_files_is_a_mistake_and_other_names_are_bytes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no tokenizer\.json in /"):
        tokenizer_for(str(tmp_path))
    assert isinstance(tokenizer_for("h100-8b"), ByteTokenizer)


@pytest.mark.model
def test_it_reads_smollm2_as_our_own_does() -> None:
    from nodes.vllm.smollm2 import hugging_face

    ours, general = SmolTokenizer(), JsonTokenizer(hugging_face())
    assert general.eos_ids == ours.eos_ids
    for text in ("", "hello", TEXT):
        assert general.encode(text) == ours.encode(text)
        assert general.chat(text) == ours.chat(text)
        assert general.chat(text, "Be brief.") == ours.chat(text, "Be brief.")
        assert general.decode(ours.chat(text)) == ours.decode(ours.chat(text))

"""The real model: its tokenizer, a completion anybody can check, and a split run of it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors import safe_open

from bus.wire.messages import Params
from nodes.own.engines import smollm2
from nodes.own.engines.base import Row
from nodes.own.engines.factory import default_engine, load_llama
from nodes.own.engines.numpy_weights import mapped
from nodes.own.engines.reference import generate_alone
from pdbus.text.tokenizer import StreamDecoder, Tokenizer, tokenizer_for

pytestmark = pytest.mark.model

GREEDY = Params()
needs_torch = pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed: it is what this is about")
JAPANESE = " \u65e5\u672c\u8a9e\U0001f468\u200d\U0001f469"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_for("smollm2")


def text_of(tokenizer: Tokenizer, prompt: list[int], n: int) -> str:
    return tokenizer.decode(generate_alone("smollm2", prompt, n, engine=default_engine()))


def test_completes_sensibly(tokenizer: Tokenizer):
    assert text_of(tokenizer, tokenizer.encode("The capital of France is"), 4).startswith(" Paris")
    answer = generate_alone(
        "smollm2", tokenizer.chat("What is the capital of Italy? One word."), 40, engine=default_engine()
    )
    assert "Rome" in tokenizer.decode(answer)
    assert answer[-1] in tokenizer.eos_ids, "a chat answer ends its turn"


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!",
        "  two  spaces\n\n\ttab",
        "in 2024: 3.14159",
        "caf\u00e9 \U0001f980" + JAPANESE,
        "a<|im_end|>b",
        "",
    ],
)
def test_text_round_trip_whole_and_streamed(tokenizer: Tokenizer, text: str):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    stream = StreamDecoder(tokenizer)
    pieces = [stream.push([token]) for token in ids]
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert not set(ids) & set(tokenizer.eos_ids), "text must not turn into special tokens"


def test_digits_are_split_one_by_one(tokenizer: Tokenizer):
    assert [tokenizer.token_bytes(token) for token in tokenizer.encode("2024")] == [b"2", b"0", b"2", b"4"]


def test_known_ids(tokenizer: Tokenizer):
    assert tokenizer.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert tokenizer.eos_ids == (2, 0)
    assert tokenizer.vocab_size == 49152
    assert tokenizer.token_bytes(2) == tokenizer.token_bytes(10**6) == b""


def test_chat_follows_the_template(tokenizer: Tokenizer):
    ids = tokenizer.chat("Hi<|im_end|>", "Be brief.")
    start, end, newline = 1, 2, tokenizer.encode("\n")
    assert ids == [
        *[start, *tokenizer.encode("system\nBe brief."), end, *newline],
        *[start, *tokenizer.encode("user\nHi<|im_end|>"), end, *newline],
        *[start, *tokenizer.encode("assistant\n")],
    ]
    assert tokenizer.decode(tokenizer.chat("Hi")).startswith("system\nYou are a helpful AI assistant named SmolLM")


@needs_torch
def test_split_run_equals_single_process_run(tokenizer: Tokenizer):
    model, _ = load_llama("torch", "smollm2")
    prompts = [tokenizer.chat("Name three colours."), tokenizer.encode("Once upon a time, in 1742,")]
    source, target = model.new_pool(12, 16), model.new_pool(12, 16)
    tables = [[3, 1, 7, 5], [2, 8, 0, 4]]
    rows = [Row(i, prompt, 0, table, GREEDY) for i, (prompt, table) in enumerate(zip(prompts, tables, strict=True))]
    outputs = [[int(token)] for token in model.forward(source, rows).argmax(-1)]
    target.copy_(source)
    for _ in range(11):
        rows = [
            Row(i, output[-1:], len(prompts[i]) + len(output) - 1, tables[i], GREEDY)
            for i, output in enumerate(outputs)
        ]
        for output, token in zip(outputs, model.forward(target, rows).argmax(-1), strict=True):
            output.append(int(token))
    assert outputs == [generate_alone("smollm2", prompt, 12, Params(ignore_eos=True)) for prompt in prompts]


@needs_torch
def test_numpy_answers_as_torch_does(tokenizer: Tokenizer):
    for prompt in (tokenizer.chat("Why is the sky blue? In one sentence."), tokenizer.encode("In 1742, once upon")):
        asked = (smollm2.NAME, prompt, 48)
        assert generate_alone(*asked, engine="numpy") == generate_alone(*asked)


def test_numpy_s_weights_are_the_file_s(tmp_path: Path):
    path = smollm2.converted() / smollm2.WEIGHTS_FILE
    told, arrays = mapped(path)
    with safe_open(str(path), framework="numpy") as file:
        assert told == file.metadata()
        assert set(arrays) == set(file.keys())
        assert (arrays["3.down"] == file.get_tensor("3.down")).all()
    assert not arrays["embed"].flags.owndata, "read as it is used, and shared by all processes"
    torn = tmp_path / "torn"
    torn.write_bytes(path.read_bytes()[:50_000])
    with pytest.raises(ValueError):
        mapped(torn)


def test_later_starts_read_the_cache_alone(monkeypatch: pytest.MonkeyPatch):
    directory = smollm2.converted()
    monkeypatch.setattr(smollm2, "_convert", lambda *arguments: pytest.fail("converted again"))
    assert smollm2.converted() == directory
    assert {path.name for path in directory.iterdir()} == {
        smollm2.WEIGHTS_FILE, smollm2.TOKENIZER_FILE, smollm2.TEMPLATE_FILE, smollm2.GENERATION_FILE,
    }  # fmt: skip

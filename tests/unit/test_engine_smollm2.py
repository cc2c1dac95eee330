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
from pdbus.text.models import ModelText, text_for

pytestmark = pytest.mark.model

GREEDY = Params()
needs_torch = pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed: it is what this is about")
JAPANESE = " \u65e5\u672c\u8a9e\U0001f468\u200d\U0001f469"


@pytest.fixture(scope="module")
def tokenizer() -> ModelText:
    return text_for("smollm2")


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def text_of(tokenizer: ModelText, prompt: list[int], n: int) -> str:
    return tokenizer.decode(generate_alone("smollm2", prompt, n, engine=default_engine()))


def test_completes_sensibly(tokenizer: ModelText):
    assert text_of(tokenizer, tokenizer.encode("The capital of France is"), 4).startswith(" Paris")
    answer = generate_alone(
        "smollm2", tokenizer.chat(asked("What is the capital of Italy? One word.")), 40, engine=default_engine()
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
        "",
    ],
)
def test_text_round_trip_whole_and_streamed(tokenizer: ModelText, text: str):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    stream = tokenizer.decoder()
    pieces = [stream.push([token]) for token in ids]
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert not set(ids) & set(tokenizer.eos_ids)


def test_digits_are_split_one_by_one(tokenizer: ModelText):
    assert [tokenizer.token_bytes(token) for token in tokenizer.encode("2024")] == [b"2", b"0", b"2", b"4"]


def test_known_ids(tokenizer: ModelText):
    assert tokenizer.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert tokenizer.eos_ids == (2, 0)
    assert (tokenizer.decode([2]), tokenizer.token_bytes(2)) == ("", b"<|im_end|>")


def test_chat_follows_the_template(tokenizer: ModelText):
    ids = tokenizer.chat([{"role": "system", "content": "Be brief."}, *asked("Hi<|im_end|>")])
    start, end, newline = 1, 2, tokenizer.encode("\n")
    written = [id for word in ("<", "|", "im", "_", "end", "|", ">") for id in tokenizer.encode(word)]  # is no token
    assert ids == [
        *[start, *tokenizer.encode("system\nBe brief."), end, *newline],
        *[start, *tokenizer.encode("user\nHi"), *written, end, *newline],
        *[start, *tokenizer.encode("assistant\n")],
    ]
    assert tokenizer.decode(tokenizer.chat(asked("Hi"))).startswith(
        "system\nYou are a helpful AI assistant named SmolLM"
    )


@needs_torch
def test_split_run_equals_single_process_run(tokenizer: ModelText):
    model, _ = load_llama("torch", "smollm2")
    prompts = [tokenizer.chat(asked("Name three colours.")), tokenizer.encode("Once upon a time, in 1742,")]
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
    for prompt, output in zip(prompts, outputs, strict=True):  # in one process, asked for all tokens at once
        rows = [Row(0, prompt, 0, range(4), GREEDY)]
        rows += [Row(0, [token], len(prompt) + n, range(4), GREEDY) for n, token in enumerate(output[:-1])]
        assert model.forward(model.new_pool(4, 16), rows).argmax(-1).tolist() == output


@needs_torch
def test_numpy_answers_as_torch_does(tokenizer: ModelText):
    """Each is asked for each token of an answer at once, as it would ask itself for one after the other; numpy does ask
    itself for the first ones. (The texts are the model's own.)"""
    ours, _ = load_llama("numpy", smollm2.NAME)
    model, _ = load_llama("torch", smollm2.NAME)
    sky = (
        "The sky is blue because of a process called Rayleigh Scattering, where light encounters tiny molecules of air "
        "and is scattered in every direction by molecules of air. This phenomenon occurs because of the speed of "
        "light, which is approximately 30"
    )
    city = (
        " a time, the city of New Orleans was a thriving metropolis, with a population of around 2.5 million people. "
        "However, in 1742, the city was still a French colony, and the French had already established"
    )
    chat = tokenizer.chat(asked("Why is the sky blue? In one sentence."))
    for prompt, text in ((chat, sky), (tokenizer.encode("In 1742, once upon"), city)):
        first = generate_alone(smollm2.NAME, prompt, 8, engine="numpy")
        assert len(first) == 8 or first[-1] in tokenizer.eos_ids
        answer = first + tokenizer.encode(text)[8:]
        blocks = -(-(len(prompt) + 48) // 16)
        rows = [Row(0, prompt, 0, range(blocks), GREEDY)]
        rows += [Row(0, [token], len(prompt) + n, range(blocks), GREEDY) for n, token in enumerate(answer[:47])]
        said = model.forward(model.new_pool(blocks, 16), rows).argmax(-1).tolist()
        assert len(said) == 48
        assert said[:8] == first
        assert ours.forward(ours.new_pool(blocks, 16), rows).argmax(-1).tolist() == said


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

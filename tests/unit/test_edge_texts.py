"""What an edge makes of texts: the tokens of prompts, and the texts of answers."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from edge_world import AT, World, chat, letters
from test_text_folder import folder, llama

from pdbus.client.options import make_request
from pdbus.client.output import ModelTexts
from pdbus.client.sync import Stream
from pdbus.text.find import places_of
from pdbus.text.folder import FolderText

CHAT, COMPLETE, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


def world_of(path: Path, script: Any = None, **config: Any) -> World:
    return World(script, tokenizers=places_of([str(path)]), **config)


def script_of(ids: list[int]) -> Any:
    from edge_world import ended

    return lambda prompt, options: [*((id,) for id in ids), ended(options["rid"], "stop", ids)]


def test_a_message_has_the_same_tokens_by_the_client_library(tmp_path: Path) -> None:
    world = world_of(folder(tmp_path))
    written = "  hé<|end|> "
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": written}]
    at_edge = run(world.post("/tokenize", {"messages": messages})).json["tokens"]
    texts = ModelTexts(places=places_of([str(tmp_path)]))
    assert texts.prompt("sim", written, True, "be")[1] == at_edge
    by_itself = run(world.post("/tokenize", {"prompt": written})).json["tokens"]
    assert texts.prompt("sim", written, False, None)[1] == by_itself != at_edge


def test_special_tokens_of_a_prompt_are_read_and_those_of_a_chat_are_not(tmp_path: Path) -> None:
    text = FolderText(folder(tmp_path))
    world = world_of(tmp_path)
    for path, body in ((COMPLETE, {"prompt": "a<|end|>"}), (GENERATE, {"text": "a<|end|>"})):
        run(world.post(path, body))
        assert world.client.asked[-1][0] == [*text.encode("a"), 257]
    run(world.post(CHAT, chat("a<|end|>")))
    assert world.client.asked[-1][0].count(257) == 1, "the template's"


def test_special_tokens_are_put_around_a_text_or_not(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    bpe = tokenizers.Tokenizer.from_file(str(folder(tmp_path) / "tokenizer.json"))
    bpe.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 256)])
    bpe.save(str(tmp_path / "tokenizer.json"))
    world = world_of(tmp_path)
    for body, firsts in (({}, [256]), ({"add_special_tokens": False}, [])):
        run(world.post(COMPLETE, {"prompt": "a", **body}))
        assert len(world.client.asked[-1][0]) == len(firsts) + 1
        assert run(world.post("/tokenize", {"prompt": "a", **body})).json["count"] == len(firsts) + 1
    run(world.post(CHAT, chat("a")))
    once = world.client.asked[-1][0]
    run(world.post(CHAT, chat("a", add_special_tokens=True)))
    assert world.client.asked[-1][0] == [256, *once]


def test_special_tokens_of_an_answer_are_left_out_or_not(tmp_path: Path) -> None:
    ids = [*FolderText(folder(tmp_path)).encode("a"), 258, 257]
    for more, shown in (({}, "a"), ({"skip_special_tokens": False}, "a<|user|>")):
        answer = run(world_of(tmp_path, script_of(ids)).post(COMPLETE, {"prompt": "x", **more})).json
        assert answer["choices"][0]["text"] == shown
        body = {"text": "x", "sampling_params": more}
        assert run(world_of(tmp_path, script_of(ids)).post(GENERATE, body)).json["text"] == shown


def test_an_answer_keeps_its_first_space(tmp_path: Path) -> None:
    text = llama(tmp_path)
    paris, is_ = (int(text._whole.token_to_id(f"\u2581{word}")) for word in ("Paris", "is"))
    world = world_of(tmp_path, script_of([is_, paris]))
    assert run(world.post(COMPLETE, {"prompt": [1, paris]})).json["choices"][0]["text"] == " is Paris"


def test_an_end_token_that_is_no_special_one_is_no_text(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    bpe = tokenizers.Tokenizer.from_file(str(folder(tmp_path, eos_token_id=261) / "tokenizer.json"))
    bpe.add_tokens([tokenizers.AddedToken("<end_of_turn>", special=False, normalized=False)])
    bpe.save(str(tmp_path / "tokenizer.json"))
    text = FolderText(tmp_path)
    ids = text.encode("a<end_of_turn>")
    assert ids[-1] == 261
    for more, shown in (({}, "a"), ({"ignore_eos": True}, "a<end_of_turn>")):
        answer = run(world_of(tmp_path, script_of(ids)).post(CHAT, chat(**more))).json
        assert answer["choices"][0]["message"]["content"] == shown
    request = make_request([1], {}, AT, random.Random(1), eos_ids=text.eos_ids)
    stream = Stream(SimpleNamespace(drop=print), request, text, dict)  # type: ignore[arg-type]
    piece = stream._piece(tuple(ids))
    assert piece is not None
    assert (piece.ids, piece.text) == (tuple(ids), "a"), "nor in the client library"


def test_stop_strings_count_behind_min_tokens() -> None:
    for stop, shown in ((".", "a.b.c"), (".c", "a.b"), ("c.", "a.b.")):
        for script in (letters("a.b.c.d"), script_of([3 + byte for byte in b"a.b.c.d"])):
            answer = run(World(script).post(CHAT, chat(min_tokens=4, stop=[stop]))).json
            assert answer["choices"][0]["message"]["content"] == shown


def test_a_model_without_a_tokenizer_streams_ids_and_takes_them_in_completions(tmp_path: Path) -> None:
    from edge_world import rank, status

    def world() -> World:
        return World(letters("hello"), status(rank("u", "unified", "nobody-has-it")))

    streamed = run(world().post(GENERATE, {"input_ids": [1, 2], "stream": True})).events
    assert [event["output_ids"][-1] for event in streamed[:-1]] == [3 + byte for byte in b"hello"], "as tokens come"
    whole = run(world().post(COMPLETE, {"prompt": [1, 2], "logprobs": 0}))
    (choice,) = whole.json["choices"]
    assert (whole.status, choice["text"]) == (200, "")
    assert choice["logprobs"]["tokens"] == [f"token_id:{3 + byte}" for byte in b"hello"]
    for path, body in ((COMPLETE, {"prompt": "a"}), (CHAT, chat(model="")), (GENERATE, {"text": "a"})):
        assert run(world().post(path, body)).status == 501
    refused = run(world().post(COMPLETE, {"prompt": [1], "stop": "a"}))
    assert (refused.status, refused.error["param"]) == (400, "stop")


def test_a_chat_is_as_long_as_fits(tmp_path: Path) -> None:
    def most(world: World) -> int:
        run(world.post(CHAT, chat("a")))
        ids, options = world.client.asked[-1]
        return options["max_tokens"] + (len(ids) if options["max_tokens"] > 1500 else 0)

    assert most(world_of(folder(tmp_path))) == 2048, "the KV memory of a rank"
    assert most(world_of(folder(tmp_path, max_new_tokens=300))) == 300
    assert most(world_of(tmp_path, chat_max_tokens=40)) == 40
    assert most(World()) == 1024, "our own engines reserve memory for all that may come"


def test_sampling_defaults_are_the_models_unless_a_setting_says_otherwise(tmp_path: Path) -> None:
    said = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}
    folder(tmp_path, **said)
    for path, body in ((CHAT, chat()), (COMPLETE, {"prompt": "a"})):
        world = world_of(tmp_path)
        run(world.post(path, body))
        assert world.client.asked[-1][1].items() >= said.items()
        run(world.post(path, {**body, "temperature": 0, "top_k": -1}))
        assert world.client.asked[-1][1].items() >= {**said, "temperature": 0, "top_k": 0}.items()
        world = world_of(tmp_path, sampling_defaults="openai")
        run(world.post(path, body))
        assert world.client.asked[-1][1]["temperature"] == 1.0
        assert "top_k" not in world.client.asked[-1][1]
    world = world_of(tmp_path)
    run(world.post(GENERATE, {"text": "a"}))
    assert "top_k" not in world.client.asked[-1][1], "SGLang's /generate has none"


def test_a_template_that_refuses_is_a_wrong_request(tmp_path: Path) -> None:
    for template, why in (("{{ raise_exception('no such role') }}", "no such role"), (None, "no chat template")):
        (tmp_path / "tokenizer_config.json").unlink(missing_ok=True)
        answer = run(world_of(folder(tmp_path, template)).post(CHAT, chat()))
        assert (answer.status, answer.error["param"]) == (400, "messages")
        assert why in answer.error["message"]


def test_the_request_goes_by_the_id_in_its_body() -> None:
    for body in ({"request_id": "mine"}, {"rid": "mine"}, {"rid": "mine", "request_id": "mine"}):
        answer = run(World().post(CHAT, chat(**body)))
        assert (answer.headers["x-request-id"], answer.json["id"]) == ("mine", "chatcmpl-mine")
    assert run(World().post(CHAT, chat(rid="a", request_id="b"))).error["param"] == "rid"
    assert run(World().post(CHAT, chat(request_id="a\nb"))).error["param"] == "request_id"

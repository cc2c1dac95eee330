"""A grammar of a model that reasons, through vLLM's own server and on a real vLLM rank: it binds only once the
reasoning has ended."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from front_server import Front
from real_engines import ENGINE, ENV, WAIT_S

from bus.runtime.ports import free_ports
from nodes.vllm.smollm2 import CHAT_TEMPLATE, hugging_face
from pdbus.launcher import Cluster, ClusterSpec

pytestmark = pytest.mark.timeout(900)

CHAT = "/v1/chat/completions"
NAME, PARSER = ("--served-model-name", "smollm2"), ("--reasoning-parser", "deepseek_r1")
MARKS = {"<jupyter_script>": "<think>", "<empty_output>": "</think>"}  # ids that SmolLM2 has and chats do not use
BUDGET = 6  # tokens of reasoning, which vLLM then ends; by itself the model says ten and an end
SCHEMA = {
    "type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
BODY: dict[str, Any] = {
    "model": "smollm2", "temperature": 0, "max_tokens": 60, "thinking_token_budget": BUDGET,
    "messages": [{"role": "user", "content": "Which city is the capital of France, and why?"}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}},
}  # fmt: skip


def thinking_model(folder: Path) -> Path:
    """Write SmolLM2 with two of its special tokens as the marks of reasoning, and a template that begins it; return its
    folder."""
    source = hugging_face()
    for file in source.iterdir():
        if not file.name.startswith("tokenizer"):
            (folder / file.name).symlink_to(file)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        if name := MARKS.get(token["content"]):
            token |= {"content": name, "special": False}
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {MARKS.get(name, name): number for name, number in vocabulary.items()}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((source / "tokenizer_config.json").read_text())
    template = CHAT_TEMPLATE.replace("assistant{{ '\n' }}", "assistant{{ '\n' }}{{ prefix | default('<think>') }}")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(thinking_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def cluster(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    spec = ClusterSpec(
        unified=1, engine="vllm", model=model, start_timeout_s=WAIT_S, engine_args=(*ENGINE, *NAME, *PARSER), env=ENV,
        log_dir=str(tmp_path_factory.mktemp("logs")),
    )  # fmt: skip
    with Cluster(spec) as made:
        yield made


def front(cluster: Cluster, model: str, log: Path, *parser: str) -> Front:
    port = free_ports("127.0.0.1", 1)
    line = ["pdbus", "serve", "--front", "vllm", "--model", model, "--http", str(port)]
    return Front([*line, "--controller", cluster.controller, "--", *NAME, *parser], port, log)


@pytest.fixture(scope="module")
def served(cluster: Cluster, model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with front(cluster, model, tmp_path_factory.mktemp("front") / "log", *PARSER) as made:
        yield made


def test_a_grammar_binds_once_the_reasoning_has_ended(served: Front) -> None:
    status, answer, _ = served.post(CHAT, BODY)
    assert status == 200, answer
    (choice,) = answer["choices"]
    thought, said = choice["message"]["reasoning"], choice["message"]["content"]
    assert json.loads(said)["city"] in ("Paris", "Rome")
    assert choice["finish_reason"] == "stop"
    assert thought.strip()
    assert not thought.lstrip().startswith("{"), "the grammar did not bind inside the reasoning"
    assert answer["usage"]["completion_tokens"] > BUDGET


def test_a_grammar_binds_at_once_where_the_prompt_has_ended_the_reasoning(served: Front) -> None:
    body = BODY | {"chat_template_kwargs": {"prefix": "<think></think>"}, "thinking_token_budget": None}
    status, answer, _ = served.post(CHAT, body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    text = (choice["message"]["reasoning"] or "") + (choice["message"]["content"] or "")
    assert json.loads(text)["city"] in ("Paris", "Rome")


def test_its_stream_is_the_whole_answer(served: Front) -> None:
    _, answer, _ = served.post(CHAT, BODY)
    (choice,) = answer["choices"]
    deltas = [each["choices"][0]["delta"] for each in served.stream(CHAT, BODY) if each["choices"]]
    for part in ("reasoning", "content"):
        assert "".join(delta.get(part) or "" for delta in deltas) == choice["message"][part]
    kinds = [part for delta in deltas for part in ("reasoning", "content") if delta.get(part)]
    assert kinds == sorted(kinds, reverse=True), "the reasoning comes first"
    assert kinds.count("reasoning") > 1


def test_a_server_with_another_parser_is_refused_by_name(cluster: Cluster, model: str, tmp_path: Path) -> None:
    """Ranks say theirs in hello. What needs no parser is served."""
    with front(cluster, model, tmp_path / "log", "--reasoning-parser", "qwen3") as other:
        for stream in (False, True):
            status, answer, _ = other.post(CHAT, BODY | {"stream": stream})
            assert status == 400, answer
            assert "parser:qwen3" in answer["error"]["message"]
        free = {name: BODY[name] for name in ("model", "temperature", "max_tokens", "messages")}
        assert other.post(CHAT, free)[0] == 200


def test_a_grammar_of_a_server_without_a_parser_is_for_the_whole_answer(
    cluster: Cluster, model: str, tmp_path: Path
) -> None:
    with front(cluster, model, tmp_path / "log") as other:
        body = {name: value for name, value in BODY.items() if name != "thinking_token_budget"}
        status, answer, _ = other.post(CHAT, body)
        assert status == 200, answer
        assert json.loads(answer["choices"][0]["message"]["content"])["city"] in ("Paris", "Rome")

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
PARSER = ("--reasoning-parser", "deepseek_r1")
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
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    model, logs = str(thinking_model(tmp_path_factory.mktemp("model"))), tmp_path_factory.mktemp("logs")
    name = ("--served-model-name", "smollm2")
    spec = ClusterSpec(
        unified=1, engine="vllm", model=model, start_timeout_s=WAIT_S, engine_args=(*ENGINE, *name, *PARSER), env=ENV,
        log_dir=str(logs),
    )  # fmt: skip
    port = free_ports("127.0.0.1", 1)
    command = ["pdbus", "serve", "--front", "vllm", "--model", model, "--http", str(port)]
    with Cluster(spec) as cluster:
        line = [*command, "--controller", cluster.controller, "--", *name, *PARSER]
        with Front(line, port, logs / "front.log") as made:
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

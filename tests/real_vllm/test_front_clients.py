"""Unmodified clients against vLLM's own server in front of the bus: each finishes a loop of three tool calls, with
streaming, and so do requests in the shape that coding agents send. Behind it are a prefill and a decode rank whose
answers are written down (`scripted`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_venv import python_of
from front_server import ENV, Front, plugin_path
from scripted_front import ANSWER, CITIES, FACTS, QUESTION, SCHEMA

pytestmark = pytest.mark.timeout(900)

HERE = Path(__file__).parent
LOOP = {"asked": list(CITIES), "answer": ANSWER}


@pytest.fixture(scope="module")
def python() -> Path:
    return python_of(
        "front-clients", "clients of OpenAI's and Anthropic's APIs", HERE / "clients.txt", takes="a minute, 300 MB"
    )


@pytest.mark.parametrize("client", ["openai-chat", "openai-responses", "anthropic", "langchain", "litellm"])
def test_a_client_finishes_a_loop_of_three_calls(coder: Front, python: Path, client: str) -> None:
    line = [str(python), "-P", str(HERE / "agent_clients.py"), client, f"http://127.0.0.1:{coder.port}"]
    env = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, env=env, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == LOOP


def test_a_loop_in_the_shape_of_claude_code(coder: Front) -> None:
    """`/v1/messages` with a system prompt in parts, cached parts, metadata and tool results as lists."""
    asked: list[str] = []
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}}]}
    ]
    head = {
        "model": "coder", "max_tokens": 200, "temperature": 1,
        "system": [{"type": "text", "text": "You are a coding agent.", "cache_control": {"type": "ephemeral"}}],
        "tools": [{"name": "weather", "description": "The temperature.", "input_schema": SCHEMA}],
        "metadata": {"user_id": "user_1_account__session_2"},
    }  # fmt: skip
    for _ in range(9):
        blocks: dict[int, dict[str, Any]] = {}
        for event in coder.stream("/v1/messages?beta=true", head | {"messages": messages}):
            if event["type"] == "content_block_start":
                blocks[event["index"]] = {**event["content_block"], "json": ""}
            elif event["type"] == "content_block_delta":
                delta, block = event["delta"], blocks[event["index"]]
                block["text"] = block.get("text", "") + delta.get("text", "")
                block["json"] += delta.get("partial_json", "")
        calls = [block for block in blocks.values() if block["type"] == "tool_use"]
        if not calls:
            answer = "".join(block["text"] for block in blocks.values() if block["type"] == "text")
            assert {"asked": asked, "answer": answer} == LOOP
            return
        asked += [json.loads(call["json"])["city"] for call in calls]
        used = [{"type": "tool_use", "id": c["id"], "name": c["name"], "input": json.loads(c["json"])} for c in calls]
        content = [{"type": "text", "text": FACTS[CITIES.index(asked[-1])]}]
        results = [{"type": "tool_result", "tool_use_id": call["id"], "content": content} for call in calls]
        messages += [{"role": "assistant", "content": used}, {"role": "user", "content": results}]
    raise AssertionError(asked)


def test_a_loop_in_the_shape_of_codex(coder: Front) -> None:
    """`/v1/responses` with instructions, typed input items, nothing stored, and a prompt cache key."""
    asked: list[str] = []
    items: list[Any] = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]
    head = {
        "model": "coder", "instructions": "You are a coding agent.", "tool_choice": "auto",
        "tools": [{"type": "function", "name": "weather", "description": "x", "strict": False, "parameters": SCHEMA}],
        "parallel_tool_calls": False, "store": False, "include": [], "prompt_cache_key": "019a-conversation",
    }  # fmt: skip
    for _ in range(9):
        done = [
            event["item"]
            for event in coder.stream("/v1/responses", head | {"input": items})
            if event["type"] == "response.output_item.done"
        ]
        calls = [item for item in done if item["type"] == "function_call"]
        if not calls:
            (message,) = (item for item in done if item["type"] == "message")
            answer = "".join(part["text"] for part in message["content"])
            assert {"asked": asked, "answer": answer} == LOOP
            return
        for call in calls:
            asked.append(json.loads(call["arguments"])["city"])
            output = FACTS[CITIES.index(asked[-1])]
            sent = {name: call[name] for name in ("type", "name", "arguments", "call_id")}
            items += [sent, {"type": "function_call_output", "call_id": call["call_id"], "output": output}]
    raise AssertionError(asked)


def test_vllms_own_benchmark_has_no_failed_request(coder: Front, tmp_path: Path) -> None:
    """Both of its backends at the same time, each with forty requests, eight at a time, of random tokens."""
    model = coder.log.parent / "model"
    env = {**os.environ, **ENV, "PYTHONPATH": plugin_path(tmp_path / "plugin")}
    running = []
    for backend, path in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
        line = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", backend]
        line += ["--base-url", f"http://127.0.0.1:{coder.port}", "--endpoint", path, "--model", "coder"]
        line += ["--tokenizer", str(model), "--dataset-name", "random", "--random-input-len", "200", "--ignore-eos"]
        line += ["--random-output-len", "16", "--num-prompts", "40", "--max-concurrency", "8", "--disable-tqdm"]
        line += ["--save-result", "--result-dir", str(tmp_path), "--result-filename", f"{backend}.json"]
        running.append(subprocess.Popen(line, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    for process, backend in zip(running, ("openai", "openai-chat"), strict=True):
        said, _ = process.communicate(timeout=600)
        assert process.returncode == 0, said[-4000:]
        result = json.loads((tmp_path / f"{backend}.json").read_text())
        assert (result["completed"], result["failed"], result["total_output_tokens"]) == (40, 0, 640), said
        assert result["median_ttft_ms"] > 0

"""vLLM's own API server in front of prefill and decode ranks of our engine, by HTTP, as clients use it.

One cluster and one server serve most tests, in order, because vLLM takes 12 s of a core to start.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from front_server import ENV, TOOLS, Front, events, front, plugin_path, unmodified
from real_engines import until

from nodes.vllm.smollm2 import hugging_face
from pdbus.launcher import Cluster, ClusterSpec
from pdbus.text.models import text_for

pytestmark = pytest.mark.timeout(600)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
QUESTION: dict[str, Any] = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
GREEDY: dict[str, Any] = {"model": "smollm2", "temperature": 0}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    spec = ClusterSpec(
        prefill=1, decode=2, engine="numpy", model="smollm2", prefill_method="cache_aware",
        decode_method="total_tokens", log_dir=str(tmp_path_factory.mktemp("cluster")),
    )  # fmt: skip
    with Cluster(spec) as made:
        yield made


@pytest.fixture(scope="module")
def served(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with front(cluster.controller, tmp_path_factory.mktemp("front") / "log") as made:
        yield made


def said(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def idle(cluster: Cluster) -> bool:
    return not any(rank.load and rank.load.running + rank.load.waiting for rank in cluster.status().ranks)


def joined(events: list[Any]) -> str:
    return "".join(each["choices"][0]["delta"].get("content") or "" for each in events if each["choices"])


def test_a_chat_is_answered_whole_and_as_a_stream(served: Front) -> None:
    status, answer, _ = served.post(CHAT, GREEDY | QUESTION)
    assert (status, said(answer)) == (200, "The capital of France is Paris.")
    assert answer["choices"][0]["finish_reason"] == "stop"
    found = served.stream(CHAT, GREEDY | QUESTION | {"stream_options": {"include_usage": True}})
    assert joined(found) == said(answer)
    usage = found[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (37, 8)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 32  # the same prompt came before


def test_tokens_are_those_that_the_cluster_makes(cluster: Cluster, served: Front) -> None:
    ids = text_for("smollm2").encode("Once upon a time there was a")
    body = GREEDY | {"prompt": ids, "max_tokens": 12, "return_token_ids": True}
    _, answer, _ = served.post(COMPLETIONS, body)
    with cluster.client() as client:
        stream = client.generate_tokens(ids, max_tokens=12)
        stream.tokens()
    assert answer["choices"][0]["token_ids"] == list(stream.result.ids)


def test_tools_are_offered_and_what_ranks_cannot_carry_is_refused_by_name(served: Front) -> None:
    body = GREEDY | QUESTION | {"tools": [TOOL]}
    status, answer, _ = served.post(CHAT, body)
    assert (status, said(answer)) == (200, "The capital of France is Paris.")
    for changed, name in (
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
        ({"logit_bias": {"1": 1.0}, "priority": 5000}, "priority"),
    ):
        for stream in (False, True):
            status, answer, _ = served.post(CHAT, GREEDY | QUESTION | changed | {"stream": stream})
            assert status == 400, answer
            assert name in answer["error"]["message"]
            assert answer["error"]["param"] in (name, None)


def test_responses_and_messages_are_answered(served: Front) -> None:
    status, answer, _ = served.post(
        "/v1/responses", GREEDY | {"input": "What is the capital of France?", "max_output_tokens": 16}
    )
    assert (status, answer["output"][0]["content"][0]["text"]) == (200, "The capital of France is Paris.")
    found = served.stream("/v1/responses", GREEDY | {"input": "What is the capital of France?"})
    assert found[-1]["type"] == "response.completed"
    assert "".join(e["delta"] for e in found if e["type"] == "response.output_text.delta") == (
        "The capital of France is Paris."
    )
    body = GREEDY | QUESTION | {"max_tokens": 16}
    status, answer, _ = served.post("/v1/messages", body)
    assert (status, answer["content"][0]["text"]) == (200, "The capital of France is Paris.")
    found = served.stream("/v1/messages", body)
    assert found[-1]["type"] == "message_stop"
    assert "".join(e["delta"]["text"] for e in found if e["type"] == "content_block_delta") == (
        "The capital of France is Paris."
    )


def test_a_stream_that_no_rank_can_run_has_its_status_in_each_api(served: Front) -> None:
    """`min_p` goes to no rank of our own engine."""
    status, answer, _ = served.post(CHAT, QUESTION | {"model": "smollm2", "min_p": 0.5, "stream": True})
    assert (status, answer["error"]["code"]) == (400, 400)
    body: dict[str, Any] = {"model": "smollm2", "frequency_penalty": 0.5, "input": "Hi", "stream": True}
    status, answer, _ = served.post("/v1/responses", body)
    assert (status, answer["error"]["code"]) == (400, 400)
    body = GREEDY | QUESTION | {"max_tokens": 4, "stream": True, "tools": [{"name": "x", "input_schema": {}}]}
    status, answer, _ = served.post("/v1/messages", body | {"tool_choice": {"type": "any"}})
    assert (status, answer["type"]) == (400, "error")


def test_several_answers_and_stop_strings(cluster: Cluster, served: Front) -> None:
    body = QUESTION | {"model": "smollm2", "temperature": 0.9, "seed": 5, "n": 2, "max_tokens": 6}
    status, answer, _ = served.post(CHAT, body)
    assert status == 200
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 12
    _, answer, _ = served.post(CHAT, GREEDY | QUESTION | {"stop": [" is"], "max_tokens": 400, "ignore_eos": True})
    assert (said(answer), answer["choices"][0]["stop_reason"]) == ("The capital of France", " is")
    until(lambda: idle(cluster), "the stopped request is gone from its rank", 10)


def test_a_chosen_rank_is_taken(cluster: Cluster, served: Front) -> None:
    for rank in (0, 1):
        status, _, _ = served.post(CHAT, GREEDY | QUESTION | {"max_tokens": 4}, x_data_parallel_rank=str(rank))
        assert status == 200
    status, answer, _ = served.post(CHAT, GREEDY | QUESTION, x_data_parallel_rank="9")
    assert status == 400, answer


def test_a_client_that_leaves_frees_its_ranks(cluster: Cluster, served: Front) -> None:
    connection, answer = served.begin(
        CHAT, GREEDY | QUESTION | {"stream": True, "ignore_eos": True, "max_tokens": 4000}
    )
    assert next(events(answer))
    connection.close()
    answer.close()
    until(lambda: idle(cluster), "both ranks are free", 10)


def test_a_decode_rank_that_is_killed_is_a_pause(cluster: Cluster, served: Front) -> None:
    body = GREEDY | QUESTION | {"ignore_eos": True, "max_tokens": 60}
    whole = joined(served.stream(CHAT, body))
    connection, answer = served.begin(CHAT, body | {"stream": True})
    found: list[Any] = []
    killed = ""
    for each in events(answer):
        found.append(each)
        if len(found) == 5:
            busy = [
                rank for rank in cluster.status().ranks if rank.role == "decode" and rank.load and rank.load.running
            ]
            killed = f"{busy[0].instance}/{busy[0].dp_rank}"
            cluster.kill(killed)
    connection.close()
    assert killed
    assert joined(found) == whole
    assert found[-1]["choices"][0]["finish_reason"] == "length"
    cluster.restart(killed)


def test_without_a_controller_it_is_unhealthy_and_it_comes_back_by_itself(cluster: Cluster, served: Front) -> None:
    assert served.get("/health")[0] == 200
    cluster.kill("controller-0")
    until(lambda: served.get("/health")[0] == 503, "it is unhealthy", 30)
    status, _, headers = served.post(CHAT, GREEDY | QUESTION | {"stream": True})
    assert status == 503
    assert int(headers["retry-after"]) >= 1
    cluster.restart("controller-0")
    until(lambda: served.get("/health")[0] == 200, "it is healthy again", 60)
    status, answer, _ = served.post(CHAT, GREEDY | QUESTION)
    assert (status, said(answer)) == (200, "The capital of France is Paris.")


def test_a_port_that_is_taken_is_one_line(cluster: Cluster, served: Front) -> None:
    line = [sys.executable, "-P", "-m", "pdbus", "serve", "--front", "vllm", "--model", "smollm2"]
    line += ["--http", str(served.port), "--controller", cluster.controller]
    ended = subprocess.run(line, env={**os.environ, **ENV}, capture_output=True, text=True, timeout=200)
    said = f"pdbus: error: cannot listen on {served.port}: Address already in use; choose another --http\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "", said)


def test_metrics_of_both_are_there(served: Front) -> None:
    text = served.get("/metrics")[1].decode()
    assert 'vllm:request_success_total{engine="0",finished_reason="stop"' in text
    assert "pdbus_front_failed_requests_total" in text


def test_after_sigterm_the_running_requests_finish(cluster: Cluster, served: Front) -> None:
    """This is the last test of this server, because it ends it."""
    body = GREEDY | QUESTION | {"ignore_eos": True, "max_tokens": 30}
    whole = joined(served.stream(CHAT, body))
    connection, answer = served.begin(CHAT, body | {"stream": True})
    found = []
    for each in events(answer):
        found.append(each)
        if len(found) == 3:
            served.process.send_signal(signal.SIGTERM)
    connection.close()
    assert joined(found) == whole
    assert served.process.wait(30) == 0


def test_an_unmodified_vllm_serve_is_a_front_by_its_plugin(cluster: Cluster, tmp_path: Path) -> None:
    """One parent runs two API servers, and no engine core."""
    arguments = ("--served-model-name", "smollm2", "--api-server-count", "2", *TOOLS)
    with unmodified(hugging_face(), tmp_path, *arguments, PDBUS_VLLM_CONTROLLER=cluster.controller) as served:
        for _ in range(4):  # either of the two may answer
            status, answer, _ = served.post(CHAT, GREEDY | QUESTION)
            assert (status, said(answer)) == (200, "The capital of France is Paris.")
        names = [" ".join(each.cmdline()) for each in served.family()]
        assert not [name for name in names if "EngineCore" in name], names
        assert served.process.poll() is None


def test_ways_to_start_that_need_an_engine_end_in_one_line(cluster: Cluster, tmp_path: Path) -> None:
    environ = {
        **os.environ, **ENV, "PDBUS_VLLM_CONTROLLER": cluster.controller,
        "PYTHONPATH": plugin_path(tmp_path / "plugin"),
    }  # fmt: skip
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", str(hugging_face()), "--headless"]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("pdbus: --headless: ")
    assert "Traceback" not in ended.stderr

"""`pdbus serve` and `pdbus up --http` with what people use: the openai package and curl; and with faults."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest
from edge_process import Serve, get, streaming, url, wait
from up_process import Up

from nodes.own.engines.sim import sim_generate
from pdbus.client import Client
from pdbus.demo import HTTP_PORT, how_to_ask

MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Up]:
    line, _ = how_to_ask("tiny")  # as the demo says
    arguments = ["0" if word == str(HTTP_PORT) else word for word in shlex.split(line)[2:]]
    with tempfile.TemporaryDirectory(prefix="pd") as path, Up(Path(path), *arguments) as up:
        wait(lambda: get(url(up), "/ready")[0] == 200)
        yield up


def running(base: str) -> int:
    return sum(rank["running"] or 0 for rank in json.loads(get(base, "/load")[1])["ranks"])


def metric(base: str, line: str) -> float:
    found = re.search(rf"^{re.escape(line)} (\S+)$", get(base, "/metrics")[1].decode(), re.M)
    return float(found[1]) if found else 0.0


def estimates(controller: str) -> list[float]:
    """The load in force at each rank, in tokens."""
    said = get(controller, "/metrics")[1].decode()
    return [float(value) for value in re.findall(r"^pdbus_controller_estimate_tokens\{.*\} (\S+)$", said, re.M)]


@pytest.fixture
def program(cluster: Up) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url(cluster) + "/v1", api_key="none", max_retries=0) as client:
        yield client


# --- the openai package -------------------------------------------------------------------------------------------


def test_an_openai_program(cluster: Up, program: openai.OpenAI) -> None:
    (model,) = program.models.list()
    with Client(cluster.controller) as own:
        expected = own.generate("hi", max_tokens=24).text()
    assert len(expected) > 5
    ask: Any = {"model": model.id, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    whole = program.chat.completions.create(**ask)
    assert whole.choices[0].message.content == expected
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == 2
    text = ""
    for chunk in program.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
    assert text == expected
    assert chunk.usage == whole.usage
    with program.chat.completions.with_streaming_response.create(**ask, extra_headers={"x-request-id": "mine"}) as raw:
        assert raw.headers["x-request-id"] == "mine"
    stop = expected[4:6]
    stopped = program.chat.completions.create(**ask, stop=stop).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == (expected[: expected.index(stop)], "stop")
    again = program.chat.completions.create(**ask | {"temperature": 1.0}, n=3, seed=5).choices
    assert len({choice.message.content for choice in again}) == 3
    turns = [*MESSAGES, whole.choices[0].message, {"role": "user", "content": "and?"}]
    assert program.chat.completions.create(**ask | {"messages": turns}).usage.prompt_tokens > 2  # type: ignore[union-attr]


def test_log_probabilities_as_the_package_reads_them(program: openai.OpenAI) -> None:
    ask: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    choice = program.chat.completions.create(**ask, logprobs=True, top_logprobs=2).choices[0]
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    assert len(content) == 12
    assert all(each.logprob == each.top_logprobs[0].logprob > each.top_logprobs[1].logprob for each in content)
    streamed = []
    for chunk in program.chat.completions.create(**ask, logprobs=True, top_logprobs=2, stream=True):
        said = chunk.choices[0].logprobs
        streamed += (said.content or []) if said else []
    assert streamed == content
    completion = program.completions.create(model="tiny", prompt="hi", max_tokens=5, temperature=0, logprobs=3)
    assert completion.choices[0].logprobs is not None
    assert len(completion.choices[0].logprobs.token_logprobs or []) == 5


def test_batches_of_texts_and_of_ids(program: openai.OpenAI) -> None:
    ask: Any = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    alone = [program.completions.create(prompt=prompt, **ask).choices[0].text for prompt in ("a", "b")]
    assert alone[0] != alone[1]
    batch = program.completions.create(prompt=["a", "b"], **ask).choices
    assert [choice.text for choice in batch] == alone
    ids = program.completions.create(prompt=[[3 + ord("a")], [3 + ord("b")]], **ask).choices
    assert [choice.text for choice in ids] == alone


def test_the_package_raises_its_own_errors(program: openai.OpenAI) -> None:
    ask: Any = {"model": "tiny", "messages": MESSAGES}
    for more, kind, param in (
        ({"model": "gpt-4"}, openai.NotFoundError, "model"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"extra_body": {"echo": True}}, openai.BadRequestError, "echo"),
        ({"extra_body": {"colour": 1}}, openai.BadRequestError, "colour"),
    ):
        with pytest.raises(kind) as raised:
            program.chat.completions.create(**ask | more)
        assert raised.value.param == param
    with pytest.raises(openai.BadRequestError) as raised:
        program.chat.completions.create(**ask, max_tokens=10_000)
    assert raised.value.code == "context_length_exceeded"


def test_a_prompt_goes_where_its_prefix_is_cached() -> None:
    """`cache_aware`, the default for prefill: the edge hashes the prompt's blocks for every client."""
    with (
        tempfile.TemporaryDirectory(prefix="pd") as path,
        Up(Path(path), "--model", "sim", "--http", "0") as up,
        openai.OpenAI(base_url=url(up) + "/v1", api_key="none", max_retries=0) as program,
        Client(up.controller) as own,
    ):

        def settled(blocks: int) -> bool:
            """The controller has heard of so many blocks, and counts nothing as queued: that weighs against a cache."""
            status = own.status()
            queued = any(rank.estimate_tokens for rank in status.ranks)
            return status.counts["prefix_blocks"] == blocks and not queued

        wait(lambda: get(url(up), "/ready")[0] == 200)
        for number in range(6):
            prompt = [[3 + (number * 50 + at) % 256 for at in range(200)]]
            seen = []
            for _ in range(3):
                said = program.completions.create(model="sim", prompt=prompt, max_tokens=2)
                assert said.usage is not None
                assert said.usage.prompt_tokens_details is not None
                rank = said.choices[0].model_extra["pdbus"]["prefill"]  # type: ignore[index]
                seen.append((rank, said.usage.prompt_tokens_details.cached_tokens))
                blocks = 12 * (number + 1)  # full ones of each prompt so far
                wait(lambda blocks=blocks: settled(blocks))  # type: ignore[misc]
            assert seen == [(seen[0][0], cached) for cached in (0, 192, 192)], "the same rank, and all its full blocks"


def test_many_at_once_with_asyncio(cluster: Up) -> None:
    async def all_of_them() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=url(cluster) + "/v1", api_key="none") as client:
            ask: Any = {"model": "tiny", "max_tokens": 16, "temperature": 0}
            answers = await asyncio.gather(
                *(client.chat.completions.create(messages=MESSAGES, **ask) for _ in range(20))
            )
        return [answer.choices[0].message.content for answer in answers]

    assert len(set(asyncio.run(all_of_them()))) == 1


def test_who_leaves_ends_the_request_at_its_rank(cluster: Up, program: openai.OpenAI) -> None:
    base = url(cluster)
    gone = 'pdbus_edge_requests_total{endpoint="/v1/chat/completions",status="499"}'
    before = metric(base, gone)
    ask: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 1500, "extra_body": {"ignore_eos": True}}
    stream = program.chat.completions.create(**ask, stream=True)
    for _, _ in zip(stream, range(5), strict=False):
        pass
    stream.close()
    wait(lambda: metric(base, gone) == before + 1)
    wait(lambda: running(base) == 0)
    assert metric(base, "pdbus_edge_requests_in_flight") == 0


# --- curl ---------------------------------------------------------------------------------------------------------


def test_the_curl_line_that_up_prints_works(cluster: Up) -> None:
    line = cluster.until("stdout", r"^or:  (curl .*)$")[1]
    assert line.replace(url(cluster), f"http://127.0.0.1:{HTTP_PORT}") == how_to_ask("tiny")[1], "and the demo"
    done = subprocess.run([*shlex.split(line), "-s"], capture_output=True, check=True, timeout=120)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_curl_streams(cluster: Up) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 4, "stream": True})
    line = ["curl", "-sN", url(cluster) + "/v1/completions", "-H", "Content-Type: application/json", "-d", "@-"]
    done = subprocess.run(line, input=body.encode(), capture_output=True, check=True, timeout=120)
    assert done.stdout.startswith(b'data: {"id":"cmpl-')
    assert done.stdout.endswith(b"data: [DONE]\n\n")


# --- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.fault
@pytest.mark.parametrize("part", ["decode", "controller-0"])
def test_a_part_that_dies_mid_stream_is_a_pause_and_no_more(part: str) -> None:
    """The client sees every token once and in order, as if nothing had happened."""
    prompt, count = [5, 6, 7], 300
    slow = ("--", "--sim-base-s", "0.01")
    with (
        tempfile.TemporaryDirectory(prefix="pd") as path,
        Up(Path(path), "--model", "sim", "--prefill", "1", "--http", "0", *slow) as up,
    ):
        base = url(up)
        wait(lambda: get(base, "/ready")[0] == 200)
        killed = None
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": count}, "stream": True}
        request = urllib.request.Request(
            base + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            seen: list[int] = []
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                assert event["output_ids"][: len(seen)] == seen, "what was said stays said"
                seen = event["output_ids"]
                if len(seen) > 20 and killed is None:
                    killed = part if part != "decode" else streaming(base)
                    os.kill(up.pid(killed), signal.SIGKILL)
        assert seen == sim_generate(prompt, count)
        assert event["meta_info"]["finish_reason"] == {"type": "length", "length": count}
        if part == "decode":
            assert event["meta_info"]["pdbus"]["attempts"] > 1


# --- the process ------------------------------------------------------------------------------------------------------


def test_a_first_signal_lets_streams_finish_and_a_second_does_not(cluster: Up) -> None:
    ask: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 1000, "extra_body": {"ignore_eos": True}}
    for signals in (1, 2):
        with (
            Serve(cluster.controller) as edge,
            openai.OpenAI(base_url=edge.url + "/v1", api_key="none", max_retries=0) as client,
        ):
            stream = client.chat.completions.create(**ask, stream=True)
            next(stream)
            edge.process.send_signal(signal.SIGTERM)
            wait(lambda port=edge.port: refused(port))  # type: ignore[misc]
            if signals == 2:
                edge.process.send_signal(signal.SIGTERM)
                assert edge.end()[0] == 0
                continue
            reasons = []
            with suppress(openai.APIConnectionError):
                reasons += [chunk.choices[0].finish_reason for chunk in stream]
            assert reasons[-1:] == ["length"]
            assert edge.end() == (0, "")


def refused(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_tls_and_keys_that_come_and_go(cluster: Up, tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    make = f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {cert} -days 1 -subj /CN=localhost"
    subprocess.run(
        [*make.split(), "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True, timeout=60
    )
    keys = tmp_path / "keys.toml"
    keys.write_text('[alice]\nkey = "sk-alices-key"\n')
    keys.chmod(0o600)
    arguments = ("--tls-cert", str(cert), "--tls-key", str(key), "--api-keys", str(keys))
    trust = ssl.create_default_context(cafile=str(cert))

    def status(edge: Serve, said: str) -> int:
        request = urllib.request.Request(f"{edge.url}/v1/models", headers={"Authorization": f"Bearer {said}"})
        try:
            with urllib.request.urlopen(request, context=trust, timeout=120) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    with Serve(cluster.controller, *arguments) as edge:
        assert edge.url.startswith("https://")
        assert (status(edge, "sk-alices-key"), status(edge, "sk-bobs-key")) == (200, 401)
        keys.write_text('[bob]\nkey = "sk-bobs-key"\n')
        wait(lambda: status(edge, "sk-bobs-key") == 200)
        assert status(edge, "sk-alices-key") == 401


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (("--http", "nowhere"), 2, "give --http a port"),
        (("--http", "203.0.113.1:80"), 3, "cannot listen on 203.0.113.1:80"),
        (("--tls-cert", "x"), 2, "--tls-cert and --tls-key go together"),
        (("--tls-cert", __file__, "--tls-key", __file__), 2, "cannot use"),
        (("--api-keys", "/nowhere"), 2, "cannot read /nowhere"),
        (("--tokenizer", "/nowhere"), 2, "/nowhere has no tokenizer.json"),
        (("--controller", "ipc:///tmp/pdbus-nowhere/c", "--wait-s", "0.2"), 3, "no controller answers"),
        (("--controller", "nowhere"), 2, "an address starts with"),
    ],
)
def test_what_a_user_can_get_wrong_is_one_line(arguments: tuple[str, ...], code: int, why: str) -> None:
    line = [sys.executable, "-P", "-m", "pdbus", "serve", "--http", "0", *arguments]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stderr
    assert why in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") <= 1 + done.stderr.count("waiting for")


def test_a_taken_port_is_one_line(cluster: Up) -> None:
    with Serve(cluster.controller) as edge:
        second = Serve(cluster.controller, port=str(edge.port))
        code, said = second.end()
    assert code == 3
    assert "Address already in use; choose another --http" in said


def test_two_edges_side_by_side_share_nothing(cluster: Up) -> None:
    answers: list[str] = []

    def ask(edge: Serve) -> None:
        with openai.OpenAI(base_url=edge.url + "/v1", api_key="none") as client:
            for _ in range(5):
                said = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=8, temperature=0)
                answers.append(said.choices[0].message.content or "")

    with Serve(cluster.controller) as one, Serve(cluster.controller) as other:
        threads = [threading.Thread(target=ask, args=(edge,)) for edge in (one, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(answers) == 10
    assert len(set(answers)) == 1

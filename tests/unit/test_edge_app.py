"""The edge over ASGI, in memory: what each endpoint answers, and with which status."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from edge_world import LOAD, PAIR, World, chat, ended, letters, rank, status
from msgspec.structs import replace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from structlog.testing import capture_logs

from bus.errors import ConfigError
from bus.runtime.spans import Spans, provider_of
from bus.tracecontext import ids_of, parse
from bus.wire.codes import Code, status_of
from bus.wire.messages import WantedRole
from pdbus.edge import app, fields, jobs
from pdbus.edge.cluster import LOST_S, View
from pdbus.text.models import BytesText


def run(coroutine: Any) -> Any:
    async def bounded() -> Any:
        task = asyncio.ensure_future(coroutine)
        await asyncio.wait([task], timeout=10)
        assert task.done() or not task.cancel(), "it goes on and on"
        return task.result()

    return asyncio.run(bounded())


def test_a_chat_whole_and_streamed_is_the_same() -> None:
    world = World(letters("héllo"))
    whole = run(world.post("/v1/chat/completions", chat()))
    assert whole.status == 200
    (choice,) = whole.json["choices"]
    assert choice["message"] == {"role": "assistant", "content": "héllo", "refusal": None}
    assert (choice["finish_reason"], choice["pdbus"]["decode"]) == ("stop", "d/0")
    assert whole.json["usage"]["completion_tokens"] == 6
    usage = {"include_usage": True}
    streamed = run(world.post("/v1/chat/completions", chat(stream=True, stream_options=usage)))
    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, last = streamed.events
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == "héllo"
    assert [event["choices"][0]["finish_reason"] for event in events][-2:] == [None, "stop"]
    assert (last["choices"], last["usage"]) == ([], whole.json["usage"])
    assert all(event["usage"] is None for event in events)
    assert {event["id"] for event in streamed.events} == {"chatcmpl-" + streamed.headers["x-request-id"]}


def test_usage_in_every_event_as_load_generators_ask_for_it() -> None:
    """vLLM's; of a choice, as far as it has come."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, body in (("/v1/chat/completions", chat()), ("/v1/completions", {"prompt": "ab", "n": 2})):
        streamed = run(World(letters("hello")).post(path, {**body, "stream": True, "stream_options": options}))
        *events, last = streamed.events
        first = [event["usage"] for event in events if event["choices"][0]["index"] == 0]
        assert [usage["completion_tokens"] for usage in first] == sorted(usage["completion_tokens"] for usage in first)
        assert first[-1] == {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7}
        assert last["usage"]["completion_tokens"] == 5 * body.get("n", 1)  # type: ignore[operator]
    alone = {"continuous_usage_stats": True}
    silent = run(
        World(letters("hello")).post("/v1/completions", {"prompt": "a", "stream": True, "stream_options": alone})
    )
    assert not any("usage" in event for event in silent.events)


def test_completions_take_texts_ids_and_batches() -> None:
    world = World()
    answers = run(world.post("/v1/completions", {"model": "sim", "prompt": ["a", "bc"], "n": 2})).json
    assert [choice["index"] for choice in answers["choices"]] == [0, 1, 2, 3]
    assert [ids for ids, _ in world.client.asked] == [[100], [100], [101, 102], [101, 102]]
    assert answers["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 20, "total_tokens": 23,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    world.client.asked.clear()
    streamed = run(world.post("/v1/completions", {"prompt": [[1], [2, 3]], "stream": True}))
    texts, ends = {0: "", 1: ""}, {0: [], 1: []}  # type: ignore[var-annotated]
    for event in streamed.events:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
        ends[choice["index"]].append(choice["finish_reason"])
    assert texts == {0: "hello", 1: "hello"}
    assert ends == {0: [None] * 5 + ["stop"], 1: [None] * 5 + ["stop"]}, "also of tokens that came all at once"
    assert [ids for ids, _ in world.client.asked] == [[1], [2, 3]]
    rids = [options["rid"] for _, options in world.client.asked]
    assert rids == [f"{streamed.headers['x-request-id']}-{n}" for n in (0, 1)]


def test_a_streamed_batch_of_generate_says_once_how_each_ended() -> None:
    events = run(World().post("/generate", {"input_ids": [[1], [2]], "stream": True})).events
    for index in (0, 1):
        said = [event["meta_info"]["finish_reason"] for event in events if event["index"] == index]
        assert said == [None] * 5 + [{"type": "stop", "matched": None}]


def test_cached_tokens_of_a_prompt_count_once() -> None:
    world = World(lambda ids, o: [(100,), ended(o["rid"], cached_tokens=0 if o["rid"].endswith("-0") else len(ids))])
    usage = run(world.post("/v1/completions", {"prompt": [[1, 2, 3], [4, 5]], "n": 2})).json["usage"]
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]) == (5, {"cached_tokens": 2})
    meta = run(world.post("/generate", {"input_ids": [1, 2, 3]})).json["meta_info"]
    assert meta["cached_tokens"] == 3
    assert world.edge.counts.cached_tokens == 2 + 3, "as prompt tokens are: once a prompt"


def test_every_answer_of_a_seed_has_a_seed_of_its_own() -> None:
    world = World()
    run(world.post("/v1/chat/completions", chat(n=3, seed=7)))
    assert [options["seed"] for _, options in world.client.asked] == [7, 8, 9]


def said_of(token: str, logprob: float, data: bytes = b"") -> dict[str, Any]:
    return {"token": token, "logprob": pytest.approx(logprob), "bytes": list(data or token.encode())}


def test_log_probabilities_of_a_chat_whole_and_streamed_are_the_same() -> None:
    """Of each token once, whatever of its text was held back: of a character's bytes, before a stop string, the end."""
    world = World(letters("hé.", "length"))
    ask = chat(logprobs=True, top_logprobs=1, stop="..")
    (choice,) = run(world.post("/v1/chat/completions", ask)).json["choices"]
    assert world.client.asked[-1][1]["logprobs"] == 1
    names = ["h", "\ufffd", "\ufffd", "."]
    tokens = [3 + byte for byte in "hé.".encode()]
    assert [
        {key: value for key, value in each.items() if key != "top_logprobs"} for each in choice["logprobs"]["content"]
    ] == [said_of(name, -0.5 - id / 1000, bytes([id - 3])) for name, id in zip(names, tokens, strict=True)]
    assert choice["logprobs"]["content"][0]["top_logprobs"] == [said_of("i", -0.25)]
    events = run(world.post("/v1/chat/completions", ask | {"stream": True})).events
    said = [event["choices"][0]["logprobs"] for event in events]
    assert [len(each["content"]) if each else 0 for each in said] == [0, 1, 2, 1, 0], "with the text that they made"
    assert [one for each in said if each for one in each["content"]] == choice["logprobs"]["content"]
    (choice,) = run(world.post("/v1/chat/completions", chat(logprobs=True))).json["choices"]
    assert choice["logprobs"]["content"][0]["top_logprobs"] == []
    for nothing in ({}, {"logprobs": False}, {"logprobs": None, "top_logprobs": 0}):
        (choice,) = run(world.post("/v1/chat/completions", chat(**nothing))).json["choices"]
        assert choice["logprobs"] is None
        assert "logprobs" not in world.client.asked[-1][1]


def test_log_probabilities_of_a_completion() -> None:
    world = World(letters("hé"))
    ask = {"model": "sim", "prompt": "x", "logprobs": 1}
    (choice,) = run(world.post("/v1/completions", ask)).json["choices"]
    chosen = [pytest.approx(-0.5 - (3 + byte) / 1000) for byte in "hé".encode()]
    assert choice["logprobs"] == {
        "tokens": ["h", "\ufffd", "\ufffd"],
        "token_logprobs": chosen,
        "top_logprobs": [{"i": -0.25, "h": chosen[0]}, {"\ufffd": chosen[1]}, {"\ufffd": chosen[2]}],
        "text_offset": [0, 1, 2],
    }
    events = run(world.post("/v1/completions", ask | {"stream": True})).events
    parts = [event["choices"][0]["logprobs"] for event in events]
    for name, values in choice["logprobs"].items():
        assert [one for part in parts if part for one in part[name]] == values
    (choice,) = run(world.post("/v1/completions", ask | {"logprobs": 0})).json["choices"]
    assert (choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]) == (chosen, [None] * 3)


def test_what_came_together_is_written_together() -> None:
    """Each message of a rank is an event; those that were there when the first was read are one write with it."""
    streamed = run(World(letters("hello")).post("/v1/chat/completions", chat(stream=True)))
    assert len(streamed.parts) == 1
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in streamed.events) == "hello"
    assert len(streamed.events) == 1 + 5 + 1


def test_sglangs_generate() -> None:
    world = World(letters("hey", "length"))
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3}, "rid": "mine", "bootstrap_room": 9}
    ranks = {"routed_dp_rank": 0, "disagg_prefill_dp_rank": 0}
    said = run(world.post("/generate", body | ranks)).json
    assert (said["text"], said["output_ids"]) == ("hey", [107, 104, 124])
    meta = said["meta_info"]
    assert (meta["id"], meta["finish_reason"]) == ("mine", {"type": "length", "length": 3})
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (2, 3)
    ((ids, options),) = world.client.asked
    assert ids == [5, 6]
    assert options | ranks | {"bootstrap_room": 9, "max_tokens": 3} == options
    assert options["rid"].startswith("mine-")
    events = run(world.post("/generate", {"text": "x", "stream": True})).events
    assert [event["text"] for event in events] == ["h", "he", "hey", "hey"], "each repeats what came before"
    batch = run(world.post("/generate", {"text": ["x", "y"], "bootstrap_room": [1, 2]})).json
    assert [each["index"] for each in batch] == [0, 1]
    assert [options["bootstrap_room"] for _, options in world.client.asked[-2:]] == [1, 2]
    assert len(run(world.post("/generate", {"text": ["x"]})).json) == 1, "a list is answered by a list"


def test_a_stop_string_ends_the_answer_and_cancels_the_rest() -> None:
    world = World(letters("one two three", "length"))
    said = run(world.post("/v1/chat/completions", chat(stop=["wo t", "zzz"]))).json
    (choice,) = said["choices"]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("one t", "stop", "wo t")
    assert said["usage"]["completion_tokens"] == len("one two t"), "what was made to find it"
    assert world.client.channel.cancelled == [said["id"].removeprefix("chatcmpl-")]
    with_stop = chat(stop="wo t", include_stop_str_in_output=True, stream=True)
    events = run(world.post("/v1/chat/completions", with_stop)).events
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == "one two t"


def test_a_stop_token_is_no_part_of_the_text() -> None:
    world = World(letters("abc"))
    said = run(world.post("/v1/completions", {"prompt": "x", "stop_token_ids": [102]})).json
    assert (said["choices"][0]["text"], said["choices"][0]["stop_reason"]) == ("ab", 102)
    assert world.client.asked[0][1]["stop_token_ids"] == [102, 2], "and the model's own end token"


def test_what_a_request_tells_the_cluster() -> None:
    world = World(max_time_s=50.0)
    headers = {"x-request-id": "r-1", "x-request-deadline-s": "2.5", "x-request-priority": "-3"}
    headers |= {"x-ttft-slo-s": "0.5", "x-tpot-slo-s": "0.02", "x-slo-class": "interactive"}
    answer = run(world.post("/v1/chat/completions", chat(max_tokens=5), headers=headers))
    assert answer.headers["x-request-id"] == "r-1"
    options = world.client.asked[0][1]
    assert options["rid"].startswith("r-1-")
    told = {
        "deadline_s": 2.5,
        "priority": -3,
        "ttft_slo_s": 0.5,
        "tpot_slo_s": 0.02,
        "slo_class": "interactive",
        "max_tokens": 5,
        "leg": "pair",
        "model": "sim",
    }
    assert options | told == options
    assert options["block_tokens"] == 16, "so that cache_aware sees the prompt's prefix"
    run(world.post("/v1/chat/completions", chat(max_tokens=5, max_completion_tokens=6)))
    assert world.client.asked[1][1]["max_tokens"] == 6
    assert world.client.asked[1][1]["deadline_s"] == 50.0
    run(world.post("/v1/chat/completions", chat("x" * 2040)))
    assert world.client.asked[2][1]["max_tokens"] == 8, "as many as fit behind the prompt"


def test_a_session_is_the_headers_or_the_bodys() -> None:
    world = World()
    body = chat(session_id="mine", prompt_cache_key="openai's")
    for headers, said in (({"x-session-id": "header's"}, body), ({}, body), ({}, chat(prompt_cache_key="openai's"))):
        run(world.post("/v1/chat/completions", said, headers=headers))
    run(world.post("/v1/chat/completions", chat()))
    assert [options.get("session") for _, options in world.client.asked] == ["header's", "mine", "openai's", None]
    answer = run(world.post("/v1/chat/completions", chat(prompt_cache_key="x" * 129)))
    assert (answer.status, answer.error["param"]) == (400, "prompt_cache_key")
    answer = run(world.post("/generate", {"text": "x"}, headers={"x-session-id": "x" * 129}))
    assert (answer.status, answer.error["param"]) == (400, "x-session-id")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat(tools=[{"type": "function"}])),
        ("/v1/chat/completions", chat(tool_choice="required")),
        ("/v1/chat/completions", chat(reasoning_effort="low")),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}),
        ("/v1/chat/completions", {"messages": [{"role": "tool", "content": "3"}]}),
        ("/v1/responses", {}),
    ],
)
def test_what_agents_send_is_refused_with_the_server_that_takes_it(path: str, body: dict[str, Any]) -> None:
    message = run(World().post(path, body)).error["message"]
    assert message.endswith("; pdbus serve --front vllm takes it")
    assert "\n" not in message


def test_prompts_are_not_hashed_where_nobody_looks() -> None:
    world = World(seen=status(rank("u", "unified"), uses_hashes=("prefill",)))
    run(world.post("/v1/chat/completions", chat()))
    assert (world.client.asked[0][1]["leg"], world.client.asked[0][1]["block_tokens"]) == ("unified", 0)


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "param"),
    [
        ("/v1/chat/completions", chat(model="other"), {}, 404, "model"),
        ("/v1/chat/completions", chat() | {"messages": []}, {}, 400, "messages"),
        ("/v1/chat/completions", chat(temperature=-1), {}, 400, "temperature"),
        ("/v1/chat/completions", chat(max_tokens=0), {}, 400, "max_tokens"),
        ("/v1/chat/completions", chat(stop_token_ids=[1] * 65), {}, 400, "stop_token_ids"),
        ("/v1/chat/completions", chat(seed=-2), {}, 400, "seed"),
        ("/v1/chat/completions", chat(tools=[{}]), {}, 400, "tools"),
        ("/v1/chat/completions", chat(top_logprobs=2), {}, 400, "top_logprobs"),
        ("/v1/chat/completions", chat(logprobs=True, top_logprobs=21), {}, 400, "top_logprobs"),
        ("/v1/completions", {"prompt": "x", "logprobs": -1}, {}, 400, "logprobs"),
        ("/generate", {"text": "x", "sampling_params": {"logprobs": 1}}, {}, 400, "sampling_params.logprobs"),
        ("/v1/chat/completions", chat(stream_options={}), {}, 400, "stream_options"),
        ("/v1/chat/completions", chat(), {"x-request-priority": "high"}, 400, "x-request-priority"),
        ("/v1/chat/completions", chat(), {"x-request-priority": "5000"}, 400, "x-request-priority"),
        ("/v1/chat/completions", chat(), {"x-request-priority": "1.5"}, 400, "x-request-priority"),
        ("/v1/chat/completions", chat(), {"x-request-deadline-s": "nan"}, 400, "x-request-deadline-s"),
        ("/v1/chat/completions", chat(), {"x-ttft-slo-s": "0"}, 400, "x-ttft-slo-s"),
        ("/v1/chat/completions", chat(), {"x-tpot-slo-s": "0"}, 400, "x-tpot-slo-s"),
        ("/v1/chat/completions", chat(), {"x-request-deadline-s": "-1"}, 400, "x-request-deadline-s"),
        ("/v1/chat/completions", chat(), {"x-request-id": "a" * 121}, 400, "x-request-id"),
        ("/v1/chat/completions", chat(), {"content-type": "text/plain"}, 415, None),
        ("/v1/chat/completions", chat(), {"content-encoding": "gzip"}, 415, None),
        ("/v1/completions", {"prompt": [1, "a"]}, {}, 400, None),
        ("/v1/completions", {"prompt": [1, -2]}, {}, 400, None),
        ("/v1/completions", {"prompt": [2**31]}, {}, 400, None),
        ("/v1/completions", {"prompt": "x", "n": 1000}, {}, 400, "n"),
        ("/v1/completions", {"prompt": "x", "routed_dp_rank": 2**70}, {}, 400, "routed_dp_rank"),
        ("/generate", {}, {}, 400, "text"),
        ("/generate", {"text": "x", "rid": "é"}, {}, 400, "rid"),
        ("/generate", {"text": ["a", "b"], "bootstrap_room": [1]}, {}, 400, "bootstrap_room"),
        ("/generate", {"text": ["a", "b"], "bootstrap_room": 1}, {}, 400, "bootstrap_room"),
        ("/tokenize", {}, {}, 400, "prompt"),
        ("/detokenize", {"tokens": [-1]}, {}, 400, "tokens"),
        ("/v1/embeddings", {}, {}, 404, None),
        ("/v1/models", {}, {}, 405, None),
        ("/v1/models", {}, {"x-request-id": ""}, 405, None),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_openais_shape(
    path: str, body: Any, headers: dict[str, str], status: int, param: str | None
) -> None:
    world = World()
    answer = run(world.post(path, body, headers=headers))
    assert (answer.status, answer.error["param"]) == (status, param), answer.error
    assert answer.error.keys() == {"message", "type", "param", "code"}
    assert world.edge.counts.in_flight == 0
    assert sum(world.edge.counts.errors.values()) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("code", sorted(Code.__args__))
def test_a_request_that_fails_before_its_first_token_has_the_status_of_its_code(code: Any, stream: bool) -> None:
    if code == "ok":
        return
    world = World(lambda ids, o: [ended(o["rid"], "failed", code=code, message="why", retry_after_s=2.5)])
    answer = run(world.post("/v1/chat/completions", chat(stream=stream)))
    assert answer.status == status_of(code)
    assert answer.error["message"] == "why"
    assert answer.error["code"] == ("context_length_exceeded" if code == "too_long" else code)
    assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("3", "2500")


def test_an_answer_that_fails_on_its_way_ends_with_the_error() -> None:
    def script(ids: Any, options: Any) -> Any:
        return [(100,), ended(options["rid"], "failed", code="engine_failed", message="broke")]

    answer = run(World(script).post("/v1/chat/completions", chat(stream=True)))
    assert answer.status == 200
    assert answer.events[-1]["error"] == {
        "message": "broke", "type": "server_error", "param": None, "code": "engine_failed",
    }  # fmt: skip


def test_an_id_that_a_client_says_again_is_another_on_the_bus() -> None:
    world = World()
    longest = "a" * 120
    for _ in range(2):
        for body in (chat(), chat(n=128)):
            answer = run(world.post("/v1/chat/completions", body, headers={"x-request-id": longest}))
            assert answer.headers["x-request-id"] == longest
        assert run(world.post("/generate", {"text": "x", "rid": "mine"})).json["meta_info"]["id"] == "mine"
    rids = [options["rid"] for _, options in world.client.asked]
    assert len(set(rids)) == len(rids) == 2 * (1 + 128 + 1)
    assert max(map(len, rids)) <= 128
    assert all(rid.startswith((f"{longest[:115]}-", "mine-")) for rid in rids)


def cut(code: str = "bad_request") -> Any:
    """An answer that loses its rank after a token, and cannot be resumed."""
    return lambda ids, o: [(100,), ended(o["rid"], "failed", (100,), code=code, message="no resume with a grammar")]


def test_an_answer_that_cannot_be_resumed_begins_anew_where_nothing_was_shown() -> None:
    scripts = [cut(), letters("hello"), letters("other"), cut(), letters("hello")]
    world = World(lambda ids, options: scripts.pop(0)(ids, options))
    assert run(world.post("/v1/chat/completions", chat())).json["choices"][0]["message"]["content"] == "hello"
    said = run(world.post("/v1/chat/completions", chat(n=2), headers={"x-request-deadline-s": "9"})).json
    assert [choice["message"]["content"] for choice in said["choices"]] == ["other", "hello"]
    rids = [options["rid"] for _, options in world.client.asked]
    assert len(set(rids)) == len(rids)
    assert all(options["deadline_s"] <= 9 for _, options in world.client.asked[2:])
    assert world.edge.counts.in_flight == 0


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_was_interrupted_may_be_asked_for_again(stream: bool) -> None:
    """400 would tell its client not to."""
    world = World(cut())
    answer = run(world.post("/v1/chat/completions", chat(stream=stream)))
    if stream:
        assert answer.events[-1]["error"]["code"] == "interrupted"
        assert answer.events[-1]["error"]["type"] == "server_error"
    else:
        assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "interrupted", "1")
        assert len(world.client.asked) == 3, "after it was begun anew twice"
    refused = World(lambda ids, o: [ended(o["rid"], "failed", code="bad_request", message="no")])
    assert run(refused.post("/v1/chat/completions", chat(stream=stream))).status == 400
    assert len(refused.client.asked) == 1


def test_a_request_that_another_cancelled_has_an_answer() -> None:
    def script(ids: Any, options: Any) -> Any:
        return [(100,), ended(options["rid"], "failed", (100,), code="cancelled", message="cancelled by an admin")]

    assert run(World(script).post("/v1/chat/completions", chat())).status == 410
    events = run(World(script).post("/v1/chat/completions", chat(stream=True))).events
    assert events[-1]["error"]["code"] == "cancelled"


def test_one_of_several_that_fails_ends_the_others() -> None:
    def script(ids: Any, options: Any) -> Any:
        bad = options["rid"].endswith("-1")
        return [ended(options["rid"], "failed", code="poison", message="x")] if bad else [(100,)]

    world = World(script)
    assert run(world.post("/v1/chat/completions", chat(n=3))).status == 500
    assert {rid[-2:] for rid in world.client.channel.cancelled} >= {"-0", "-2"}
    assert world.edge.counts.in_flight == 0


@pytest.mark.parametrize(("stream", "leave_after"), [(True, 1), (True, 0), (False, 0)])
def test_who_leaves_is_cancelled_and_counted(stream: bool, leave_after: int) -> None:
    world = World(lambda ids, options: [(100,)] * 20)  # it never ends by itself
    run(world.post("/v1/chat/completions", chat(stream=stream, n=2), leave_after=leave_after))
    assert len(set(world.client.channel.cancelled)) == 2
    assert world.edge.counts.requests["/v1/chat/completions", "499"] == 1
    assert world.edge.counts.in_flight == 0


def test_a_body_has_limits() -> None:
    world = World(max_body_bytes=100)
    assert run(world.ask("POST", "/tokenize", [b"x" * 60, b"x" * 60])).status == 413
    claimed = run(world.ask("POST", "/tokenize", [b"x"], headers={"content-length": "101"}))
    assert (claimed.status, claimed.headers["connection"]) == (413, "close")


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async def silent() -> Any:
        world = World(receive_s=0.01)
        sent: list[Any] = []

        async def receive() -> Any:
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/tokenize",
            "headers": [(b"content-type", b"application/json")],
        }
        request = asyncio.create_task(world.edge(scope, receive, send))
        await asyncio.wait([request], timeout=10)
        assert request.done()
        return sent[0]["status"]

    assert run(silent()) == 408


def test_who_stops_reading_is_cut_off() -> None:
    async def slow() -> World:
        world = World(lambda ids, options: [(100,)] * 3, send_s=60.0)
        await world.edge.look()
        stuck = asyncio.Event()
        body = [{"type": "http.request", "body": b'{"prompt": "x", "stream": true}'}]

        async def receive() -> Any:
            return body.pop() if body else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                stuck.set()
                await asyncio.Event().wait()

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
        request = asyncio.create_task(world.edge(scope, receive, send))
        await stuck.wait()
        world.now += 59
        await world.edge.look()
        assert not request.done()
        world.now += 2
        await world.edge.look()
        await asyncio.wait([request], timeout=10)
        assert request.done()
        return world

    world = run(slow())
    assert world.client.channel.cancelled
    assert world.edge.counts.in_flight == 0


def test_more_than_it_may_hold_is_turned_away() -> None:
    world = World(max_requests=2)
    answer = run(world.post("/v1/chat/completions", chat(n=3)))
    assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (429, "overloaded", "1")
    assert run(world.post("/v1/chat/completions", chat(n=2))).status == 200


def test_an_engine_that_tells_no_kv_memory_bounds_no_answer_by_it() -> None:
    """As a scheduler of one's own behind a RankLink, whose loads have 0 there."""
    untold = msgspec.structs.replace(LOAD, kv_capacity=0)
    toy = status(rank("toy", "unified", load=untold))
    (card,) = run(World(seen=toy).get("/v1/models")).json["data"]
    assert card["max_model_len"] == 4096
    world = World(seen=toy)
    run(world.post("/v1/completions", {"prompt": "hello"}))
    assert world.client.asked[0][1]["max_tokens"] == 16


def test_models_probes_and_load() -> None:
    world = World()
    (card,) = run(world.get("/v1/models")).json["data"]
    assert (card["id"], card["max_model_len"]) == ("sim", 2048)
    assert run(world.get("/v1/models/sim")).json == card
    assert run(world.get("/v1/models/x")).status == 404
    assert run(world.get("/ready")).body == b"ok\n"
    assert [each["rank"] for each in run(world.get("/load")).json["ranks"]] == ["p/0", "d/0"]
    world.now += 6
    world.client.seen = None
    stale = run(world.get("/ready"))
    assert (stale.status, stale.body) == (503, b"the controller has not answered for 6 s\n")
    assert run(world.get("/health")).status == 200


def test_what_is_served_stays_while_a_new_controller_gathers_its_ranks() -> None:
    """Or each restart of one would fail the requests of that second, which the client library lets wait."""
    world = World(letters("hi"))
    assert run(world.post("/v1/chat/completions", chat())).status == 200
    for uptime_s, answered in ((0.2, 200), (LOST_S + 1.0, 503)):
        for ranks in ((), PAIR.ranks[:1]):  # none; and without a decode rank no context to fill
            world.client.seen = replace(PAIR, epoch=2, uptime_s=uptime_s, ranks=ranks)
            run(world.edge.look())
            assert run(world.get("/ready")).status == answered
    world = World(letters("hi"), seen=replace(world.client.seen, uptime_s=0.2))  # who knows no better
    assert run(world.get("/ready")).status == 503


def test_what_fits_no_rank_is_refused_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """By characters where a text must have too many tokens, before it is made tokens, else by tokens; counts are told
    all the same."""
    world = World()
    long = "x" * 5000
    encode, encoded = BytesText.encode, []

    def note(self: BytesText, text: str, **options: Any) -> list[int]:
        encoded.append(text)
        return encode(self, text, **options)

    monkeypatch.setattr(BytesText, "encode", note)
    for path, body in (
        ("/v1/completions", {"prompt": long}),
        ("/v1/completions", {"prompt": ["x", long]}),
        ("/v1/completions", {"prompt": [[5] * 4097]}),
        ("/generate", {"text": long}),
        ("/generate", {"input_ids": [5] * 5000}),
        ("/v1/chat/completions", chat(long)),
    ):
        answer = run(world.post(path, body))
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert world.client.asked == []
    assert encoded == ["x"]
    assert run(world.post("/tokenize", {"prompt": long})).json["count"] == 5000


def test_work_that_takes_long_is_done_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long texts, and messages and parts without any."""
    threads: set[str] = set()
    world = World()
    run(world.edge.look())

    def note(self: Any, messages: Any, **_: Any) -> list[int]:
        threads.add(threading.current_thread().name)
        return [5]

    def noted(turn: fields.Turn, at: int) -> dict[str, str]:
        threads.add(threading.current_thread().name)
        return read(turn, at)

    read = fields.message_of
    monkeypatch.setattr(fields, "message_of", noted)
    monkeypatch.setattr(BytesText, "chat", note)
    parts = [{"type": "text", "text": ""}] * 1000
    for messages, on_loop in (
        ([{"role": "user", "content": "x" * 1900}], True),
        ([{"role": "user", "content": ""}] * 1000, False),
        ([{"role": "user", "content": parts}], False),
    ):
        threads.clear()
        assert run(world.post("/v1/chat/completions", {"model": "sim", "messages": messages})).status == 200
        assert (threading.main_thread().name in threads) is on_loop


def test_no_answer_tells_an_address_of_the_inside() -> None:
    why = "no controller answers at ipc:///run/pdbus/controller.clients (waited 10 s), tcp://10.0.0.1:5560#c, or so"
    world = World(lambda ids, o: [ended(o["rid"], "failed", code="peer_lost", message=why)])
    with capture_logs() as logs:
        answer = run(world.post("/v1/completions", {"prompt": "x"}))
    assert answer.status == 503
    assert answer.error["message"] == "no controller answers at (address) (waited 10 s), (address), or so"
    assert [line["message"] for line in logs if line["event"] == "request.failed"] == [why]


@pytest.mark.parametrize(
    ("ranks", "leg", "context"),
    [
        (("unified prefill"), "unified", 1000),
        (("unified prefill decode"), "pair", 300),
        (("unified decode"), "unified", 1000),
        (("unified prefill decode-lost"), "unified", 1000),
        (("unified-lost prefill decode"), "pair", 300),
        (("unified-lost prefill-lost decode-lost"), "pair", 300),
    ],
)
def test_requests_run_by_the_roles_that_are_ready(ranks: str, leg: str, context: int) -> None:
    """A first rank that splits joins a unified cluster, or the last of them leaves."""
    roles = [said.partition("-")[::2] for said in ranks.split()]
    most = {"unified": 1000, "prefill": 50, "decode": 300}
    seen = status(*(rank(role, role, state=state or "ready", max_context=most[role]) for role, state in roles))  # type: ignore[arg-type]
    model = View(seen).models["sim"]
    assert (model.leg, model.max_context) == (leg, context)
    assert bool(model.missing) is (ranks == "unified-lost prefill-lost decode-lost")


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (None, "no controller has answered yet"),
        (status(), "no rank has joined"),
        (status(rank("p", "prefill")), "no decode rank is ready"),
        (status(rank("p", "prefill", state="draining"), rank("d", "decode")), "no prefill rank is ready"),
        (status(rank("u", "unified", state="lost")), "no unified rank is ready"),
    ],
)
def test_it_is_ready_when_every_role_is(seen: Any, why: str) -> None:
    world = World(seen=seen)
    answer = run(world.get("/ready"))
    assert (answer.status, answer.body.decode()) == (503, f"{why}\n")


def test_several_models_must_be_named() -> None:
    world = World(seen=status(rank("u", "unified", "sim"), rank("v", "unified", "tiny")))
    assert run(world.post("/v1/chat/completions", chat(model="tiny"))).status == 200
    refused = run(world.post("/v1/chat/completions", {"messages": chat()["messages"]}))
    assert (refused.status, refused.error["message"]) == (400, "several models are served: name one of sim, tiny")


def test_a_model_that_lost_its_last_rank_takes_no_other_with_it() -> None:
    """Its controller is not ready then, and an edge goes on serving what it can."""
    lost = replace(rank("v", "unified", "tiny"), state="lost")
    seen = status(rank("u", "unified", "sim"), lost)
    world = World(seen=replace(seen, wanted=(WantedRole("unified", "sim", 1), WantedRole("unified", "tiny", 0))))
    assert run(world.post("/v1/chat/completions", chat())).status == 200
    assert run(world.get("/ready")).status == 200


def test_a_model_without_a_tokenizer_takes_ids_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def missing(model: str, folders: Any) -> Any:
        tried.append(model)
        raise ConfigError("the package is missing")

    monkeypatch.setattr(jobs, "text_for", missing)

    async def ask() -> None:
        world = World()
        for _ in range(3):
            await world.edge.look()
            await asyncio.wait(world.edge._texts._loading.values())
        refused = await world.post("/v1/completions", {"prompt": "x"})
        assert (refused.status, refused.error["code"]) == (501, "no_tokenizer")
        assert len(tried) == 2, "once when the model was seen, and again when it was asked for"
        assert (await world.post("/generate", {"text": "x"})).status == 501
        said = await world.post("/generate", {"input_ids": [5]})
        assert (said.json["text"], said.json["output_ids"]) == ("", [107, 104, 111, 111, 114])
        assert world.client.asked[0][1]["stop_token_ids"] == []

    run(ask())


def test_texts_become_ids_and_ids_texts() -> None:
    world = World()
    said = run(world.post("/tokenize", {"prompt": "hé"})).json
    assert said == {"count": 3, "max_model_len": 2048, "tokens": [107, 198, 172]}
    assert run(world.post("/detokenize", {"tokens": said["tokens"]})).json == {"prompt": "hé"}
    assert run(world.post("/tokenize", chat("hi"))).json["count"] == 2
    assert run(world.post("/tokenize", {"model": None, **chat("hi"), "add_generation_prompt": None})).status == 200


def test_metrics_count_what_happened() -> None:
    world = World()
    run(world.post("/v1/chat/completions", chat()))
    run(world.post("/nowhere", {}))
    page = run(world.get("/metrics")).body.decode()
    for line in (
        'pdbus_edge_requests_total{endpoint="/v1/chat/completions",status="200"} 1.0',
        'pdbus_edge_requests_total{endpoint="other",status="404"} 1.0',
        'pdbus_edge_errors_total{code="not_found"} 1.0',
        "pdbus_edge_prompt_tokens_total 2.0",
        "pdbus_edge_generation_tokens_total 5.0",
        "pdbus_edge_requests_in_flight 0.0",
        "pdbus_edge_time_to_first_token_seconds_count 1.0",
        "pdbus_edge_inter_token_latency_seconds_count 4.0",
        "pdbus_edge_e2e_request_latency_seconds_count 1.0",
        'pdbus_edge_time_to_first_token_seconds_bucket{le="0.0005"} 1.0',
    ):
        assert line in page, line
    assert 'le="600.0"' in page


def test_the_api_page_knows_every_endpoint_and_field() -> None:
    world = World()
    document = run(world.get("/openapi.json")).json
    for_people = {"/", "/docs", "/openapi.json", "/fleet", "/fleet/stream"}
    served = set(world.edge._routes) - for_people
    assert set(document["paths"]) == served
    page = run(world.get("/docs")).body.decode()
    for name in ("max_completion_tokens", "stop_token_ids", "input_ids", "x-request-deadline-s", "logprobs"):
        assert f"<code>{name}</code>" in page, name


def test_the_api_page_names_the_headers_that_mean_something_and_their_bounds() -> None:
    paths = run(World().get("/openapi.json")).json["paths"]
    headers = {
        path: {each["name"]: each["schema"] for each in methods["post"]["parameters"]}
        for path, methods in paths.items()
        if "post" in methods
    }
    assert set(headers["/tokenize"]) == set(headers["/detokenize"]) == {"x-request-id"}
    for path in ("/v1/chat/completions", "/v1/completions", "/generate"):
        assert headers[path]["x-request-priority"] == {"type": "integer", "minimum": -1000, "maximum": 1000}
        assert headers[path]["x-request-deadline-s"]["exclusiveMinimum"] == 0


def test_the_edge_document_names_every_metric_and_endpoint() -> None:
    text = (Path(__file__).parents[2] / "docs" / "edge.md").read_text()
    world = World()
    for path in world.edge._routes:
        assert f"`{path}`" in text, path
    for metric in world.edge.counts.snapshot():
        assert metric.name.removeprefix("pdbus_edge_") in text, metric.name
    for header in re.findall(r'b"(x-request-[a-z-]+)"', Path(app.__file__).read_text()):
        assert f"`{header}`" in text


def test_head_is_answered_as_get() -> None:
    assert run(World(seen=PAIR).ask("HEAD", "/health", [b""])).status == 200


def test_a_rank_that_has_just_joined_is_seen_by_the_first_request() -> None:
    world = World()

    async def story() -> list[int]:
        world.client.seen = status()
        await world.edge.look()
        before = await world.get("/ready")
        world.client.seen = PAIR
        return [before.status, (await world.post("/v1/chat/completions", chat())).status]

    assert run(story()) == [503, 200]


HEADER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_a_trace_is_passed_on_as_it_came_and_nonsense_is_dropped() -> None:
    world = World()
    sent = {"traceparent": HEADER, "tracestate": "a=1"}
    for headers in (sent, {"traceparent": "nonsense", "tracestate": "a=1"}, {}):
        assert run(world.post("/v1/chat/completions", chat(), headers=headers)).status == 200
    told = [{name: options.get(name) for name in ("traceparent", "tracestate")} for _, options in world.client.asked]
    assert told == [sent, *[{"traceparent": None, "tracestate": None}] * 2]


def test_where_spans_are_exported_the_edge_has_one_between_the_caller_and_the_cluster() -> None:
    world = World(letters("hello"))
    memory = InMemorySpanExporter()
    world.edge._spans = spans = Spans(provider_of(memory, "edge", {}))
    bodies = {"n": 2, "messages": chat()["messages"], "model": "sim"}
    run(world.post("/v1/chat/completions", bodies, headers={"traceparent": HEADER, "x-request-id": "r"}))
    run(world.post("/generate", {"text": "hi"}))
    run(world.post("/generate", {"text": 5}))
    run(world.get("/v1/models"))
    spans.close()
    handed = [parse(str(options["traceparent"])) for _, options in world.client.asked]
    first, second = memory.get_finished_spans()
    assert first.parent is not None
    assert f"{first.parent.span_id:016x}" == HEADER.split("-")[2]
    assert handed[0] == handed[1], "two answers to one request"
    assert handed[0] is not None
    assert handed[2] is not None
    assert [ids_of(each) for each in (handed[0], handed[2])] == [
        (each.context.trace_id, each.context.span_id) for each in (first, second)
    ]
    assert second.parent is None
    assert first.name == "POST /v1/chat/completions"
    assert dict(first.attributes or {}).items() >= {
        "gen_ai.operation.name": "chat", "gen_ai.request.model": "sim", "http.response.status_code": 200,
        "gen_ai.usage.output_tokens": 10, "gen_ai.response.finish_reasons": ("stop", "stop"), "pdbus.rid": "r",
    }.items()  # fmt: skip


def test_an_answer_that_fails_has_a_span_with_its_status() -> None:
    world = World(lambda prompt, options: [ended(options["rid"], "failed", code="peer_lost", message="gone")])
    memory = InMemorySpanExporter()
    world.edge._spans = spans = Spans(provider_of(memory, "edge", {}))
    assert run(world.post("/generate", {"text": "hi"})).status >= 500
    spans.close()
    (span,) = memory.get_finished_spans()
    assert not span.status.is_ok
    assert dict(span.attributes or {})["http.response.status_code"] >= 500  # type: ignore[operator]


def test_model_cards_and_the_version_are_as_load_generators_look_for_them() -> None:
    world = World()
    (card,) = run(world.get("/v1/models")).json["data"]
    assert (card["id"], card["root"], card["parent"]) == ("sim", "sim", None)
    assert run(world.get("/version")).json["version"]
    assert run(world.get("/ping")).status == 200


def test_a_browsers_pages_may_use_it_where_a_setting_says_so(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text('[a]\nkey = "sk-12345"\n')
    keys.chmod(0o600)
    asks = {"origin": "https://a", "access-control-request-method": "POST"}
    asks["access-control-request-headers"] = "authorization,content-type"

    def preflight(*allowed: str) -> Any:
        world = World(api_keys=str(keys), cors_origins=allowed)
        return run(world.ask("OPTIONS", "/v1/chat/completions", [b""], headers=asks))

    assert preflight().status == preflight("https://b").status == 405
    for allowed in ("https://a", "*"):
        answer = preflight("https://b", allowed)
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (204, "https://a")
        assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
    world = World(api_keys=str(keys), cors_origins=("https://a",))
    for key, expected in (("sk-12345", 200), ("none", 401)):
        headers = {"origin": "https://a", "authorization": f"Bearer {key}"}
        answer = run(world.post("/v1/chat/completions", chat(), headers=headers))
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (expected, "https://a"), "errors too"
    answer = run(world.get("/health", headers={"origin": "https://b"}))
    assert "access-control-allow-origin" not in answer.headers

"""What becomes of vLLM's fields, of this vLLM's own classes; its seams; and what a failed request answers."""

from __future__ import annotations

import asyncio
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeChatRequest, TokenizeCompletionRequest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest

from bus.errors import ConfigError
from bus.wire.messages import TokenLogprobs
from pdbus.edge import fields as edge
from pdbus.vllm_front import fields, plugin, records, seams, settings
from pdbus.vllm_front.asked import ASKED, Asked, Failure
from pdbus.vllm_front.fields import Unsupported, options_of, sampling_options
from pdbus.vllm_front.launch import refused_arguments
from pdbus.vllm_front.middleware import StatusOfFirstEvent

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from engines_fields import refused_at_defaults


def request(**changed: Any) -> EngineCoreRequest:
    made = EngineCoreRequest(
        request_id="cmpl-1", prompt_token_ids=[1, 2], mm_features=None, sampling_params=SamplingParams(),
        pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt=None, data_parallel_rank=None,
    )  # fmt: skip
    for name, value in changed.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("record", "taken", "of_the_server", "refused"),
    [
        (SamplingParams, fields.MAPPED, fields.OF_THE_SERVER, fields.REFUSED),
        (EngineCoreRequest, fields.REQUEST_MAPPED, fields.REQUEST_OF_THE_SERVER, fields.REQUEST_REFUSED),
        (StructuredOutputsParams, fields.GRAMMARS, fields.GRAMMAR_OF_THE_SERVER, fields.GRAMMAR_REFUSED),
    ],
)
def test_each_field_of_vllms_stands_in_one_table(
    record: Any, taken: frozenset[str], of_the_server: frozenset[str], refused: dict[str, str]
) -> None:
    """A new field of vLLM's fails here first; until then it is refused where it asks for something."""
    tables = [*taken, *of_the_server, *refused]
    assert sorted(tables) == sorted(fields.fields_of(record))


@pytest.mark.parametrize(
    ("kind", "body", "record"),
    [
        (edge.Chat, {"messages": [{"role": "user", "content": "a"}]}, ChatCompletionRequest),
        (edge.Completion, {"prompt": "a"}, CompletionRequest),
        (edge.Tokenize, {"prompt": "a"}, TokenizeCompletionRequest),
        (edge.Tokenize, {"messages": [{"role": "user", "content": "a"}]}, TokenizeChatRequest),
        (edge.Detokenize, {"tokens": [1]}, DetokenizeRequest),
    ],
)
def test_our_own_edge_takes_each_field_of_vllms_at_its_default(kind: type, body: dict[str, Any], record: Any) -> None:
    """Load generators and libraries send them so."""
    assert refused_at_defaults(kind, body, record) == {}


def test_what_asks_for_nothing_is_taken() -> None:
    options = options_of(request())
    assert options == {
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "ignore_eos": False, "stop_token_ids": (), "max_tokens": 16,
        "rid": "cmpl-1",
    }  # fmt: skip


def test_every_option_is_carried() -> None:
    params = SamplingParams(
        temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, seed=-3, stop_token_ids=[7], ignore_eos=True, max_tokens=9,
        min_tokens=2, presence_penalty=0.1, frequency_penalty=0.2, repetition_penalty=1.1, logprobs=3,
        logit_bias={5: 1.0}, structured_outputs=StructuredOutputsParams(regex="a+"), prompt_logprobs=0,
        bad_words=["no"], allowed_token_ids=[3, 4], thinking_token_budget=0, extra_args={"session_id": "s"},
    )  # fmt: skip
    params._bad_words_token_ids = [[1], [2, 3]]
    headers = {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"}  # `Asked` has them of every request
    found = options_of(
        request(
            sampling_params=params, data_parallel_rank=3, priority=-7, trace_headers=headers, request_id="r" * 129,
            cache_salt="pepper", session_id="s", reasoning_ended=False, reasoning_parser_kwargs={"a": 1},
        ),
        reasoning_parser="qwen3",
    )  # fmt: skip
    assert found == {
        "temperature": 0.5, "top_p": 0.9, "top_k": 0, "min_p": 0.1, "seed": 2**63 - 3, "stop_token_ids": (7,),
        "ignore_eos": True, "max_tokens": 9, "min_tokens": 2, "presence_penalty": 0.1, "frequency_penalty": 0.2,
        "repetition_penalty": 1.1, "logprobs": 3, "logit_bias": {5: 1.0}, "regex": "a+", "routed_dp_rank": 3,
        "priority": 7, "prompt_logprobs": 0, "bad_words": [[1], [2, 3]], "allowed_token_ids": [3, 4],
        "thinking_token_budget": 0, "cache_salt": "pepper", "reasoning_parser": "qwen3", "reasoning_ended": False,
        "reasoning_parser_kwargs": '{"a": 1}',
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"json": {"type": "string"}}, {"json_schema": '{"type": "string"}'}),
        ({"json": '{"a":1}'}, {"json_schema": '{"a":1}'}),
        ({"json_object": True}, {"json_schema": '{"type": "object"}'}),
        ({"grammar": "root ::= \"a\""}, {"ebnf": 'root ::= "a"'}),
        ({"choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"structural_tag": '{"format": {}}'}, {"structural_tag": '{"format": {}}'}),
    ],
)  # fmt: skip
def test_grammars_are_carried_in_each_form(given: dict[str, Any], expected: dict[str, Any]) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**given))
    found = sampling_options(params)
    assert {name: found[name] for name in expected} == expected  # type: ignore[literal-required]


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"skip_reading_prefix_cache": True}, "skip_reading_prefix_cache"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"extra_args": {"kv_transfer_params": {"do_remote_prefill": True}}}, "kv_transfer_params"),
        ({"extra_args": {"x": 1}}, "vllm_xargs"),
        ({"trace_decode_token_ids": [1]}, "trace_decode_token_ids"),
        ({"structured_outputs": StructuredOutputsParams(regex="a", whitespace_pattern=" ")}, "whitespace_pattern"),
    ],
)
def test_what_no_rank_carries_is_refused_by_name(changed: dict[str, Any], name: str) -> None:
    with pytest.raises(Unsupported) as refused:
        sampling_options(SamplingParams(**changed))
    assert refused.value.name == name


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"lora_request": object()}, "LoRA adapters"),
        ({"mm_features": [object()]}, "images, audio and video"),
        ({"prompt_embeds": object()}, "prompt_embeds"),
        ({"resumable": True}, "streamed input"),
        ({"kv_hints": object()}, "kv_hints"),
        ({"priority": 1001}, "priority"),
        ({"prompt_token_ids": None}, "prompt"),
    ],
)
def test_requests_that_no_rank_can_run_are_refused_by_name(changed: dict[str, Any], name: str) -> None:
    with pytest.raises(Unsupported) as refused:
        options_of(request(**changed))
    assert refused.value.name == name


def test_an_unknown_field_is_refused_where_it_asks_for_something() -> None:
    known = {name: getattr(SamplingParams(), name) for name in fields.fields_of(SamplingParams)}
    assert sampling_options(types.SimpleNamespace(**known, brand_new=None))
    with pytest.raises(Unsupported, match="brand_new"):
        sampling_options(types.SimpleNamespace(**known, brand_new=0.5))


def test_ranks_need_a_reasoning_parser_only_where_something_waits_for_it() -> None:
    assert "reasoning_parser" not in options_of(request(reasoning_ended=False), reasoning_parser="qwen3")
    budget = request(sampling_params=SamplingParams(thinking_token_budget=5))
    assert options_of(budget, reasoning_parser="qwen3")["reasoning_parser"] == "qwen3"
    assert "reasoning_parser" not in options_of(budget)


def test_headers_are_options_and_sessions_of_two_keys_are_apart() -> None:
    headers = {"x-request-deadline-s": "3", "x-ttft-slo-s": "0.5", "x-slo-class": "chat", "traceparent": "00-a"}
    assert Asked(headers).options() == {"deadline_s": 3.0, "ttft_slo_s": 0.5, "slo_class": "chat"}, "as W3C says"
    parent = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    traced = Asked({"traceparent": parent, "tracestate": "x=y"}).options()
    assert traced == {"traceparent": parent, "tracestate": "x=y"}
    for wrong in ("-1", "x", "inf", "nan"):
        with pytest.raises(ValueError, match=r"^x-tpot-slo-s: "):
            Asked({"x-tpot-slo-s": wrong}).options()
    sessions = {Asked({"authorization": f"Bearer {key}"}).session("s") for key in "ab"} | {Asked({}).session("s")}
    assert len(sessions) == 3
    assert "s" in sessions
    with pytest.raises(ValueError, match=r"^session_id: 128"):
        Asked({}).session("s" * 129)


def test_log_probabilities_of_a_prompt_have_vllms_form() -> None:
    record = records.output("r", [1], (), None, None, None)
    records.of_prompt(
        record, [4, 5, 6], [TokenLogprobs(-1.0, ((9, -0.5),), 7), TokenLogprobs(-0.5, ((6, -0.5),), 1)], 1
    )
    ids, values, ranks, *_ = record.new_prompt_logprobs_tensors
    assert ids.tolist() == [[5, 9], [6, 6]]
    assert values.tolist() == [[-1.0, -0.5], [-0.5, -0.5]]
    assert ranks.tolist() == [7, 1]


def test_log_probabilities_have_vllms_form() -> None:
    """Each row is one token's: the sampled token comes first, then the most likely ones."""
    found = [TokenLogprobs(-0.5, ((9, -0.1), (7, -0.5))), TokenLogprobs(-3.0, ((9, -0.25), (8, -0.5)))]
    ids, values, ranks, _ = records.logprobs_lists([7, 5], found, 2)
    assert ids.tolist() == [[7, 9, 7], [5, 9, 8]]
    assert values.tolist() == [[-0.5, pytest.approx(-0.1), -0.5], [-3.0, -0.25, -0.5]]
    assert ranks.tolist() == [2, 3]


def test_the_seams_fit_this_vllm() -> None:
    assert list(seams.mismatches()) == []


def test_another_vllm_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM calls the plugin, and the exception ends that call."""
    other = seams.Seam("vllm.v1.engine.async_llm", "AsyncLLM.generate", "self, prompt, something_else")
    monkeypatch.setattr(seams, "REPLACED", (other,))
    monkeypatch.setattr(seams, "serves_http", lambda: True)
    monkeypatch.setenv(settings.CONTROLLER, "tcp://127.0.0.1:1")
    with pytest.raises(SystemExit, match=r"^pdbus: vLLM \S+ is not as its front knows it .*takes \(.*\), not \(.*\)$"):
        plugin.load()
    monkeypatch.setattr(seams, "REPLACED", (seams.Seam("vllm.v1.engine.gone", "x", ""),))
    with pytest.raises(SystemExit, match=r"vllm.v1.engine.gone.x is not there$"):
        plugin.load()


def test_a_missing_key_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(seams, "serves_http", lambda: True)
    monkeypatch.setenv(settings.CONTROLLER, "tcp://127.0.0.1:1")
    monkeypatch.setenv(settings.KEYS, str(tmp_path))
    with pytest.raises(SystemExit, match=r"^pdbus: \S+ has no secret of a client; "):
        plugin.load()


def test_without_its_variable_the_plugin_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(settings.CONTROLLER, raising=False)
    monkeypatch.setattr(seams, "install", lambda _: pytest.fail("installed"))
    plugin.load()


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="PDBUS_VLLM_CONTROLLER"):
        settings.read({settings.CONTROLLER: "somewhere"})
    with pytest.raises(ConfigError, match="PDBUS_VLLM_KEY_NAME needs PDBUS_VLLM_KEYS"):
        settings.read({settings.CONTROLLER: "tcp://127.0.0.1:1", settings.KEY_NAME: "alice"})
    environ = {settings.KEYS: "old"}
    given = settings.Settings(controller="tcp://127.0.0.1:1", model="m")
    settings.write(given, environ)
    assert settings.read(environ) == given
    assert settings.KEYS not in environ


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"headless": True}, "--headless"),
        ({"grpc": True}, "--grpc"),
        ({"data_parallel_multi_port_external_lb": True}, "--data-parallel-multi-port-external-lb"),
        ({"data_parallel_external_lb": True}, "--data-parallel-external-lb"),
        ({"data_parallel_hybrid_lb": True}, "--data-parallel-hybrid-lb"),
        ({"data_parallel_rank": 0}, "--data-parallel-rank"),
        ({"data_parallel_size": 2}, "--data-parallel-size"),
        ({"enable_lora": True}, "--enable-lora"),
    ],
)
def test_ways_to_start_that_need_an_engine_are_refused(given: dict[str, Any], said: str) -> None:
    why = refused_arguments(types.SimpleNamespace(**given))
    assert why.startswith(said)
    assert "\n" not in why
    assert refused_arguments(types.SimpleNamespace()) == ""


def test_the_rust_front_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    assert refused_arguments(types.SimpleNamespace()).startswith("VLLM_USE_RUST_FRONTEND")


# --- what a failed request answers ------------------------------------------------------------------------------------

EVENTS = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
FULL = Failure(503, "full", None, 3.5)


def answered(path: str, steps: list[Any]) -> list[dict[str, Any]]:
    """What is sent of an application that takes `steps`: a chunk, a failure of the bus, or an exception."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked = ASKED.get()
        assert asked is not None
        await send(EVENTS)
        for step in steps:
            if isinstance(step, Failure):
                asked.failure = step
            elif isinstance(step, Exception):
                raise step
            elif step is True:
                asked.began = True
            else:
                await send({"type": "http.response.body", "body": step, "more_body": bool(step)})

    async def send(message: Any) -> None:
        sent.append(message)

    layer = StatusOfFirstEvent(app, types.SimpleNamespace())
    scope = {"type": "http", "path": path, "method": "POST", "headers": []}
    asyncio.run(layer(scope, None, send))  # type: ignore[arg-type]
    return sent


def body_of(sent: list[dict[str, Any]]) -> bytes:
    return b"".join(message.get("body", b"") for message in sent)


@pytest.mark.parametrize(
    ("path", "steps", "body"),
    [
        ("/v1/chat/completions", [FULL, b"data: {}\n\n", b""], b'{"error": {"message": "full", "type": "Service Unav'),
        ("/v1/responses", [b"event: response.created\n\n", FULL, ValueError()], b'{"error": {"message": "full"'),
        ("/v1/messages", [FULL, b"event: error\n\n", b""], b'{"type": "error", "error": {"type": "overloaded_error"'),
    ],
)
def test_a_stream_that_fails_before_its_first_token_has_the_status_of_its_failure(
    path: str, steps: list[Any], body: bytes
) -> None:
    sent = answered(path, steps)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[0]["status"] == 503
    assert dict(sent[0]["headers"])[b"retry-after"] == b"4"
    assert dict(sent[0]["headers"])[b"retry-after-ms"] == b"3500"
    assert body_of(sent).startswith(body)


@pytest.mark.parametrize(
    ("path", "steps", "end"),
    [
        ("/v1/responses", [b"a\n\n", True, b"b\n\n", FULL, ValueError()],
         b'{"type": "error", "code": "503", "message": "full", "param": null, "sequence_number": 2}'),
        ("/v1/messages", [True, b"a\n\n", FULL, b"event: error, not readable\n\n", b""],
         b'event: error\ndata: {"type": "error", "error": {"type": "overloaded_error", "message": "full"}}'),
        ("/v1/chat/completions", [True, b"a\n\n", FULL, b'data: {"error"', b""], b'data: {"error"'),
    ],
)  # fmt: skip
def test_a_stream_that_fails_later_ends_with_one_event(path: str, steps: list[Any], end: bytes) -> None:
    sent = answered(path, steps)
    assert sent[0] is EVENTS
    assert body_of(sent).rstrip(b"\n").endswith(end)
    assert sent[-1]["more_body"] is False


def test_what_is_no_stream_of_an_answer_is_passed_on_at_once() -> None:
    sent = answered("/v1/audio", [b"a", b""])
    assert body_of(sent) == b"a"
    assert Asked({}).failure is None

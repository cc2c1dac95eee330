"""What a request may say: fields, defaults, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdbus.client import Options
from pdbus.edge import fields
from pdbus.edge.errors import HttpError
from pdbus.edge.refused import REFUSED_BY_GENERATE, REFUSED_BY_OPENAI, REFUSED_BY_TOKENIZE

MESSAGES = [{"role": "user", "content": "hi"}]


def read(kind: type, **body: Any) -> Any:
    return fields.read(kind, json.dumps(body).encode())


@pytest.mark.parametrize("name", sorted(REFUSED_BY_OPENAI))
def test_what_is_not_supported_is_refused_by_name_unless_it_asks_for_nothing(name: str) -> None:
    for nothing in REFUSED_BY_OPENAI[name]:
        read(fields.Chat, messages=MESSAGES, **{name: nothing})
        read(fields.Completion, prompt="a", **{name: nothing})
    for kind, body in ((fields.Chat, {"messages": MESSAGES}), (fields.Completion, {"prompt": "a"})):
        with pytest.raises(HttpError) as refused:
            read(kind, **body, **{name: "something"})
        assert (refused.value.status, refused.value.param) == (400, name)


@pytest.mark.parametrize("name", sorted(REFUSED_BY_TOKENIZE))
def test_so_it_is_where_texts_become_ids(name: str) -> None:
    for nothing in REFUSED_BY_TOKENIZE[name]:
        read(fields.Tokenize, prompt="a", **{name: nothing})
    with pytest.raises(HttpError) as refused:
        read(fields.Tokenize, prompt="a", **{name: "something"})
    assert (refused.value.status, refused.value.param) == (400, name)


@pytest.mark.parametrize("name", sorted(REFUSED_BY_GENERATE))
def test_so_it_is_with_sglangs_names(name: str) -> None:
    for nothing in REFUSED_BY_GENERATE[name]:
        read(fields.Generate, text="a", **{name: nothing})
    with pytest.raises(HttpError) as refused:
        read(fields.Generate, text="a", **{name: "something"})
    assert refused.value.param == name
    with pytest.raises(HttpError) as refused:
        read(fields.Generate, text="a", sampling_params={"best_of": 5})
    assert refused.value.param == "sampling_params.best_of"


@pytest.mark.parametrize(
    ("said", "options"),
    [
        ({"min_p": 0.1, "min_tokens": 3}, {"min_p": 0.1, "min_tokens": 3}),
        ({"logit_bias": {"7": -100}}, {"logit_bias": {7: -100.0}}),
        ({"presence_penalty": 1, "frequency_penalty": -1.5}, {"presence_penalty": 1.0, "frequency_penalty": -1.5}),
        ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"json_schema": '{"type":"object"}'}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string"}}}},
            {"json_schema": '{"type":"string"}'},
        ),
    ],
)  # fmt: skip
def test_what_some_ranks_can_do_is_passed_on(said: dict[str, Any], options: dict[str, Any]) -> None:
    assert fields.options_of(read(fields.Chat, messages=MESSAGES, **said)) == {"temperature": 1.0, **options}


def test_sglangs_grammars_are_passed_on() -> None:
    for name in ("json_schema", "regex", "ebnf"):
        said = read(fields.Generate, text="a", sampling_params={name: "x"})
        assert fields.options_of(said.sampling_params)[name] == "x"


def test_a_schema_that_is_not_there_is_missed_by_name() -> None:
    said = read(fields.Chat, messages=MESSAGES, response_format={"type": "json_schema"})
    with pytest.raises(HttpError) as refused:
        fields.options_of(said)
    assert refused.value.param == "response_format.json_schema"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"messages": [{"role": "user", "content": "a"}], "colour": 1}', "colour"),
        (b'{"messages": [{"role": "user", "content": "a", "colour": 1}]}', "messages[0].colour"),
        (b'{"messages": [{"role": "user", "content": "a"}], "n": "two"}', "n"),
        (b'{"messages": [{"role": "user", "content": "a"}], "stream_options": {"x": 1}}', "stream_options.x"),
        (b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "messages[0].content[0].text"),
        (b"{}", "messages"),
        (b'"text"', None),
        (b'{"messages": ', None),
        (b'{"user": "\xff"}', None),
        (b'{"user": "\\ud800"}', None),
        (b'{"tools": ' + b"[" * 100_000, None),
    ],
)
def test_the_field_at_fault_is_named(body: bytes, param: str | None) -> None:
    with pytest.raises(HttpError) as refused:
        fields.read(fields.Chat, body)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_an_answer_of_openais_package_can_be_sent_back() -> None:
    answer = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "tool_calls": None,
    }
    said = read(fields.Chat, messages=[answer])
    assert fields.message_of(said.messages[0], 0)["content"] == "x"


def test_texts_in_parts_are_joined_and_other_parts_refused() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert fields.message_of(read(fields.Chat, messages=[{"role": "user", "content": parts}]).messages[0], 0) == {
        "role": "user",
        "content": "ab",
    }
    for message, param in (
        ({"role": "user", "content": [{"type": "sound", "text": ""}]}, "messages[3].content[0].type"),
        ({"role": "tool", "content": "x"}, "messages[3].role"),
        ({"role": "assistant"}, "messages[3].content"),
    ):
        with pytest.raises(HttpError) as refused:
            fields.message_of(read(fields.Chat, messages=[message]).messages[0], 3)
        assert refused.value.param == param


def test_a_prompt_has_four_forms() -> None:
    for prompt, meant in (
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ):
        assert fields.prompts_of(read(fields.Completion, prompt=prompt).prompt, "prompt") == meant
    for prompt in ([], ["a", 1], ["a", [1]], [[1], "a"]):
        with pytest.raises(HttpError) as refused:
            fields.prompts_of(prompt, "prompt")
        assert refused.value.param == "prompt"


def test_every_supported_parameter_is_passed_on_under_its_name() -> None:
    said = {"top_p": 0.5, "top_k": 3, "seed": 4, "ignore_eos": True, "stop_token_ids": [9], "bootstrap_room": 5}
    ranks = {"routed_dp_rank": 1, "disagg_prefill_dp_rank": 0}
    options = fields.options_of(read(fields.Chat, messages=MESSAGES, temperature=0.25, **said, **ranks))
    assert options == {"temperature": 0.25, **said, **ranks}
    assert options.keys() <= Options.__annotations__.keys()
    assert fields.options_of(read(fields.Chat, messages=MESSAGES, top_k=-1)) == {"temperature": 1.0, "top_k": 0}


def test_how_many_answers_there_may_be() -> None:
    assert fields.choices_of(read(fields.Chat, messages=MESSAGES, n=3), 2) == 3
    for n, prompts, more in ((0, 1, {}), (-1, 1, {}), (65, 2, {}), (2, 1, {"bootstrap_room": 1})):
        with pytest.raises(HttpError):
            fields.choices_of(read(fields.Chat, messages=MESSAGES, n=n, **more), prompts)


def test_stop_strings() -> None:
    assert fields.stops_of(read(fields.Chat, messages=MESSAGES, stop="a")) == ("a",)
    assert fields.stops_of(read(fields.Chat, messages=MESSAGES, stop=["a", "b"])) == ("a", "b")
    for stop in ("", ["a", ""], ["x"] * 17):
        with pytest.raises(HttpError) as refused:
            fields.stops_of(read(fields.Chat, messages=MESSAGES, stop=stop))
        assert refused.value.param == "stop"


def test_what_programs_send_is_taken() -> None:
    history = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
            "name": "bob",
        },
        {"role": "assistant", "content": "b", "reasoning_content": None, "reasoning": None},
    ]
    options = {"include_usage": True, "include_obfuscation": False}
    said = read(
        fields.Chat, messages=history, stream=True, stream_options=options, safety_identifier="me", prompt_cache_key="k"
    )
    first, second = (fields.message_of(turn, at) for at, turn in enumerate(said.messages))
    assert first == {"role": "user", "content": "a", "name": "bob"}
    assert second == {"role": "assistant", "content": "b"}


def test_a_seed_of_minus_one_is_none() -> None:
    assert "seed" not in fields.options_of(read(fields.Chat, messages=MESSAGES, seed=-1))
    assert fields.options_of(read(fields.Chat, messages=MESSAGES, seed=0))["seed"] == 0


def test_sglangs_names_of_seed_and_least_length() -> None:
    def options(**sampling: Any) -> Any:
        return fields.options_of(read(fields.Generate, text="a", sampling_params=sampling).sampling_params)

    assert options(sampling_seed=7, min_new_tokens=3).items() >= {"seed": 7, "min_tokens": 3}.items()
    assert options(sampling_seed=7, seed=7)["seed"] == 7
    for name, sampling in (
        ("sampling_seed", {"sampling_seed": 7, "seed": 8}),
        ("min_new_tokens", {"min_new_tokens": 1, "min_tokens": 2}),
    ):
        with pytest.raises(HttpError) as refused:
            options(**sampling)
        assert refused.value.param == name

"""What the client refuses itself, and what it leaves to the controller."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from bus.errors import ConfigError
from bus.wire.codec import decode
from bus.wire.hashing import block_hashes, pack_hashes, root_of
from bus.wire.messages import PARAMS, Params, RankState, RankStatus, Status, Submit, TraceContext
from pdbus.client import AsyncClient, Client
from pdbus.client.options import (
    DEFAULT_MAX_TOKENS,
    Options,
    choices,
    controllers_of,
    make_request,
    model_of,
    patience,
    prompt_bytes,
)
from pdbus.client.request import Request

AT = controllers_of("ipc:///tmp/pdx/c", None, None)


class Drawn(random.Random):
    """Draws the largest number of as many bits."""

    def getrandbits(self, bits: int) -> int:
        return 2**bits - 1


def request(ids: list[int], **options: Any) -> Request:
    return make_request(ids, Options(**options), AT, Drawn(), eos_ids=(2,))  # type: ignore[typeddict-item]


def params(**options: Any) -> Params:
    decoded = decode(request([5], **options).params, PARAMS)
    assert isinstance(decoded, Params)
    return decoded


def test_defaults() -> None:
    made = request([5])
    assert (made.rid, made.main, made.stop_ids) == (
        "f" * 16, Submit("f" * 16, "pair", 1, DEFAULT_MAX_TOKENS, 2**63 - 1), frozenset({2}),
    )  # fmt: skip
    assert request([5], leg="prefill").main.bootstrap_room is None  # who sends a lone leg knows the room
    assert request([5], ignore_eos=True, stop_token_ids=(7,)).stop_ids == frozenset({7})
    assert params() == Params(seed=2**32 - 1, seed_drawn=True)
    assert params().needs == ()
    assert params(seed=7, stop_token_ids=[9]) == Params(seed=7, stop_token_ids=(9,))


def test_what_not_every_rank_knows_is_named_as_a_need() -> None:
    assert request([5], temperature=1.0, min_p=0.0, repetition_penalty=1.0).main.needs == ()
    chosen = {"min_p": 0.1, "min_tokens": 3, "logit_bias": {7: -100.0}, "json_schema": "{}"}
    assert request([5], **chosen).main.needs == ("min_p", "min_tokens", "logit_bias", "json_schema")
    assert params(seed=1, **chosen) == Params(
        seed=1, min_p=0.1, min_tokens=3, logit_bias=((7, -100.0),), json_schema="{}"
    )
    pair = make_request(
        [5], Options(ebnf="root ::= 'a'"), controllers_of(None, "ipc:///tmp/pdx/p", "ipc:///tmp/pdx/d"), Drawn()
    )
    assert [each.needs for each in pair.submits.values()] == [("ebnf",), ("ebnf",)]


def test_what_only_an_engine_like_vllm_knows_is_named_as_a_need() -> None:
    chosen = {
        "structural_tag": "{}", "choice": ["yes", "no"], "bad_words": [[7], [8, 9]], "allowed_token_ids": [3, 7],
        "cache_salt": "a", "reasoning_parser": "qwen3", "reasoning_ended": False, "reasoning_parser_kwargs": "{}",
        "thinking_token_budget": 0, "prompt_logprobs": 0,
    }  # fmt: skip
    names = tuple(name for name in chosen if name != "reasoning_parser")
    assert request([5], leg="unified", **chosen).main.needs == (*names, "parser:qwen3")
    assert params(leg="unified", seed=1, **chosen) == Params(
        seed=1, structural_tag="{}", choice=("yes", "no"), bad_words=((7,), (8, 9)), allowed_token_ids=(3, 7),
        cache_salt="a", reasoning_parser="qwen3", reasoning_ended=False, reasoning_parser_kwargs="{}",
        thinking_token_budget=0, prompt_logprobs=0,
    )  # fmt: skip


def test_a_salt_parts_the_hashes_of_equal_prompts() -> None:
    made = [
        request([1, 2, 3, 4], block_tokens=2, **salt).main for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"})
    ]
    assert len({each.block_hashes for each in made}) == 3
    assert made[1].block_hashes == pack_hashes(block_hashes([1, 2, 3, 4], 2, root_of("a")))


def test_a_session_is_a_part_of_each_submit() -> None:
    assert request([5]).main.session == ""
    assert request([5], session="s").main.session == "s"
    at = controllers_of(None, "ipc:///tmp/pdx/p", "ipc:///tmp/pdx/d")
    assert [each.session for each in make_request([5], Options(session="s"), at, Drawn()).submits.values()] == [
        "s",
        "s",
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"session": "x" * 257}, "session: expected"),
        ({"bad_words": [[]]}, "bad_words: expected"),
        ({"reasoning_parser": "x" * 26}, "reasoning_parser: expected"),
        ({"allowed_token_ids": range(16_385)}, "allowed_token_ids: expected"),
        ({"choice": ["x" * 1025]}, "choice: expected"),
        ({"prompt_logprobs": 1, "leg": "pair"}, "prompt_logprobs: unified ranks alone"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"min_p": 1.5}, "min_p: expected `float` <= 1"),
        ({"presence_penalty": 3.0}, "presence_penalty: expected `float` <= 2"),
        ({"logit_bias": {-1: 0.5}}, "logit_bias: expected `int` >= 0"),
        ({"deadline_s": -1.0}, "deadline_s"),
        ({"deadline_s": float("nan")}, "deadline_s"),
        ({"deadline_s": float("inf")}, "deadline_s"),
        ({"temperature": -0.5}, "temperature: expected"),
        ({"top_p": 0.0}, "top_p: expected"),
        ({"seed": -1}, "seed: expected"),
        ({"stop_token_ids": (-4,)}, "stop_token_ids: expected"),
        ({"rid": "x" * 129}, "rid: expected"),
        ({"priority": 5000}, "priority: expected"),
        ({"max_tokens": 2**63}, "max_tokens: expected"),
        ({"leg": "both"}, "leg: invalid"),
        ({"routed_dp_rank": 2**70}, "routed_dp_rank: "),
        ({"disagg_prefill_dp_rank": -(2**70)}, "disagg_prefill_dp_rank: "),
        ({"bootstrap_room": 2**64}, "bootstrap_room: "),
        ({"rid": "\ud800"}, "rid: "),
        ({"json_schema": "\ud800"}, "json_schema: "),
    ],
)
def test_what_cannot_be_sent_is_one_clear_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        request([5], **options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ids", [[-1], [2**31], ["a"], [1.5]])
def test_token_ids(ids: list[Any]) -> None:
    with pytest.raises(ConfigError, match="token ids are integers"):
        prompt_bytes(ids)


def test_the_controller_judges_the_rest() -> None:
    for options in ({"bootstrap_room": -3}, {"routed_dp_rank": 4000}, {"routed_dp_rank": -1}, {"instance": "nowhere"}):
        request([], **options)


@pytest.mark.parametrize(
    "arguments",
    [
        (None, "ipc:///a/b", None),
        (None, None, "ipc:///a/b"),
        ("ipc:///a/c", "ipc:///a/b", "ipc:///a/b"),
        ("http://x:1", None, None),
        ("ipc://relative", None, None),
        ("tcp://host", None, None),
    ],
)
def test_addresses(arguments: tuple[str | None, str | None, str | None]) -> None:
    with pytest.raises(ConfigError):
        controllers_of(*arguments)


def test_params_keep_their_bounds() -> None:
    assert params(temperature=1).temperature == 1.0


def status_of(*ranks: tuple[str, RankState]) -> Status:
    listed = [
        RankStatus("u", n, "unified", model, state, 1, "", 0, 0.0, None, 0, 0, 0, 0, 0, 0, 0, 0)
        for n, (model, state) in enumerate(ranks)
    ]
    return Status(1, "c", 1, 0.0, {}, {}, tuple(listed))


def test_the_model_of_text_is_the_one_that_ready_ranks_serve() -> None:
    assert model_of(status_of(("old", "lost"), ("old", "draining"), ("new", "ready"))) == "new"
    assert model_of(status_of(("new", "starting"), ("gone", "gone"))) == "new"
    with pytest.raises(ConfigError, match="new, old"):
        model_of(status_of(("old", "ready"), ("new", "ready")))
    with pytest.raises(ConfigError, match="no rank has joined"):
        model_of(status_of(("old", "gone")))


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 0.0, -1.0])
def test_patience_is_a_number_of_seconds(seconds: float) -> None:
    with pytest.raises(ConfigError, match="connect_timeout_s a number of seconds"):
        patience(6, seconds)


UNKNOWN = [
    ("max_new_tokens", "did you mean 'max_tokens'?"),
    ("temperatur", "did you mean 'temperature'?"),
    ("stop", "did you mean 'stop_token_ids'?"),
    ("n", "choose from max_tokens, temperature, "),
]


@pytest.mark.parametrize(("name", "hint"), UNKNOWN)
def test_an_unknown_option_is_named_with_the_one_that_is_meant(name: str, hint: str) -> None:
    """Both clients, before anything is sent: no controller is there to answer."""
    options: Any = {name: 4}
    with Client("ipc:///tmp/pdx/c") as client:
        for call in (lambda: client.generate("hi", **options), lambda: client.generate_tokens([5], **options)):
            with pytest.raises(TypeError) as caught:
                call()
            assert str(caught.value).startswith(f"a request has no option {name!r}; {hint}")

    async def asynchronously() -> None:
        async with AsyncClient("ipc:///tmp/pdx/c") as client:
            with pytest.raises(TypeError, match=f"no option {name!r}"):
                await client.generate("hi", **options)
            with pytest.raises(TypeError, match=f"no option {name!r}"):
                await client.generate_tokens([5], **options)

    asyncio.run(asynchronously())


def test_messages_of_a_chat_where_text_belongs_are_one_clear_line() -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    with Client("ipc:///tmp/pdx/c") as client, pytest.raises(TypeError) as caught:
        client.generate(messages)
    assert "the user's text as one str, not a list (system=... is the system message" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_several_answers_are_as_many_requests_of_their_own() -> None:
    shared = {"temperature": 0.8, "max_tokens": 3}
    assert choices(2, **shared) == [shared, shared]  # type: ignore[arg-type]
    assert choices(3, seed=7, rid="r", **shared) == [  # type: ignore[arg-type]
        {**shared, "seed": 7, "rid": "r-0"}, {**shared, "seed": 8, "rid": "r-1"}, {**shared, "seed": 9, "rid": "r-2"}
    ]  # fmt: skip
    assert choices(1, seed=7, rid="r", bootstrap_room=5) == [{"seed": 7, "rid": "r", "bootstrap_room": 5}]
    with pytest.raises(ConfigError, match="bootstrap_room: a room is one request's"):
        choices(2, bootstrap_room=5)
    with pytest.raises(ConfigError, match="n: 1 to 4096 answers, not 0"):
        choices(0)
    with pytest.raises(TypeError, match="did you mean 'seed'"):
        choices(2, seeds=5)  # type: ignore[call-arg]


def test_a_trace_goes_with_every_submit_of_the_request() -> None:
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    at = controllers_of(None, "ipc:///tmp/pdx/p", "ipc:///tmp/pdx/d")
    request = make_request([5], Options(traceparent=parent, tracestate="a=1"), at, Drawn(), asked_us=7)
    assert [submit.trace for submit in request.submits.values()] == [TraceContext(parent, "a=1")] * 2
    assert {submit.asked_us for submit in request.submits.values()} == {7}
    assert request.header(next(iter(request.submits)), 5.0).trace == TraceContext(parent, "a=1")
    assert make_request([5], Options(), AT, Drawn()).main.trace is None
    with pytest.raises(ConfigError, match="traceparent: 'nonsense' is none"):
        make_request([5], Options(traceparent="nonsense"), AT, Drawn())

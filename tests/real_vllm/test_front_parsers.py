"""vLLM's tool and reasoning parsers over the bus: a client gets, byte for byte but ids and times, the answers of vLLM's
own server to the same tokens, streamed and whole: of calls that are well formed, parallel, cut, malformed, and of none.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import vllm.entrypoints.cli.serve  # noqa: F401  (a front replaces parts of it)
from part_process import PartProcess
from scripted import Answer, Gate, Script, rank
from scripted_model import END, ids_of, model_folder
from scripted_servers import Engine, ScriptedCore, gated

from pdbus.vllm_front.seams import install
from pdbus.vllm_front.settings import Settings

pytestmark = pytest.mark.timeout(900)

CHAT = "/v1/chat/completions"
AUTO = ("--enable-auto-tool-choice", "--tool-call-parser")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]


class Style(NamedTuple):
    """The way in which the models of a tool parser write calls; `one` is a call."""

    parser: str
    one: str  # {c}: the city, {d}: the days
    several: str = "{0}{1}"
    before: str = "Let me look.\n"
    around: str = "{0}"


def json_call(name: str = "arguments") -> str:
    return '{{"name": "weather", "' + name + '": {{"city": "{c}", "days": {d}}}}}'


STYLES = (
    Style("hermes", f"<tool_call>\n{json_call()}\n</tool_call>", "{0}\n{1}"),
    Style("granite4", f"<tool_call>{json_call()}</tool_call>"),
    Style("llama3_json", json_call("parameters"), "{0}; {1}", before=""),
    Style("mistral", json_call(), "{0}, {1}", around="[TOOL_CALLS][{0}]"),
    Style("jamba", json_call(), "{0}, {1}", around="<tool_calls>[{0}]</tool_calls>"),
    Style("phi4_mini_json", json_call(), "{0}, {1}", before="", around="functools[{0}]"),
    Style(
        "deepseek_v3",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        '{{"city": "{c}", "days": {d}}}\n```<｜tool▁call▁end｜>',
        "{0}\n{1}",
        around="<｜tool▁calls▁begin｜>{0}<｜tool▁calls▁end｜>",
    ),
    Style(
        "kimi_k2",
        "<|tool_call_begin|>functions.weather:{n}<|tool_call_argument_begin|>"
        '{{"city": "{c}", "days": {d}}}<|tool_call_end|>',
        around="<|tool_calls_section_begin|>{0}<|tool_calls_section_end|>",
    ),
    Style("pythonic", "weather(city='{c}', days={d})", "{0}, {1}", before="", around="[{0}]"),
    Style(
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\n{c}\n</parameter>\n<parameter=days>\n{d}\n</parameter>\n"
        "</function>\n</tool_call>",
        "{0}\n{1}",
    ),
    Style(
        "glm45",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{c}</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>{d}</arg_value>\n</tool_call>",
        "{0}\n{1}",
    ),
)  # fmt: skip
UNSTABLE = ("jamba", "deepseek_v3", "llama3_json")  # parsers that lose parts of calls where tokens come several at once
REASONING = {
    "deepseek_r1": ("I have to add.\nTwo and two.</think>", "The sum is 4."),
    "qwen3": ("<think>\nI have to add.\n</think>\n\n", "The sum is 4."),
    "granite": ("Here is my thought process: I have to add. Here is my response: ", "The sum is 4."),
    "glm45": ("<think>I have to add.</think>", "The sum is 4."),
}


class Case(NamedTuple):
    """One answer of a model, and the arguments of the servers that read it."""

    name: str
    arguments: tuple[str, ...]
    reasoning: str  # the parser; empty: none
    text: str
    tools: bool
    max_tokens: int | None = None

    @property
    def mark(self) -> str:
        return f"case {self.name}."


def cases() -> Iterator[Case]:
    for style in STYLES:
        arguments = (*AUTO, style.parser)
        first, second = style.one.format(c="Paris", d=3, n=0), style.one.format(c='São "Paulo"', d=14, n=1)
        plain = style.one.format(c="Rome", d=1, n=1)
        one = style.before + style.around.format(first)
        for name, text in (
            ("one", one),
            ("two", style.before + style.around.format(style.several.format(first, plain))),
            ("odd", style.before + style.around.format(second)),
            ("malformed", one.replace('"city"', "city").replace("city=", "=").replace("weather", 'wea"ther{')),
            ("none", "It rains, {as always} in [some] cities < 5."),
        ):
            yield Case(f"{style.parser} {name}", arguments, "", text + END, True)
        for size in (12, 19):
            yield Case(f"{style.parser} cut at {size}", arguments, "", one + END, True, size)
    for parser, (thought, answer) in REASONING.items():
        yield Case(f"reasoning {parser} whole", (), parser, thought + answer + END, False)
        yield Case(f"reasoning {parser} cut", (), parser, thought + answer + END, False, 5)
        yield Case(f"reasoning {parser} none", (), parser, answer + END, False)
    both = (*AUTO, "hermes")
    thought, call = REASONING["qwen3"][0], STYLES[0].one.format(c="Paris", d=3, n=0)
    yield Case("qwen3 with a call", both, "qwen3", thought + call + END, True)
    yield Case("qwen3 with a call in its reasoning", both, "qwen3", f"<think>{call}</think>{call}" + END, True)


CASES = {case.name: case for case in cases()}


def script_of(model: Path) -> Script:
    ids, (end, size) = ids_of(model)
    answers = tuple(Answer(ids(f"\n{case.mark}")[1:], ids(case.text)) for case in CASES.values())
    return Script(answers, vocab_size=size, eos_ids=(end,))


def body_of(case: Case, stream: bool, ids: bool = False) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": "scripted", "messages": [{"role": "user", "content": f"Say\n{case.mark}"}], "temperature": 0,
        "stream": stream, "return_token_ids": ids,
    }  # fmt: skip
    if stream:
        body["stream_options"] = {"include_usage": True}
    if case.tools:
        body["tools"] = TOOLS
    if case.max_tokens is not None:
        body["max_tokens"] = case.max_tokens
    return body


GRAMMAR = {
    "model": "scripted", "messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"},
}  # fmt: skip
IDS = re.compile(rb'"id": ?"(?:chatcmpl|call)[^"]*"|"id": ?"[A-Za-z0-9]{9}"|"created": ?\d+')


def plain(part: bytes) -> bytes:
    """Return `part` without ids and times."""
    return IDS.sub(b'"#":0', part)


Answers = dict[tuple[str, str], tuple[int, list[bytes]]]


async def ask_all(model: Path, gate: Gate, core: Any) -> Answers:
    """Return the answers to each case: whole, as a stream of one token an event, and as a stream that runs free."""
    found: Answers = {}
    ordered = sorted(CASES.values(), key=lambda case: (case.reasoning, case.arguments))
    for parser, group in itertools.groupby(ordered, key=lambda case: case.reasoning):
        reasoning = ("--reasoning-parser", parser) if parser else ()
        async with Engine(model, ("--enable-prompt-tokens-details", *reasoning), core) as engine:
            if reasoning and core is None:
                server = await engine.server(())
                found[parser, "grammar"] = await server.ask(CHAT, GRAMMAR)
            for arguments, some in itertools.groupby(group, key=lambda case: case.arguments):
                server = await engine.server(arguments)
                for case in some:
                    gate.open()
                    found[case.name, "whole"] = await server.ask(CHAT, body_of(case, stream=False))
                    found[case.name, "free"] = await server.ask(CHAT, body_of(case, stream=True, ids=True))
                    gate.close()
                    found[case.name, "gated"] = await server.ask(CHAT, body_of(case, stream=True))
    return {key: (status, [plain(part) for part in parts]) for key, (status, parts) in found.items()}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Answers, Answers]]:
    """The answers of vLLM's own servers, and of those in front of the bus."""
    folder = tmp_path_factory.mktemp("front")
    model = model_folder(tmp_path_factory.mktemp("model"))
    script, gate = script_of(model), Gate()
    bus, controller = f"ipc://{folder}/bus", f"ipc://{folder}/c"
    line = [sys.executable, "-P", "-m", "controller", "--with-broker", "--bus", bus, "--controller", controller]
    undo = gated(gate)
    direct = asyncio.run(ask_all(model, gate, lambda config: ScriptedCore(script, gate)))
    gate.on_change.clear()
    part = PartProcess(line, folder / "log")
    try:
        part.until_ready()
        with ExitStack() as stack:
            for role in ("prefill", "decode"):
                stack.enter_context(rank(role, bus, controller, folder, script, gate))
            install(Settings(controller=controller))
            yield direct, asyncio.run(ask_all(model, gate, None))
    finally:
        undo()
        part.close()


@pytest.mark.parametrize("how", ["whole", "gated"])
@pytest.mark.parametrize("name", CASES)
def test_a_client_gets_the_bytes_of_vllms_own_server(both: tuple[Answers, Answers], name: str, how: str) -> None:
    direct, bus = (answers[name, how] for answers in both)
    assert bus == direct
    assert direct[0] == 200, direct


@pytest.mark.parametrize("name", CASES)
def test_a_stream_that_runs_free_has_all_tokens_once(both: tuple[Answers, Answers], name: str) -> None:
    """It has them however they are merged. What parsers make of them is the same too, but for UNSTABLE, which lose
    parts of merged calls in vLLM itself."""
    direct, bus = (joined(answers[name, "free"][1]) for answers in both)
    assert bus["token_ids"] == direct["token_ids"]
    assert len(bus["token_ids"]) == bus["usage"]["completion_tokens"]
    parser, _, kind = name.partition(" ")
    if parser not in UNSTABLE and kind in ("one", "two", "none"):
        expected = joined(both[0][name, "gated"][1])
        assert {**bus, "token_ids": []} == expected


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.parser)
def test_the_scripts_are_calls(both: tuple[Answers, Answers], style: Style) -> None:
    """They would be equal too if no parser found anything."""
    for case, cities in (("one", ["Paris"]), ("two", ["Paris", "Rome"])):
        (part,) = both[1][f"{style.parser} {case}", "whole"][1]
        (choice,) = json.loads(part)["choices"]
        found = [json.loads(call["function"]["arguments"]) for call in choice["message"]["tool_calls"]]
        assert [each["city"] for each in found] == cities
        assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("parser", REASONING)
def test_the_scripts_reason(both: tuple[Answers, Answers], parser: str) -> None:
    (part,) = both[1][f"reasoning {parser} whole", "whole"][1]
    (choice,) = json.loads(part)["choices"]
    assert "I have to add" in choice["message"]["reasoning"]
    assert "The sum is 4." in choice["message"]["content"]


@pytest.mark.parametrize("parser", REASONING)
def test_a_grammar_needs_ranks_with_the_parser_of_the_server(both: tuple[Answers, Answers], parser: str) -> None:
    """The ranks have none, so it would bind inside the reasoning."""
    status, (part,) = both[1][parser, "grammar"]
    assert status == 400
    assert f"parser:{parser}" in json.loads(part)["error"]["message"]


def joined(parts: Sequence[bytes]) -> dict[str, Any]:
    """The deltas of a stream put together, with its end."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "ends": [], "usage": None, "token_ids": []}
    for line in b"".join(parts).split(b"\n\n"):
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        found["usage"] = event.get("usage") or found["usage"]
        for choice in event["choices"]:
            delta = choice["delta"]
            found["token_ids"] += choice.get("token_ids") or ()
            found["content"] += delta.get("content") or ""
            found["reasoning"] += delta.get("reasoning") or ""
            for call in delta.get("tool_calls") or ():
                kept = found["calls"].setdefault(call["index"], {"name": "", "arguments": ""})
                for name in kept:
                    kept[name] += call.get("function", {}).get(name) or ""
            if choice.get("finish_reason"):
                found["ends"].append((choice["finish_reason"], choice.get("stop_reason")))
    return found

"""Unmodified clients of the APIs that agents use, each in a loop in which it says what is called, as agents may: three
calls by `tool_choice`, each with its result given back, then an answer. Prints as JSON what was called, the answer, and
the tokens of each prompt, of its cached and its written part and of what came. Runs in an environment of its own,
without pdbus.

python forced_clients.py openai-chat|openai-responses|anthropic|langchain URL
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

MODEL, KEY = "coder", "sk-none"
MOST = 96  # tokens of an answer; a call takes some 65 of them
CHOICES = ("required", "train", "weather", "none")  # "required": the model chooses which
CITIES = ("Paris", "Rome", "Oslo")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": list(CITIES)}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = {"weather": "The weather in a city on the next days.", "train": "When the next trains to a city leave."}


class Loop:
    """What came of a loop."""

    def __init__(self, client: str) -> None:
        self.question = f"I am {client}. Plan a trip of a few days: where shall I go, and when does the train leave?"
        self.calls: list[tuple[str, Any]] = []
        self.answer = ""
        self.tokens: list[tuple[int | None, ...]] = []

    def result(self, name: str, arguments: Any) -> str:
        """Note a call, and return its result."""
        self.calls.append((name, arguments))
        city, days = arguments["city"], arguments["days"]
        if name == "weather":
            return f"It is {17 + len(city)} degrees in {city} for the next {days} days, with some rain in the evening."
        return f"A train to {city} leaves at {8 + days} o'clock on each of the next {days} days, from platform 4."


def openai_chat(url: str, loop: Loop) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key=KEY)
    tools: Any = [
        {"type": "function", "function": {"name": name, "description": about, "parameters": SCHEMA}}
        for name, about in TOOLS.items()
    ]
    messages: list[Any] = [{"role": "user", "content": loop.question}]
    for choice in CHOICES:
        chosen: Any = {"type": "function", "function": {"name": choice}} if choice in TOOLS else choice
        with client.chat.completions.stream(
            model=MODEL, messages=messages, tools=tools, tool_choice=chosen, parallel_tool_calls=False, temperature=0,
            max_completion_tokens=MOST, stream_options={"include_usage": True},
        ) as stream:  # fmt: skip
            for _ in stream:
                pass
            completion = stream.get_final_completion()
        message: Any = completion.choices[0].message
        usage: Any = completion.usage
        details: Any = usage.prompt_tokens_details
        written = details.created_cache_tokens
        loop.tokens.append((usage.prompt_tokens, details.cached_tokens, written, usage.completion_tokens))
        messages.append(message)
        for call in message.tool_calls or ():
            content = loop.result(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        loop.answer = message.content or ""


def openai_responses(url: str, loop: Loop) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key=KEY)
    tools: list[Any] = [
        {"type": "function", "name": name, "description": about, "parameters": SCHEMA} for name, about in TOOLS.items()
    ]
    items: list[Any] = [{"role": "user", "content": loop.question}]
    for choice in CHOICES:
        chosen: Any = {"type": "function", "name": choice} if choice in TOOLS else choice
        final = None
        for event in client.responses.create(
            model=MODEL, input=items, tools=tools, tool_choice=chosen, parallel_tool_calls=False, temperature=0,
            max_output_tokens=MOST, stream=True, store=False,
        ):  # fmt: skip
            if event.type in ("response.completed", "response.incomplete"):
                final = event.response
        assert final is not None
        usage: Any = final.usage
        details: Any = usage.input_tokens_details
        written = details.cache_write_tokens
        loop.tokens.append((usage.input_tokens, details.cached_tokens, written, usage.output_tokens))
        items += [item.model_dump(exclude_none=True) for item in final.output]
        for item in final.output:
            if item.type == "function_call":
                output = loop.result(item.name, json.loads(item.arguments))
                items.append({"type": "function_call_output", "call_id": item.call_id, "output": output})
        loop.answer = final.output_text


def anthropic(url: str, loop: Loop) -> None:
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key=KEY)
    tools: list[Any] = [{"name": name, "description": about, "input_schema": SCHEMA} for name, about in TOOLS.items()]
    messages: list[Any] = [{"role": "user", "content": loop.question}]
    kinds = {"required": "any", "none": "none"}
    for choice in CHOICES:
        chosen: Any = {"type": kinds[choice]} if choice in kinds else {"type": "tool", "name": choice}
        if choice != "none":
            chosen["disable_parallel_tool_use"] = True
        with client.messages.stream(
            model=MODEL, max_tokens=MOST, messages=messages, tools=tools, tool_choice=chosen,
            extra_body={"temperature": 0},
        ) as stream:  # fmt: skip
            for _ in stream:
                pass
            message = stream.get_final_message()
        usage: Any = message.usage
        cached, created = usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0
        loop.tokens.append((usage.input_tokens + cached + created, cached, created, usage.output_tokens))
        messages.append({"role": "assistant", "content": message.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": loop.result(block.name, block.input)}
            for block in message.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})
        loop.answer = "".join(block.text for block in message.content if block.type == "text")


def langchain(url: str, loop: Loop) -> None:
    from langchain.agents import create_agent
    from langchain.agents.middleware import wrap_model_call
    from langchain_core.tools import StructuredTool
    from langchain_openai import ChatOpenAI

    def choose(request: Any, handler: Any) -> Any:
        called = sum(message.type == "tool" for message in request.messages)
        return handler(request.override(tool_choice=CHOICES[called], model_settings={"parallel_tool_calls": False}))

    def tool(name: str) -> Any:
        def run(**arguments: Any) -> str:
            return loop.result(name, arguments)

        return StructuredTool.from_function(run, name=name, description=TOOLS[name], args_schema=SCHEMA)

    tools = [tool(name) for name in TOOLS]
    model = ChatOpenAI(
        model=MODEL, base_url=f"{url}/v1", api_key=KEY, streaming=True, stream_usage=True, temperature=0,
        max_completion_tokens=MOST,
    )  # fmt: skip
    agent = create_agent(model, tools, middleware=[wrap_model_call(choose)])
    states = list(agent.stream({"messages": [{"role": "user", "content": loop.question}]}, stream_mode="values"))
    messages: list[Any] = states[-1]["messages"]
    for message in messages:
        if message.type == "ai":
            usage = message.usage_metadata
            details = usage["input_token_details"]
            cached, written = details.get("cache_read", 0), details.get("cache_creation")
            loop.tokens.append((usage["input_tokens"], cached, written, usage["output_tokens"]))
    loop.answer = str(messages[-1].content)


CLIENTS: dict[str, Callable[[str, Loop], None]] = {
    "openai-chat": openai_chat, "openai-responses": openai_responses, "anthropic": anthropic, "langchain": langchain,
}  # fmt: skip

if __name__ == "__main__":
    made = Loop(sys.argv[1])
    CLIENTS[sys.argv[1]](sys.argv[2], made)
    print(json.dumps({"calls": made.calls, "answer": made.answer, "tokens": made.tokens}))

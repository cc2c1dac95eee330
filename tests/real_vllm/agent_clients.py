"""Unmodified clients of the APIs that agents use, each in a loop of tool calls with streaming. Prints the cities that
it was asked about, and the answer, as JSON. Runs in an environment of its own, without pdbus.

python agent_clients.py openai-chat|openai-responses|anthropic|langchain|litellm URL
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

MODEL, KEY = "coder", "sk-none"
QUESTION = "Plan my trip"
DEGREES = {"Paris": 17, "Rome": 21, "Oslo": 3}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ABOUT = "The temperature in a city."
MOST_ROUNDS = 9


def weather(city: str) -> str:
    return f"It is {DEGREES[city]} degrees in {city}"


def openai_chat(url: str, asked: list[str]) -> str:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key=KEY)
    tools: Any = [{"type": "function", "function": {"name": "weather", "description": ABOUT, "parameters": SCHEMA}}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(MOST_ROUNDS):
        with client.chat.completions.stream(model=MODEL, messages=messages, tools=tools) as stream:
            for _ in stream:
                pass
            message = stream.get_final_completion().choices[0].message
        if not message.tool_calls:
            return str(message.content)
        messages.append(message)
        for call in message.tool_calls:
            asked.append(json.loads(call.function.arguments)["city"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": weather(asked[-1])})
    raise AssertionError


def openai_responses(url: str, asked: list[str]) -> str:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key=KEY)
    tools: list[Any] = [{"type": "function", "name": "weather", "description": ABOUT, "parameters": SCHEMA}]
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(MOST_ROUNDS):
        final = None
        for event in client.responses.create(model=MODEL, input=items, tools=tools, stream=True, store=False):
            if event.type == "response.completed":
                final = event.response
        assert final is not None
        items += [item.model_dump(exclude_none=True) for item in final.output]
        calls = [item for item in final.output if item.type == "function_call"]
        if not calls:
            return str(final.output_text)
        for call in calls:
            asked.append(json.loads(call.arguments)["city"])
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": weather(asked[-1])})
    raise AssertionError


def anthropic(url: str, asked: list[str]) -> str:
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key=KEY)
    tools: list[Any] = [{"name": "weather", "description": ABOUT, "input_schema": SCHEMA}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(MOST_ROUNDS):
        with client.messages.stream(model=MODEL, max_tokens=200, messages=messages, tools=tools) as stream:
            for _ in stream:
                pass
            message = stream.get_final_message()
        messages.append({"role": "assistant", "content": message.content})
        results = []
        for block in message.content:
            if block.type == "tool_use":
                asked.append(block.input["city"])
                results.append({"type": "tool_result", "tool_use_id": block.id, "content": weather(asked[-1])})
        if not results:
            return "".join(block.text for block in message.content if block.type == "text")
        messages.append({"role": "user", "content": results})
    raise AssertionError


def langchain(url: str, asked: list[str]) -> str:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    def tool(city: str) -> str:
        """The temperature in a city."""
        asked.append(city)
        return weather(city)

    tool.__name__ = "weather"
    model = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key=KEY, streaming=True)
    agent = create_agent(model, [tool])
    last = None
    for state in agent.stream({"messages": [{"role": "user", "content": QUESTION}]}, stream_mode="values"):
        last = state["messages"][-1]
    assert last is not None
    return str(last.content)


def litellm(url: str, asked: list[str]) -> str:
    import litellm

    tools: Any = [{"type": "function", "function": {"name": "weather", "description": ABOUT, "parameters": SCHEMA}}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(MOST_ROUNDS):
        parts = list(
            litellm.completion(
                f"openai/{MODEL}", messages=messages, tools=tools, api_base=f"{url}/v1", api_key=KEY, stream=True
            )
        )
        message = litellm.stream_chunk_builder(parts, messages=messages).choices[0].message
        if not message.tool_calls:
            return str(message.content)
        messages.append(message.model_dump())
        for call in message.tool_calls:
            asked.append(json.loads(call.function.arguments)["city"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": weather(asked[-1])})
    raise AssertionError


CLIENTS: dict[str, Callable[[str, list[str]], str]] = {
    "openai-chat": openai_chat, "openai-responses": openai_responses, "anthropic": anthropic, "langchain": langchain,
    "litellm": litellm,
}  # fmt: skip

if __name__ == "__main__":
    cities: list[str] = []
    answer = CLIENTS[sys.argv[1]](sys.argv[2], cities)
    print(json.dumps({"asked": cities, "answer": answer}))

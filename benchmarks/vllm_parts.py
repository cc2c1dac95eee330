"""The callers of `vllm`: each asks its own way, under the same load. Each function is a process of the benchmark, which
runs until the parent has gone. A command gives `count`, `concurrency` and `output` tokens; its answer is the
microseconds from each request to its first output (`first_us`) and the seconds of all (`elapsed_s`)."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from benchmarks.child import STDIN, Parent
from nodes.vllm import versions
from nodes.vllm.main import keep_stdout
from nodes.vllm.reaper import Reaper
from pdbus.text.models import text_for

WORDS = "Tell me of the sea, and of the ships that sail on it at night."
Ask = Callable[[str, int], AsyncIterator[object]]  # of a prompt and a number of tokens: an item whenever some come


async def _load(ask: Ask, texts: AsyncIterator[str], count: int, concurrency: int, output: int) -> dict[str, Any]:
    """The microseconds from each request to its first item, and the seconds of all."""
    first_us: list[float] = []
    left = iter(range(count))

    async def one() -> None:
        for _ in left:
            text = await anext(texts)
            began, came = time.perf_counter(), False
            async for _ in ask(text, output):
                if not came:
                    came = True
                    first_us.append((time.perf_counter() - began) * 1e6)
            assert came, "an answer without a token"

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(concurrency)))
    return {"first_us": first_us, "elapsed_s": time.perf_counter() - began}


async def _texts() -> AsyncIterator[str]:
    """Each begins another way, so that no prefix cache helps."""
    for number in itertools.count(time.time_ns()):
        yield f"{number} {WORDS}"


def _serve(parent: Parent, loop: asyncio.AbstractEventLoop, ask: Ask) -> None:
    texts = _texts()

    def answer(**settings: int) -> dict[str, Any]:
        return loop.run_until_complete(_load(ask, texts, **settings))

    parent.serve(answer)


def direct(parent: Parent, model: str, arguments: list[str]) -> None:
    """Ask vLLM's front end in this process. Token ids in, token ids out."""
    loop = asyncio.new_event_loop()
    choices = versions.Choices(
        role="unified", ranks=1, engine_id="", host="127.0.0.1", side_port=0, events_port=0, lease_s=1
    )
    keep_stdout()
    os.environ.update(versions.environment(choices))
    args = versions.engine_args(model, "smollm2", arguments, choices)
    tokenizer = text_for("smollm2")
    numbers = itertools.count()

    async def ask(text: str, output: int) -> AsyncIterator[object]:
        params = versions.sampling(max_tokens=output, temperature=0.0, ignore_eos=True, detokenize=False)
        prompt = versions.prompt(tokenizer.encode(text))
        async for out in engine.generate(prompt, params, str(next(numbers))):
            yield out

    with Reaper():
        engine = loop.run_until_complete(_started(args))
        _serve(parent, loop, ask)
        engine.shutdown()


def server(parent: Parent, arguments: list[str]) -> None:
    """Run vLLM's HTTP server in this process, as `vllm serve` does, until the parent has gone. It takes no commands."""
    keep_stdout()
    parent.ready()
    os.environ.update(VLLM_LOGGING_STREAM="ext://sys.stderr", VLLM_WORKER_MULTIPROC_METHOD="spawn")
    versions.check_requests()  # imports vLLM
    name = "vllm.entrypoints.openai.api_server"

    def leave_with_parent() -> None:
        while os.read(STDIN, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=leave_with_parent, daemon=True).start()
    sys.argv = [name, *arguments]
    with Reaper():
        runpy.run_module(name, run_name="__main__", alter_sys=True)


async def _started(args: Any) -> Any:
    return await versions.start(args, lambda rank, kv_usage: None)


def bus(parent: Parent, controller: str) -> None:
    """Ask by the client library. Text in, text out."""
    from pdbus.client import AsyncClient

    client = AsyncClient(controller)

    async def ask(text: str, output: int) -> AsyncIterator[object]:
        stream = await client.generate(text, chat=False, max_tokens=output, ignore_eos=True)
        async for piece in stream:
            yield piece

    loop = asyncio.new_event_loop()
    try:
        _serve(parent, loop, ask)
    finally:
        loop.run_until_complete(client.close())


def http(parent: Parent, port: int) -> None:
    """Ask by OpenAI's completions, streamed, over a connection a request. Text in, text out."""

    async def ask(text: str, output: int) -> AsyncIterator[object]:
        fields = {"model": "smollm2", "prompt": text, "max_tokens": output, "temperature": 0, "ignore_eos": True}
        body = json.dumps({**fields, "stream": True}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            writer.write(b"%bContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (head, len(body), body))
            status = await reader.readline()
            if b" 200 " not in status:
                raise ValueError(f"vllm serve: {status.decode().strip()}")
            async for line in reader:  # a chunk's size, an event, or nothing
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])["choices"][0]["text"]
        finally:
            writer.close()

    _serve(parent, asyncio.new_event_loop(), ask)

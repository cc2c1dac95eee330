"""The processes around `edge`: clients with and without HTTP, the other routers and their engines. Each function is a
process of the benchmark; `parent` is the process that started it, whose commands it answers until that has gone."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from benchmarks.child import STDIN, Parent
from nodes.link import Cancel, Leg, RankFacts, RankLink, Start
from nodes.own.engines import smollm2

WORDS = (
    "about", "after", "again", "all", "also", "and", "another", "any", "are", "ask", "away", "back", "because",
    "before", "between", "both", "but", "call", "can", "come", "could", "day", "did", "do", "down", "each", "end",
    "even", "every", "find", "first", "follow", "for", "found", "from", "get", "give", "good", "great",
)  # fmt: skip
START_S, IDLE_S = 30.0, 0.05
TOKEN = (260,)  # of SmolLM2: " the", a text, so that each is an event
ENGINE_GAP_S = 0.0005  # between two tokens, so that each is an event of its own


def load(parent: Parent) -> None:
    """Send HTTP requests to `/generate`. A command gives the URL, tokens of a prompt, `count`, `connections` at once,
    `output` tokens, and whether to stream and to send text; its answer is the microseconds of each request, or an
    `error`."""

    def ask(
        url: str, tokens: int, count: int, connections: int, output: int = 1, stream: int = 0, text: int = 0
    ) -> Any:
        try:
            return asyncio.run(_load(url, tokens, count, connections, output, bool(stream), bool(text)))
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            return {"error": f"{type(error).__name__}: {error}"}

    parent.serve(ask)


async def _load(
    url: str, tokens: int, count: int, connections: int, output: int, stream: bool, text: bool
) -> list[float]:
    at = urlsplit(url)
    rng = random.Random(tokens)
    ids = ",".join(str(rng.randrange(10_000, 50_000)) for _ in range(tokens - 1))
    prompt = f'"text":"%s{text_of(tokens)}"' if text else f'"input_ids":[%s,{ids}]'
    taken: list[float] = []
    left = iter(range(count))

    async def one() -> None:
        reader, writer = await asyncio.open_connection(at.hostname, at.port, limit=1 << 20)
        try:
            for number in left:
                sampling = json.dumps({"max_new_tokens": output, "temperature": 0, "ignore_eos": True})
                first = 10_000 + (time.monotonic_ns() + number) % 40_000  # so that no prefix cache helps
                body = f'{{{prompt % first},"sampling_params":{sampling},"stream":{str(stream).lower()}}}'
                head = f"POST /generate HTTP/1.1\r\nHost: {at.netloc}\r\nContent-Type: application/json\r\n"
                began = time.perf_counter()
                writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
                await _response(reader)
                taken.append((time.perf_counter() - began) * 1e6)
        finally:
            writer.close()

    await asyncio.gather(*(one() for _ in range(connections)))
    return taken


async def _response(reader: asyncio.StreamReader) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if not head.startswith(b"http/1.1 200"):
        raise ValueError(head.split(b"\r\n")[0].decode())
    if b"content-length: " in head:
        await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
        return
    while size := int(await reader.readuntil(b"\r\n"), 16):
        await reader.readexactly(size + 2)
    await reader.readexactly(2)


def text_of(tokens: int) -> str:
    """Return `tokens` words, each of which is one token to most tokenizers; the same for the same number."""
    rng = random.Random(tokens)
    return "".join(f" {rng.choice(WORDS)}" for _ in range(tokens))


def tokenizing(parent: Parent) -> None:
    """Answer each command (`tokens`, `count`) with the microseconds of processor time that it takes to make ids of a
    text."""
    from pdbus.text.folder import FolderText

    model = FolderText(smollm2.converted())

    def ask(tokens: int, count: int) -> float:
        text = text_of(tokens)
        began = time.process_time()
        for _ in range(count):
            model.encode(text)
        return (time.process_time() - began) / count * 1e6

    parent.serve(ask)


def client(parent: Parent, controller: str) -> None:
    """Send requests by the client library, without an edge. A command gives `tokens` of a prompt and `count`; its
    answer is the microseconds of each, one after the other."""
    from pdbus.client import Client

    with Client(controller) as one:

        def ask(tokens: int, count: int) -> list[float]:
            taken = []
            for number in range(count):
                ids = [time.monotonic_ns() % 40_000, number, *range(tokens - 2)]
                began = time.perf_counter()
                one.generate_tokens(ids, max_tokens=1, ignore_eos=True).tokens()
                taken.append((time.perf_counter() - began) * 1e6)
            return taken

        parent.serve(ask)


def engine(parent: Parent) -> None:
    """Serve SGLang's `/generate`, which routers route to, and answer at once. The port is a JSON line after READY."""
    from aiohttp import web

    async def generate(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        count = body["sampling_params"]["max_new_tokens"]
        meta = {"id": "x", "finish_reason": {"type": "length"}, "prompt_tokens": 1, "completion_tokens": count}
        answer = {"text": "a", "output_ids": [5], "meta_info": meta}
        if not body.get("stream"):
            return web.json_response(answer)
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        event = b"data: " + json.dumps(answer).encode() + b"\n\n"
        for _ in range(count):
            await stream.write(event)
            await asyncio.sleep(ENGINE_GAP_S)
        await stream.write(b"data: [DONE]\n\n")
        return stream

    async def known(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "model_path": "m", "data": [{"id": "m"}]})

    async def listening(app: web.Application) -> None:
        threading.Thread(target=_until_parent_leaves, args=(lambda: os._exit(0),), daemon=True).start()

    listener = socket.create_server(("127.0.0.1", 0))
    app = web.Application(client_max_size=1 << 24)
    app.on_startup.append(listening)
    app.router.add_post("/generate", generate)
    for path in ("health", "health_generate", "v1/models", "server_info", "get_server_info", "model_info"):
        app.router.add_get(f"/{path}", known)
    parent.ready()
    parent.send(listener.getsockname()[1])
    web.run_app(app, sock=listener, print=None, access_log=None)


def _until_parent_leaves(then: Callable[[], object]) -> None:
    while os.read(STDIN, 4096):
        pass
    then()


def rank(parent: Parent, bus: str, controller: str, instance: str, data: str) -> None:
    """Run a rank link for our edge, and behind it an engine that answers at once, as the mock engine does."""
    gone = threading.Event()
    facts = RankFacts(model=smollm2.NAME, max_context=1 << 20, block_tokens=16, vocab_size=1 << 16)
    left: dict[Leg, int] = {}  # output tokens
    with RankLink(bus, controllers=[controller], role="unified", instance=instance, facts=facts, data=data) as link:
        if not link.wait_ready(START_S):
            return
        parent.ready()
        threading.Thread(target=_until_parent_leaves, args=(gone.set,), daemon=True).start()
        while not gone.is_set():
            for order in link.poll(timeout_s=ENGINE_GAP_S if left else IDLE_S):
                if isinstance(order, Start):
                    left[order.leg] = order.leg.max_tokens
                elif isinstance(order, Cancel):
                    left.pop(order.leg, None)
            for leg in list(left):
                link.output(leg, TOKEN)
                left[leg] -= 1
                if not left[leg]:
                    del left[leg]
                    link.finish(leg, "length")


def become(parent: Parent, argv: list[str]) -> None:
    """Run the program `argv` in this process's place, with its stdout sent to stderr, because answers are read from
    stdout. It does not return."""
    parent.ready()
    sys.stdout.flush()
    os.dup2(2, 1)
    os.execv(argv[0], argv)

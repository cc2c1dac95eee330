"""The clients of `front`."""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any

from benchmarks.child import Parent

VOCABULARY = 40_000


def load(parent: Parent) -> None:
    """Ask servers for streamed completions of token ids. A command gives the `port`, `tokens` of a prompt, `count`,
    `connections` at once and `output` tokens; its answer is the microseconds from each request to its first event
    (`first_us`) and the number of events with tokens (`events`), or an `error`."""

    def ask(**asked: int) -> dict[str, Any]:
        try:
            return asyncio.run(_load(**asked))
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            return {"error": f"{type(error).__name__}: {error}"}

    parent.serve(ask)


async def _load(port: int, tokens: int, count: int, connections: int, output: int) -> dict[str, Any]:
    rng = random.Random(tokens)
    ids = ",".join(str(rng.randrange(VOCABULARY)) for _ in range(tokens - 1))
    first_us: list[float] = []
    events = 0
    left = iter(range(count))
    settings = json.dumps({"max_tokens": output, "temperature": 0, "ignore_eos": True, "stream": True})[1:]

    async def one() -> None:
        nonlocal events
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        try:
            for number in left:
                first = (time.monotonic_ns() + number) % VOCABULARY  # so that no prefix cache helps
                body = f'{{"model":"smollm2","prompt":[{first},{ids}],{settings}'
                head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                began = time.perf_counter()
                writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
                came_at, came = await _events(reader)
                first_us.append((came_at - began) * 1e6)
                events += came
        finally:
            writer.close()

    await asyncio.gather(*(one() for _ in range(connections)))
    return {"first_us": first_us, "events": events}


async def _events(reader: asyncio.StreamReader) -> tuple[float, int]:
    """Read a stream. Return when its first event came (seconds of perf_counter), and the number of those with
    tokens."""
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise ValueError(head.split(b"\r\n")[0].decode())
    came_at, events = 0.0, 0
    while size := int(await reader.readuntil(b"\r\n"), 16):
        chunk = await reader.readexactly(size + 2)
        came_at = came_at or time.perf_counter()
        if b'"error"' in chunk:
            raise ValueError(chunk.decode())
        events += chunk.count(b"data: {")
    await reader.readexactly(2)
    return came_at, events

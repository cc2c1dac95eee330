"""An edge in memory: ASGI by hand, a client library whose requests end as a script says, and a cluster's status."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import laws

from bus.wire.messages import Load, Location, RankStatus, Role, Status, TokenLogprobs
from pdbus.client import AsyncStream, Options, Result
from pdbus.client.options import controllers_of, make_request
from pdbus.client.traffic import Update
from pdbus.edge.app import Edge
from pdbus.edge.config import EdgeConfig

LOAD = Load(
    seq=1, step=1, running=0, waiting=0, waiting_tokens=0, kv_tokens=0, kv_capacity=2048, max_running=16
)  # fmt: skip
Script = Callable[[Sequence[int], Options], Iterable[Update]]
AT = controllers_of(None, None, None)


def rank(instance: str, role: Role, model: str = "sim", state: str = "ready", **more: Any) -> RankStatus:
    fields: dict[str, Any] = {
        "dp_rank": 0, "epoch": 1, "endpoint": "ipc:///x", "max_context": 4096, "report_age_s": 0.1,
        "load": LOAD, "in_flight_requests": 0, "in_flight_tokens": 0,
        "estimate_requests": 0, "estimate_tokens": 0, "outstanding": 0, "dispatched_total": 0, "ended_total": 0,
        "failed_total": 0, "block_tokens": 16,
    }  # fmt: skip
    return RankStatus(instance=instance, role=role, model=model, state=state, **fields | more)  # type: ignore[arg-type]


def status(*ranks: RankStatus, uses_hashes: tuple[Role, ...] = ("prefill",)) -> Status:
    return Status(1, "ctl", 1, 1.0, {}, {}, ranks, uses_hashes=uses_hashes)


PAIR = status(rank("p", "prefill"), rank("d", "decode"))


def ended(rid: str, finish: str = "stop", ids: Sequence[int] = (), **more: Any) -> Result:
    at = Location("d", 0, 1, "ipc:///d")
    return Result(rid, finish, tuple(ids), 1, 1, Location("p", 0, 1, "ipc:///p"), at, "told", 0.1, 0.2, **more)  # type: ignore[arg-type]


def letters(text: str, finish: str = "stop") -> Script:
    """`text` as the byte tokenizer's tokens, one at a time."""
    ids = [3 + byte for byte in text.encode()]
    return lambda prompt, options: [*((id,) for id in ids), ended(options["rid"], finish, ids)]


def likely_of(token: int, top: int) -> TokenLogprobs:
    """The likeliest is the token after the one that was chosen."""
    return TokenLogprobs(-0.5 - token / 1000, tuple((token + 1 + n, -0.25 - n) for n in range(top)))


class _Channel:
    def __init__(self) -> None:
        self.streams: dict[str, AsyncStream] = {}
        self.cancelled: list[str] = []

    def cancel(self, rid: str, sink: Any = None) -> None:
        self.cancelled.append(rid)
        if not any(isinstance(update, Result) for update in self.streams[rid]._updates):
            self.streams[rid]._sink(ended(rid, "cancelled"))

    def drop(self, rid: str, sink: Any) -> None: ...


class ScriptedClient:
    """What an edge uses of AsyncClient. Options are judged by the real code."""

    def __init__(self, script: Script, seen: Status | None = PAIR) -> None:
        self.script = script
        self.seen = seen
        self.asked: list[tuple[list[int], Options]] = []
        self.channel = _Channel()

    async def status(self, *, timeout_s: float | None = None) -> Status:
        from bus.errors import PeerLost

        if self.seen is None:
            raise PeerLost("nobody answers")
        return self.seen

    async def generate_tokens(self, ids: Sequence[int], **options: Any) -> AsyncStream:
        request = make_request(ids, options, AT, random.Random(1))  # type: ignore[arg-type]
        self.asked.append((list(ids), options))  # type: ignore[arg-type]
        stream = AsyncStream(self.channel, request, None, dict)  # type: ignore[arg-type]
        self.channel.streams[options["rid"]] = stream
        for update in self.script(ids, options):  # type: ignore[arg-type]
            if isinstance(update, tuple) and "logprobs" in options:
                request.logprobs += [likely_of(token, options["logprobs"]) for token in update]
            stream._sink(update)
        return stream


@dataclass
class Response:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        said: dict[str, Any] = self.json
        assert "error" in said, said
        error: dict[str, Any] = said["error"]
        return error

    @property
    def events(self) -> list[Any]:
        """Of server-sent events; the last one is [DONE]."""
        *events, done, rest = self.body.decode().split("\n\n")
        assert (done, rest) == ("data: [DONE]", ""), self.body
        return [json.loads(event.removeprefix("data: ")) for event in events]


class World:
    """`await world.post(path, body)`. `leave_after` parts of the response the client disconnects."""

    def __init__(self, script: Script | None = None, seen: Status | None = PAIR, **config: Any) -> None:
        self.client = ScriptedClient(script or letters("hello"), seen)
        self.now = 100.0
        self.edge = Edge(EdgeConfig(**config), self.client, lambda: self.now)  # type: ignore[arg-type]
        laws.watch(lambda: laws.check(laws.of_edge(self.edge.counts)))

    async def post(self, path: str, body: Any, **more: Any) -> Response:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.ask("POST", path, [data], **more)

    async def get(self, path: str, **more: Any) -> Response:
        return await self.ask("GET", path, [b""], **more)

    async def ask(
        self,
        method: str,
        path: str,
        body: Sequence[bytes],
        headers: dict[str, str] | None = None,
        leave_after: int | None = None,
    ) -> Response:
        if not self.edge.view.models:
            await self.edge.look()
        named = {"content-type": "application/json"} | (headers or {})
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": [(name.encode(), value.encode()) for name, value in named.items()],
        }
        response, left, parts = Response(), asyncio.Event(), list(body)
        if leave_after == 0:
            left.set()

        async def receive() -> dict[str, Any]:
            if parts:
                return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            await asyncio.sleep(0)
            if message["type"] == "http.response.start":
                response.status = message["status"]
                response.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                response.parts.append(message["body"])
                if len(response.parts) == leave_after:
                    left.set()

        await self.edge(scope, receive, send)
        return response


def chat(text: str = "hi", **more: Any) -> dict[str, Any]:
    return {"model": "sim", "messages": [{"role": "user", "content": text}], **more}

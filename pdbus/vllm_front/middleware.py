"""An ASGI layer around vLLM's server: a request that fails before its first token gets the failure's status.

vLLM begins a stream with 200 before its engine has answered. So what a stream begins with waits here until the first
output has come from the bus: where a failure comes instead, it is the answer, with its status, and with `Retry-After`
where trying again may help. A failure after that ends the stream with one event in the form of its API.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from pdbus.edge.errors import RETRY_AFTER_S
from pdbus.vllm_front.asked import ASKED, PATHS, Api, Asked, Failure

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
BUSY = (429, 503)


class StatusOfFirstEvent:
    """The layer around the application `app`. `state` is the application's, which has vLLM's engine client."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], state: Any) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request to its end. An exception of the application passes through, unless the request failed
        in the cluster after its answer had begun."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Asked({name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]})
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        api = PATHS.get(path) if scope["method"] == "POST" else None
        answer = Answer(asked, api, send, self._hint_s)
        ASKED.set(asked)
        try:
            await self._app(scope, receive, answer.send)
        except Exception:
            if asked.failure is None or not answer.begun:
                raise  # vLLM's own
            await answer.fail(asked.failure)

    def _hint_s(self) -> float:
        core = getattr(getattr(self._state, "engine_client", None), "engine_core", None)
        return float(core.hint_s()) if core is not None else 0.0


def is_news(record: logging.LogRecord) -> bool:
    """Return false for a traceback of vLLM's about a request that failed on the bus: one layer of vLLM cannot read the
    event that another layer made of the failure. The client gets the failure all the same, and the log has a line of
    it."""
    asked = ASKED.get()
    return not record.exc_info or asked is None or asked.failure is None


class Answer:
    """One answer on its way out. All messages of an answer that is a stream of `api` wait until the request
    has begun or failed; without an `api` none waits."""

    def __init__(self, asked: Asked, api: Api | None, send: Send, hint_s: Callable[[], float]) -> None:
        self.begun = False  # its application has begun it
        self._asked = asked
        self._api = api
        self._send = send
        self._hint_s = hint_s
        self._held: list[Message] = []
        self._sent = False  # its head is out
        self._over = False  # this layer has ended it
        self._events = 0  # so far; in a Responses stream they are numbered

    async def send(self, message: Message) -> None:
        """Pass on a message of the application, now or later; drop it after `fail`."""
        if self._over:
            return
        if self._sent and self._asked.failure is None:  # nothing waits any more: this is each event's way
            if self._api == "responses":
                self._events += message["body"].count(b"\n\n")
            await self._send(message)
            return
        if message["type"] == "http.response.start":
            self.begun = True
            if self._api is not None and message["status"] == 200 and _is_stream(message):
                self._held.append(message)
                return
            self._api = None
            if message["status"] in BUSY:
                message = _with_retry_after(message, self._hint_s())
        if self._api is None:
            await self._send(message)
            return
        self._events += message.get("body", b"").count(b"\n\n")
        failure = self._asked.failure
        if failure is not None and (not self._sent or self._api == "anthropic"):
            await self.fail(failure)
            return
        self._held.append(message)
        if self._sent or self._asked.began or not message.get("more_body"):
            await self._flush()

    async def fail(self, failure: Failure) -> None:
        """End the answer with a failure: with its status where nothing is out yet, else with an event. A second call
        does nothing."""
        if self._over:
            return
        self._over = True
        api = self._api or "openai"
        if self._sent:
            body = failure.event(api, self._events)
        else:
            body = failure.body(api)
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
            head: Message = {"type": "http.response.start", "status": failure.status, "headers": headers}
            hint_s = failure.retry_after_s or self._hint_s()
            await self._send(_with_retry_after(head, hint_s) if failure.status in BUSY else head)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _flush(self) -> None:
        self._sent = True
        held, self._held = self._held, []
        for message in held:
            await self._send(message)


def _is_stream(message: Message) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in message.get("headers", ())
    )


def _with_retry_after(message: Message, hint_s: float) -> Message:
    headers = [each for each in message.get("headers", ()) if each[0].lower() != b"retry-after"]
    seconds = max(hint_s, RETRY_AFTER_S)
    headers += [(b"retry-after", b"%d" % math.ceil(seconds)), (b"retry-after-ms", b"%d" % math.ceil(seconds * 1000))]
    return {**message, "headers": headers}

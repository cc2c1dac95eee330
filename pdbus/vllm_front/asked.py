"""One HTTP request as this package sees it: what its headers ask for, and how it fared in the cluster. Pure.

The middleware makes one for each HTTP request. `core`, which submits it to the bus, finds it in `ASKED`, a variable of
the task's context. This module owns the shapes in which each API states an error.
"""

from __future__ import annotations

import json
import math
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import sha256
from http import HTTPStatus
from typing import Any, Literal

from bus.tracecontext import parse
from pdbus.client import Options
from pdbus.edge.fields import SESSION_MAX

Api = Literal["openai", "responses", "anthropic"]
PATHS: dict[str, Api] = {
    "/v1/chat/completions": "openai",
    "/v1/completions": "openai",
    "/v1/responses": "responses",
    "/v1/messages": "anthropic",
}
ANTHROPIC_TYPES = {400: "invalid_request_error", 429: "rate_limit_error", 503: "overloaded_error"}


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a request failed: an HTTP status, a sentence, the field at fault (None: no one field), and the
    seconds to wait before a new try (0: no advice)."""

    status: int
    message: str
    param: str | None = None
    retry_after_s: float = 0.0

    def body(self, api: Api) -> bytes:
        """Return the JSON body of an HTTP answer that reports this failure, in the form of the API; status and headers
        are the caller's."""
        if api == "anthropic":
            return json.dumps(self._of_anthropic()).encode()
        error = {
            "message": self.message,
            "type": "BadRequestError" if self.status == 400 else HTTPStatus(self.status).phrase,
            "param": self.param,
            "code": self.status,
        }
        return json.dumps({"error": error}).encode()

    def event(self, api: Api, number: int = 0) -> bytes:
        """Return the server-sent event that ends a stream with this failure; `number` is its place in a Responses
        stream (ignored for other APIs)."""
        if api == "anthropic":
            return b"event: error\ndata: " + json.dumps(self._of_anthropic()).encode() + b"\n\n"
        if api == "responses":
            event = {
                "type": "error",
                "code": str(self.status),
                "message": self.message,
                "param": self.param,
                "sequence_number": number,
            }
            return b"event: error\ndata: " + json.dumps(event).encode() + b"\n\n"
        return b"data: " + self.body(api) + b"\n\n"

    def _of_anthropic(self) -> dict[str, Any]:
        kind = ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}


class Asked:
    """One HTTP request: the headers by name in lower case, and how far it came."""

    __slots__ = ("began", "failure", "headers")

    def __init__(self, headers: dict[str, str]) -> None:
        self.headers = headers
        self.began = False  # a first output came from the bus
        self.failure: Failure | None = None

    def options(self) -> Options:
        """Return the options of the client library that the headers give; `pdbus serve` without vLLM takes the same
        headers. Raises ValueError, with the header's name first, for a number of seconds that is not above 0; an
        invalid `traceparent` is ignored, as W3C says."""
        options = Options()
        for header, name in (
            ("x-request-deadline-s", "deadline_s"), ("x-ttft-slo-s", "ttft_slo_s"), ("x-tpot-slo-s", "tpot_slo_s"),
        ):  # fmt: skip
            if given := self.headers.get(header):
                options[name] = _seconds(header, given)  # type: ignore[literal-required]
        if slo_class := self.headers.get("x-slo-class"):
            options["slo_class"] = slo_class
        trace = parse(self.headers.get("traceparent", ""), self.headers.get("tracestate", ""))
        if trace is not None:
            options["traceparent"], options["tracestate"] = trace.traceparent, trace.tracestate
        return options

    def session(self, session: str) -> str:
        """Return the name on the bus of the session that a client calls `session`: with an API key, a hash of the key
        goes before it, so that two keys have no session in common. Raises ValueError where `session` is too long."""
        if len(session) > SESSION_MAX:
            raise ValueError(f"session_id: {SESSION_MAX} characters at most")
        key = self.headers.get("authorization") or self.headers.get("x-api-key")
        return session if not key else f"{sha256(key.encode()).hexdigest()[:16]}/{session}"


def _seconds(header: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ValueError(f"{header}: seconds, above 0")
    return seconds


ASKED: ContextVar[Asked | None] = ContextVar("pdbus_asked", default=None)

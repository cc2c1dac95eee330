"""Errors for HTTP clients: a status, and a body in OpenAI's form. `bus.wire.codes` has the HTTP status of each of the
cluster's codes."""

from __future__ import annotations

import math
import re

import msgspec

from bus.errors import BusError, ConfigError, PeerLost, RequestFailed
from bus.wire.codes import status_of
from pdbus.client import Options

CLIENT_GONE = 499  # nginx's number: counted, never sent
OPENAI_CODES = {"too_long": "context_length_exceeded"}  # codes that clients know under another name
TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_ADDRESS = re.compile(r"\b(?:ipc|tcp|inproc)://[^\s,;)]+")  # addresses inside a cluster
RETRY_AFTER_S = 1.0  # for a 429 or 503 without a hint


class HttpError(Exception):
    """An error to be answered with `status`. `param` names the field at fault, `code` is for programs (None: without).
    `retry_after_s` 0: no advice when to try again, except that 429 and 503 then advise RETRY_AFTER_S."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float = 0.0,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s or (RETRY_AFTER_S if status in (429, 503) else 0.0)
        self._headers = headers

    @property
    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        """The response's headers for this error. Advice when to try again is in `Retry-After` (whole seconds) and in
        `retry-after-ms` (which OpenAI's own clients read)."""
        if not self.retry_after_s:
            return self._headers
        seconds, ms = math.ceil(self.retry_after_s), math.ceil(self.retry_after_s * 1000)
        return (*self._headers, (b"retry-after", b"%d" % seconds), (b"retry-after-ms", b"%d" % ms))

    def body(self) -> bytes:
        """Return the JSON body in OpenAI's form. From status 500 on, addresses inside the cluster are hidden."""
        kind = TYPES.get(self.status, "rate_limit_error" if self.status == 429 else "")
        kind = kind or ("server_error" if self.status >= 500 else "invalid_request_error")
        message = _ADDRESS.sub("(address)", self.message) if self.status >= 500 else self.message  # the log has it
        error = {"message": message, "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


def invalid(param: str | None, message: str, code: str | None = None) -> HttpError:
    """Return the error 400 for a field that is wrong or not supported; `param` None: no one field is at fault."""
    return HttpError(400, message, code=code, param=param)


def of_bus(error: BusError) -> HttpError:
    """Return the HTTP error for an error of the client library."""
    if isinstance(error, RequestFailed):
        status = status_of(error.code)
        code = OPENAI_CODES.get(error.code, error.code)
        return HttpError(status, error.message, code=code, retry_after_s=error.retry_after_s)
    if isinstance(error, ConfigError):  # the message begins with the option at fault
        word = str(error).split(maxsplit=1)[0].rstrip(":")
        return invalid(word if word in Options.__annotations__ else None, str(error))
    return HttpError(503 if isinstance(error, PeerLost) else 500, str(error), code="peer_lost")

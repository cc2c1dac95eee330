"""The errors that pdbus raises. This module owns the hierarchy and holds no logic. Failure codes are
`bus.wire.codes.Code`.

`assert` is for our own bugs. Everything that a peer or a user can cause is one of these.
"""

from __future__ import annotations


class BusError(Exception):
    """The base class of everything that pdbus raises on purpose."""


class ConfigError(BusError):
    """A bad setting; the message is one line that says what to change. A process exits 2 on it."""


class StartError(BusError):
    """A part could not start (a taken port, a missing bus), or serves already; another try may help. A process exits
    with 3."""


class Replaced(StartError):
    """A rank was started again elsewhere, and this start of it leaves. A process exits with 4; it must not be
    restarted."""


class PartFailed(BusError):
    """The part that was called does not serve: it was not started or was stopped, it is the parent's in a forked
    child, or its thread has failed, which is a bug of ours (`__cause__` is the exception)."""


REASONS = ("frames", "not_yours", "rank", "schema", "size", "syntax", "tag", "topic", "version")


class ProtocolError(BusError):
    """A message breaks `docs/protocol.md`; `reason` is one of REASONS and fits a metric label."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class RemoteProtocolError(ProtocolError):
    """A peer sent an invalid message: it is counted, logged once per peer, and dropped."""


class LocalProtocolError(ProtocolError):
    """We were about to send an invalid message: a bug or an invalid argument on our side."""


class PeerLost(BusError):
    """The process at the other end is gone, or has been silent past its lease."""


class RequestFailed(BusError):
    """A request ended without its answer.

    `code` is one of the codes of `docs/protocol.md` (see `bus.wire.codes.Code`), `message` a sentence for people.
    `retryable` is true where the same request may succeed later, and `retry_after_s` is the time to wait before it, in
    seconds; 0: not known.
    """

    def __init__(self, code: str, message: str, *, retryable: bool = False, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retryable = retryable
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        hint = f" (retry in {self.retry_after_s:g} s)" if self.retry_after_s > 0 else ""
        return f"{self.code}: {self.message}{hint}"

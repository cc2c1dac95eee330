"""The log: structlog for a process of ours (stderr), the host program's own logging for a part that it embeds.

`get_logger` is for all of pdbus. Events go to structlog where it is configured (by a main with `configure`, or by
the host), else to stdlib `logging` under `pdbus.*`, which prints nothing until the host asks for it. An event that
cannot be written (disk full, pipe closed) is counted and dropped: no part ends because of its log.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from collections.abc import Callable, MutableMapping
from typing import Any

LEVELS = ("debug", "info", "warning", "error")
_ROOT = "pdbus"
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")

logging.getLogger(_ROOT).addHandler(logging.NullHandler())
_lost = 0
_counting = threading.Lock()


class Logger:
    """The logger of one part: `log.info("node.registered", instance=..., dp_rank=...)`; `bind` adds keys to all its
    events.

    It never raises because an event cannot be written. It looks nothing up before an event happens, so that the host
    may configure its logging after it has imported us.
    """

    __slots__ = ("_bound", "_name", "_stdlib")

    def __init__(self, name: str, bound: dict[str, object] | None = None) -> None:
        self._name = name
        self._bound = bound or {}
        self._stdlib = logging.getLogger(name)

    def bind(self, **fields: object) -> Logger:
        """Return a logger that adds `fields` to all its events; this one stays as it is."""
        return Logger(self._name, self._bound | fields)

    def debug(self, event: str, **fields: object) -> None:
        self._write("debug", logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        self._write("info", logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._write("warning", logging.WARNING, event, fields)

    def error(self, event: str, **fields: object) -> None:
        self._write("error", logging.ERROR, event, fields)

    def exception(self, event: str, **fields: object) -> None:
        """Log an error, with the traceback of the exception that is being handled."""
        self._write("exception", logging.ERROR, event, fields)

    def _write(self, method: str, level: int, event: str, fields: dict[str, object]) -> None:
        try:
            structlog = sys.modules.get("structlog")  # what is not imported is not configured
            if structlog is not None and structlog.is_configured():
                getattr(structlog.get_logger(self._name), method)(event, **self._bound | fields)
            elif self._stdlib.isEnabledFor(level):
                every = self._bound | fields
                line = " ".join([event, *(f"{key}={value!r}" for key, value in every.items())])
                failing = method == "exception"
                self._stdlib.log(level, "%s", line, exc_info=failing, extra={"fields": every}, stacklevel=3)
        except Exception:  # of a stream, a handler or a processor, which may raise anything
            _count_loss()


def get_logger(part: str) -> Logger:
    """Return the logger of one part: `pdbus.<part>`."""
    return Logger(f"{_ROOT}.{part}")


def lost() -> int:
    """Return the number of log events that this process could not write, since its start."""
    return _lost


def configure(level: str = "info", **bound: object) -> None:
    """Configure the log, once, in a main: events go to stderr, readable on a terminal, as JSON lines otherwise. The
    `bound` keys (part, instance, dp_rank) appear on every line."""
    structlog = _structlog()
    terminal = sys.stderr.isatty()
    renderer: Any = structlog.dev.ConsoleRenderer() if terminal else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            *([_harmless] if terminal else []),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(**bound)


def _harmless(logger: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Write out what could control a terminal, where a peer's text is logged to one. JSON escapes it anyway."""
    for key, value in event.items():
        if key != "exception":
            event[key] = _CONTROLS.sub(_written_out, value) if isinstance(value, str) else value
    return event


def _written_out(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


def set_level(level: str) -> None:
    """Set the level (one of LEVELS) from now on, in a process that called `configure`."""
    structlog = _structlog()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())))


def _structlog() -> Any:
    """Return structlog, imported late. Its import of rich is prevented: that takes a quarter of a process's start,
    for tracebacks that `configure` does not use."""
    if "structlog" not in sys.modules and "rich" not in sys.modules:
        sys.modules["rich"] = None  # type: ignore[assignment]
        try:
            import structlog
        finally:
            del sys.modules["rich"]
    import structlog

    return structlog


def adopt(library: str, log_line: Callable[[str], None], every_s: float) -> None:
    """Pass what `library` logs with `logging` (warnings or worse) to `log_line` from now on, instead of its own
    handlers; at most one line each `every_s` seconds, the others are lost."""

    class Adopted(logging.Handler):
        next_at = 0.0

        def emit(self, record: logging.LogRecord) -> None:
            if time.monotonic() >= self.next_at:
                self.next_at = time.monotonic() + every_s
                log_line(record.getMessage())

    theirs = logging.getLogger(library)
    theirs.handlers, theirs.propagate = [Adopted(logging.WARNING)], False


def _count_loss() -> None:
    global _lost
    with _counting:
        _lost += 1

"""Records and drops streams of the bus in each Python process that has this folder on its PYTHONPATH. For tests alone.

`STREAMS_TAP` names a folder, where each process appends what it receives to `<pid>.tap`: pickles of (seconds since
1970, frames). `STREAMS_CUT` names streams of `stream_registry`, separated by commas, which their senders drop; a drop
is a record, too. Modules are patched when they are imported, so a process pays for what it imports alone.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from stream_registry import STREAMS, Stream

_lock = threading.Lock()
DROP = object()


def record(what: object) -> None:
    with _lock, open(os.path.join(os.environ["STREAMS_TAP"], f"{os.getpid()}.tap"), "ab") as file:
        file.write(pickle.dumps((time.time(), what)))


# --- the tap ----------------------------------------------------------------------------------------------------------


def tapped(receive: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    def recording(*args: Any, **options: Any) -> list[Any]:
        frames = receive(*args, **options)
        record([bytes(frame) if isinstance(frame, bytes) else b"" for frame in frames])
        return frames

    return recording


# --- the cuts ---------------------------------------------------------------------------------------------------------


def _is_it(stream: Stream, what: Any) -> bool:
    """A message of the stream, or what carries one."""
    config = getattr(type(what), "__struct_config__", None)
    if config is not None and config.tag is not None and config.tag == stream.tag:
        return True
    inner = getattr(what, "message", None)
    return inner is not None and _is_it(stream, inner)


def _without(stream: Stream, what: Any) -> Any:
    """`what` with nothing of the stream in it, or DROP."""
    if isinstance(what, list | tuple):
        if stream.topic and what and isinstance(what[0], bytes) and what[0].startswith(stream.topic):
            return DROP
        kept = [each for each in what if not _is_it(stream, each)]
        return what if len(kept) == len(what) else kept
    return DROP if _is_it(stream, what) else what


def _cut(stream: Stream, send: Callable[..., Any]) -> Callable[..., Any]:
    def sending(*args: Any, **options: Any) -> Any:
        if stream.how == "call":
            record(f"dropped {stream.name}")
            return None
        if stream.how == "returned":
            made = send(*args, **options)
            kept = _without(stream, made)
            if kept is not made:
                record(f"dropped {stream.name}")
            return kept
        if stream.socket and not any(each is getattr(args[0], stream.socket) for each in args):
            return send(*args, **options)
        if stream.how == "acks":
            kept = [_without_acks(each) for each in args]
        else:
            kept = [_without(stream, each) for each in args]
        if any(new is not old for new, old in zip(kept, args, strict=True)):
            record(f"dropped {stream.name}")
        return stream.returns if DROP in kept else send(*kept, **options)

    return sending


def _without_acks(what: Any) -> Any:
    if not getattr(what, "acks", ()):
        return what
    from msgspec.structs import replace

    return replace(what, acks=())


def _patch(module: ModuleType, path: str, wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    *owners, name = path.split(".")
    owner: Any = module
    for each in owners:
        owner = getattr(owner, each)
    setattr(owner, name, wrapped(getattr(owner, name)))


# --- when a module is imported ----------------------------------------------------------------------------------------


class Patching(importlib.abc.MetaPathFinder):
    def __init__(self, patches: dict[str, list[tuple[str, Callable[[Any], Any]]]]) -> None:
        self._patches = patches

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        patches = self._patches.pop(name, None)
        if patches is None:
            return None
        spec = importlib.util.find_spec(name)
        assert spec is not None, name
        assert spec.loader is not None, name
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            for symbol, wrapped in patches:
                _patch(module, symbol, wrapped)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    patches: dict[str, list[tuple[str, Callable[[Any], Any]]]] = {"bus.runtime.frames": [("receive", tapped)]}
    for name in filter(None, os.environ.get("STREAMS_CUT", "").split(",")):
        stream = STREAMS[name]
        for sender in stream.senders:
            module, _, symbol = sender.partition(":")
            patches.setdefault(module, []).append((symbol, lambda send, stream=stream: _cut(stream, send)))  # type: ignore[misc]
    sys.meta_path.insert(0, Patching(patches))


if "STREAMS_TAP" in os.environ:
    install()

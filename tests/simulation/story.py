"""What happened, for people: messages as they arrive and what processes log, of one request or of all."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

from simulation.network import Pipe

if TYPE_CHECKING:
    from simulation.spec import Spec


def message_in(frames: list[bytes]) -> list[Any]:
    """Tag and fields of the message in `frames`; of what is none, nothing but an empty tag."""
    for frame in frames:
        if frame[:1] == b"\x01":
            try:
                message = msgspec.msgpack.decode(frame[1:])
            except msgspec.DecodeError:
                continue
            if isinstance(message, list) and message and isinstance(message[0], str):
                return message
    return [""]


def ends_of(pipe: Pipe) -> str:
    """Who speaks to whom."""
    other = pipe.peer.socket.process.name if pipe.peer is not None else "?"
    return f"{pipe.socket.process.name} -> {other}"


def told(spec: Spec, rid: str) -> list[str]:
    """The trial again, line by line: what concerns `rid`, or all of it."""
    from simulation.world import World

    world = World(spec)
    lines: list[str] = []

    def line(text: str) -> None:
        if rid in text or "fault" in text:
            lines.append(f"{world.now:10.4f}  {text}"[:240])

    def arrived(pipe: Pipe, frames: list[bytes]) -> None:
        tag, *fields = message_in(frames)
        line(f"{ends_of(pipe)}: {tag} {fields}")

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            line(f"{world.running.name if world.running else ''}: {record.getMessage()}")

    log, handler = logging.getLogger("pdbus"), Handler()
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    world.network.on_message = arrived
    world.on_fault = lambda fault: line(f"fault: {fault}")
    try:
        world.run()
    except Exception as error:
        line(f"fault: {error}")
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
    return lines

"""What happened, for people: messages as they arrive and what processes log, of one request or of all."""

from __future__ import annotations

from typing import Any

import msgspec

from simulation.network import Pipe


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

"""Frames out of and into a socket, at the least price in Python: what `send_multipart` and `recv_multipart` do, minus
their looking for options that we don't use, which costs more than moving a small frame does.

Owns no socket; must not wait, decode or decide. Both raise what pyzmq raises, zmq.Again above all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zmq
from zmq.backend import Socket as Backend
from zmq.backend import zmq_poll

from bus.runtime.sockets import Socket

ALL = 1 << 30
_NOW = int(zmq.NOBLOCK)
_NOW_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_send, _receive = Backend.send, Backend.recv


def send(socket: Socket, frames: Sequence[Any]) -> None:
    """Send one message of `frames`: bytes are copied (below some 64 KiB cheaper than sharing), a zmq.Frame is shared.

    EAGAIN when the peer's queue is full, EHOSTUNREACH from a ROUTER whose peer is gone: then nothing was sent.
    """
    last = len(frames) - 1
    for index in range(last):
        _send(socket, frames[index], _NOW_MORE)
    _send(socket, frames[last], _NOW)


def receive(socket: Socket, copied: int = ALL) -> list[Any]:
    """One message: its first `copied` frames (at least one) as bytes, the others as they are, zmq.Frames."""
    frame = _receive(socket, _NOW, False)  # a Frame knows whether more follow; to ask the socket costs more than this
    frames: list[Any] = [frame.bytes]
    while frame.more:
        frame = _receive(socket, _NOW, False)
        frames.append(frame.bytes if len(frames) < copied else frame)
    return frames


def has_message(socket: Socket) -> bool:
    """Whether `receive` would find one."""
    return bool(zmq_poll([(socket, zmq.POLLIN)], 0))

"""Frames out of and into a socket at the lowest cost in Python.

These functions do what `send_multipart` and `recv_multipart` do, without the checks for options that we do not use;
those cost more than moving a small frame. This module owns no socket; it must not wait, decode or decide. The
functions raise what pyzmq raises, above all zmq.Again.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any

import zmq
from zmq.backend import Socket as Backend
from zmq.backend import zmq_poll

from bus.rights import Known, key_of
from bus.runtime.sockets import Socket

ALL = 1 << 30
FRAMES_MAX = 64  # of a message; ours have five at most
SKIP_MAX = 4096  # frames thrown away at a time: some milliseconds
_DISGUISE = os.urandom(16)
_NOW = int(zmq.NOBLOCK)
_NOW_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_send, _receive = Backend.send, Backend.recv
_receive_many: Any = None
_libc: Any = ctypes.PyDLL(None)  # PyDLL: short calls, which keep the interpreter's lock

try:  # as pyzmq has libzmq loaded; some builds hide it
    _libc.malloc.argtypes, _libc.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
    _libc.wordfree.argtypes, _libc.wordfree.restype = (ctypes.c_void_p,), None
    _receive_many = ctypes.PyDLL(sys.modules[Backend.__module__].__file__).zmq_recviov
    _receive_many.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int
except (AttributeError, OSError):
    pass


def send(socket: Socket, frames: Sequence[Any]) -> None:
    """Send one message of `frames` without waiting: bytes are copied (below some 64 KiB that is cheaper than sharing),
    a zmq.Frame is shared.

    Raise zmq.Again (EAGAIN) when the peer's queue is full, ZMQError (EHOSTUNREACH) from a ROUTER whose peer is gone:
    then nothing was sent.
    """
    *first, last = frames
    for frame in first:
        _send(socket, frame, _NOW_MORE)
    _send(socket, last, _NOW)


def name_of(first: bytes) -> str:
    """Return the sender of a message for logs, from its first frame: the name of a key, a topic, or a disguised form
    of a ROUTER's own id (the id itself would show which ids come next)."""
    if key := key_of(first):
        return key
    if first.startswith(b"\0"):
        return blake2b(first, key=_DISGUISE, digest_size=4).hexdigest()
    return repr(first[:100])


class TooManyFrames(Exception):
    """Raised by `receive` for a message of more than FRAMES_MAX frames; the caller must `skip` the rest. `descriptor`
    and `source` are those of its connection (-1 and empty over inproc)."""

    def __init__(self, frame: zmq.Frame) -> None:
        super().__init__()
        self.descriptor, self.source = -1, ""
        with suppress(zmq.ZMQError):
            self.descriptor, self.source = int(frame.get(zmq.SRCFD)), str(frame.get("Peer-Address"))


def receive(socket: Socket, copied: int = ALL, keyed: bool = False, routed: bool = False) -> list[Any]:
    """Return one message without waiting: its first `copied` frames (at least one) as bytes, the others as zmq.Frames.
    zmq.Again if there is none.

    The first frame from a `keyed` socket is Known: it has the key that the sender's connection proved. `routed`: the
    socket is a ROUTER. TooManyFrames where the message has more than FRAMES_MAX frames.
    """
    if routed and not keyed:  # what a ROUTER puts before a message is never all of it
        frames: list[Any] = [_receive(socket, _NOW)]
    else:
        frame = _receive(socket, _NOW, False)  # knows whether more follow; to ask the socket costs more than a Frame
        frames = [_known(frame) if keyed else frame.bytes]
        if not frame.more:
            return frames
    for number in range(1, FRAMES_MAX):
        frame = _receive(socket, _NOW, False)
        frames.append(frame.bytes if number < copied else frame)
        if not frame.more:
            return frames
    raise TooManyFrames(frame)


def _known(frame: zmq.Frame) -> Known:
    """Return the frame with its sender's key. ZMQError where there is none, which cannot happen: the socket accepts
    no connection without a key."""
    known = Known(frame.bytes)
    known.key = str(frame.get("User-Id"))
    return known


def skip(socket: Socket) -> bool:
    """Drop the rest of a message after TooManyFrames, SKIP_MAX frames at most; return false when more frames are left.
    zmq.Again if the next frame has not come.

    Until the message ends, no other peer of the socket is served, so this is not done frame by frame: libzmq copies
    many frames in one call, for the caller to free, and libc frees them in one call. That takes a seventh of the time.
    """
    if _receive_many is None:
        return any(not _receive(socket, _NOW, False).more for _ in range(SKIP_MAX))
    parts = (ctypes.c_size_t * (2 * SKIP_MAX))()  # where each is, how large it is
    count = ctypes.c_size_t(SKIP_MAX)
    failed = _receive_many(socket.underlying, parts, ctypes.byref(count), _NOW) < 0
    copies = memoryview(parts)[: 2 * count.value : 2].tobytes() + bytes(ctypes.sizeof(ctypes.c_size_t))
    words = _libc.malloc(len(copies))
    ctypes.memmove(words, copies, len(copies))
    _libc.wordfree((ctypes.c_size_t * 3)(count.value, words, 0))  # wordexp_t: so many words, where, an offset
    if failed:
        raise zmq.ZMQError()
    return not socket.getsockopt(zmq.RCVMORE)


def has_message(socket: Socket) -> bool:
    """Return true if `receive` would find a message now."""
    return bool(zmq_poll([(socket, zmq.POLLIN)], 0))

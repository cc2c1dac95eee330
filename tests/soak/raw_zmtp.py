"""ZMTP 3.0 written byte by byte (RFC 23), to say what no ZeroMQ library would. Without keys; loopback and ipc only."""

from __future__ import annotations

import socket as unix
import struct
from contextlib import suppress

MORE, LONG, COMMAND = 1, 2, 4
GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL" + b"\0" * 16 + b"\0" + b"\0" * 31


def frame(body: bytes, flags: int = 0) -> bytes:
    if len(body) < 256:
        return bytes((flags, len(body))) + body
    return struct.pack(">BQ", flags | LONG, len(body)) + body


def ready(kind: bytes, identity: bytes = b"") -> bytes:
    def field(name: bytes, value: bytes) -> bytes:
        return bytes((len(name),)) + name + struct.pack(">I", len(value)) + value

    return frame(b"\5READY" + field(b"Socket-Type", kind) + field(b"Identity", identity), COMMAND)


def connect(endpoint: str, timeout_s: float = 5.0) -> unix.socket:
    """A bare connection to an ipc or a loopback tcp endpoint, and to no other."""
    if endpoint.startswith("ipc://"):
        peer = unix.socket(unix.AF_UNIX)
        peer.settimeout(timeout_s)
        try:
            peer.connect(endpoint.removeprefix("ipc://"))
        except OSError:
            peer.close()
            raise
        return peer
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    assert host == "127.0.0.1", "hostile traffic stays on this machine"
    return unix.create_connection((host, int(port)), timeout=timeout_s)


def greet(endpoint: str, kind: bytes = b"DEALER", identity: bytes = b"", timeout_s: float = 5.0) -> unix.socket:
    """A connection whose handshake is over; OSError where it was refused."""
    peer = connect(endpoint, timeout_s)
    try:
        peer.sendall(GREETING + ready(kind, identity))
        got = b""
        while b"READY" not in got:
            more = peer.recv(4096)
            if not more:
                raise ConnectionResetError(endpoint)
            got += more
    except BaseException:
        peer.close()
        raise
    return peer


def pour(peer: unix.socket, data: bytes, times: int) -> int:
    """Send `data` so often, or until the other side hangs up or stops reading for the socket's timeout: bytes sent."""
    sent = 0
    with suppress(OSError):
        for _ in range(times):
            peer.sendall(data)
            sent += len(data)
    return sent

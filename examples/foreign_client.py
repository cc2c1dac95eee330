"""A pdbus client written from docs/protocol.md alone: pyzmq and msgpack, nothing of pdbus.

    python examples/foreign_client.py CONTROLLER_CLIENTS_ENDPOINT --prompt 5,6,7 --max-tokens 8

Submits one request as a pair, attaches to the rank that decodes it, prints its tokens, one line, as they come.
Exit codes: 0 all tokens came, 1 the request failed, 2 bad arguments, 3 nobody answers.
"""

from __future__ import annotations

import argparse
import secrets
import struct
import sys
import time
from typing import Any

import msgpack
import zmq

VERSION = b"\x01"


class Failed(Exception):
    """The request ended without its answer."""


class Silent(Exception):
    """Nobody answered in time."""


def encode(*fields: Any) -> bytes:
    packed: bytes = msgpack.packb(fields)
    return VERSION + packed


def decode(frame: bytes) -> list[Any]:
    if frame[:1] != VERSION:
        raise Failed(f"a message of protocol version {frame[0] if frame else 'none'}, this program speaks 1")
    fields: list[Any] = msgpack.unpackb(frame[1:])
    return fields


def padded(fields: list[Any], required: int, *defaults: Any) -> list[Any]:
    """`required` fields and then those with a default, which a peer may leave out; newer ones are cut off."""
    return fields[: required + len(defaults)] + list(defaults[len(fields) - required :])


def dealer(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 500)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise SystemExit(f"error: cannot connect to {endpoint}: {error.strerror}") from None
    return socket


def generate(endpoint: str, prompt: list[int], max_tokens: int, *, leg: str, timeout_s: float) -> None:
    context = zmq.Context()
    controller = dealer(context, endpoint)
    rank: zmq.Socket[bytes] | None = None
    poller = zmq.Poller()
    poller.register(controller, zmq.POLLIN)
    rid = f"foreign-{secrets.token_hex(8)}"
    room = secrets.randbelow(2**63) if leg == "pair" else None
    attempt = have = 0  # `have`: index of the next token we want
    finished = False
    try:
        submit = encode("submit", rid, leg, len(prompt), max_tokens, room)  # the other fields take their defaults
        controller.send_multipart([submit, struct.pack(f"<{len(prompt)}i", *prompt), encode("params")])
        last_seen_at = time.monotonic()
        while not finished:  # `done` may come before or after; the output ends with `finish`
            ready = dict(poller.poll(250))
            if ready:
                last_seen_at = time.monotonic()
            elif time.monotonic() - last_seen_at > timeout_s:
                who = "the controller" if rank is None else "the rank that decodes"
                raise Silent(f"{who} has said nothing for {timeout_s:g} s")
            if controller in ready:
                tag, *fields = decode(controller.recv_multipart()[0])
                if tag == "accepted" and fields[4] is None:  # it waits for a rank there
                    continue
                if tag == "accepted" and fields[1] > attempt:  # again, with a new attempt, when a rank was lost
                    _, attempt, _, prefill, decode_at = fields[:5]
                    where = " and ".join(f"{at[0]}/{at[1]}" for at in (prefill, decode_at) if at)
                    print(f"accepted: room {room}, attempt {attempt}, runs on {where}", file=sys.stderr)
                    if rank is not None:
                        poller.unregister(rank)
                        rank.close()
                    rank = dealer(context, decode_at[3])
                    rank.send(encode("attach", rid, attempt, have))
                    poller.register(rank, zmq.POLLIN)
                elif tag == "failed":
                    raise Failed(f"{fields[2]}: {fields[3]}")
                elif tag == "refused":
                    raise Failed(f"{fields[0]}: {fields[1]}")
            if rank is not None and rank in ready:
                tag, *fields = decode(rank.recv_multipart()[0])
                if tag != "tokens" or fields[1] != attempt:
                    continue
                _, _, start, ids, finish, code, message = padded(fields, 4, "", "ok", "")
                if start > have:  # some were lost with a connection: ask again from where we are
                    rank.send(encode("attach", rid, attempt, have))
                    continue
                for token in ids[have - start :]:
                    print(token, end=" ", flush=True)
                    have += 1
                if finish in ("stop", "length"):
                    finished = True
                    print(flush=True)
                    rank.send(encode("detach", rid, attempt))
                elif finish:
                    print(f"attempt {attempt} ended: {code}: {message}", file=sys.stderr)  # another may follow
    finally:
        if not finished:
            controller.send(encode("cancel", rid))
        context.destroy(linger=500)


def main() -> int:
    parser = argparse.ArgumentParser(description="Submit one request to a pdbus controller and print its tokens.")
    parser.add_argument("controller", help="where it serves clients: ipc:///dir/controller.clients, tcp://host:port")
    parser.add_argument("--prompt", required=True, help="token ids, like 5,6,7")
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--leg", choices=("pair", "unified"), default="pair")
    parser.add_argument("--timeout-s", type=float, default=10.0, help="give up after this long without a word")
    options = parser.parse_args()
    try:
        prompt = [int(token) for token in options.prompt.split(",")]
        struct.pack(f"<{len(prompt)}i", *prompt)
    except (ValueError, struct.error):
        parser.error(f"--prompt {options.prompt!r}: want numbers below 2147483648 with commas between, like 5,6,7")
    try:
        generate(options.controller, prompt, options.max_tokens, leg=options.leg, timeout_s=options.timeout_s)
    except Failed as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    except Silent as error:
        print(f"error: {error} at {options.controller}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())

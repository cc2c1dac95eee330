"""The floors: what the same job costs in bare pyzmq, without pdbus. Each function is a process of a benchmark
(`child`): it says READY to `parent`, the process that started it, and runs until that has gone.

In the pyzmq that one would write: sockets are drained per turn, small frames are copied and large ones are not. The
broker comes `lean` too: it moves its frames as we do (`bus.runtime.frames`, the only part of ours in here), and does no
more.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import zmq

from benchmarks.child import STDIN, Parent
from bus.runtime import frames

NO_COPY_FROM = 64 * 1024  # bytes of payload; below, a copy is cheaper than a Frame object
BUDGET = 128


def broker(parent: Parent, clients: str, nodes: str, node_count: int, payload_bytes: int, lean: bool) -> None:
    """Pass each message of client DEALERs at the endpoint `clients` to the `node_count` node DEALERs at `nodes` in
    turn, and their answers back to the client. Waits first until all nodes have sent something. `payload_bytes` decides
    whether frames are copied."""
    copy = payload_bytes < NO_COPY_FROM

    def take(socket: zmq.Socket[bytes], copy: bool = True) -> list[Any]:
        return frames.receive(socket, 2, routed=True) if lean else socket.recv_multipart(zmq.NOBLOCK, copy=copy)

    def give(socket: zmq.Socket[bytes], message: list[Any], copy: bool = True) -> None:
        if lean:
            frames.send(socket, message)
        else:
            socket.send_multipart(message, copy=copy)

    with zmq.Context() as context, context.socket(zmq.ROUTER) as front, context.socket(zmq.ROUTER) as back:
        for socket, endpoint in ((front, clients), (back, nodes)):
            socket.linger = 0
            socket.bind(endpoint)
        parent.ready()
        next_node = itertools.cycle([back.recv_multipart()[0] for _ in range(node_count)]).__next__
        poller = zmq.Poller()
        for source in (front, back, STDIN):
            poller.register(source, zmq.POLLIN)
        while not parent.gone:
            for source, _ in poller.poll():
                if source is front:
                    for _ in range(BUDGET):
                        try:
                            message = take(front, copy)
                        except zmq.Again:
                            break
                        give(back, [next_node(), *message], copy)
                elif source is back:
                    for _ in range(BUDGET):
                        try:
                            message = take(back)
                        except zmq.Again:
                            break
                        give(front, message[1:])
                else:
                    parent.commands()


def echo(parent: Parent, endpoint: str) -> None:
    """Bind a ROUTER to `endpoint` and send every message back."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.bind(endpoint)
        parent.ready()
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(STDIN, zmq.POLLIN)
        while not parent.gone:
            for source, _ in poller.poll():
                if source is router:
                    router.send_multipart(router.recv_multipart())
                else:
                    parent.commands()


def asker(parent: Parent, endpoint: str) -> None:
    """Ask `echo` at `endpoint` over a REQ socket. A command gives `count`, `request_bytes` and `rate`; its answer is
    the seconds of each round trip."""
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.linger = 0
        socket.connect(endpoint)

        def round_trips(count: int, request_bytes: int, rate: float = 0.0) -> list[float]:
            """At `rate` a second, as the path beside it is paced; 0: one after the other."""
            request = b"x" * request_bytes
            times: list[float] = []
            first = time.perf_counter()
            for number in range(count):
                if rate:
                    time.sleep(max(0.0, first + number / rate - time.perf_counter()))
                began = time.perf_counter()
                socket.send(request)
                socket.recv()
                times.append(time.perf_counter() - began)
            return times

        parent.serve(round_trips)

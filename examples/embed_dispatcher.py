"""An engine that embeds the dispatcher in place of its own data-parallel controller.

Two engine ranks (here minimal ones that answer at once: `examples/foreign_scheduler.py` shows a whole one) join over
ZeroMQ; the process that holds the requests dispatches to them without blocking.
"""

from __future__ import annotations

import tempfile
import threading
import time

import zmq

from bus.endpoints import ControllerAddress
from bus.runtime.epochs import new_epoch
from bus.wire import codec
from bus.wire.messages import CONTROLLER_TO_NODE, Dispatch, Ended, Hello, Ping, Pong, Progress
from controller import ControllerConfig, Dispatcher


def engine_rank(dp_rank: int, endpoint: str, leave: threading.Event) -> None:
    """What every engine has: a loop that takes requests in and says when they have ended."""
    epoch = new_epoch()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoint)
        socket.send(codec.encode(Hello("engine", dp_rank, epoch, "unified", "m", 2, "ready", "", 8192, 0, 0, 16)))
        while not leave.is_set():
            if socket.poll(50):
                message = codec.decode(socket.recv_multipart()[0], CONTROLLER_TO_NODE)
                if isinstance(message, Ping):
                    socket.send(codec.encode(Pong(message.n, 0, False)))
                elif isinstance(message, Dispatch):
                    ended = (Ended(message.rid, message.attempt, "unified", "ok"),)
                    socket.send(codec.encode(Progress("engine", dp_rank, epoch, (), ended)))


leave = threading.Event()
with tempfile.TemporaryDirectory(prefix="pd") as folder:
    config = ControllerConfig(
        bus=f"ipc://{folder}/bus", controller=f"ipc://{folder}/c", with_broker=True, unified_method="total_tokens"
    )
    with Dispatcher(config) as dispatcher:  # ten lines from here
        endpoint = ControllerAddress(config.controller).nodes
        ranks = [threading.Thread(target=engine_rank, args=(n, endpoint, leave)) for n in range(2)]
        for rank in ranks:
            rank.start()
        while sum(rank.state == "ready" for rank in dispatcher.status().ranks) < 2:
            time.sleep(0.02)
        for n in range(4):
            dispatcher.dispatch(f"request-{n}", [bytes(4 * 100), b""], max_tokens=16)  # a prompt of 100 token ids
        ended = 0
        while ended < 4:  # an engine would just poll once a step
            for answer in dispatcher.poll(timeout_s=0.1):
                ended += type(answer).__name__ in ("Done", "Failed")
                print(answer.rid, type(answer).__name__, getattr(getattr(answer, "decode", None), "dp_rank", ""))
        leave.set()
        for rank in ranks:
            rank.join()

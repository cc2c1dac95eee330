"""Asks a controller what became of a request."""

from __future__ import annotations

import time

import zmq

from bus.endpoints import ControllerAddress
from bus.errors import PeerLost, RemoteProtocolError, RequestFailed
from bus.runtime.keys import load_keys
from bus.runtime.sockets import Sockets
from bus.wire import codec
from bus.wire.messages import CONTROLLER_TO_CLIENT, Refused, TraceIs, TraceQuery

REPEAT_S = 2.0  # longer than a controller waits for its ranks


def ask(controller: str, rid: str, keys: str, wait_s: float) -> TraceIs:
    """PeerLost without an answer, RequestFailed where the controller refuses one."""
    with Sockets(keys=load_keys(keys, "admins", "clients") if keys else None) as sockets:
        dealer = sockets.dealer(ControllerAddress(controller).clients, role="controllers")
        until = time.monotonic() + wait_s
        number = 0
        while (left_s := until - time.monotonic()) > 0:
            number += 1
            try:
                dealer.send(codec.encode(TraceQuery(number, rid)), zmq.NOBLOCK)
            except zmq.Again:
                break  # refused already: it does not know our key
            again = time.monotonic() + min(left_s, REPEAT_S)
            while dealer.poll(max(0, int(1000 * (again - time.monotonic())))):
                try:
                    answer = codec.decode(dealer.recv_multipart()[-1], CONTROLLER_TO_CLIENT)
                except RemoteProtocolError:
                    continue
                if isinstance(answer, Refused):
                    if answer.code == "bad_message":
                        raise RequestFailed(answer.code, "the controller is older than this command")
                    raise RequestFailed(answer.code, answer.message)
                if isinstance(answer, TraceIs):
                    return answer
    raise PeerLost(f"no controller answers at {controller} (waited {wait_s:g} s)")

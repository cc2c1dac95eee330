"""The surroundings of another engine's dispatcher in the `peers` benchmark: a sender of requests, and ranks that end
each at once. Needs no engine: requests, and the form of answers, were encoded by the engine's own code
(`benchmarks.peers_engines`). Functions with `parent` are processes, which run until the parent has gone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import zmq
from msgspec import msgpack

from benchmarks import pick
from benchmarks.bare import BUDGET, NO_COPY_FROM
from benchmarks.child import STDIN, Parent
from benchmarks.client import Traffic
from benchmarks.node import Journeys
from bus.build import CORES

MARK = b"sent-at-"  # in a request's id, before the nanoseconds of its submit in 16 hexadecimal digits; 0: not measured
ID = "{number:08d}-sent-at-{sent_ns:016x}"
HEAD_BYTES = 1_024  # of an encoded request; the id is in there
LOADS_S = 0.05  # between the loads of a busy rank


def sender(parent: Parent, replies: str, sockets: dict[str, str], requests: dict[str, dict[str, str]]) -> None:
    """Push requests to one of `sockets` (endpoints by name) and count the ends that ranks send to `replies`. `requests`
    gives the file of an encoded request by socket and by tokens of the prompt. Commands are those of
    `benchmarks.client`, with `to` and `tokens`."""
    with zmq.Context() as context, context.socket(zmq.PULL) as pull:
        pull.bind(replies)
        pushes = {to: context.socket(zmq.PUSH) for to in sockets}
        for to, endpoint in sockets.items():
            pushes[to].linger = 0
            pushes[to].bind(endpoint)
        traffics = {
            (to, tokens): Pushed(pushes[to], pull, path) for to in sockets for tokens, path in requests[to].items()
        }
        parent.serve(lambda do, to, tokens, **how: getattr(traffics[to, str(tokens)], do)(**how))
        for push in pushes.values():
            push.close()


class Pushed(Traffic):
    """The traffic with one encoded request, again and again, its id stamped with the time; ranks send the number of
    ends."""

    def __init__(self, push: zmq.Socket[bytes], pull: zmq.Socket[bytes], path: str) -> None:
        with open(path, "rb") as file:
            encoded = file.read()
        self._push, self._pull = push, pull
        stamp = encoded.index(MARK) + len(MARK)
        assert stamp + 16 <= HEAD_BYTES
        self._before, self._after = encoded[:stamp], encoded[stamp + 16 :]
        self._copy = len(encoded) < NO_COPY_FROM
        self._sent = self._ended = 0

    def _stamped(self, sent_ns: int) -> bytes:
        return b"%s%016x%s" % (self._before, sent_ns, self._after)

    def _submit(self, prompt: bytes) -> None:
        self._sent += 1
        self._push.send(prompt, 0, self._copy)

    def _receive(self, timeout_ms: int, idle_is_error: bool = True) -> str:
        if not self._pull.poll(timeout_ms):
            return "no answer" if idle_is_error else ""
        while True:
            try:
                self._ended += int.from_bytes(self._pull.recv(zmq.NOBLOCK), "little")
            except zmq.Again:
                return ""


def pulling_rank(parent: Parent, takes: str, replies: str) -> None:
    """Run a rank that takes what is pushed to `takes`, as SGLang's schedulers do, and sends `replies` how many requests
    it got, once a turn. Commands are answered with the journeys since the last."""
    with zmq.Context() as context, context.socket(zmq.PULL) as pull, context.socket(zmq.PUSH) as push:
        pull.bind(takes)
        push.linger = 0
        push.connect(replies)
        journeys = Journeys()
        take = _taker(pull, journeys)
        _turns(parent, journeys, (pull,), lambda _: push.send(len(take()).to_bytes(4, "little")))


def dealing_rank(
    parent: Parent, takes: str, number: int, replies: str, loads: str, waves: str, ended: list[Any], load: str
) -> None:
    """Run rank `number`, which takes what the ROUTER at `takes` deals, as vLLM's engines do. It pushes one message of
    all that ended in a turn to `replies`, and its load to the coordinator at `loads` while it changes. `ended` is the
    form of such a message for one request, whose id is MARK; `load` is a message, in hexadecimal digits. Commands are
    answered with the journeys since the last."""
    with (
        zmq.Context() as context,
        context.socket(zmq.DEALER) as dealer,
        context.socket(zmq.PUSH) as outputs,
        context.socket(zmq.PUSH) as coordinator,
        context.socket(zmq.SUB) as waves_in,
    ):
        for socket, endpoint in ((dealer, takes), (outputs, replies), (coordinator, loads), (waves_in, waves)):
            socket.linger = 0
            if socket is dealer:
                socket.setsockopt(zmq.IDENTITY, number.to_bytes(2, "little"))
            if socket is waves_in:
                socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.connect(endpoint)
        dealer.send(b"")
        journeys = Journeys()
        take = _taker(dealer, journeys)
        form, finished = ended[1][0], ended.index([MARK.decode()])
        state = msgpack.decode(bytes.fromhex(load))
        ended[0] = state[0] = number
        sent_at = 0.0

        def turn(source: Any) -> None:
            nonlocal sent_at
            if source is waves_in:
                waves_in.recv()
                return
            ids = take()
            ended[1], ended[finished] = [[each, *form[1:]] for each in ids], ids
            outputs.send(msgpack.encode(ended))
            if (now := time.monotonic()) - sent_at >= LOADS_S:
                sent_at = now
                coordinator.send(msgpack.encode(state))

        _turns(parent, journeys, (dealer, waves_in), turn)


def _taker(socket: zmq.Socket[bytes], journeys: Journeys) -> Callable[[], list[str]]:
    def take() -> list[str]:
        """The ids of the requests that have come, at most BUDGET of them."""
        ids = []
        for _ in range(BUDGET):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            for frame in frames:
                head = bytes(frame.buffer[:HEAD_BYTES])
                if (at := head.find(MARK)) >= 0:
                    stamp = head[at + len(MARK) : at + len(MARK) + 16]
                    journeys.sent_at(int(stamp, 16))
                    ids.append((head[at - 9 : at] + MARK + stamp).decode())
                    break
        return ids

    return take


def _turns(
    parent: Parent, journeys: Journeys, sockets: tuple[zmq.Socket[bytes], ...], turn: Callable[[Any], Any]
) -> None:
    """Call `turn` for each of `sockets` that has something; send journeys when asked, until the parent has gone."""
    parent.ready()
    poller = zmq.Poller()
    for source in (*sockets, STDIN):
        poller.register(source, zmq.POLLIN)
    while not parent.gone:
        for source, _ in poller.poll():
            if source != STDIN:
                turn(source)
                continue
            for _ in parent.commands():
                parent.send(journeys.take())


def pick_of_ours(ranks: list[int], picks: int) -> dict[str, list[float]]:
    """Measure our pick with its raise by `total_tokens`: return microseconds of CPU by number of ranks, several values
    each."""
    return {str(count): pick.measure("total_tokens", count, picks)["ours"] for count in ranks}


def cores() -> str:
    """Return whether this Python has our compiled cores or pure Python, as text."""
    return CORES

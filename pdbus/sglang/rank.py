"""An SGLang rank's own side on the bus: the requests that it has ingested, its load reports, and the rooms that it
prefills (a room is SGLang's number of a request, by which the decode rank finds the prefill rank).

Runs on the scheduler's thread and never blocks it. The bus has a thread of its own (`bus.Publisher`), and so has
`HttpRooms`, which registers rooms with SGLang's HTTP server while the broker is silent.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException
from typing import Any, Protocol

from bus.runtime.logs import get_logger
from bus.wire.codes import Code
from bus.wire.messages import MAX_ROOM, Ack, Load

BROKER_LOST_S = 3.0  # a broker silent for longer counts as gone
MAX_QUEUED = 10_000
HTTP_S = 5.0

log = get_logger("sglang")


class Bus(Protocol):
    """The part of `bus.Publisher` that is used here: `silent_s` is the seconds since the broker's last sign of life,
    `register` and `drop` publish rooms, `report` a load."""

    @property
    def silent_s(self) -> float: ...
    def register(self, room: int) -> None: ...
    def drop(self, room: int, attempt: int = 1, code: Code = "ok") -> None: ...
    def report(self, load: Load) -> None: ...


def fits(room: object) -> bool:
    """Return true if the bus can carry `room`; SGLang takes any number."""
    return isinstance(room, int) and 0 <= room <= MAX_ROOM


def charge_of(request: Any) -> int:
    """Return the number of the prompt's tokens; SGLang's ranks and DP controller count requests by it."""
    return len(request.input_ids or ())


def load_of(snapshot: Any, step: int, ack: Ack | None) -> Load:
    """Return SGLang's LoadSnapshot as our Load, not numbered; `step` counts changes, `ack` are the requests ingested so
    far (None: not acknowledged).

    SGLang's `num_total_tokens` are held tokens and those of all waiting prompts. The rest of a prompt that is computed
    in chunks is only in `num_waiting_uncached_tokens`.
    """
    held = int(snapshot.num_used_tokens)
    waiting_tokens = max(int(snapshot.num_total_tokens) - held, int(snapshot.num_waiting_uncached_tokens), 0)
    return Load(
        seq=0,
        step=step,
        running=int(snapshot.num_running_reqs),
        waiting=int(snapshot.num_waiting_reqs),
        waiting_tokens=waiting_tokens,
        kv_tokens=max(0, held),
        kv_capacity=int(snapshot.max_total_num_tokens),
        max_running=int(snapshot.max_running_requests),
        acks=() if ack is None else (ack,),
        prompt_tokens_total=int(snapshot.total_prefill_uncached_tokens),
        busy_us_total=int(snapshot.total_prefill_busy_us),
    )


class Rank:
    """One rank on the bus. `nonce` is the number of the server's start, which the DP controller shares; 0: it does not,
    and nothing is acknowledged. `http(address, room)` registers a room with SGLang's own server: `always`, or while the
    broker is silent; None: never."""

    def __init__(
        self, bus: Bus, nonce: int, *, http: Callable[[str, int], None] | None = None, always: bool = False
    ) -> None:
        self._bus = bus
        self._nonce = nonce
        self._http = http
        self._always = always
        self._dispatches = 0
        self._tokens = 0
        self._step = 0
        self._last: Load | None = None
        self.rooms: dict[int, str] = {}  # registered rooms -> the bootstrap address of their request
        self._by_http: set[int] = set()  # rooms that the HTTP server knows too

    @property
    def broker_alive(self) -> bool:
        """True if the broker has given a sign of life within BROKER_LOST_S."""
        return self._bus.silent_s < BROKER_LOST_S

    def ingested(self, tokens: int) -> None:
        """Count a request with `tokens` prompt tokens that SGLang has taken in; the next report acknowledges it."""
        self._dispatches += 1
        self._tokens += tokens

    def report(self, snapshot: Any) -> None:
        """Publish the load; called each time SGLang's loop publishes its own. `snapshot` is that one, None where it
        published none. An unchanged load is not sent again (the publisher repeats it itself). While the broker is
        silent, also register all rooms over HTTP."""
        if self.rooms and not self.broker_alive:
            for room, address in self.rooms.items():
                self._register_by_http(room, address)
        if snapshot is None:
            return
        ack = Ack(self._nonce, self._dispatches, self._tokens) if self._nonce else None
        load = load_of(snapshot, self._step, ack)
        if load != self._last:
            self._step += 1
            self._last = load_of(snapshot, self._step, ack)
            self._bus.report(self._last)

    def register(self, room: int, address: str) -> None:
        """Publish that `room` is prefilled here; `address` is the bootstrap address of its request. A number that the
        bus cannot carry is registered over HTTP alone."""
        if fits(room):
            self.rooms[room] = address
            self._bus.register(room)
        if self._always or not fits(room) or not self.broker_alive:
            self._register_by_http(room, address)

    def drop(self, room: int, *, failed: bool) -> None:
        """Publish that `room` is no longer here; SGLang has released it. With `failed`, the ranks that wait for it are
        notified. An unknown room is ignored."""
        self._by_http.discard(room)
        if self.rooms.pop(room, None) is not None:
            self._bus.drop(room, code="prefill_failed" if failed else "ok")

    def _register_by_http(self, room: int, address: str) -> None:
        if self._http is not None and room not in self._by_http:
            self._by_http.add(room)
            self._http(address, room)


class HttpRooms:
    """Registers rooms of rank `dp_rank` at SGLang's bootstrap servers over HTTP, one after another, on a thread of its
    own. A failure is logged, not repeated."""

    def __init__(self, dp_rank: int) -> None:
        self._dp_rank = dp_rank
        self._queue: queue.Queue[tuple[str, int] | None] = queue.Queue(MAX_QUEUED)
        self._connections: dict[str, HTTPConnection] = {}
        self._failing = False
        self._thread: threading.Thread | None = None

    def __call__(self, address: str, room: int) -> None:
        """Enqueue `room` for the server at `address` (`host:port`), without waiting; if the queue is full it is left
        out, and that is logged."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pdbus-sglang-http", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait((address, room))
        except queue.Full:
            log.warning("pdbus.room.not_registered", room=room, why="too many wait for the HTTP server")

    def stop(self) -> None:
        """Stop after the queued rooms, for tests; otherwise the thread ends with the process."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
        for connection in self._connections.values():
            connection.close()

    def _run(self) -> None:
        while (queued := self._queue.get()) is not None:
            address, room = queued
            try:
                self._post(address, room)
                self._failing = False
            except (OSError, HTTPException) as error:
                self._connections.pop(address).close()
                if not self._failing:
                    log.warning("pdbus.room.not_registered", room=room, server=address, why=f"{error}"[:200])
                self._failing = True

    def _post(self, address: str, room: int) -> None:
        body = json.dumps({"bootstrap_room": room, "dp_rank": self._dp_rank})
        for fresh in (False, True):  # a kept connection may have been closed meanwhile
            connection = self._connections.setdefault(address, HTTPConnection(address, timeout=HTTP_S))
            try:
                connection.request("POST", "/register_dp_rank", body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                answer.read()
            except (OSError, HTTPException):
                connection.close()  # and opens itself again
                if fresh:
                    raise
                continue
            if answer.status != 200:
                raise HTTPException(f"status {answer.status}")
            return

"""A rank's own side: what it has taken in, the loads that say so, and the rooms it prefills.

Runs on the scheduler's thread, which nothing here blocks: the bus has a thread of its own (`bus.Publisher`), and so has
what registers rooms with SGLang's HTTP server while no broker is heard (`HttpRooms`).
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

BROKER_LOST_S = 3.0  # a broker silent for longer is taken for gone
MAX_QUEUED = 10_000
HTTP_S = 5.0

log = get_logger("sglang")


class Bus(Protocol):
    """Of `bus.Publisher`, what is used here."""

    @property
    def silent_s(self) -> float: ...
    def register(self, room: int) -> None: ...
    def drop(self, room: int, attempt: int = 1, code: Code = "ok") -> None: ...
    def report(self, load: Load) -> None: ...


def fits(room: object) -> bool:
    """Whether the bus can carry a room; SGLang takes any number."""
    return isinstance(room, int) and 0 <= room <= MAX_ROOM


def charge_of(request: Any) -> int:
    """Return the tokens of a request's prompt."""
    return len(request.input_ids or ())


def load_of(snapshot: Any, step: int, ack: Ack | None) -> Load:
    """SGLang's LoadSnapshot in our words. Its `num_total_tokens` are those held and those of all prompts that wait; the
    rest of a prompt that is computed in chunks is in neither, but in the uncached ones."""
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
    """One rank on the bus. `nonce` is 0 where DP controller and ranks share none: then nothing is acknowledged.
    `http(address, room)` registers a room with SGLang's own server, `always` or while no broker is heard."""

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
        self.rooms: dict[int, str] = {}  # registered and not dropped -> the bootstrap address they came by
        self._by_http: set[int] = set()  # of them, those that the HTTP server knows too

    @property
    def broker_alive(self) -> bool:
        """Whether the broker is there."""
        return self._bus.silent_s < BROKER_LOST_S

    def ingested(self, tokens: int) -> None:
        """A request of so many tokens was taken in."""
        self._dispatches += 1
        self._tokens += tokens

    def report(self, snapshot: Any) -> None:
        """SGLang's loop has come to where it publishes its load: `snapshot`, or None where it published none. An idle
        rank comes here all the time: what has not changed is not said again (the publisher repeats it in its time)."""
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
        """`room` is prefilled here; its request came by the bootstrap server at `address`."""
        if fits(room):
            self.rooms[room] = address
            self._bus.register(room)
        if self._always or not fits(room) or not self.broker_alive:
            self._register_by_http(room, address)

    def drop(self, room: int, *, failed: bool) -> None:
        """SGLang has let go of `room`; if it failed, whoever waits for it is told."""
        self._by_http.discard(room)
        if self.rooms.pop(room, None) is not None:
            self._bus.drop(room, code="prefill_failed" if failed else "ok")

    def _register_by_http(self, room: int, address: str) -> None:
        if self._http is not None and room not in self._by_http:
            self._by_http.add(room)
            self._http(address, room)


class HttpRooms:
    """Registers rooms of `dp_rank` at SGLang's bootstrap servers, one after the other, on a thread of its own."""

    def __init__(self, dp_rank: int) -> None:
        self._dp_rank = dp_rank
        self._queue: queue.Queue[tuple[str, int] | None] = queue.Queue(MAX_QUEUED)
        self._connections: dict[str, HTTPConnection] = {}
        self._failing = False
        self._thread: threading.Thread | None = None

    def __call__(self, address: str, room: int) -> None:
        """Soon; what does not fit in the queue is left out."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pdbus-sglang-http", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait((address, room))
        except queue.Full:
            log.warning("pdbus.room.not_registered", room=room, why="too many wait for the HTTP server")

    def stop(self) -> None:
        """After what is queued. For tests: a scheduler's process ends with its threads."""
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
        for fresh in (False, True):  # a connection kept from before may have been closed meanwhile
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

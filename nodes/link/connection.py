"""One rank's connection to one controller: hello (the rank introduces itself), liveness, and all messages in both
directions. It owns its DEALER.

A controller may start late, vanish and return. The rank sends hello until it is welcomed. It sends it again over each
new connection, because the controller cannot know which rank is behind it, and after half a lease (the silence after
which one side takes the other for lost). Requests of a vanished controller go on. Their results are kept until the
queue takes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import zmq

from bus.defaults import LEASE_S
from bus.errors import LocalProtocolError, RemoteProtocolError
from bus.runtime.logs import get_logger
from bus.runtime.sockets import PAYLOAD_MAX, Socket, Sockets
from bus.wire.codec import decode, encode
from bus.wire.messages import (
    CONTROLLER_TO_NODE,
    Bye,
    CancelLeg,
    Dispatch,
    Drain,
    Ended,
    Hello,
    HistoryQuery,
    HistoryReply,
    Message,
    Ping,
    Pong,
    Progress,
    RecordQuery,
    RecordReply,
    Refused,
    TraceEvent,
    Welcome,
    Who,
)

HELLO_S = 1.0
WHO_GAP_S = 0.05
MAX_ENDED_PER_MESSAGE = 128  # so that both fit in a frame with the longest rids and sentences, in any script
MAX_STARTED_PER_MESSAGE = 512
MAX_OWED = 65_536  # beginnings, and ends, kept for a controller whose queue is full

log = get_logger("node")


class RankEndpoint(Protocol):
    """The interface of a rank that its connection calls, on the loop's thread. `hello` makes the introduction.
    `welcomed` (`again`: not for the first time), `dispatched`, `cancelled` and `drain` take in the controller's
    messages; `restate_cache` publishes the whole cache again. `recall` returns a request's events, `recorded` what the
    rank does. `superseded`: the controller refuses this start of the rank because of a later one."""

    instance: str
    dp_rank: int
    epoch: int
    wall_s: float  # what makes seconds since 1970 of the clock

    def hello(self) -> Hello: ...
    def welcomed(self, connection: Connection, welcome: Welcome, again: bool) -> None: ...
    def dispatched(self, connection: Connection, dispatch: Dispatch, frames: list[bytes]) -> None: ...
    def cancelled(self, connection: Connection, cancel: CancelLeg) -> None: ...
    def drain(self, cause: str) -> None: ...
    def steps(self) -> tuple[int, bool, int]:
        """Return (forward steps done, whether one is running, seq of the newest load)."""
        ...

    def restate_cache(self) -> None: ...
    def recall(self, rid: str) -> tuple[TraceEvent, ...]: ...
    def recorded(self, query: RecordQuery) -> RecordReply: ...
    def superseded(self, why: str) -> None: ...


class Connection:
    """The connection; all methods are for the loop's thread, and none blocks. `key` names it to the rank's core as the
    owner of legs. `welcome` is None until the controller has answered, and when it refuses this start of the rank
    since; `fenced` is its reason. `unsent` counts messages that the queue did not take. `rejected(socket, error, peer)`
    is called for each invalid message."""

    def __init__(
        self, sockets: Sockets, rank: RankEndpoint, key: int, endpoint: str, clock: Callable[[], float],
        rejected: Callable[[str, RemoteProtocolError, str], None],
    ) -> None:  # fmt: skip
        self.rank = rank
        self.key = key
        self.endpoint = endpoint
        self.welcome: Welcome | None = None
        self._fenced = ""
        self.unsent = 0
        self._clock = clock
        self._rejected = rejected
        self._sockets = sockets
        self._last_seen_at = float("-inf")
        self._hello_at = float("-inf")
        self._hello_owed = False
        self._bye_owed = False
        self._started: list[tuple[str, int]] = []
        self._ended: list[Ended] = []
        self.socket: Socket = sockets.dealer(endpoint, maximum=PAYLOAD_MAX, role="controllers")
        self._connected = sockets.connections(self.socket)

    @property
    def silent(self) -> bool:
        """True if the controller never welcomed the rank, or was silent for a lease."""
        return self._silent(1.0)

    @property
    def fenced(self) -> str:
        """Return why the controller refuses the rank; empty: it does not, or has been silent for a lease since then."""
        return self._fenced if self._clock() - self._last_seen_at <= LEASE_S else ""

    def _silent(self, leases: float) -> bool:
        return self.welcome is None or self._clock() - self._last_seen_at > leases * (self.welcome.lease_s or LEASE_S)

    @property
    def owes(self) -> bool:
        """True while progress or the goodbye waits for space in the queue."""
        return bool(self._started or self._ended or self._bye_owed)

    def tick(self) -> None:
        """Send what is due: progress that is owed, and hello. The rank calls it many times a second."""
        self._send_owed()
        if self._connected() and self.welcome is not None:
            self.send_hello()
        if (self._hello_owed or self._silent(0.5)) and self._clock() - self._hello_at >= HELLO_S:
            self.send_hello()

    def send_hello(self) -> None:
        """Send hello now; if the queue is full, `tick` sends it later."""
        self._hello_at = self._clock()
        self._hello_owed = not self.send(self.rank.hello())

    def send_bye(self) -> None:
        """Send the goodbye after all progress that is owed, because it ends every leg that is not known to have
        ended."""
        self._bye_owed = True
        self._send_owed()

    def progress(self, started: list[tuple[str, int]], ended: list[Ended]) -> None:
        """Send which legs began and which ended. Beyond MAX_OWED the oldest are dropped: their controller was silent
        all that time, and gets the remembered ends when it welcomes the rank again."""
        self._started += started
        self._ended += ended
        self._send_owed()
        del self._started[:-MAX_OWED], self._ended[:-MAX_OWED]

    def _send_owed(self) -> None:
        """Send what is owed: one message, or a few when there is much, as far as the queue takes it."""
        rank = self.rank
        while self._started or self._ended:
            started, ended = self._started[:MAX_STARTED_PER_MESSAGE], self._ended[:MAX_ENDED_PER_MESSAGE]
            if not self.send(Progress(rank.instance, rank.dp_rank, rank.epoch, tuple(started), tuple(ended))):
                return
            del self._started[: len(started)], self._ended[: len(ended)]
        if self._bye_owed:
            self._bye_owed = not self.send(Bye(rank.instance, rank.dp_rank, rank.epoch))

    def send(self, message: Message) -> bool:
        """Send a message; return false when the queue is full: the caller may send it again later. A message that is
        too large is dropped and counted as `unsent`."""
        try:
            self.socket.send(encode(message), zmq.NOBLOCK)
        except (zmq.Again, LocalProtocolError) as error:
            if not self.unsent:
                log.warning("controller.unsent", endpoint=self.endpoint, why=type(error).__name__)
            self.unsent += 1
            return not isinstance(error, zmq.Again)
        return True

    def receive(self, frames: list[bytes]) -> None:
        """Take in one message of the controller: answer it, or call the rank. An invalid one is rejected."""
        try:
            message = decode(frames[0], CONTROLLER_TO_NODE)
            if len(frames) > 1 and not isinstance(message, Dispatch):
                raise RemoteProtocolError("frames", f"{len(frames)} frames")
        except RemoteProtocolError as error:
            self._rejected("controller", error, self.endpoint)
            return
        now = self._clock()
        self._last_seen_at = now
        rank = self.rank
        if isinstance(message, Dispatch):
            rank.dispatched(self, message, frames[1:])
        elif isinstance(message, Ping):
            self.send(Pong(message.n, *rank.steps(), at_us=round((rank.wall_s + now) * 1e6)))
            if message.restate:
                rank.restate_cache()
        elif isinstance(message, CancelLeg):
            rank.cancelled(self, message)
        elif isinstance(message, Welcome):
            again = self.welcome is not None
            self.welcome, self._fenced = message, ""
            rank.welcomed(self, message, again)
        elif isinstance(message, Who):
            if now - self._hello_at >= WHO_GAP_S:
                self.send_hello()
        elif isinstance(message, HistoryQuery):
            self.send(HistoryReply(message.id, rank.recall(message.rid)))
        elif isinstance(message, RecordQuery):
            self.send(rank.recorded(message))
        elif isinstance(message, Drain):
            rank.drain("drain")
        elif isinstance(message, Refused):
            log.warning("controller.refused", endpoint=self.endpoint, code=message.code, why=message.message)
            if message.code == "fenced":
                self.welcome, self._fenced = None, message.message
                rank.superseded(message.message)

    def close(self, *, linger_ms: int) -> None:
        """Close the socket; it goes on sending what is queued for `linger_ms`."""
        self._sockets.close_socket(self.socket, linger_ms=linger_ms)

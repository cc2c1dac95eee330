"""The sockets of one foreign engine's feeds: changes of its ranks' prefix caches (KV events), their replay, load. This
module owns sockets and time; it decides nothing.

Each rank has a SUB of its own, so that sequence numbers are kept apart, and each replay a DEALER of its own, so that
answers of an old replay are not taken for those of a new one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from bus.errors import RemoteProtocolError
from bus.runtime.intake import Rejections
from bus.runtime.logs import get_logger
from bus.runtime.loop import Loop, Timer
from bus.runtime.sockets import Socket, Sockets
from bus.wire.kv_names import Changes
from bus.wire.messages import Load, MemberKey
from controller.feeds.follower import Follower, Learned
from controller.feeds.load_stat import parse_load_stat
from controller.feeds.settings import EngineSettings

REPLAY_S = 2.0  # an answer that pauses for so long is over

log = get_logger("controller")


class EngineFeed:
    """The feed of one engine, from its construction to `close`. It calls `on_changes` and `on_load` with a rank's key
    on the loop's thread. Messages that cannot be read are counted in `counts`, as `Follower` does, and logged."""

    def __init__(
        self,
        loop: Loop,
        sockets: Sockets,
        settings: EngineSettings,
        on_changes: Callable[[MemberKey, Changes], None],
        on_load: Callable[[MemberKey, Load], None],
        counts: Counter[str],
    ) -> None:
        self.settings = settings
        self.followers = [Follower(rank, counts, replay=bool(settings.replay)) for rank in range(settings.dp_size)]
        self._counts = counts
        self._rejections = Rejections(log, counts, prefix="rejected_")
        self._loop = loop
        self._sockets = sockets
        self._on_changes = on_changes
        self._on_load = on_load
        self._replays: dict[int, tuple[Socket, Timer]] = {}
        self._open: list[Socket] = []
        for rank in range(settings.dp_size):
            self._listen(settings.port, rank, (b"",), partial(self._event, rank))
            if settings.load:
                self._listen(settings.load, rank, (b"load",), partial(self._load, rank))
        log.info("engine.followed", kind=settings.kind, host=settings.host, port=settings.port, ranks=settings.dp_size)

    def close(self) -> None:
        """Close the sockets; a second call does nothing. Call it on the loop's thread."""
        for rank in list(self._replays):
            self._end_replay(rank)
        for socket in self._open:
            self._loop.remove(socket)
            self._sockets.close_socket(socket)
        self._open.clear()

    # --- inside -----------------------------------------------------------------------------------------------

    def _listen(self, port: int, rank: int, topics: tuple[bytes, ...], handler: Callable[[list[Any]], None]) -> None:
        socket = self._sockets.sub(self.settings.endpoint(port, rank), topics)
        self._open.append(socket)
        self._loop.add(socket, handler)

    def _event(self, rank: int, frames: list[bytes]) -> None:
        try:
            learned = self.followers[rank].live(frames)
        except RemoteProtocolError as error:
            self._reject(rank, error)
            return
        self._do(rank, learned)

    def _load(self, rank: int, frames: list[bytes]) -> None:
        try:
            _, reported, load = parse_load_stat(frames)
            if reported != rank:
                raise RemoteProtocolError("rank", f"load of rank {reported}")
        except RemoteProtocolError as error:
            self._reject(rank, error)
            return
        self._on_load((self.settings.instance, rank), load)

    def _do(self, rank: int, learned: Learned) -> None:
        if learned.changes:
            self._on_changes((self.settings.instance, rank), learned.changes)
        if learned.replay_from is not None:
            self._ask(rank, learned.replay_from)
        elif not self.followers[rank].sequence.replaying:
            self._end_replay(rank)

    def _ask(self, rank: int, start: int) -> None:
        self._end_replay(rank)
        socket = self._sockets.dealer(self.settings.endpoint(self.settings.replay, rank))
        self._loop.add(socket, partial(self._replayed, rank, socket))
        self._replays[rank] = (socket, self._loop.call_later(REPLAY_S, partial(self._silence, rank)))
        socket.send_multipart([b"", start.to_bytes(8, "big")])

    def _replayed(self, rank: int, socket: Socket, frames: list[bytes]) -> None:
        current, timer = self._replays[rank]
        assert current is socket
        timer.cancel()
        self._replays[rank] = (socket, self._loop.call_later(REPLAY_S, partial(self._silence, rank)))
        try:
            learned = self.followers[rank].replayed(frames)
        except RemoteProtocolError as error:
            self._reject(rank, error)
            return
        self._do(rank, learned)

    def _silence(self, rank: int) -> None:
        self._end_replay(rank)
        self._do(rank, self.followers[rank].unanswered())

    def _end_replay(self, rank: int) -> None:
        replay = self._replays.pop(rank, None)
        if replay is not None:
            socket, timer = replay
            timer.cancel()
            self._loop.remove(socket)
            self._sockets.close_socket(socket)

    def _reject(self, rank: int, error: RemoteProtocolError) -> None:
        self._rejections.note(f"{self.settings.host}/{rank}", error)

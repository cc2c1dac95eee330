"""The hooks in an SGLang scheduler's process (one of a rank): a prefill rank publishes its rooms, a decode rank finds
the rooms that it waits for and gives up lost ones. A room is SGLang's number of a request.

A thin layer: `rank` and `rooms` decide. After an error of ours, SGLang's own way is used from then on, and the log says
so once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from bus import Publisher, Resolver
from bus.errors import BusError
from bus.runtime.logs import get_logger
from bus.wire import topics
from pdbus.sglang import addresses, engine
from pdbus.sglang.rank import BROKER_LOST_S, HttpRooms, Rank, charge_of
from pdbus.sglang.rooms import FORGET_S, PrefillBus, RankLiveness
from pdbus.sglang.settings import Settings
from pdbus.sglang.watch import Watch

log = get_logger("sglang")
LIVES_TOPICS = (topics.BEACON, topics.MEMBER)


class Decoding:
    """A decode rank's view of a prefill server's bus: its rooms and the liveness of its ranks."""

    def __init__(self, bus: str, settings: Settings) -> None:
        self.named_at = time.monotonic()  # when a request last named it
        self._settings = settings
        self._resolver = Resolver(bus, keys=settings.keys, instance=settings.instance)
        lives = RankLiveness(settings.lost_s)
        self.lost_ranks: frozenset[tuple[str, int]] = frozenset()

        def tick(_now: float) -> None:
            self.lost_ranks = lives.lost()

        self._watch = Watch(
            bus, LIVES_TOPICS, lives.on_message, tick, keys=settings.keys, instance=settings.instance
        )  # fmt: skip
        self.rooms = PrefillBus(self._resolver, lives, room_s=settings.room_s, shared=bool(settings.bus))

    def start(self) -> Decoding:
        """Start its two threads. Raises BusError if one cannot start; then none runs."""
        self._resolver.start()
        try:
            self._watch.start()
        except BaseException:
            self._resolver.stop()
            raise
        return self

    def stop(self) -> None:
        """Stop its threads."""
        self._watch.stop()
        self._resolver.stop()


class SchedulerSide:
    """The hooks in one scheduler process; SGLang calls them on its loop's thread. `original` is SGLang's own function
    where a hook runs around it. The rank joins the bus when SGLang's loop first publishes a load. No hook raises an
    error of ours."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.rank: Rank | None = None
        self._publisher: Publisher | None = None
        self._http: HttpRooms | None = None
        self._goodbye = threading.Thread(target=self._send_goodbye, name="pdbus-goodbye", daemon=True)
        self._tried = False
        self._thread = threading.get_ident()  # SGLang's loop runs where plugins are loaded
        self._decoding: dict[str, Decoding | None] = {}  # by bootstrap address; None: not possible

    def stop(self) -> None:
        """Stop the threads, for tests; otherwise they end with the process."""
        if self._goodbye.ident is not None:
            self._goodbye.join()
        for decoding in self._decoding.values():
            if decoding is not None:
                decoding.stop()
        for each in (self._publisher, self._http):
            if each is not None:
                each.stop()

    # --- the rank itself ----------------------------------------------------------------------------------------------

    def count(self, scheduler: Any, request: Any, **_also: Any) -> None:
        """Count a request as taken in by this rank, before Scheduler.handle_generate_request and the one for
        embeddings. Health checks do not count."""

        def ingested(rank: Rank) -> None:
            if not engine.is_health_check(request):
                rank.ingested(charge_of(request))

        if self._is_up(scheduler):
            self._do(ingested)

    def report(self, snapshot: Any, scheduler: Any, force: bool = False) -> None:
        """Publish the load (None: SGLang published none), after Scheduler.publish_load_snapshot."""
        if self._is_up(scheduler):
            self._do(lambda rank: rank.report(snapshot))

    def register_room(self, original: Callable[[Any], None], sender: Any) -> None:
        """Publish that a room is prefilled here, around CommonKVSender._register_prefill_dp_rank. SGLang calls it in
        each process of a rank; only the first one does anything. Off the bus, the room is registered over HTTP."""
        manager = sender.kv_mgr
        if manager.attn_tp_rank or manager.attn_cp_rank or manager.pp_rank:
            return
        room, address = sender.bootstrap_room, sender.bootstrap_server_url
        if self._start() and self._do(lambda rank: rank.register(room, address)):
            return
        if not self._by_http(room, address):
            original(sender)

    def drop_room(self, _result: None, sender: Any) -> None:
        """Publish that a room is no longer here, after CommonKVSender.clear."""
        if self.rank is not None:
            from sglang.srt.disaggregation.base.conn import KVPoll

            failed = sender.conclude_state == KVPoll.Failed
            self._do(lambda rank: rank.drop(sender.bootstrap_room, failed=failed))

    def _is_up(self, scheduler: Any) -> bool:
        return self.rank is not None or (not self._tried and engine.speaks(scheduler) and self._start())

    def _start(self) -> bool:
        """Join the bus at the first call. Returns false where that is not possible."""
        if self._tried:
            return self.rank is not None
        self._tried = True
        settings = self.settings
        try:
            here, dp_rank = engine.server(), engine.dp_rank()
            if here.dp_size == 1 or here.why_not:
                return False
            bus = here.bus(settings)

            def publisher() -> Publisher:
                return Publisher(
                    bus, instance=settings.name, dp_rank=dp_rank, dp_size=here.dp_size, role=here.role,
                    epoch=settings.nonce, keys=settings.keys,
                )  # fmt: skip

            self._make_publisher = publisher
            self._publisher = publisher().start()
        except Exception as error:
            _failed("pdbus.rank.not_on_the_bus", error)
            return False
        self._http = HttpRooms(dp_rank) if here.role == "prefill" else None
        self.rank = Rank(self._publisher, settings.nonce, http=self._http, always=settings.http)
        log.info("pdbus.rank.on_the_bus", bus=bus, instance=settings.name, dp_rank=dp_rank, role=here.role)
        return True

    def _do(self, what: Callable[[Rank], None]) -> bool:
        """Run `what` with the rank. An error takes the rank off the bus, and does not reach SGLang's loop."""
        rank = self.rank
        assert rank is not None
        try:
            what(rank)
        except Exception as error:
            self.rank = None
            _failed("pdbus.rank.left_the_bus", error)
            for room, address in rank.rooms.items():
                self._by_http(room, address)
            self._goodbye.start()
            return False
        return True

    def _by_http(self, room: int, address: str) -> bool:
        """Register a room with SGLang's server under the rank's own number (SGLang itself gives 0 for each rank under
        plain DP). Returns false where that is not possible."""
        try:
            if self._http is not None:
                self._http(address, room)
        except Exception as error:
            self._http = None
            _failed("pdbus.rooms.by_sglang", error)
        return self._http is not None

    def _send_goodbye(self) -> None:
        """Leave the bus, on a thread, because it may take a moment. A publisher that went on would repeat the last load
        without end, and the rank would get fewer and fewer requests. If its thread has failed, another publisher
        leaves."""
        try:
            assert self._publisher is not None
            self._publisher.stop()
            if self._publisher.failure is not None:
                with self._make_publisher() as again:
                    again.wait_ready(BROKER_LOST_S)
        except Exception as error:
            _failed("pdbus.rank.said_no_goodbye", error)

    # --- rooms of others ----------------------------------------------------------------------------------------------

    def find_rooms(
        self, original: Callable[[str, list[int]], dict[str, int]], bootstrap_addr: str, bootstrap_rooms: list[int]
    ) -> dict[str, int]:
        """Return the ranks of the rooms that are known, around CommonKVReceiver.query_prefill_dp_ranks. Only SGLang's
        own query blocks; a call on another thread is a prefetch and always uses it."""
        decoding = self._of(bootstrap_addr) if threading.get_ident() == self._thread else None
        if decoding is None:
            return original(bootstrap_addr, bootstrap_rooms)
        try:
            return decoding.rooms.find(bootstrap_rooms, lambda rooms: original(bootstrap_addr, rooms))
        except Exception as error:
            self._decoding[bootstrap_addr] = None
            _failed("pdbus.rooms.by_http", error)
            return original(bootstrap_addr, bootstrap_rooms)

    def prefetch_rooms(self, original: Callable[[Any], None], queue: Any) -> None:
        """Leave out SGLang's DecodePreallocQueue.prefetch_prefill_dp_rank_queries, which asks over HTTP from other
        threads, unless a room waits for a server that the bus does not answer for."""
        waiting = {receiver.bootstrap_addr for receiver in _receivers(queue.pending_reqs)}
        decodings = [self._decoding[address] for address in waiting if address in self._decoding]
        if not all(decoding is not None and decoding.rooms.asked for decoding in decodings):
            original(queue)

    def resolve_pending(self, original: Callable[[Any], None], queue: Any) -> None:
        """Run SGLang's DecodePreallocQueue._resolve_pending_reqs, then end the requests whose room or prefill rank is
        lost: the receiver is aborted, as SGLang does it when a prefill server cannot be reached."""
        original(queue)
        for address, decoding in list(self._decoding.items()):
            if decoding is None:
                continue
            try:
                if lost := decoding.rooms.lost():
                    self._abort(queue, address, lost)
                if decoding.lost_ranks:
                    self._abandon(queue, address, decoding)
            except Exception as error:
                self._decoding[address] = None
                _failed("pdbus.rooms.by_http", error)

    @staticmethod
    def _abort(queue: Any, address: str, lost: dict[int, str]) -> None:
        for receiver in _receivers(queue.pending_reqs):
            reason = lost.get(receiver.bootstrap_room)
            if reason is not None and receiver.bootstrap_addr == address:
                receiver.abort()
                queue.kv_manager.record_failure(receiver.bootstrap_room, reason)
                log.warning("pdbus.room.lost", room=receiver.bootstrap_room, why=reason)

    @staticmethod
    def _abandon(queue: Any, address: str, decoding: Decoding) -> None:
        """End the requests that wait for a rank that has died, or for its KV cache."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        manager = queue.kv_manager
        for receiver in _receivers([*queue.queue, *queue.transfer_queue.queue]):
            room = receiver.bootstrap_room
            at = decoding.rooms.where(room) if receiver.bootstrap_addr == address else None
            if at not in decoding.lost_ranks or receiver.conclude_state is not None:
                continue
            if manager.request_status.get(room) in (None, KVPoll.Failed, KVPoll.Success):
                continue
            reason = f"bootstrap_room {room}: prefill rank {at[1]} of {at[0]} has died"
            manager.record_failure(room, reason)
            manager.update_status(room, KVPoll.Failed)
            log.warning("pdbus.room.lost", room=room, why=reason)

    def _of(self, address: str) -> Decoding | None:
        now = time.monotonic()
        if address not in self._decoding:
            self._decoding[address] = None
            try:
                if not engine.server().why_not:
                    self._forget(now)
                    bus = self.settings.bus or addresses.beside(address)
                    self._decoding[address] = Decoding(bus, self.settings).start()
                    log.info("pdbus.rooms.by_bus", server=address, bus=bus)
            except Exception as error:
                _failed("pdbus.rooms.by_http", error)
        decoding = self._decoding[address]
        if decoding is not None:
            decoding.named_at = now
        return decoding

    def _forget(self, now: float) -> None:
        """Forget prefill servers that no request has named for an hour; new servers have new addresses."""
        for address, decoding in list(self._decoding.items()):
            if decoding is not None and now - decoding.named_at > FORGET_S:
                del self._decoding[address]
                decoding.stop()


def _receivers(requests: list[Any]) -> list[Any]:
    """Return the receivers of SGLang's DecodeRequests; ended requests and health checks have none that counts."""
    return [request.kv_receiver for request in requests if hasattr(request.kv_receiver, "bootstrap_addr")]


def _failed(event: str, error: Exception) -> None:
    """Log an error in one line, or with its traceback if it is a bug."""
    if isinstance(error, BusError):
        log.warning(event, why=str(error))
    else:
        log.exception(event)

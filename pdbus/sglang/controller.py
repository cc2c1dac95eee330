"""The hooks in the process of SGLang's DP controller, which distributes requests over data-parallel ranks: our choice
of a rank in `dispatching`, and an event loop that sleeps.

Only the choice is replaced; SGLang's sockets still carry its own objects. A thread reads the bus (`watch`) and shares a
lock with the choices.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import zmq

from bus.errors import BusError, ConfigError
from bus.runtime.logs import get_logger
from bus.runtime.loop import Loop
from bus.runtime.sockets import Sockets
from bus.wire import topics
from bus.wire.kv_names import Changes
from bus.wire.messages import MemberKey, Message
from controller.feeds import EngineSettings
from controller.feeds.engine import EngineFeed
from controller.policies import PolicySettings, make_policy, resolve
from pdbus.sglang import engine
from pdbus.sglang.chooser import Chooser
from pdbus.sglang.settings import Settings
from pdbus.sglang.watch import Watch

IDLE_MS = 1_000  # SGLang's watchdog must be fed regularly
NO_CACHE = "these ranks keep no prefix cache; a decode server keeps one with --disaggregation-decode-enable-radix-cache"

log = get_logger("sglang")


class Dispatching:
    """Replaces one DataParallelController's `dispatching`: it chooses a rank and sends. Where it has no rank, or after
    an error of ours, SGLang's own `dispatching` is used for that request. `send(worker's socket, request)` is
    SGLang's."""

    def __init__(
        self,
        chooser: Chooser,
        controller: Any,
        send: Callable[[Any, Any], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lock = threading.Lock()
        self._chooser = chooser
        self._controller = controller
        self._original = controller.dispatching
        self._refreshes = controller.refresh_load_budget_on_dispatch
        self._send = send
        self._clock = clock
        self._failing = False

    def __call__(self, request: Any) -> None:
        """Dispatch a request, on the thread of SGLang's loop. A request with a `routed_dp_rank` goes to that rank."""
        controller = self._controller
        if request.routed_dp_rank is not None:  # a router's choice; SGLang refuses a rank that is not active
            controller.maybe_external_dp_rank_routing(request)
            self._ours(lambda now: self._chooser.chosen(request, request.routed_dp_rank, now))
            return
        able = [rank for rank in controller._active_workers if controller.status[rank]]
        rank = self._ours(lambda now: self._chooser.pick(request, able, now))
        # The refresh reads every rank's shared memory, and only SGLang's own choice needs it.
        controller.refresh_load_budget_on_dispatch = self._refreshes and rank is None
        if rank is None:
            self._original(request)
        else:
            self._send(controller.workers[rank], request)

    def on_message(self, message: Message, now: float) -> None:
        """Pass on a publication of the bus; called on the watch's thread."""
        with self.lock:
            left = self._chooser.on_message(message, now)
        if left is not None:
            log.warning("pdbus.dispatch.by_sglang", why=f"rank {left} has left the bus")

    def changed(self, key: MemberKey, changes: Changes) -> None:
        """Pass on changes of a rank's prefix cache; called on the watch's thread."""
        with self.lock:
            self._chooser.changed(key[1], changes)

    def tick(self, now: float) -> None:
        """Look for ranks that have become silent, or speak again, and log them; called on the watch's thread."""
        with self.lock:
            turned = self._chooser.tick(now)
        for dp_rank, ready in turned:
            log.warning("pdbus.rank.heard_again" if ready else "pdbus.rank.silent", dp_rank=dp_rank)

    def _ours(self, choose: Callable[[float], int | None]) -> int | None:
        """Run our choice; its errors must not end SGLang's loop."""
        try:
            with self.lock:
                return choose(self._clock())
        except Exception:
            if not self._failing:
                log.exception("pdbus.dispatch.by_sglang")
            self._failing = True
            return None


class ControllerSide:
    """The hooks in the DP controller's process; SGLang calls them instead of its own functions. They catch and
    log the errors of our own code."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.watch: Watch | None = None
        self.chooser: Chooser | None = None

    def stop(self) -> None:
        """Stop the thread that reads the bus, for tests; otherwise it ends with the process."""
        if self.watch is not None:
            self.watch.stop()

    def make_controller(self, original: Callable[..., None], controller: Any, *args: Any, **kwargs: Any) -> None:
        """Run SGLang's DataParallelController.__init__ (`original`), which returns when all ranks of this machine are
        up; then replace its `dispatching` by ours and start to read the bus. If our part fails, SGLang dispatches
        by itself; errors of `original` are raised."""
        original(controller, *args, **kwargs)
        if not hasattr(controller, "recv_from_tokenizer"):
            return  # the controller of another machine dispatches
        try:
            self._take_over(controller, engine.server())
        except BusError as error:
            log.warning("pdbus.dispatch.by_sglang", why=str(error))
        except Exception:  # an error of ours must not stop the server
            log.exception("pdbus.dispatch.by_sglang")

    def _take_over(self, controller: Any, here: engine.Server) -> None:
        from sglang.srt.managers.io_struct import sock_send

        settings = self.settings
        if here.why_not:
            return  # the server's main process logs it
        if here.nodes > 1 and not settings.nonce_given:
            raise ConfigError("its ranks are on several machines: set the same PDBUS_SGLANG_NONCE on all of them")
        method = resolve(settings.method or settings.named or here.method, here.role)
        policy = make_policy(
            method,
            PolicySettings(role=here.role, cache_weight=settings.cache_weight),
            lambda hook, why: log.error("pdbus.policy.failed", method=method, hook=hook, why=why),
        )
        page = engine.page_size(controller)
        self.chooser = chooser = Chooser(
            policy, instance=settings.name, role=here.role, dp_size=here.dp_size, nonce=settings.nonce,
            now=time.monotonic(), block_tokens=page,
        )  # fmt: skip
        dispatching = Dispatching(chooser, controller, sock_send)
        events = engine.kv_events(controller, settings.name, here) if policy.uses_hashes and page else None
        if policy.uses_hashes and not page:
            log.warning("pdbus.caches.none", method=method, why=NO_CACHE)
        elif policy.uses_hashes and events is None:
            log.warning(
                "pdbus.caches.unseen", method=method, why="give SGLang --kv-events-config to have evictions known"
            )
        bus = here.bus(settings)
        self.watch = Watch(
            bus, _topics(settings.name, here.dp_size), dispatching.on_message, dispatching.tick, keys=settings.keys,
            instance=settings.instance, more=_following(events, dispatching) if events is not None else None,
        ).start()  # fmt: skip
        controller.dispatching = dispatching
        controller.refresh_load_budget_on_dispatch = False
        log.info("pdbus.dispatch.by_pdbus", method=method, ranks=here.dp_size, bus=bus, page_tokens=page)

    @staticmethod
    def event_loop(_original: Callable[[Any], None], controller: Any) -> None:
        """Replace DataParallelController.event_loop, which polls its socket without pause; this one waits for requests.
        It never returns."""
        from sglang.srt.managers.io_struct import sock_recv

        socket = controller.recv_from_tokenizer
        while True:
            controller.soft_watchdog.feed()
            if not socket.poll(IDLE_MS):
                continue
            while True:
                try:
                    request = sock_recv(socket, flags=zmq.NOBLOCK)
                except zmq.ZMQError:
                    break
                controller._request_dispatcher(request)
                controller.soft_watchdog.feed()


def _topics(instance: str, dp_size: int) -> tuple[bytes, ...]:
    """Return the topics of its own ranks, and of the broker's beacons."""
    kinds = (topics.LOAD, topics.ROOMS, topics.MEMBER)
    return (topics.BEACON, *(topics.for_rank(kind, instance, rank) for kind in kinds for rank in range(dp_size)))


def _following(events: EngineSettings, dispatching: Dispatching) -> Callable[[Loop, ExitStack], None]:
    """Return a function that follows the ranks' KV events on the watch's thread."""

    def follow(loop: Loop, exits: ExitStack) -> None:
        sockets = exits.enter_context(Sockets())
        feed = EngineFeed(loop, sockets, events, dispatching.changed, lambda key, load: None, Counter())
        exits.callback(feed.close)

    return follow

"""A poll loop: sockets, timers, wake-ups from other threads, signals. It owns the waiting and decides nothing.

One thread runs a Loop and owns every socket added to it. Each turn handles at most `budget` messages a socket, for
about SLICE_S at most, so that no peer can starve another or the timers. Then it runs the timers that are due, then
the `after_turn` hooks (batching). A message of too many frames is dropped, some thousands of frames a turn, and its
sender is cut off.

A socket may rest if its messages matter only once something must be decided. Then its messages cause no wake-up, and
it is read first in the next turn that has another cause. So a socket of many small messages costs no wake-ups, and
no message is missed.

With `spin_s` the loop polls before it sleeps, while two events come within that time of each other: waking a thread
takes longer than handling a small message. Timers are no such events.
"""

from __future__ import annotations

import heapq
import itertools
import signal
import socket as unix
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import zmq

from bus.runtime.connection_limiter import hang_up
from bus.runtime.frames import ALL, TooManyFrames, has_message, receive, skip
from bus.runtime.logs import get_logger
from bus.runtime.sockets import Socket

Handler = Callable[[list[Any]], None]
MAX_IDLE_MS = 1_000
SLICE_S = 0.02  # of a turn for one socket: a valid frame of 1 MiB may take 15 ms
FEW = 7  # messages of a socket, after each of which it is asked for more: as many questions as a zmq.Again costs

log = get_logger("bus")


class Timer:
    """A call that is planned for `due` (on the loop's clock), and repeated each `interval_s` if that is not None. The
    loop's `call_later` and `call_every` make it; `cancel()` removes it."""

    __slots__ = ("active", "due", "function", "interval_s")

    def __init__(self, due: float, function: Callable[[], None], interval_s: float | None) -> None:
        self.due = due
        self.function = function
        self.interval_s = interval_s
        self.active = True

    def cancel(self) -> None:
        """Make the call not happen (again); idempotent."""
        self.active = False


class Loop:
    """The loop of one thread. `clock` gives seconds; `spin_s` is how long it polls before it sleeps. All methods except
    `stop`, `call_threadsafe` and `still_s` are for its own thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, spin_s: float = 0.0) -> None:
        self.clock = clock
        self._spin_s = spin_s
        self._spin_until = self._event_at = float("-inf")
        self._poller = zmq.Poller()
        self._handlers: dict[Any, tuple[Handler, int, int, bool, bool]] = {}
        self._resting: list[Socket] = []
        self._skipping: set[Any] = set()  # sockets in the midst of a message with too many frames
        self.behind = False  # a resting socket has more than its budget
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._calls: deque[Callable[[], None]] = deque()
        self._after_turn: list[Callable[[], None]] = []
        self._turned_at: float | None = None
        self._stopping = threading.Event()
        self._wake_in, self._wake_out = unix.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._poller.register(self._wake_in, zmq.POLLIN)
        self._signals: deque[int] = deque()
        self._signal_handler: Callable[[int], None] = lambda number: self.stop()

    # --- sockets, timers, calls ---------------------------------------------------------------------------------

    def add(
        self, socket: Socket, handler: Handler, *, budget: int = 128, copied: int = ALL, keyed: bool = False
    ) -> None:
        """Call `handler(frames)` for each message of `socket` from now on, at most `budget` of them a turn: the first
        `copied` frames are bytes, the others (large payloads) zmq.Frames. With `keyed`, where peers prove keys, the
        first frame is Known."""
        self._handlers[socket] = (handler, budget, copied, keyed, socket.type == zmq.ROUTER)
        self._poller.register(socket, zmq.POLLIN)

    def remove(self, socket: Socket) -> None:
        """Stop reading `socket`. It is not closed."""
        self.rest(socket, False)
        self._skipping.discard(socket)
        del self._handlers[socket]
        self._poller.unregister(socket)

    def rest(self, socket: Socket, resting: bool) -> None:
        """Set whether `socket` rests: while it does, its messages do not wake the loop, and wait for a turn with
        another cause (a timer, at the latest)."""
        if resting is (socket in self._resting):
            return
        if resting:
            self._resting.append(socket)
            self._poller.unregister(socket)
        else:
            self._resting.remove(socket)
            self._poller.register(socket, zmq.POLLIN)

    def call_later(self, delay_s: float, function: Callable[[], None]) -> Timer:
        """Call `function` once, after `delay_s` seconds."""
        return self._schedule(Timer(self.clock() + delay_s, function, None))

    def call_every(self, interval_s: float, function: Callable[[], None]) -> Timer:
        """Call `function` every `interval_s` seconds, until the timer is cancelled. After a late turn the calls that
        were missed are left out."""
        return self._schedule(Timer(self.clock() + interval_s, function, interval_s))

    def call_threadsafe(self, function: Callable[[], None]) -> None:
        """Run `function` on the loop's thread, soon; return at once. Besides `stop`, this is the only method that other
        threads may call."""
        self._calls.append(function)
        self._wake()

    def after_turn(self, function: Callable[[], None]) -> None:
        """Call `function` at the end of every turn, for example to send what the turn collected."""
        self._after_turn.append(function)

    # --- life ---------------------------------------------------------------------------------------------------

    def on_signals(self, function: Callable[[int], None], *numbers: int) -> None:
        """Handle these signals (none given: SIGINT and SIGTERM) by `function(number)`, which the loop calls in its next
        turn: the signal handler itself merely wakes the loop. Main thread only."""

        def note(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)

        for number in numbers or (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, note)
        signal.set_wakeup_fd(self._wake_out.fileno(), warn_on_full_buffer=False)
        self._signal_handler = function

    def stop(self) -> None:
        """End `run` after the present turn. Any thread may call it."""
        self._stopping.set()
        self._wake()

    def run(self) -> None:
        """Run turns until `stop()`; it blocks. An exception in a handler is our bug: it ends the loop and reaches the
        caller."""
        while not self._stopping.is_set():
            self.turn()

    def close(self) -> None:
        """Free the loop's descriptors, after `run` has ended. Its sockets stay open: their owner closes them."""
        if threading.current_thread() is threading.main_thread():
            descriptor = signal.set_wakeup_fd(-1)
            if descriptor not in (-1, self._wake_out.fileno()):
                signal.set_wakeup_fd(descriptor)
        self._handlers.clear()
        self._wake_in.close()
        self._wake_out.close()

    @property
    def still_s(self) -> float:
        """The seconds since the loop's last turn (0 before the first). Any thread may ask."""
        return 0.0 if self._turned_at is None else self.clock() - self._turned_at

    def turn(self) -> None:
        """Run one turn: wait for a message, a timer or a wake-up (MAX_IDLE_MS at most), then handle everything that is
        ready. `run` calls it."""
        ready = self._wait()
        self.behind = False
        for resting in tuple(self._resting):
            if resting in self._resting and has_message(resting) and not self._drain(resting):
                self.behind = True
        for socket, _ in ready:
            if socket in self._handlers:
                self._drain(socket)
            else:
                self._drain_wakeups()
        while self._calls:
            self._calls.popleft()()
        self._run_timers()
        for function in self._after_turn:
            function()

    # --- inside -------------------------------------------------------------------------------------------------

    def _wait(self) -> list[tuple[Any, int]]:
        """Return the awake sockets that have something to read; none when a timer is due."""
        timeout_ms = self._timeout_ms()
        if not self._spin_s:
            return self._poller.poll(timeout_ms)
        ready: list[tuple[Any, int]] = []
        now = self.clock()
        until = min(self._spin_until, now + timeout_ms / 1000)
        while now < until and not ready:
            ready = self._poller.poll(0)
            now = self.clock()
        if not ready:
            ready = self._poller.poll(self._timeout_ms())
            now = self.clock()
        if ready:
            dense = now - self._event_at < self._spin_s
            self._event_at, self._spin_until = now, now + self._spin_s if dense else now
        return ready

    def _drain(self, socket: Any) -> bool:
        """Handle the messages that have come, within the socket's budget; return false if there may be more."""
        handler, budget, copied, keyed, routed = self._handlers[socket]
        if socket in self._skipping:
            if not skip(socket):
                return False
            self._skipping.discard(socket)
        until = self.clock() + SLICE_S
        for number in range(budget):
            if number & 3 == 3 and self.clock() > until:
                return False
            if 0 < number <= FEW and not has_message(socket):
                return True
            try:
                frames = receive(socket, copied, keyed, routed)
            except zmq.Again:
                return True
            except TooManyFrames as error:
                log.warning("peer.cut_off", peer=error.source, why="too_many_frames")
                hang_up(error.descriptor, error.source)
                self._skipping.add(socket)
                return False
            handler(frames)
            if socket not in self._handlers:
                return True
        return False

    def _schedule(self, timer: Timer) -> Timer:
        heapq.heappush(self._timers, (timer.due, next(self._order), timer))
        return timer

    def _timeout_ms(self) -> int:
        if self._calls or self.behind or self._stopping.is_set():
            return 0
        while self._timers and not self._timers[0][2].active:
            heapq.heappop(self._timers)
        if not self._timers:
            return MAX_IDLE_MS
        left_s = self._timers[0][0] - self.clock()
        return min(MAX_IDLE_MS, max(0, -int(-left_s * 1000 // 1)))

    def _run_timers(self) -> None:
        now = self._turned_at = self.clock()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            if not timer.active:
                continue
            if timer.interval_s is not None:
                timer.due += timer.interval_s
                if timer.due <= now:  # a late turn does not cause a burst
                    timer.due = now + timer.interval_s
                self._schedule(timer)
            timer.function()

    def _wake(self) -> None:
        try:
            self._wake_out.send(b"\0")
        except (BlockingIOError, OSError):
            pass  # already awake, or closed

    def _drain_wakeups(self) -> None:
        with suppress(BlockingIOError):
            self._wake_in.recv(4096)  # what is left of more wakes the next turn
        while self._signals:
            self._signal_handler(self._signals.popleft())

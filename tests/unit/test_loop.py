"""The poll loop: order, fairness, timers on a clock we turn, wake-ups, signals."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from soak.usage import usage_of

from bus.runtime import frames
from bus.runtime.epochs import new_epoch
from bus.runtime.frames import FRAMES_MAX, SKIP_MAX, name_of
from bus.runtime.loop import FEW, SLICE_S, Loop
from bus.runtime.sockets import HEADER_MAX, Socket, Sockets


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def loop(clock: Clock) -> Iterator[Loop]:
    loop = Loop(clock)
    loop.call_threadsafe(lambda: None)  # so that the first turn does not wait
    yield loop
    loop.close()


def turn(loop: Loop) -> None:
    """One turn that does not wait for events."""
    loop.call_threadsafe(lambda: None)
    loop.turn()


def pair(sockets: Sockets, name: str = "x") -> tuple[Socket, Socket]:
    """Two ends that pass on just what is sent."""
    receiver, sender = (sockets._new(zmq.PAIR, HEADER_MAX) for _ in range(2))
    receiver.bind(f"inproc://{name}")
    sender.connect(f"inproc://{name}")
    return receiver, sender


def test_timers_run_when_due_and_in_order(loop: Loop, clock: Clock) -> None:
    ran: list[str] = []
    loop.call_later(2.0, lambda: ran.append("second"))
    loop.call_later(1.0, lambda: ran.append("first"))
    loop.call_later(1.0, lambda: ran.append("first, added later"))
    turn(loop)
    assert ran == []
    clock.now += 0.999
    turn(loop)
    assert ran == []
    clock.now += 1.5
    turn(loop)
    assert ran == ["first", "first, added later", "second"]
    clock.now += 10
    turn(loop)
    assert len(ran) == 3


def test_a_cancelled_timer_does_not_run(loop: Loop, clock: Clock) -> None:
    ran: list[int] = []
    timer = loop.call_later(1.0, lambda: ran.append(1))
    other = loop.call_later(1.0, lambda: ran.append(2))
    loop.call_later(0.5, other.cancel)
    timer.cancel()
    clock.now += 5
    turn(loop)
    assert ran == []


def test_a_late_turn_causes_no_burst(loop: Loop, clock: Clock) -> None:
    ran: list[float] = []
    loop.call_every(1.0, lambda: ran.append(clock.now))
    for _ in range(3):
        clock.now += 1.0
        turn(loop)
    assert len(ran) == 3
    clock.now += 60.0
    turn(loop)
    turn(loop)
    assert len(ran) == 4
    clock.now += 1.0
    turn(loop)
    assert len(ran) == 5


def test_a_repeating_timer_can_end_itself(loop: Loop, clock: Clock) -> None:
    ran: list[int] = []

    def once() -> None:
        ran.append(1)
        timer.cancel()

    timer = loop.call_every(1.0, once)
    for _ in range(3):
        clock.now += 1.0
        turn(loop)
    assert ran == [1]


def test_each_socket_gets_its_budget_and_timers_their_turn(loop: Loop, clock: Clock) -> None:
    with Sockets() as sockets:
        heard: list[bytes] = []
        senders = []
        for name in ("flood", "quiet"):
            receiver, sender = pair(sockets, name)
            loop.add(receiver, lambda frames: heard.append(frames[0]), budget=10)
            senders.append(sender)
        for _ in range(100):
            senders[0].send(b"flood")
        senders[1].send(b"quiet")
        loop.call_later(0.0, lambda: heard.append(b"timer"))
        after: list[int] = []
        loop.after_turn(lambda: after.append(len(heard)))
        loop.turn()
        assert heard.count(b"flood") == 10
        assert heard.count(b"quiet") == 1
        assert heard[-1] == b"timer"
        assert after == [12], "the hook runs once, after everything else of the turn"
        for _ in range(9):
            loop.turn()
        assert heard.count(b"flood") == 100


def test_a_removed_socket_is_not_read_again(loop: Loop) -> None:
    with Sockets() as sockets:
        receiver, sender = pair(sockets)
        heard: list[bytes] = []

        def handler(frames: list[bytes]) -> None:
            heard.append(frames[0])
            loop.remove(receiver)

        loop.add(receiver, handler)
        sender.send(b"1")
        sender.send(b"2")
        turn(loop)
        turn(loop)
        assert heard == [b"1"]


def test_frames_can_be_had_without_a_copy(loop: Loop) -> None:
    with Sockets() as sockets:
        receiver, sender = pair(sockets)
        heard: list[Any] = []
        loop.add(receiver, heard.extend, copied=1)
        sender.send_multipart([b"a", b"b", b"c"])
        loop.turn()
        assert heard[0] == b"a"
        assert [bytes(frame.buffer) for frame in heard[1:]] == [b"b", b"c"]


def test_other_threads_wake_it() -> None:
    loop = Loop()
    ran: list[int] = []
    threads: list[int] = []

    def call() -> None:
        ran.append(1)
        threads.append(threading.get_ident())
        if len(ran) == 1000:
            loop.stop()

    def push() -> None:
        for _ in range(250):
            loop.call_threadsafe(call)

    pushers = [threading.Thread(target=push) for _ in range(4)]
    started = time.monotonic()
    for pusher in pushers:
        pusher.start()
    loop.run()
    for pusher in pushers:
        pusher.join()
    loop.close()
    assert len(ran) == 1000
    assert set(threads) == {threading.get_ident()}
    assert time.monotonic() - started < 30


def test_stop_from_another_thread_ends_an_idle_loop() -> None:
    loop = Loop()
    runner = threading.Thread(target=loop.run)
    runner.start()
    loop.stop()
    runner.join(60)
    assert not runner.is_alive()
    loop.close()
    loop.stop()  # late, and harmless


def test_an_exception_in_a_handler_reaches_the_caller(loop: Loop) -> None:
    loop.call_threadsafe(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loop.run()


def test_signals_are_handled_by_the_loop_in_order() -> None:
    loop = Loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    seen: list[int] = []

    def on_signal(number: int) -> None:
        seen.append(number)
        if len(seen) == 2:
            loop.stop()

    try:
        loop.on_signals(on_signal, signal.SIGUSR1, signal.SIGUSR2)
        loop.call_later(0.0, lambda: os.kill(os.getpid(), signal.SIGUSR1))
        loop.call_later(0.01, lambda: os.kill(os.getpid(), signal.SIGUSR2))
        loop.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        loop.close()
    assert seen == [signal.SIGUSR1, signal.SIGUSR2]
    assert signal.set_wakeup_fd(-1) == -1, "the loop gave the wake-up descriptor back"


def test_epochs_are_fresh_and_in_bounds() -> None:
    """M1."""
    epochs = {new_epoch() for _ in range(1000)}
    assert len(epochs) == 1000
    assert all(1 <= epoch < 2**63 for epoch in epochs)


def test_a_resting_socket_wakes_nobody_and_is_read_first(clock: Clock) -> None:
    """What it brought is known before anything else of the turn is handled, and nothing is lost."""
    said: list[bytes] = []
    with Sockets() as sockets:
        resting, waking = sockets.router("inproc://r"), sockets.router("inproc://w")  # no thread between the ends
        to_resting, to_waking = sockets.dealer("inproc://r"), sockets.dealer("inproc://w")
        loop = Loop(clock)
        try:
            loop.add(waking, lambda frames: said.append(frames[1]))
            loop.add(resting, lambda frames: said.append(frames[1]), budget=2)
            loop.rest(resting, True)
            for number in range(5):
                to_resting.send(b"news %d" % number)
            to_waking.send(b"question")
            loop.turn()
            assert said == [b"news 0", b"news 1", b"question"], "within its budget, before the question"
            loop.turn()
            loop.turn()
            assert said[3:] == [b"news 2", b"news 3", b"news 4"], "a turn that left some is followed by one at once"
            loop.rest(resting, False)
            to_resting.send(b"awake")
            loop.turn()
            assert said[-1] == b"awake"
        finally:
            loop.close()


def test_a_resting_socket_is_read_when_a_timer_is_due() -> None:
    said: list[Any] = []
    with Sockets() as sockets:
        resting, peer = sockets.router("inproc://r"), sockets.dealer("inproc://r")
        loop = Loop(time.monotonic)
        try:
            loop.add(resting, lambda frames: said.append(frames[1]))
            loop.rest(resting, True)
            loop.call_later(0.2, lambda: said.append("timer"))
            peer.send(b"news")
            loop.turn()
            assert said == [b"news", "timer"]
            loop.remove(resting)
            peer.send(b"more")
            loop.call_threadsafe(lambda: None)
            loop.turn()
            assert said == [b"news", "timer"]
        finally:
            loop.close()


@pytest.mark.parametrize("resting", [False, True])
@pytest.mark.parametrize("many", [True, False])
def test_a_message_of_too_many_frames_is_thrown_away_piecemeal_and_others_are_served_meanwhile(
    loop: Loop, resting: bool, many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert frames._receive_many is not None, "libzmq is found here"
    if not many:
        monkeypatch.setattr(frames, "_receive_many", None)
    with Sockets() as sockets:
        (hostile, attacker), (honest, friend) = pair(sockets, "hostile"), pair(sockets, "honest")
        got: list[Any] = []
        loop.add(hostile, got.append)
        loop.rest(hostile, resting)
        loop.add(honest, got.append)
        attacker.send_multipart([b"x"] * FRAMES_MAX)
        attacker.send_multipart([b"x"] * (FRAMES_MAX + SKIP_MAX + 2))
        attacker.send(b"after it")
        for _ in range(2):
            friend.send(b"friend")
            turn(loop)
        assert sorted(got, key=len) == [[b"friend"], [b"friend"], [b"x"] * FRAMES_MAX]
        turn(loop)
        turn(loop)
        assert got[-1] == [b"after it"]


def test_what_is_thrown_away_of_a_message_is_freed(loop: Loop) -> None:
    def thrown_away() -> int:
        """Resident memory after 32 MiB of frames."""
        attacker.send_multipart([b"x" * 1000] * (8 * SKIP_MAX))
        attacker.send(b"after it")
        got.clear()
        while not got:
            turn(loop)
        return usage_of([os.getpid()]).rss_bytes

    with Sockets() as sockets:
        hostile, attacker = pair(sockets, "hostile")
        got: list[Any] = []
        loop.add(hostile, got.append)
        before = thrown_away()
        assert max(thrown_away() for _ in range(3)) < before + (24 << 20)


def test_messages_that_take_long_leave_the_turn_to_others(loop: Loop, clock: Clock) -> None:
    with Sockets() as sockets:
        (hostile, attacker), (honest, friend) = pair(sockets, "hostile"), pair(sockets, "honest")
        got: list[Any] = []

        def slow(frames: list[Any]) -> None:
            clock.now += SLICE_S / 2
            got.append("slow")

        loop.add(hostile, slow)
        loop.add(honest, lambda frames: got.append("quick"))
        for _ in range(100):
            attacker.send(b"large")
        friend.send(b"friend")
        turn(loop)
        assert 1 <= got.index("quick") <= 4
        while len(got) < 101:
            turn(loop)


def test_logs_show_topics_as_they_are_and_tell_nobody_the_ids_that_a_router_gives_out() -> None:
    ids = [b"\0" + number.to_bytes(4) for number in range(1000, 1100)]
    names = {name_of(each) for each in ids}
    assert len(names) == 100
    assert all(len(name) == 8 and f"{1000:x}" != name.lstrip("0") for name in names)
    assert name_of(b"load/p/0/") == "b'load/p/0/'"


def test_what_has_come_is_read_without_running_into_its_end(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A zmq.Again costs as much as seven questions whether there is more."""
    ends: list[int] = []
    made = zmq.Again.__init__

    def counting(end: zmq.Again, *arguments: Any) -> None:
        ends.append(1)
        made(end, *arguments)

    monkeypatch.setattr(zmq.Again, "__init__", counting)
    with Sockets() as sockets:
        receiver, sender = pair(sockets)
        heard: list[bytes] = []
        loop.add(receiver, lambda frames: heard.append(frames[0]))
        for count in (1, FEW, 3 * FEW):
            for _ in range(count):
                sender.send(b"x")
            turn(loop)
            assert len(heard) == count
            assert len(ends) == (count > FEW)
            heard.clear()
        loop.remove(receiver)

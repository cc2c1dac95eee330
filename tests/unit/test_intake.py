"""Messages that are dropped, and items of other threads on their way into a loop."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from bus.errors import RemoteProtocolError
from bus.runtime import intake
from bus.runtime.intake import Mailbox, Rejections
from bus.runtime.logs import get_logger
from bus.runtime.loop import Loop
from bus.runtime.ticker import Ticker

ROOT = Path(__file__).parents[2]


def rejections(**how: Any) -> tuple[Rejections, Counter[str]]:
    counts: Counter[str] = Counter()
    return Rejections(get_logger("test"), counts, **how), counts


class TestRejections:
    def test_each_is_counted_and_the_first_of_each_peer_logged(self) -> None:
        part, counts = rejections(prefix="rejected_", socket="data")
        with capture_logs() as logs:
            for peer, reason in (("a", "tag"), ("a", "tag"), ("a", "size"), ("b", "tag")):
                part.note(peer, RemoteProtocolError(reason, "x" * 1000))
        assert counts == {"rejected_tag": 3, "rejected_size": 1}
        assert [(line["event"], line["peer"], line["reason"], line["socket"]) for line in logs] == [
            ("message.rejected", "a", "tag", "data"),
            ("message.rejected", "b", "tag", "data"),
        ]
        assert len(logs[0]["detail"]) == intake.DETAIL_MAX

    def test_peers_without_end_fill_no_log(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(intake, "PEERS_REMEMBERED", 2)
        part, counts = rejections()
        with capture_logs() as logs:
            for number in range(5):
                part.note(f"peer-{number}", RemoteProtocolError("tag"))
        assert (len(logs), counts) == (2, {"tag": 5})

    @pytest.mark.skipif(not (ROOT / "bus").is_dir(), reason="beside compiled cores there are no sources to read")
    def test_no_other_module_has_a_rule_of_its_own(self) -> None:
        modules = [
            path for package in ("bus", "controller", "nodes", "pdbus") for path in (ROOT / package).rglob("*.py")
        ]
        logging = {
            str(path.relative_to(ROOT)) for path in modules if '"message.rejected"' in path.read_text(encoding="utf-8")
        }
        assert logging == {"bus/runtime/intake.py"}


class TestMailbox:
    def test_it_wakes_once_for_all_that_comes_before_it_is_emptied(self) -> None:
        woken: list[bool] = []
        box: Mailbox[int] = Mailbox(10)
        box.open(lambda: woken.append(True))
        assert [box.put(1), box.put(2)] == [True, True]
        assert (len(woken), box.take(), box.take()) == (1, [1, 2], [])
        box.put(3)
        assert (len(woken), box.take()) == (2, [3])

    def test_what_came_before_it_was_opened_wakes_it_then(self) -> None:
        woken: list[bool] = []
        box: Mailbox[int] = Mailbox(10)
        box.put(1)
        box.open(lambda: woken.append(True))
        assert (len(woken), box.take()) == (1, [1])
        box.close()
        box.put(2)
        assert len(woken) == 1

    def test_it_is_bounded_and_knows_what_lost_something(self) -> None:
        woken: list[bool] = []
        box: Mailbox[str] = Mailbox(1)
        box.open(lambda: woken.append(True))
        assert [box.put("a"), box.put("b"), box.put("c", spills=7), box.put("d", spills=7)] == [
            True,
            False,
            False,
            False,
        ]
        assert box.put("the end", always=True)
        assert (box.take(), box.spilled(), box.spilled()) == (["a", "the end"], [7], [])
        assert len(woken) == 1
        box.put("e", spills=8)
        box.clear()
        assert (box.take(), box.spilled()) == ([], [])

    def test_nothing_is_lost_between_threads(self) -> None:
        """Four threads put in while a loop's thread takes: each item comes once, each thread's in order."""
        loop, box, came = Loop(), Mailbox[tuple[int, int]](100_000), list[tuple[int, int]]()

        def take() -> None:
            came.extend(box.take())
            if len(came) == 4 * 2_000:
                loop.stop()

        def put(thread: int) -> None:
            for number in range(2_000):
                assert box.put((thread, number))

        box.open(lambda: loop.call_threadsafe(take))
        threads = [threading.Thread(target=put, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        loop.run()
        loop.close()
        for thread in threads:
            thread.join()
        for number in range(4):
            assert [count for of, count in came if of == number] == list(range(2_000))


class FakeLoop:
    """Keeps what is to be called later."""

    def __init__(self) -> None:
        self.timers: list[Any] = []

    def call_later(self, delay_s: float, function: Any) -> Any:
        timer = type("Timer", (), {"due": delay_s, "function": staticmethod(function), "active": True})()
        timer.cancel = lambda: setattr(timer, "active", False)
        self.timers.append(timer)
        return timer

    def due(self) -> list[float]:
        return [timer.due for timer in self.timers if timer.active]

    def fire(self) -> None:
        (timer,) = [timer for timer in self.timers if timer.active]
        timer.active = False
        timer.function()


class TestTicker:
    def test_it_ticks_as_asked_and_seldom_while_nothing_can_happen(self) -> None:
        loop, pauses = FakeLoop(), iter([0.1, None, None, 0.2])
        ticker = Ticker(loop, lambda: next(pauses), idle_s=5.0)  # type: ignore[arg-type]
        ticker.wake()
        assert (ticker.dozing, loop.due()) == (False, [0.1])
        loop.fire()
        assert (ticker.dozing, loop.due()) == (True, [5.0])
        loop.fire()
        assert (ticker.dozing, loop.due()) == (True, [5.0])
        ticker.wake(0.3)
        assert (ticker.dozing, loop.due()) == (False, [0.3]), "the long wait is over"
        loop.fire()
        assert (ticker.dozing, loop.due()) == (False, [0.2])

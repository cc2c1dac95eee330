"""`--spin-us`: the loop polls before it sleeps while messages come densely, never longer than asked, never when idle.

Time is the polls' own: each that may not wait takes STEP_S, one that may wait goes on until the next event or its end.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import pytest

from bus.broker import Broker, BrokerConfig
from bus.errors import ConfigError
from bus.runtime.loop import Loop
from bus.runtime.service import Service
from controller.config import ControllerConfig
from controller.shell import Controller

SPIN_S = 0.001
STEP_S = 0.00001


class Poller:
    """An event at each of `times`; counts polls that did not wait, and those that did."""

    def __init__(self, times: list[float]) -> None:
        self.now = 0.0
        self.times = times
        self.spun: list[float] = []  # when
        self.slept = 0

    def clock(self) -> float:
        return self.now

    def poll(self, timeout_ms: int) -> list[Any]:
        if timeout_ms:
            self.slept += 1
        else:
            self.spun.append(self.now)
        until = self.now + (timeout_ms / 1000 or STEP_S)
        if not self.times or self.times[0] > until:
            self.now = until
            return []
        self.now = max(self.now, self.times.pop(0))
        return [(-1, 1)]


def turned(
    times: list[float], until: float, spin_s: float = SPIN_S, tick_s: float = 10.0, ticks: list[float] | None = None
) -> Poller:
    """A loop with a timer each `tick_s` that has turned from 0 to `until`, with an event at each of `times`."""
    poller = Poller(times)
    loop = Loop(poller.clock, spin_s=spin_s)
    loop.call_every(tick_s, lambda: None if ticks is None else ticks.append(poller.now))
    real: Any = loop._poller
    loop._poller = cast(Any, poller)
    while poller.now < until:
        loop.turn()
    loop._poller = real
    loop.close()
    return poller


def test_an_idle_loop_only_sleeps() -> None:
    poller = turned([], 10.0, tick_s=0.05)
    assert not poller.spun
    assert poller.slept == pytest.approx(200, abs=2)


def test_messages_that_come_seldom_make_nobody_spin() -> None:
    poller = turned([0.1 * number for number in range(1, 50)], 6.0, tick_s=0.05)
    assert not poller.spun


def test_dense_messages_are_awaited_without_sleep() -> None:
    gap_s = SPIN_S / 2
    poller = turned([gap_s * number for number in range(1, 101)], 0.05)
    assert poller.slept == 2, "the first and the second, which tells that they are dense"
    assert len(poller.spun) == pytest.approx(98 * gap_s / STEP_S, rel=0.05)


def test_it_sleeps_again_once_the_time_is_over_and_ticks_do_not_wake_the_spin() -> None:
    poller = turned([1.0, 1.0 + SPIN_S / 2], 11.0, tick_s=0.05)
    assert poller.spun[0] >= 1.0 + SPIN_S / 2
    assert poller.spun[-1] < 1.0 + SPIN_S / 2 + SPIN_S
    assert len(poller.spun) == pytest.approx(SPIN_S / STEP_S, rel=0.05)


def test_a_timer_is_not_kept_waiting_by_a_spin() -> None:
    ticks: list[float] = []
    poller = turned([0.992, 0.996], 1.5, spin_s=0.01, tick_s=1.0, ticks=ticks)
    assert poller.spun
    assert 1.0 <= ticks[0] <= 1.001 + 5 * STEP_S, "as late as a sleep, which goes by milliseconds, may make it"


def test_without_it_nothing_spins() -> None:
    poller = turned([SPIN_S / 2 * number for number in range(1, 101)], 1.0, spin_s=0.0)
    assert not poller.spun


@pytest.mark.parametrize("config", [partial(BrokerConfig, "ipc:///tmp/x"), ControllerConfig])
def test_how_long_is_bounded(config: Any) -> None:
    assert config(spin_us=10_000).spin_us == 10_000
    for spin_us in (-1, 10_001):
        with pytest.raises(ConfigError, match="spin_us"):
            config(spin_us=spin_us)


def test_a_part_hands_it_to_its_loop() -> None:
    parts = Broker(BrokerConfig("ipc:///tmp/x", spin_us=300)), Controller(ControllerConfig(spin_us=300))
    assert [part.spin_us for part in parts] == [300, 300]

    class Part(Service):
        part, spin_us = "test", 300

        def _open(self, exits: ExitStack) -> None:
            assert self.loop._spin_s == 0.0003

    part = Part()
    part.open()
    part.close()

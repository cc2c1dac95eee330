"""The engines to measure: a runner each, alone in this process, as a node would have it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bus.runtime.loop import Loop
from nodes.config import NodeConfig
from nodes.engines import EngineKind
from nodes.own.engines.cache import no_progress
from pdbus.calibrate.probe import Probe

TICK_S = 0.05


@contextmanager
def probe_of(kind: EngineKind, config: NodeConfig) -> Iterator[tuple[Probe, int]]:
    """A probe, and the prompt tokens of a step. ConfigError or StartError where the engine does not come up."""
    loop = Loop()
    loop.call_every(TICK_S, lambda: None)  # a turn before long
    try:
        with kind.opened(config, loop, no_progress) as opened:
            yield Probe(opened.runners[0], loop.clock, loop.turn), opened.step_tokens
    finally:
        loop.close()

"""Opens the engine to measure: one runner (an engine's adapter at a rank), alone in this process, without a cluster."""

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
    """Open the engine in this process; give a probe and the maximum of prompt tokens in a step. The engine is closed at
    the end of the `with` block. It blocks while the model loads. Raises ConfigError or StartError if the engine does
    not start."""
    loop = Loop()
    loop.call_every(TICK_S, lambda: None)  # so that a turn never waits long
    try:
        with kind.opened(config, loop, no_progress) as opened:
            yield Probe(opened.runners[0], loop.clock, loop.turn), opened.step_tokens
    finally:
        loop.close()

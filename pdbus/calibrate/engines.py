"""The engines to measure: a runner each, alone in this process, as a node would have it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bus.runtime.loop import Loop
from nodes.config import NodeConfig
from nodes.main import VLLM, own_runner
from nodes.own.engines.factory import build_engine
from pdbus.calibrate.probe import Probe

TICK_S = 0.05


@contextmanager
def probe_of(engine: str, config: NodeConfig, model: str, arguments: Sequence[str]) -> Iterator[tuple[Probe, int]]:
    """A probe, and the prompt tokens of a step. ConfigError or StartError where the engine does not come up."""
    loop = Loop()
    loop.call_every(TICK_S, lambda: None)  # a turn before long
    try:
        if engine == VLLM:
            from nodes.vllm.main import opened

            with opened(config, model, arguments, loop) as (runners, facts):
                yield Probe(runners[0], loop.clock, loop.turn), facts.step_tokens
            return
        own = build_engine(config.engine, loop)
        try:
            yield Probe(own_runner(config, 0, own), loop.clock, loop.turn), config.chunk_tokens
        finally:
            own.close()
    finally:
        loop.close()

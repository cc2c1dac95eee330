"""`pdbus calibrate` finds the parameters of an engine that has them, and says how well they fit one that has not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from statistics import median
from typing import cast

import msgspec
import pytest
from fake_vllm import STEP_S, FakeClient, runner_of
from virtual_time import VirtualTime

from bus.endpoints import default_bus, default_controller
from bus.errors import ConfigError, StartError
from bus.runtime.loop import Loop
from nodes.config import NodeConfig
from nodes.link.runner import Runner
from nodes.own.engines.faults import Faults
from nodes.own.engines.sim import SimEngine
from nodes.own.engines.timing import SimTiming, TimingFile, timing_named
from nodes.own.kinds import own_runner
from nodes.vllm.engine import EngineThread
from pdbus.calibrate.check import _fetch_token_s
from pdbus.calibrate.fit import Point, fit, relative_errors
from pdbus.calibrate.measure import measure
from pdbus.calibrate.probe import Probe
from pdbus.client import Client, Piece
from pdbus.commands.lab import timing_settings
from pdbus.lab.config import LabConfig

CHUNK = 256
CONFIG = NodeConfig(
    role="unified", instance="u", dp_size=1, dp_ranks=(0,), bus=default_bus(), controllers=(default_controller(),),
    data="ipc:///tmp", chunk_tokens=CHUNK,
)  # fmt: skip


def sim_probe(timing: SimTiming, faults: Faults | None = None) -> Probe:
    time = VirtualTime()
    engine = SimEngine(time, blocks=4096, block_tokens=16, max_context=8192, timing=timing, faults=faults or Faults())
    runner: Runner = own_runner(CONFIG, 0, engine)
    return Probe(runner, time.clock, time.fire)


@cache
def measured(timing: SimTiming) -> Sequence[Point]:
    return tuple(measure(sim_probe(timing), CHUNK, 2048, rounds=1))


@pytest.mark.parametrize(
    "timing",
    [
        SimTiming(),
        SimTiming(0.03, 2e-3, 4e-3, 1e-6),
        SimTiming(0.03, 2e-3, 1e-4, 1e-6, 0.035),
        SimTiming(0.0, 1e-4, 1e-5, 0.0),
        SimTiming(0.005, 0.0, 0.0, 1e-6),
    ],
)
def test_the_parameters_of_the_sim_engine_are_found(timing: SimTiming) -> None:
    points = measured(timing)
    found = fit(points)
    for name in ("base_s", "per_prefill_token_s", "per_decode_row_s", "per_context_token_s", "batched_s"):
        assert getattr(found, name) == pytest.approx(getattr(timing, name), rel=1e-6, abs=1e-12), name
    assert max(map(abs, relative_errors(points, found))) < 1e-6


def test_what_is_asked_covers_chunks_batches_and_contexts() -> None:
    """Else a term would be a guess."""
    points = measured(SimTiming())
    assert {point.steps for point in points if not point.decode_rows} >= {1, 2, 8}
    rows = {point.decode_rows // point.steps for point in points if point.decode_rows}
    assert rows == {1, 2, 4, 8, 16, 32, 64}
    assert max(point.context_tokens / point.decode_rows for point in points if point.decode_rows == point.steps) > 1000


def test_noise_of_some_percent_moves_no_parameter_by_much_more() -> None:
    rng = Random(1)
    points = measured(SimTiming())
    noisy = [replace(point, seconds=point.seconds * rng.gauss(1, 0.03)) for point in points]
    found = fit(noisy)
    assert found.base_s == pytest.approx(7e-3, rel=0.1)
    assert found.per_prefill_token_s == pytest.approx(1e-4, rel=0.1)
    assert sorted(map(abs, relative_errors(noisy, found)))[len(noisy) // 2] < 0.05


def test_a_term_that_would_come_out_below_nothing_is_left_out() -> None:
    falling = [Point(1, tokens, 0, 0, 0.1 - tokens * 1e-5) for tokens in (100, 1000, 2000)]
    found = fit(falling)
    assert found.per_prefill_token_s == 0.0
    assert found.base_s == pytest.approx(0.09, rel=0.05)


def test_an_engine_that_fails_or_stands_still_is_an_error() -> None:
    prompt: Sequence[int] = [5, 6, 7]
    with pytest.raises(StartError, match="the engine failed: injected fault"):
        sim_probe(SimTiming(), Faults(fail_token=6)).run([prompt], [4])
    still = VirtualTime()
    engine = SimEngine(still, blocks=64, block_tokens=16, faults=Faults(hang_token=6))
    probe = Probe(own_runner(CONFIG, 0, engine), still.clock, lambda: setattr(still, "now", still.now + 50.0))
    with pytest.raises(StartError, match="no token for 300 s"):
        probe.run([prompt], [4])


def test_vllm_is_measured_through_its_runner(tmp_path: Path) -> None:
    """A client that takes STEP_S for each step, whatever is in it, on a thread of its own."""
    loop = Loop()
    loop.call_every(0.05, lambda: None)

    async def build() -> FakeClient:
        return FakeClient(tmp_path, "fake")

    try:
        with EngineThread(build, lambda client: None) as engine:
            runner = runner_of(engine.client, "fake", 30.0, on_engine=engine.call, on_link=loop.call_threadsafe)
            points = measure(Probe(runner, loop.clock, loop.turn), 4096, 64)
    finally:
        loop.close()
    found = fit(points)
    assert {point.decode_rows // point.steps for point in points if point.decode_rows} == {1, 2, 4, 8, 16}
    # Where this thread is kept waiting, steps come in bursts and some look shorter than they were.
    assert median(point.seconds / point.steps for point in points) >= 0.5 * STEP_S
    assert found.step_s(0, 1, 16) > 0


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "choose one of h100-8b, zero, or a file that pdbus calibrate wrote"),
        ("{}", "is no timing file of pdbus calibrate: Object missing required field `engine`"),
        ('{"engine":"sim","model":"m","timing":{"base_s":-1}}', "base_s must be a number of seconds of at least 0"),
        ("\x00", "is no timing file of pdbus calibrate"),
    ],
)
def test_a_file_that_is_none_is_one_clear_line(tmp_path: Path, content: str | None, why: str) -> None:
    path = tmp_path / "timing.json"
    if content is not None:
        path.write_text(content)
    for read in (timing_named, lambda name: timing_settings(name, 1.0)):
        with pytest.raises(ConfigError, match=re.escape(why)) as error:
            read(str(path))
        assert "\n" not in str(error.value)


def test_what_is_written_is_what_replay_and_nodes_go_by(tmp_path: Path) -> None:
    timing = SimTiming(0.1, 0.02, 0.003, 4e-7)
    path = tmp_path / "timing.json"
    for fetch, first in ((None, False), (5e-5, True)):
        found = TimingFile(engine="e", model="m", timing=timing, kv_fetch_token_s=fetch, first_at_decode=first)
        path.write_bytes(msgspec.json.encode(found))
        assert timing_named(str(path)) == timing
        config = LabConfig(**timing_settings(str(path), 2.0))
        assert config.timing == timing.scaled(2.0)
        assert config.kv_fetch_token_s == (LabConfig().kv_fetch_token_s if fetch is None else fetch)
        assert config.first_at_decode is first
    assert timing_settings("h100-8b", 1.0) == {"timing": SimTiming()}


def test_two_tokens_that_come_in_one_piece_are_two() -> None:
    """A busy machine joins them."""

    class Joined:
        def generate_tokens(self, ids: list[int], **options: object) -> list[Piece]:
            return [Piece((5, 6))]

    assert _fetch_token_s(cast(Client, Joined()), LabConfig(first_at_decode=False), 800) == 0.0

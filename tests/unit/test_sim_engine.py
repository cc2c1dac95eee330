"""The sim engine: its token rule, its KV blocks and its timing, against a hand-written reference."""

from __future__ import annotations

import struct
import subprocess
import sys
import zlib

import pytest
from virtual_time import VirtualTime

from bus.errors import ConfigError
from bus.wire.messages import Params
from nodes.own.engines.base import Row, StepPlan, StepResult
from nodes.own.engines.faults import CRASH_EXIT_CODE, Faults
from nodes.own.engines.sim import SimEngine, sim_generate
from nodes.own.engines.timing import TIMINGS, SimTiming, timing_named

GREEDY = Params()


def run(loop: VirtualTime) -> None:
    while loop.next_due < float("inf"):
        loop.fire()


def engine_on(loop: VirtualTime, **options: object) -> SimEngine:
    return SimEngine(loop, **{"blocks": 64, "block_tokens": 4, **options})  # type: ignore[arg-type]


def step(loop: VirtualTime, engine: SimEngine, *rows: Row) -> StepResult:
    results: list[StepResult] = []
    engine.submit(StepPlan(1, rows), results.append)
    assert not results, "done must not be called from inside submit"
    run(loop)
    assert len(results) == 1
    return results[0]


def generate(
    loop: VirtualTime, engine: SimEngine, prompt: list[int], n: int, table: list[int], chunk: int
) -> list[int]:
    for start in range(0, len(prompt), chunk):
        tokens = prompt[start : start + chunk]
        last = start + chunk >= len(prompt)
        result = step(loop, engine, Row(1, tokens, start, table, GREEDY if last else None))
    output = [result.tokens[0][1]]
    while len(output) < n:
        result = step(loop, engine, Row(1, output[-1:], len(prompt) + len(output) - 1, table, GREEDY, len(output)))
        output.append(result.tokens[0][1])
    return output


def test_reference_follows_the_written_rule():
    state = 0
    for token in [5, 70_000]:
        state = zlib.crc32(struct.pack("<i", token), state)
    first = 3 + state % 509
    second = 3 + zlib.crc32(struct.pack("<i", first), state) % 509
    assert sim_generate([5, 70_000], 2, 512) == [first, second]


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 100])
def test_any_chunking_gives_the_reference(chunk: int):
    loop = VirtualTime()
    prompt = list(range(10, 33))
    output = generate(loop, engine_on(loop), prompt, 9, list(range(20, 30)), chunk)
    assert output == sim_generate(prompt, 9)
    assert min(output) >= 3
    assert max(output) < 512


class LateTime(VirtualTime):
    """Each timer fires `late_s` after it is due."""

    late_s = 0.002

    def fire(self) -> None:
        self.now = max(self.now, self.next_due) + self.late_s
        super().fire()


def test_a_late_timer_makes_one_answer_late_and_not_the_steps_that_follow():
    loop, row = LateTime(), Row(1, [5], 0, [1], GREEDY)
    engine = engine_on(loop, timing=SimTiming(0.01, 0.0, 0.0, 0.0))
    for _ in range(100):
        step(loop, engine, row)
        loop.now += 0.0005  # what a node does between two steps counts
    assert loop.now == pytest.approx(100 * 0.0105 + 0.002)
    loop.now += 1.0  # a pause: the next step counts from its own beginning
    began = loop.now
    step(loop, engine, row)
    assert loop.now - began == pytest.approx(0.012)


def test_what_is_asked_for_after_a_late_answer_takes_its_whole_time():
    loop = LateTime()
    engine = engine_on(loop, timing=SimTiming(0.01, 0.0, 0.0, 0.0))
    for seq in range(1, 11):
        step(loop, engine, Row(seq, [5], 0, [1], GREEDY))
    assert loop.now == pytest.approx(10 * 0.012)


def test_after_a_second_in_which_the_process_stood_still_one_step_is_made_up_for():
    loop, row = LateTime(), Row(1, [5], 0, [1], GREEDY)
    engine = engine_on(loop, timing=SimTiming(0.01, 0.0, 0.0, 0.0))
    loop.late_s = 1.0
    step(loop, engine, row)
    loop.late_s, began = 0.0, loop.now
    for _ in range(10):
        step(loop, engine, row)
    assert loop.now - began == pytest.approx(0.09)


def test_blocks_move_between_engines_and_damage_shows():
    loop = VirtualTime()
    prompt, expected = list(range(100, 110)), sim_generate(list(range(100, 110)), 6)
    prefill = engine_on(loop, kv_bytes_per_token=64)
    generate(loop, prefill, prompt, 1, [7, 3, 5], 4)
    blocks = [bytes(prefill.export_block(block)) for block in (7, 3, 5)]
    assert all(len(block) == prefill.spec.block_bytes == 4 * 64 for block in blocks)

    def continued(blocks: list[bytes]) -> list[int]:
        decode = engine_on(loop, kv_bytes_per_token=64)
        table = [11, 12, 13, 14]
        for block, data in zip(table, blocks, strict=False):
            decode.import_block(block, data)
        output = expected[:1]
        while len(output) < 6:
            row = Row(9, output[-1:], len(prompt) + len(output) - 1, table, GREEDY, len(output))
            output.append(step(loop, decode, row).tokens[0][1])
        return output

    assert continued(blocks) == expected
    assert continued(blocks[:2]) != expected
    assert continued([blocks[0], blocks[1], bytes(256)]) != expected


def test_a_block_holds_the_state_after_each_token():
    """uint32, little-endian: the layout that examples/foreign_scheduler.py serves."""
    loop = VirtualTime()
    prefill = engine_on(loop, kv_bytes_per_token=16)
    prompt = list(range(5, 11))
    generate(loop, prefill, prompt, 1, [7, 3], 6)
    states = [0]
    for token in prompt:
        states.append(zlib.crc32(struct.pack("<i", token), states[-1]))
    assert bytes(prefill.export_block(3)) == struct.pack("<2I", *states[5:]).ljust(64, b"\0")


def test_rows_of_one_step_do_not_mix_and_only_params_rows_answer():
    loop = VirtualTime()
    engine = engine_on(loop)
    prompts = {1: [5, 6, 7], 2: [9] * 6, 3: [4]}
    rows = [Row(s, p, 0, [10 * s, 10 * s + 1], None if s == 2 else GREEDY) for s, p in prompts.items()]
    assert step(loop, engine, *rows).tokens == tuple((s, sim_generate(prompts[s], 1)[0]) for s in (1, 3))


def test_answers_after_the_modelled_time():
    loop = VirtualTime()
    engine = engine_on(loop, timing=SimTiming(1.0, 0.1, 0.01, 0.001))
    rows = (Row(1, [5] * 8, 4, [0, 1, 2], None), Row(2, [5], 8, [3, 4, 5], GREEDY))
    result = step(loop, engine, *rows)
    assert result.duration_s == pytest.approx(1.0 + 0.8 + 0.01 + 0.012)
    assert loop.now == pytest.approx(result.duration_s)


def test_timing_presets_hold_what_they_promise():
    default = timing_named("h100-8b")
    assert 2000 / default.step_s(2000, 0, 0) == pytest.approx(10_000, rel=0.1)
    assert default.step_s(0, 32, 64_000) == pytest.approx(0.0105, rel=0.05)
    assert timing_named("zero").step_s(10_000, 64, 10_000) == 0.0
    assert default.rows_s([]) == 0.0
    assert default.scaled(0.5).step_s(10, 2, 3) == pytest.approx(default.step_s(10, 2, 3) / 2)
    with pytest.raises(ConfigError, match="choose one of h100-8b, zero"):
        timing_named("warp")
    with pytest.raises(ConfigError, match="base_s"):
        SimTiming(base_s=-1.0)
    assert set(TIMINGS) == {"h100-8b", "zero"}


def test_refuses_blocks_of_a_wrong_size_or_number():
    engine = engine_on(VirtualTime())
    with pytest.raises(ValueError, match="16 bytes, not 15"):
        engine.import_block(0, bytes(15))
    with pytest.raises(IndexError):
        engine.export_block(64)


def test_close_forgets_the_running_step():
    loop = VirtualTime()
    engine = engine_on(loop)
    engine.submit(StepPlan(1, (Row(1, [5], 0, [0], GREEDY),)), lambda result: pytest.fail("answered after close"))
    engine.close()
    engine.close()
    run(loop)


def test_injected_faults():
    loop = VirtualTime()
    engine = engine_on(loop, faults=Faults(fail_token=0, hang_token=1))
    result = step(loop, engine, Row(1, [5, 0], 0, [0], GREEDY), Row(2, [5], 0, [1], GREEDY))
    assert result.tokens == ()
    assert "injected" in result.error
    assert step(loop, engine, Row(2, [5], 0, [1], GREEDY)).error == ""
    engine.submit(StepPlan(2, (Row(1, [1], 0, [0], GREEDY),)), lambda result: pytest.fail("a hung step answered"))
    run(loop)


def test_injected_crash_kills_the_process():
    code = (
        "from nodes.own.engines.base import Row; from nodes.own.engines.faults import Faults\n"
        "faults = Faults(crash_token=2)\n"
        "print(repr(faults.fed([Row(1, [5, 3], 0, [0], None)])), flush=True)\n"
        "faults.fed([Row(1, [5, 2], 0, [0], None)])\n"
        "print('alive')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (CRASH_EXIT_CODE, "''\n")

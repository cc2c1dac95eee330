"""What a live replay starts, and what it asks for; that it runs is for tests/integration/test_replay_command.py."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from bus.wire.hashing import block_hashes
from pdbus.lab.config import LabConfig
from pdbus.lab.live import LiveEngine, _Replay, make_prompt, sampling, spec_of, virtual_twin
from pdbus.lab.outcome import RequestOutcome
from pdbus.lab.simulate import rooms_of, simulate
from pdbus.lab.traces import Trace, TraceRequest
from pdbus.launcher.spec import Addresses

AT = Addresses("ipc:///x/bus", {"controller-0": "ipc:///x/c"}, "ipc:///x")
CONFIG = LabConfig(ranks=1, decode_ranks=1, queue_order="slo", slo_ttft_s=7.0, slo_tpot_s=0.25, late_tokens=99)


def commands(config: LabConfig, engine: LiveEngine) -> dict[str, str]:
    """What each part is started with."""
    return {part.name: " ".join(part.args) for part in spec_of("cache_aware", config, 32, engine).parts(AT)}


def test_the_controller_gets_the_order_and_its_limits() -> None:
    for engine in (LiveEngine(), LiveEngine("vllm", "smollm2")):
        told = commands(CONFIG, engine)["controller-0"]
        for said in ("--queue-order slo", "--late-tokens 99", "--ttft-slo-s 7.0", "--tpot-slo-s 0.0"):
            assert said in told
    admitting = LabConfig(queue_order="slo", slo_tpot_s=0.25, tpot_admission=True)
    assert "--tpot-slo-s 0.25" in commands(admitting, LiveEngine())["controller-0"]


def test_a_mixture_has_the_launchers_roles_and_the_compared_method_for_two_of_them() -> None:
    started = commands(LabConfig(ranks=2, decode_ranks=2, unified_ranks=3, unified_kv_tokens=5_000), LiveEngine())
    assert [*started] == ["broker", "controller-0", "prefill-0/0-1", "decode-0/0-1", "unified-0/0-2"]
    assert "--prefill-method cache_aware --decode-method total_requests --unified-method" in started["controller-0"]
    assert "--unified-method cache_aware" in started["controller-0"]
    assert "--expect prefill --expect decode --expect unified" in started["controller-0"]
    assert "--kv-tokens 5000 --max-running 256" in started["unified-0/0-2"]
    alone = commands(LabConfig(ranks=0, decode_ranks=0, unified_ranks=1), LiveEngine("vllm", "smollm2"))
    assert [*alone] == ["broker", "controller-0", "unified-0/0"]


@pytest.mark.parametrize("kept", [True, False])
def test_decode_ranks_keep_kv_caches_where_those_of_the_virtual_run_do(kept: bool) -> None:
    method = "least_cost" if kept else "total_tokens"
    config = LabConfig(ranks=1, decode_ranks=1, decode_cache=kept, decode_prefills=kept, decode_method=method)
    started = commands(config, LiveEngine())
    assert ("--decode-cache" in started["decode-0/0"]) == kept
    assert "--decode-cache" not in started["prefill-0/0"]
    assert f"--decode-method {method}" in started["controller-0"]


def test_vllm_gets_its_own_arguments_and_none_of_the_timing_model() -> None:
    node = commands(CONFIG, LiveEngine("vllm", "smollm2", ("--dtype", "float32")))["prefill-0/0"]
    assert "--engine vllm --model smollm2" in node
    assert node.endswith(" -- --dtype float32")
    assert "--sim-" not in node
    assert "--sim-base-s 0.007" in commands(CONFIG, LiveEngine())["prefill-0/0"]


def test_what_shares_blocks_shares_them_when_it_is_made_shorter() -> None:
    requests = (TraceRequest(0.0, 1100, 90, (7, 8)), TraceRequest(1.0, 1700, 1, (7, 8, 9)))
    trace = Trace("two", requests).shrunk(16)
    assert trace.block_tokens == 32
    assert [(r.prompt_tokens, r.output_tokens) for r in trace.requests] == [(69, 6), (107, 1)]
    first, second = (block_hashes(make_prompt(r, 32, n), 32) for n, r in enumerate(trace.requests))
    assert first[:2] == second[:2]
    assert len(first) == 2
    assert len(second) == 3


def test_the_virtual_run_beside_a_live_one_has_the_timing_of_its_engine() -> None:
    measured = replace(CONFIG, kv_fetch_token_s=3e-5, first_at_decode=True, report_delay_s=0.1, report_loss=0.5)
    sim, vllm = virtual_twin(measured, LiveEngine()), virtual_twin(measured, LiveEngine("vllm", "smollm2"))
    assert (sim.kv_fetch_token_s, sim.first_at_decode) == (1e-7, False)
    assert (vllm.kv_fetch_token_s, vllm.first_at_decode) == (3e-5, True)
    assert {(twin.report_delay_s, twin.report_loss) for twin in (sim, vllm)} == {(0.0, 0.0)}


def test_load_is_sampled_until_the_last_request_has_ended() -> None:
    async def run() -> None:
        sampled, again = asyncio.Event(), asyncio.Event()

        async def sample() -> None:
            (again if sampled.is_set() else sampled).set()

        async with sampling(sample, 0.001), asyncio.timeout(60):
            await sampled.wait()
            await again.wait()  # also while nothing is sent any more

    asyncio.run(run())


def test_a_sample_that_fails_fails_the_run() -> None:
    async def run() -> None:
        async def sample() -> None:
            raise ValueError("no controller answers")

        async with sampling(sample, 60):
            await asyncio.sleep(0)

    with pytest.raises(ValueError, match="no controller"):
        asyncio.run(run())


def test_rooms_are_drawn_alike_in_virtual_time_and_live() -> None:
    """Under `follow_bootstrap_room` the room is the choice of the rank."""
    trace = Trace("t", tuple(TraceRequest(0.1 * number, 100, 2) for number in range(40)))
    config = LabConfig(ranks=4, decode_ranks=4, controllers=3)
    rooms = rooms_of(trace, replace(config, controllers=1))
    courses: list[RequestOutcome] = simulate(trace, "follow_bootstrap_room", config).courses
    assert [course.prefill_rank for course in courses] == [room % 4 for room in rooms]


class FakeClient:
    """A client whose answers take a millisecond a prompt token by their own account, and no time in fact."""

    async def generate_tokens(self, prompt: array[int], **options: Any) -> Any:
        rank = SimpleNamespace(dp_rank=0)
        result = SimpleNamespace(
            finish="length", prefill=rank, decode=rank, ttft_s=0.001, total_s=len(prompt) / 1000, cached_tokens=0
        )

        async def wait() -> Any:
            return result

        return SimpleNamespace(wait=wait)

    async def status(self) -> Any:
        return SimpleNamespace(ranks=())


def test_a_live_turn_arrives_its_think_time_after_all_answers_that_it_waits_for() -> None:
    """The answers end later than the client gets them, so a turn that counted from anything else would come sooner."""
    trace = Trace(
        "sessions",
        (
            TraceRequest(0.0, 60, 2, session=0),
            TraceRequest(0.0, 90, 2, session=0, after=(0,), think_s=0.03),
            TraceRequest(0.0, 40, 2, session=0, after=(0,)),
            TraceRequest(0.0, 50, 2, session=0, after=(1, 2), think_s=0.02),
            TraceRequest(0.0, 70, 2, session=1),
            TraceRequest(0.0, 30, 2, session=1, after=(4,), think_s=0.04),
        ),
    )
    config = LabConfig(ranks=1, decode_ranks=1, concurrency=1)

    async def run() -> list[RequestOutcome]:
        client: Any = FakeClient()
        return (await _Replay(client, trace, "cache_aware", config, lambda line: None).run()).courses

    courses = asyncio.run(run())
    assert [course.request for course in courses] == list(trace.requests)
    clock_s = 1e-6  # a timer may be early by the clock's resolution
    for course in courses:
        for former in course.request.after:
            assert course.arrived_s >= courses[former].finished_s + course.request.think_s - clock_s
    assert courses[4].arrived_s >= courses[3].finished_s - clock_s, "one session is under way at a time"

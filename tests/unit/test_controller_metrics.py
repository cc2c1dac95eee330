"""What a controller shows to Prometheus of each rank: by instance, dp_rank and role."""

from __future__ import annotations

from controller_world import EPOCH, D, P, World, pd, submit
from prometheus_client import generate_latest

from bus.runtime.metrics import registry
from controller.observe import collect, probe


def scraped(world: World) -> dict[str, float]:
    core = world.core
    ranks = core.members.ranks.values()
    counts = core.happened(), core.alive()
    left = collect(*counts, ranks, core.health.liveness, core.config.methods, core.regret, world.now)
    page = generate_latest(registry(lambda: left)).decode()
    return {
        name: float(value) for name, _, value in (line.rpartition(" ") for line in page.splitlines() if line[0] != "#")
    }


DECODE = 'dp_rank="0",instance="d",role="decode"'


def test_latencies_and_restarts_of_each_rank() -> None:
    world = pd()
    world.submit(submit("r", "pair"))
    (prefill,), (decode,) = world.dispatches(P[0]), world.dispatches(D[0])
    world.now += 0.4
    world.progress(D[0], started=[decode])
    world.progress(P[0], ended=[prefill], first_token_s=0.25)
    world.now += 0.9
    world.progress(D[0], ended=[decode], output_tokens=10)
    found = scraped(world)
    assert found[f"pdbus_controller_ttft_seconds_count{{{DECODE}}}"] == 1
    assert found[f"pdbus_controller_ttft_seconds_sum{{{DECODE}}}"] == 0.4
    assert found['pdbus_controller_ttft_seconds_sum{dp_rank="0",instance="p",role="prefill"}'] == 0.25
    assert round(found[f"pdbus_controller_tpot_seconds_sum{{{DECODE}}}"], 6) == 0.1
    assert found[f"pdbus_controller_restarts_total{{{DECODE}}}"] == 0
    assert found['pdbus_controller_failed_total{code="peer_lost"}'] == 0, (
        "there before the first, or that is no increase"
    )
    assert 'pdbus_controller_failed_total{code="ok"}' not in found
    assert found[f'pdbus_controller_rank_state{{{DECODE},state="ready"}}'] == 1


def test_acknowledgements_lag_from_a_look_until_all_sent_by_then_is_acknowledged() -> None:
    world = pd()
    for rid in ("a", "b"):
        world.submit(submit(rid, "pair", disagg_prefill_dp_rank=0, routed_dp_rank=0))
    probe(world.core.members.ranks.values(), world.now)
    assert scraped(world)[f"pdbus_controller_in_flight_requests{{{DECODE}}}"] == 2
    world.now += 0.3
    world.report(D[0], acks=[(EPOCH, 1, 10)])
    probe(world.core.members.ranks.values(), world.now)  # the first one is still out
    assert scraped(world)[f"pdbus_controller_acknowledgement_seconds_count{{{DECODE}}}"] == 0
    world.now += 0.4
    world.report(D[0], acks=[(EPOCH, 2, 20)])
    found = scraped(world)
    assert found[f"pdbus_controller_acknowledgement_seconds_count{{{DECODE}}}"] == 1
    assert round(found[f"pdbus_controller_acknowledgement_seconds_sum{{{DECODE}}}"], 6) == 0.7
    assert found[f"pdbus_controller_in_flight_requests{{{DECODE}}}"] == 0
    probe(world.core.members.ranks.values(), world.now)
    world.report(D[0], acks=[(EPOCH, 2, 20)])
    assert scraped(world)[f"pdbus_controller_acknowledgement_seconds_count{{{DECODE}}}"] == 1, "nothing was out"


def test_regret_is_told_by_role_and_method() -> None:
    world = pd(decode_method="round_robin")
    world.report(D[0], kv_tokens=700)
    world.report(D[1], kv_tokens=100)
    world.submit(submit("a", "pair", routed_dp_rank=0))
    world.now += 1.0
    world.report(D[0], kv_tokens=710, acks=[(EPOCH, 1, 10)])
    found = scraped(world)
    assert found['pdbus_controller_regret_dispatches_total{method="round_robin",role="decode"}'] == 1
    assert found['pdbus_controller_regret_tokens_total{method="round_robin",role="decode"}'] == 600
    assert found['pdbus_controller_regret_dispatches_total{method="total_tokens",role="prefill"}'] == 0

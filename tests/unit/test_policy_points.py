"""What a policy decides beside the rank: when a request goes (`admit`), which goes first (`order`), and where its
prompt is computed (`prefill_here`), live and in the lab; and the costs that it may weigh."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from controller_world import D, P, U, World, hello, load, submit

from bus.errors import BusError, ConfigError
from bus.wire.hashing import pack_hashes
from bus.wire.kv_names import Stored
from bus.wire.messages import Accepted, Cancel, Done, Load, Role
from controller.balancer import Balancer
from controller.costs import Costs
from controller.events import FromClient
from controller.load.rank import RankLoad
from controller.load.table import LoadTable
from controller.policies import Metric, Policy, make_policy
from controller.policies.guard import Guard, overrides
from controller.policies.methods import CacheAware
from nodes.own.engines.timing import SimTiming
from pdbus.lab.choosers import TableChooser, method_of
from pdbus.lab.config import LabConfig
from pdbus.lab.generator import generate
from pdbus.lab.metrics import summarise
from pdbus.lab.sessions import generate_sessions
from pdbus.lab.simulate import simulate
from pdbus.lab.traces import Trace, TraceRequest

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORTEST = f"{EXAMPLES / 'shortest_first.py'}:ShortestFirst"
FEW, CHEAPER = (f"{EXAMPLES / 'where_to_prefill.py'}:{name}" for name in ("FewHere", "Cheaper"))
HEAD = "from controller.policies.methods import CacheAware\n\n\nclass Mine(CacheAware):\n"


@pytest.fixture
def mine(tmp_path: Path) -> Any:
    """Return the name of a policy that is cache_aware but for the methods given."""

    def made(*methods: str) -> str:
        path = tmp_path / f"mine_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(HEAD + "\n\n".join(f"    {method}" for method in methods) + "\n")
        return f"{path}:Mine"

    return made


def rids(world: World) -> list[str]:
    return [each.rid for each in world.dispatches()]


# --- admit ----------------------------------------------------------------------------------------------------------


def test_what_is_not_admitted_waits_with_those_behind_it_until_it_is(mine: Any) -> None:
    method = mine("open = True", "def admit(self, rank, request):\n        return self.open or request.rid == 'c'")
    world = World(unified_method=method)
    world.join(U[0])
    policy = world.core.policies["unified"].policy  # type: ignore[attr-defined]
    world.submit(submit("a"))
    policy.open = False
    for rid in ("b", "c"):
        world.submit(submit(rid))
    assert rids(world) == ["a"], "c would be admitted, but does not overtake b"
    policy.open = True
    world.pass_time(0.1, alive=U[:1])
    assert rids(world) == ["a", "b", "c"]


def test_an_idle_rank_takes_a_request_unasked_so_nothing_waits_for_ever(mine: Any) -> None:
    world = World(unified_method=mine("def admit(self, rank, request):\n        return False"))
    world.join(U[0])
    world.report(U[0])
    for rid in ("a", "b"):
        world.submit(submit(rid))
    (first,) = world.dispatches()
    world.report(U[0], running=1, acks=[(77, 1, 10)])
    assert rids(world) == ["a"]
    world.progress(U[0], ended=[first])
    world.report(U[0], acks=[(77, 1, 10)])
    assert rids(world) == ["a", "b"]


def test_a_pair_goes_when_both_legs_are_admitted(mine: Any) -> None:
    method = mine("open = False", "def admit(self, rank, request):\n        return self.open")
    world = World(prefill_method="total_tokens", decode_method=method)
    for node in (P[0], D[0]):
        world.join(node)
    for rid in ("a", "b"):
        world.submit(submit(rid, "pair"))
    assert rids(world) == ["a", "a"]
    assert world.rank(P[0]).outstanding == 1, "nothing is charged for what waits"
    world.core.policies["decode"].policy.open = True  # type: ignore[attr-defined]
    world.pass_time(0.1, alive=(P[0], D[0]))
    assert rids(world) == ["a", "a", "b", "b"]


# --- order ----------------------------------------------------------------------------------------------------------


def waiting(method: str, **settings: Any) -> World:
    """A controller of one rank that runs one request, with requests of 30, 10 and 20 tokens that wait."""
    world = World(unified_method=method, request_overcommit=1.0, **settings)
    node = hello("u", max_running=1)
    world.join(node)
    for rid, tokens in (("first", 5), ("30", 30), ("10", 10), ("20", 20)):
        world.submit(submit(rid, prompt_tokens=tokens))
    return world


def served(world: World) -> list[str]:
    """Let one request end after the other and return the order in which they ran."""
    for number in range(4):
        world.progress(hello("u", max_running=1), ended=[world.dispatches()[-1]])
        world.report(hello("u", max_running=1), acks=[(77, number + 1, world.rank(hello("u")).sent_tokens)])
    return rids(world)[1:]


@pytest.mark.parametrize("settings", [{}, {"queue_order": "slo"}], ids=["arrival", "slo"])
def test_what_waits_goes_by_its_policys_numbers(mine: Any, settings: dict[str, str]) -> None:
    assert served(waiting(mine("def order(self, request, work, now):\n        return -work"), **settings)) == [
        "30", "20", "10",
    ]  # fmt: skip
    assert served(waiting(mine("def order(self, request, work, now):\n        return work"), **settings)) == [
        "10", "20", "30",
    ]  # fmt: skip
    assert served(waiting("total_tokens")) == ["30", "10", "20"]


def test_later_work_overtakes_no_further_than_the_bound(mine: Any) -> None:
    world = waiting(mine("def order(self, request, work, now):\n        return work"), overtake_tokens=10)
    assert served(world) == ["10", "30", "20"]


# --- prefill_here ---------------------------------------------------------------------------------------------------


def mixed(method: str, *nodes: Any, **settings: Any) -> World:
    """A controller of prefill, decode and unified ranks, whose unified ones go by `method`."""
    world = World(prefill_method="total_tokens", decode_method="total_requests", unified_method=method, **settings)
    for node in nodes or (*P, *D, *U):
        world.join(node)
    return world


HERE = "def prefill_here(self, rank, request):\n        return request.prompt_tokens < 20"


def test_a_pair_runs_at_one_rank_where_its_policy_says_so(mine: Any) -> None:
    world = mixed(mine(HERE))
    world.submit(submit("short", "pair"))
    world.submit(submit("long", "pair", prompt_tokens=20))
    assert [(each.rid, each.leg) for each in world.dispatches()] == [
        ("short", "unified"), ("long", "prefill"), ("long", "decode"),
    ]  # fmt: skip
    short = world.answers(Accepted)[0]
    assert short.prefill is None
    assert short.decode is not None
    assert short.decode.instance == "u"
    (only,) = world.dispatches(U[0])
    world.progress(U[0], started=[only], ended=[only])
    assert [leg.leg for leg in world.answers(Done)[0].legs] == ["unified"]
    world.feed(FromClient("client", Cancel("long")))
    world.assert_empty()


@pytest.mark.parametrize(
    "chosen", [{"routed_dp_rank": 0}, {"disagg_prefill_dp_rank": 0}, {"instance": "d"}, {"prefill_instance": "p"}]
)
def test_a_caller_that_names_a_rank_gets_it(mine: Any, chosen: dict[str, Any]) -> None:
    world = mixed(mine(HERE))
    world.submit(submit("r", "pair", **chosen))
    assert [each.leg for each in world.dispatches()] == ["prefill", "decode"]


def test_where_no_unified_rank_can_take_it_it_is_a_pair_as_ever(mine: Any) -> None:
    for nodes in ((*P, *D), (*P, *D, hello("u", max_context=12)), (*P, *D, hello("u", model="other"))):
        world = mixed(mine(HERE), *nodes)
        world.submit(submit("r", "pair", model="m"))
        assert [each.leg for each in world.dispatches()] == ["prefill", "decode"]


def test_a_unified_rank_that_fails_it_leaves_it_to_others(mine: Any) -> None:
    world = mixed(mine(HERE), *P, *D, U[0])
    world.submit(submit("r", "pair"))
    (first,) = world.dispatches()
    world.cut(U[0])
    legs = [(each.leg, each.attempt) for each in world.dispatches()]
    assert legs == [("unified", 1), ("prefill", 2), ("decode", 2)]
    assert first.leg == "unified"


def test_a_controller_that_starts_again_takes_over_a_pair_at_a_unified_rank(mine: Any) -> None:
    node = hello("u", running=(("r", 1),))
    world = mixed(mine(HERE), *P, *D, node)
    world.report(node, running=1)
    world.submit(submit("r", "pair"))
    assert world.core.counts["adopted"] == 1
    assert [(each.leg, each.attempt) for each in world.dispatches()] == [("unified", 1)]


# --- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hook", "method"),
    [
        ("begin", "def begin(self, costs):"),
        ("admit", "def admit(self, rank, request):"),
        ("order", "def order(self, request, work, now):"),
        ("prefill_here", "def prefill_here(self, rank, request):"),
    ],
)
@pytest.mark.parametrize("breaks", ["1 // 0", "self.costs.cached(3, 4)", "raise SystemExit"])
def test_a_fault_at_each_point_costs_no_request_is_counted_and_ends_a_replay(
    hook: str, method: str, breaks: str, mine: Any
) -> None:
    name = mine(f"{method}\n        {breaks}")
    node = hello("u", max_running=2)
    world = mixed(name, *P, *D, node, request_overcommit=1.0)
    world.submit(submit("pair", "pair"))
    for rid in ("a", "b", "c"):
        world.submit(submit(rid))
    assert rids(world) == ["pair", "pair", "a", "b"], "c waits for credit"
    assert [each.leg for each in world.dispatches()] == ["prefill", "decode", "unified", "unified"]
    world.progress(node, ended=world.dispatches()[2:3])
    world.report(node, running=1, acks=[(77, 2, 20)])
    assert rids(world)[4:] == ["c"]
    assert world.core.tally()["policy_faults"] >= 1
    world.pass_time(0.1, alive=(*P, *D, node))
    assert {note.fields["hook"] for note in world.notes if note.event == "policy.failed"} == {hook}
    config = LabConfig(ranks=2, decode_ranks=2, unified_ranks=1)
    with pytest.raises(BusError, match=rf"policy .*Mine failed in {hook}: .*\.py:\d+\)"):
        simulate(generate(60, seed=1), name, config)


def test_what_is_overridden_is_known_through_the_guard_too() -> None:
    mine = CacheAware()
    assert overrides(mine, "pick")
    assert not overrides(Guard(mine, lambda *fault: None), "admit")
    mine.admit = lambda rank, request: True  # type: ignore[method-assign]
    assert overrides(Guard(mine, lambda *fault: None), "admit")
    assert (method_of(SHORTEST).admits, method_of(SHORTEST).orders, method_of(SHORTEST).prefills_here) == (1, 1, 0)
    assert (method_of(FEW).admits, method_of(FEW).orders, method_of(FEW).prefills_here) == (0, 0, 1)


# --- costs ----------------------------------------------------------------------------------------------------------


class Asks(CacheAware):
    """Keeps the costs that it was given."""


class Seen:
    """A balancer of two ranks of each role, and the costs that its policies see."""

    def __init__(self) -> None:
        self.table = LoadTable(1)
        roles: tuple[Role, ...] = ("prefill", "decode", "unified")
        self.policies: dict[Role, Policy] = {role: Asks() for role in roles}
        self.balancer = Balancer(self.table, self.policies)
        self.ranks: dict[Role, list[RankLoad]] = {
            role: [self.balancer.opened(hello(role[0], n, role=role), ready=True) for n in range(2)] for role in roles
        }
        self.costs = self.policies["prefill"].costs
        self.seq = 0

    def report(self, role: Role, **fields: Any) -> None:
        self.seq += 1
        rank = self.ranks[role][0]
        self.balancer.report(rank.key, rank.epoch, load(self.seq, **fields), 0.1 * self.seq)


def test_all_policies_of_a_controller_see_the_same_costs_of_all_roles() -> None:
    seen = Seen()
    assert all(policy.costs is seen.costs for policy in seen.policies.values())
    for role in ("prefill", "decode", "unified"):
        assert {*seen.costs.view(role)} == {*seen.ranks[role]}
        assert seen.costs.view(role, "other").least(Metric.TOKENS) is None
    assert [*Costs().view("decode")] == []
    assert Costs().queued_by("decode") == 0


def test_queued_tokens_are_those_that_wait_not_those_that_are_held() -> None:
    seen = Seen()
    seen.report("unified", waiting=1, waiting_tokens=60, kv_tokens=500)
    seen.table.charge(seen.ranks["unified"][1], 40)
    assert [seen.costs.queued(rank) for rank in seen.ranks["unified"]] == [60, 40]
    assert (seen.costs.queued_by("unified"), seen.costs.queued_by("prefill")) == (100, 0)


def test_what_a_rank_caches_is_less_than_the_prompt() -> None:
    seen = Seen()
    first, second = seen.ranks["decode"]
    seen.balancer.cache(first, [Stored((1, 2, 3))])
    request = submit("r", prompt_tokens=48, block_tokens=16, block_hashes=pack_hashes([1, 2, 9]))
    assert [seen.costs.cached(rank, request) for rank in (first, second)] == [32, 0]
    whole = submit("r", prompt_tokens=48, block_tokens=16, block_hashes=pack_hashes([1, 2, 3]))
    assert seen.costs.cached(first, whole) == 47, "the last token is always computed"
    others: tuple[dict[str, Any], ...] = ({"block_tokens": 32, "block_hashes": pack_hashes([1])}, {})
    for other in others:
        assert seen.costs.cached(first, submit("r", prompt_tokens=48, **other)) == 0
    plain = Balancer(LoadTable(1), {"decode": make_policy("total_tokens")})
    rank = plain.opened(hello("d", role="decode"), ready=True)
    assert plain.policies["decode"].costs.cached(rank, whole) == 0


def test_speeds_are_learnt_from_the_first_question_on() -> None:
    seen = Seen()
    (rank, _), (unified, _) = seen.ranks["prefill"], seen.ranks["unified"]
    for tokens in (0, 1000):
        seen.report("prefill", prompt_tokens_total=tokens, busy_us_total=tokens * 500)
    assert seen.costs.pace(rank) == 0.0
    assert seen.costs.step_s(unified) == 0.0
    for tokens in (1000, 3000):
        seen.report("prefill", prompt_tokens_total=tokens, busy_us_total=tokens * 500)
    assert seen.costs.pace(rank) == seen.costs.pace(seen.ranks["prefill"][1]) == pytest.approx(5e-4)
    for step, (requests, tokens) in enumerate(((1, 100), (1, 100), (4, 800), (4, 800), (2, 900), (2, 900))):
        seen.report("unified", step=10 * step, running=requests, kv_tokens=tokens, busy_us_total=100_000 * step)
    assert seen.costs.step_s(unified, 50) == pytest.approx(0.01, rel=0.1)
    assert seen.costs.pace(seen.ranks["decode"][0]) == 0.0


def test_a_link_costs_what_the_lab_says_and_nothing_to_oneself() -> None:
    seen = Seen()
    one, other = seen.ranks["prefill"]
    assert seen.costs.link_s(one, other) == 0.0
    assert (Costs(2e-6).link_s(one, other), Costs(2e-6).link_s(one, one)) == (2e-6, 0.0)


# --- in the lab -----------------------------------------------------------------------------------------------------

TIMING = SimTiming(base_s=1.0, per_prefill_token_s=0.25, per_decode_row_s=0.125, per_context_token_s=1 / 1024)
PAIR = LabConfig(
    ranks=1, decode_ranks=1, load=0.0, hop_s=0.0, chunk_tokens=64, timing=TIMING, kv_fetch_token_s=0.0,
    decode_prefills=True,
)  # fmt: skip
FAR = TraceRequest(500.0, 16, 1)  # a trace has two requests


def test_the_lab_lets_short_ones_go_first_and_binds_late() -> None:
    """The first keeps the only rank busy for a while; of those that wait, the short one is served before the long."""
    requests = (TraceRequest(0.0, 4000, 1), TraceRequest(0.001, 4000, 1), TraceRequest(0.002, 100, 1))
    config = LabConfig(ranks=1, decode_ranks=0, load=0.0, chunk_tokens=2048)
    shown = {}
    for method in ("cache_aware", SHORTEST):
        first = [course.first_token_s for course in simulate(Trace("t", requests, 16), method, config).courses]
        shown[method] = sorted(range(3), key=first.__getitem__)
    assert shown == {"cache_aware": [0, 1, 2], SHORTEST: [0, 2, 1]}


def test_in_the_lab_an_idle_rank_takes_a_request_unasked_too(mine: Any) -> None:
    never = mine("def admit(self, rank, request):\n        return False")
    one = LabConfig(ranks=1, decode_ranks=0, load=0.0)
    courses = simulate(Trace("t", (TraceRequest(0.0, 4000, 1), TraceRequest(0.001, 100, 1)), 16), never, one).courses
    assert courses[1].first_token_s > courses[0].first_token_s + 0.0005


@pytest.mark.parametrize("settings", [{}, {"controllers": 3, "report_loss": 0.2}, {"queue_order": "slo"}], ids=str)
def test_a_policy_that_admits_for_decode_ranks_loses_nothing(mine: Any, settings: dict[str, Any]) -> None:
    method = mine("def admit(self, rank, request):\n        return rank.requests < 3")
    config = LabConfig(ranks=2, decode_ranks=2, decode_method=method, load=0.5, **settings)
    courses = simulate(generate(60, seed=1), "total_tokens", config).courses
    assert all(course.finished_s > course.first_token_s > course.arrived_s for course in courses)


def test_a_decode_rank_that_computes_a_prompt_is_the_sum_of_its_steps(mine: Any) -> None:
    """The steps are those of a unified rank: three chunks, then nine steps with one row each. No KV cache is
    transferred."""
    config = replace(PAIR, decode_method=mine("def prefill_here(self, rank, request):\n        return True"))
    outcome = simulate(Trace("t", (TraceRequest(0.0, 150, 10), FAR), 16), "round_robin", config)
    course = outcome.courses[0]
    first_s = sum(TIMING.step_s(tokens, 0, start) for tokens, start in ((64, 0), (64, 64), (22, 128)))
    steps_s = sum(TIMING.step_s(0, 1, 150 + number) for number in range(9))
    assert course.first_token_s == pytest.approx(first_s, rel=1e-12)
    assert course.finished_s == pytest.approx(first_s + steps_s, rel=1e-12)
    assert (course.prefill_rank, course.decode_rank, course.moved_tokens) == (-1, 0, 0)
    found = summarise(outcome, config)
    assert (found.here_share, found.prefill_busy) == (1.0, 0.0)
    assert found.decode_busy > 0


def test_the_next_turn_is_computed_from_what_decode_keeps(mine: Any) -> None:
    """The first turn, of 40 tokens, is a pair; the second has 96 tokens, of which decode holds 48."""
    trace = Trace(
        "t",
        (
            TraceRequest(0.0, 40, 24, (1, 2), 0),
            TraceRequest(0.0, 100, 2, (1, 2, 3, 4, 5, 6), 0, (0,), 1.0),
        ),
        16,
        timed=False,
    )
    here = "def prefill_here(self, rank, request):\n        return self.costs.cached(rank, request) > 0"
    config = replace(PAIR, decode_method=mine(here), decode_cache=True, concurrency=1)
    first, second = simulate(trace, "round_robin", config).courses
    assert (first.prefill_rank, first.moved_tokens) == (0, 40)
    assert (second.prefill_rank, second.moved_tokens, second.cached_tokens) == (-1, 0, 48)
    computed_s = TIMING.step_s(52, 0, 48)
    assert second.first_token_s - second.arrived_s == pytest.approx(computed_s, rel=1e-12)


def test_decode_ranks_that_compute_prompts_count_what_waits_and_a_part_of_what_they_hold_others_all() -> None:
    for able in (True, False):
        config = replace(PAIR, decode_prefills=able)
        chooser = TableChooser(make_policy("cache_aware"), "decode", 1, 0, config, 16)
        chooser.report(0, Load(seq=1, step=1, running=1, waiting=0, waiting_tokens=5, kv_tokens=90, kv_capacity=0,
                               max_running=0), 0.0)  # fmt: skip
        assert [rank.tokens for rank in chooser.table.group("decode").members if rank] == [7 if able else 95]


def test_a_chunk_in_a_decode_batch_makes_the_step_of_all_longer(mine: Any) -> None:
    here = "def prefill_here(self, rank, request):\n        return request.prompt_tokens == 48"
    config = replace(PAIR, decode_method=mine(here))
    alone, mixed = (
        simulate(Trace("t", (TraceRequest(0.0, 16, 7), *others), 16), "round_robin", config).courses[0]
        for others in ((FAR,), (TraceRequest(7.5, 48, 1), FAR))
    )
    longer_s = TIMING.step_s(48, 1, 0) - TIMING.step_s(0, 1, 0)
    assert mixed.finished_s - alone.finished_s == pytest.approx(longer_s, rel=1e-9)


def test_what_a_policy_leaves_to_prefill_ranks_is_as_if_they_were_alone(mine: Any) -> None:
    """A decode rank that could compute prompts, and is never told to, is as ever, where what it holds counts."""
    never = mine("counts_queue_only = False\n\n    def prefill_here(self, rank, request):\n        return False")
    config = LabConfig(ranks=2, decode_ranks=2, decode_method=never, decode_cache=True)
    trace = generate_sessions(4, seed=3)
    plain, able = (simulate(trace, "cache_aware", replace(config, decode_prefills=able)) for able in (False, True))
    for mine_, other in zip(plain.courses, able.courses, strict=True):
        assert (mine_.prefill_rank, mine_.decode_rank) == (other.prefill_rank, other.decode_rank)
        assert mine_.finished_s == pytest.approx(other.finished_s, rel=1e-9)


@pytest.mark.parametrize("settings", [{}, {"controllers": 2, "report_loss": 0.1}, {"queue_order": "slo"}], ids=str)
@pytest.mark.parametrize("method", [FEW, CHEAPER])
def test_the_examples_end_every_request_and_move_less(method: str, settings: dict[str, Any]) -> None:
    config = LabConfig(ranks=2, decode_ranks=2, decode_method="cache_aware", decode_cache=True, load=0.3, **settings)
    trace = generate_sessions(6, seed=2)
    plain = summarise(simulate(trace, "cache_aware", config), config)
    config = replace(config, decode_method=method, decode_prefills=True)
    outcome = simulate(trace, "cache_aware", config)
    found = summarise(outcome, config)
    assert 0 < found.here_share < 1
    assert found.moved_share < plain.moved_share
    assert repr(simulate(trace, "cache_aware", config)) == repr(outcome), "NaN is not equal to itself"


@pytest.mark.parametrize("settings", [{}, {"controllers": 2}, {"queue_order": "slo"}], ids=str)
def test_in_a_mixture_the_policy_says_which_pairs_unified_ranks_run(mine: Any, settings: dict[str, Any]) -> None:
    method = mine("def prefill_here(self, rank, request):\n        return request.prompt_tokens < 4000")
    config = LabConfig(ranks=2, decode_ranks=2, unified_ranks=2, unified_share=0.9, load=0.5, **settings)
    courses = simulate(generate(120, seed=1), method, config).courses
    assert len({course.unified_rank for course in courses}) == 3
    for course in courses:
        assert (course.unified_rank >= 0) == (course.prefill_rank < 0)
        if course.request.prompt_tokens >= 4000:
            assert course.unified_rank < 0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"decode_method": "cache_aware"}, "is for a --decode-method that says when, not cache_aware"),
        ({"decode_method": FEW, "ranks": 0, "decode_ranks": 0, "unified_ranks": 2}, "beside prefill ranks"),
        ({"decode_method": FEW, "decode_ranks": 0}, "beside prefill ranks"),
    ],
)
def test_where_no_decode_rank_computes_prompts_that_is_said(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"--decode-prefills .*{says}"):
        simulate(generate(20, seed=1), "total_tokens", LabConfig(decode_prefills=True, **settings))


@pytest.mark.parametrize("path", sorted({SHORTEST.split(":")[0], FEW.split(":")[0]}))
def test_an_example_is_short(path: str) -> None:
    assert len(Path(path).read_text().splitlines()) <= 60


def test_the_header_that_a_policy_gets_is_a_pairs_in_the_lab_as_it_is_live(mine: Any) -> None:
    method = mine("def prefill_here(self, rank, request):\n        assert request.leg == 'pair'\n        return True")
    config = LabConfig(ranks=1, decode_ranks=1, unified_ranks=1)
    assert {course.unified_rank for course in simulate(generate(20, seed=1), method, config).courses} == {0}
    world = mixed(method)
    world.submit(submit("r", "pair"))
    assert "policy_faults" not in world.core.tally()

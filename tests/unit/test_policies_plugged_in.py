"""Policies from outside: how they are found, what they are told, what becomes of those that break their contract."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from controller_world import EPOCH, World, hello, peer_of, submit
from odd_policies import Broken, Recorder

from bus.errors import BusError, ConfigError
from bus.wire.kv_names import Cleared, Removed, Stored
from bus.wire.messages import Bye, Cancel, RankStatus, Status
from controller.config import ControllerConfig
from controller.events import CacheChanged, FromClient, FromNode, Undelivered
from controller.load.groups import Group, Subset, View
from controller.load.rank import RankLoad
from controller.load.table import LoadTable
from controller.policies import POLICIES, Policy, PolicySettings, make_policy, resolve
from controller.policies.guard import Guard
from pdbus.client.options import block_tokens_for
from pdbus.lab.choosers import METHODS, check_method
from pdbus.lab.config import LabConfig
from pdbus.lab.generator import generate
from pdbus.lab.simulate import simulate

ROOT = Path(__file__).parents[2]
EXAMPLE = f"{ROOT / 'examples' / 'two_choices.py'}:TwoChoices"
BIG = {"kv_capacity": 100_000, "max_context": 100_000, "max_running": 100}


def inner(policy: Policy) -> Any:
    assert isinstance(policy, Guard)
    return policy.policy


# --- names ----------------------------------------------------------------------------------------------------------


def test_module_and_class_a_file_and_an_installed_name_are_methods_like_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "somebody-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebody\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pdbus.policies]\nrecorded = odd_policies:Recorder\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for method in ("odd_policies:Recorder", f"{Path(sys.modules['odd_policies'].__file__ or '')}:Recorder", "recorded"):
        config = ControllerConfig(prefill_method=method)
        assert config.methods["prefill"] == method == check_method(method)
        made = inner(make_policy(method, PolicySettings("prefill", 2.0, 5)))
        assert type(made).__name__ == "Recorder"
        assert made.settings == PolicySettings("prefill", 2.0, 5)
    with pytest.raises(ConfigError, match=r"did you mean recorded\?"):
        resolve("recorder", "decode")


def test_a_factory_put_into_the_table_is_a_method_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "mine", Recorder)
    assert ControllerConfig(decode_method="mine").decode_method == check_method("mine") == "mine"
    assert isinstance(inner(make_policy("mine")), Recorder)


def test_a_file_is_imported_once_and_hides_no_module(tmp_path: Path) -> None:
    path = tmp_path / "json.py"
    path.write_text("from odd_policies import Recorder\nclass Mine(Recorder): pass\n")
    first, second = (type(inner(make_policy(f"{path}:Mine"))) for _ in range(2))
    assert first is second
    assert Path(sys.modules["json"].__file__ or "").parent != tmp_path


@pytest.mark.parametrize("method", POLICIES)
def test_ours_run_unguarded(method: str) -> None:
    assert not isinstance(make_policy(method), Guard)


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (
            "total_token",
            r"unknown .*'total_token' for decode \(did you mean total_tokens\?\): choose from auto, round_r",
        ),
        ("no_such_module:X", "cannot load the policy no_such_module:X: ModuleNotFoundError: No module named 'no_such"),
        ("odd_policies:Recordr", "no attribute 'Recordr'"),
        ("odd_policies:EPOCH", "no attribute 'EPOCH'"),
        ("odd_policies:__doc__", "is a str: name a class or function that makes a policy"),
        ("nowhere/two.py:X", "FileNotFoundError: .*nowhere/two.py"),
        (":X", "cannot load the policy :X"),
        ("odd_policies:", "cannot load the policy odd_policies:"),
    ],
)
def test_what_cannot_be_meant_is_one_line(method: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        ControllerConfig(decode_method=method)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text", ["def", "import sys\nsys.exit(3)", "raise KeyError('a\\nb')", "class X(Missing): pass"]
)
def test_a_file_that_cannot_be_imported_is_one_line_and_leaves_nothing(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text(text)
    for _ in range(2):
        with pytest.raises(ConfigError, match="cannot load the policy") as error:
            resolve(f"{path}:X", "prefill")
        assert "\n" not in str(error.value)
    assert str(path) not in sys.modules


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("odd_policies:nothing", "makes a object, which is no policy: subclass controller.Policy"),
        ("odd_policies:failing", r"could not be made with its settings: OSError: no model .*odd_policies.py:\d+"),
        ("builtins:dict", "could not be made with its settings: TypeError"),
    ],
)
def test_what_makes_no_policy_is_one_line(method: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        make_policy(method)
    assert "\n" not in str(error.value)


# --- what it is told ------------------------------------------------------------------------------------------------


class Recorded:
    """A controller whose unified ranks are a Recorder's, with two ranks."""

    def __init__(self, **settings: Any) -> None:
        self.world = World(unified_method="odd_policies:Recorder", **settings)
        self.policy: Recorder = inner(self.world.core.policies["unified"])
        self.nodes = [hello("u", n, **BIG) for n in range(2)]  # type: ignore[arg-type]
        for node in self.nodes:
            self.world.join(node)
            self.world.report(node)
        self.policy.calls.clear()

    def told(self, *hooks: str) -> list[tuple[Any, ...]]:
        return [call for call in self.policy.calls if call[0] in hooks]


def test_a_leg_is_told_of_when_it_goes_out_and_when_it_ends_with_what_it_took() -> None:
    here = Recorded()
    here.world.now = 1.0
    here.world.submit(submit("a", routed_dp_rank=1))
    assert here.told("dispatched") == [("dispatched", ("u", 1), "a", 1.0)]
    here.world.now = 3.5
    here.world.progress(here.nodes[1], started=here.world.dispatches(), ended=here.world.dispatches())
    ((_, key, rid, end, took_s),) = here.told("ended")
    assert (key, rid, end.code, took_s) == (("u", 1), "a", "ok", 2.5)


def test_a_leg_that_failed_says_why_and_its_next_attempt_is_another_leg() -> None:
    here = Recorded()
    here.world.submit(submit("a"))
    (first,) = here.world.dispatches()
    here.world.progress(here.nodes[first.dp_rank], ended=[first], code="engine_failed")
    assert [(call[0], call[1][1]) for call in here.told("dispatched", "ended")] == [
        ("dispatched", first.dp_rank), ("ended", first.dp_rank), ("dispatched", 1 - first.dp_rank),
    ]  # fmt: skip
    assert here.told("ended")[0][3].code == "engine_failed"


@pytest.mark.parametrize("how", ["cancel", "undelivered", "lost", "deadline", "superseded"])
def test_a_leg_that_is_given_up_ends_once_without_a_word_of_its_rank(how: str) -> None:
    here = Recorded(attempts=1)
    world = here.world
    world.submit(submit("a", routed_dp_rank=0, deadline_s=1.0))
    (sent,) = world.dispatches()
    if how == "cancel":
        world.feed(FromClient("client", Cancel("a")))
    elif how == "undelivered":
        world.feed(Undelivered(peer_of(here.nodes[0]), sent))
    elif how == "lost":
        world.feed(FromNode(peer_of(here.nodes[0]), Bye("u", 0, 1)))
        assert here.told("forgotten") == [("forgotten", ("u", 0))]
    elif how == "deadline":
        world.pass_time(1.1, alive=here.nodes)
    else:
        world.submit(submit("a", routed_dp_rank=1, attempt=2))
    assert here.told("ended")[0] == ("ended", ("u", 0), "a", None, 0.0)
    assert here.policy.running == ([("a", ("u", 1))] if how == "superseded" else [])
    world.progress(here.nodes[0], ended=[sent])  # the rank's own word comes too late
    assert len(here.told("ended")) == 1


def test_caches_and_time_reach_the_policy_of_their_role_alone() -> None:
    here = Recorded()
    here.world.join(hello("p", role="prefill"))
    for key in (("u", 1), ("p", 0)):
        here.world.feed(CacheChanged(key, (Stored((1, 2)), Removed((2,)), Cleared())))
    assert here.told("stored", "removed", "forgotten") == [
        ("stored", ("u", 1), (1, 2)), ("removed", ("u", 1), (2,)), ("forgotten", ("u", 1)),
    ]  # fmt: skip
    here.world.pass_time(0.1, alive=here.nodes)
    assert here.told("tick")[-1] == ("tick", pytest.approx(0.1))


def test_a_policy_of_ones_own_that_counts_the_queue_alone_sees_no_held_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    for counts, tokens in ((False, 700), (True, 0)):
        monkeypatch.setattr(Recorder, "counts_queue_only", counts)
        here = Recorded()
        here.world.report(here.nodes[0], running=1, kv_tokens=700)
        assert here.world.rank(here.nodes[0]).tokens == tokens


def test_a_policy_that_looks_at_hashes_gets_them_from_clients() -> None:
    here = Recorded(prefill_method="total_tokens")
    status = here.world.core.status(1, 0.0)
    assert status.uses_hashes == ("unified",)
    assert status.methods["unified"] == "odd_policies:Recorder"
    assert block_tokens_for(status) == 16
    assert World(unified_method="cache_aware").core.status(1, 0.0).uses_hashes == ("unified",)
    assert World(unified_method="total_tokens").core.status(1, 0.0).uses_hashes == ()
    rank = RankStatus("p", 0, "prefill", "m", "ready", 1, "", 0, 0.0, None, 0, 0, 0, 0, 0, 0, 0, 0, 32)
    assert block_tokens_for(Status(1, "c", 1, 0.0, {}, {}, (rank,))) == 0
    assert block_tokens_for(Status(1, "c", 1, 0.0, {}, {}, (rank,), uses_hashes=("prefill",))) == 32


# --- what becomes of faults -----------------------------------------------------------------------------------------


class Says(Policy):
    """Picks what it is told to."""

    def __init__(self, answer: Any, *, fixed: bool = False) -> None:
        self.answer, self.fixed = answer, fixed

    def pick(self, view: View, request: Any, tokens: int) -> RankLoad | None:
        return self.answer(view) if callable(self.answer) else self.answer  # type: ignore[no-any-return]


def ranks_of(table: LoadTable, instance: str = "i", count: int = 3) -> list[RankLoad]:
    ranks = [table.open(hello(instance, n, dp_size=count, max_running=1)) for n in range(count)]
    for rank in ranks:
        table.set_ready(rank, True)
    return ranks


class TestGuard:
    def setup_method(self) -> None:
        self.table = LoadTable(EPOCH)
        self.ranks = ranks_of(self.table)
        self.table.charge(self.ranks[0], 5)  # so that 1 is the least loaded
        self.faults: list[tuple[str, str]] = []

    def pick(self, answer: Any, view: Group | Subset | None = None, *, fixed: bool = False) -> RankLoad | None:
        guard = Guard(Says(answer, fixed=fixed), lambda hook, why: self.faults.append((hook, why)))
        return guard.pick(view or self.table.group("unified"), submit(), 1)

    def test_a_candidate_is_taken(self) -> None:
        for view in (None, Subset(self.ranks)):
            assert self.pick(self.ranks[2], view) is self.ranks[2]
        assert not self.faults

    def test_a_rank_that_is_no_candidate_is_not(self) -> None:
        stranger = ranks_of(LoadTable(1))[2]
        full, unready, gone = ranks_of(self.table, "j")
        for _ in range(2):
            self.table.charge(full, 1)
        self.table.set_ready(unready, False)
        self.table.close(gone)
        assert not full.candidate
        for answer in (stranger, full, unready, gone, 3, "i/2", object()):
            assert self.pick(answer) is self.ranks[1]
        assert len(self.faults) == 7
        assert self.faults[1] == ("pick", "it returned rank j/0, which is none of the candidates")
        assert self.pick(self.ranks[2], Subset(self.ranks[:1])) is self.ranks[0]
        assert self.pick(stranger, fixed=True) is self.ranks[1]

    def test_none_is_an_answer_only_where_there_is_no_candidate(self) -> None:
        assert self.pick(None) is self.ranks[1]
        assert self.faults == [("pick", "it returned NoneType, which is none of the candidates")]
        self.faults.clear()
        assert self.pick(None, fixed=True) is None
        for rank in self.ranks:
            self.table.set_ready(rank, False)
        assert self.pick(None) is None
        assert not self.faults

    def test_a_fixed_policy_may_name_a_rank_without_credit(self) -> None:
        for _ in range(2):
            self.table.charge(self.ranks[2], 1)
        assert not self.ranks[2].candidate
        assert self.pick(self.ranks[2], fixed=True) is self.ranks[2]
        assert not self.faults
        self.table.set_ready(self.ranks[2], False)
        assert self.pick(self.ranks[2], fixed=True) is self.ranks[1]

    def test_what_it_raises_is_told_with_its_place(self) -> None:
        assert self.pick(lambda view: view.no_such) is self.ranks[1]
        ((hook, why),) = self.faults
        assert hook == "pick"
        assert re.fullmatch(r"AttributeError: 'Group' object .* \(.*test_policies_plugged_in\.py:\d+\)", why)


@pytest.mark.parametrize("hook", ["cost", "charge", "dispatched", "ended", "stored", "removed", "forgotten", "tick"])
def test_a_hook_that_raises_is_told_and_goes_no_further(hook: str) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("no luck")

    policy, faults = Says(None), list[tuple[str, str]]()
    setattr(policy, hook, broken)
    (rank, *_) = ranks_of(LoadTable(EPOCH))
    arguments = {
        "dispatched": (rank, submit(), 1.0), "ended": (rank, submit(), None, 1.0), "stored": (rank, (1,)),
        "removed": (rank, (1,)), "forgotten": (rank,), "tick": (1.0,), "charge": (rank, submit()),
        "cost": (rank, submit()),
    }  # fmt: skip
    getattr(Guard(policy, lambda *fault: faults.append(fault)), hook)(*arguments[hook])
    ((name, why),) = faults
    assert (name, why.split(" (")[0]) == (hook, "ZeroDivisionError: no luck")


@pytest.mark.parametrize(("says", "charge"), [(-1, 0), (7, 7), (1 << 70, 10)])
def test_a_charge_lies_within_the_prompt(says: int, charge: int) -> None:
    policy = Says(None)
    policy.charge = lambda rank, request: says  # type: ignore[method-assign]
    (rank, *_) = ranks_of(LoadTable(EPOCH))
    assert Guard(policy, lambda *fault: None).charge(rank, submit(prompt_tokens=10)) == charge


def test_a_broken_policy_costs_no_request_is_counted_and_told_once() -> None:
    world = World(unified_method="odd_policies:Broken")
    node = hello("u", **BIG)  # type: ignore[arg-type]
    world.join(node)
    world.report(node)
    for n in range(5):
        world.submit(submit(f"r{n}"))
    assert len(world.dispatches()) == 5
    assert world.core.tally()["policy_faults"] == 5
    world.pass_time(0.5, alive=[node])
    (note,) = [note for note in world.notes if note.event == "policy.failed"]
    assert note.level == "error"
    assert note.fields["method"] == "odd_policies:Broken"
    assert (note.fields["role"], note.fields["hook"]) == ("unified", "pick")
    assert "ZeroDivisionError: no luck" in note.fields["why"]


def test_a_policy_given_as_an_object_is_guarded_too() -> None:
    from controller.core import ControllerCore

    core = ControllerCore(ControllerConfig(), EPOCH, 0.0, {"decode": Broken()})
    assert isinstance(core.policies["decode"], Guard)
    with pytest.raises(ConfigError, match="no policy"):
        ControllerCore(ControllerConfig(), EPOCH, 0.0, {"decode": 3})  # type: ignore[dict-item]


# --- in the lab -----------------------------------------------------------------------------------------------------

LAB = LabConfig(controllers=2, cache_blocks=1000)


def test_the_lab_tells_a_policy_what_a_controller_would(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Recorder] = []

    def factory(settings: PolicySettings) -> Policy:
        made.append(Recorder(settings))
        return made[-1]

    monkeypatch.setitem(POLICIES, "recorded", factory)
    trace = generate(60, seed=1)
    outcome = simulate(trace, "recorded", LAB)
    policies = [policy for policy in made if policy.calls]
    assert [policy.settings for policy in policies] == [PolicySettings("prefill", 1.0, f"1/{n}") for n in range(2)]
    went = [call for policy in policies for call in policy.calls if call[0] == "dispatched"]
    assert sorted(int(rid) for _, _, rid, _ in went) == list(range(len(trace)))
    ended = {rid: (end, took_s) for policy in policies for hook, _, rid, end, took_s in
             (call for call in policy.calls if call[0] == "ended")}  # fmt: skip
    assert len(ended) > 0.9 * len(trace)  # the run ends with the last token, which may be sooner
    for rid, (end, took_s) in ended.items():
        course = outcome.courses[int(rid)]
        assert (end.leg, end.code, end.cached_tokens) == ("prefill", "ok", course.cached_tokens)
        assert took_s == pytest.approx(course.first_token_s - course.request.arrival_s - 2 * LAB.hop_s, abs=1e-6)
    assert {call[0] for policy in policies for call in policy.calls} >= {"stored", "tick"}


def test_the_example_finds_prefixes_and_beats_two_blind_choices() -> None:
    trace = generate(300, seed=1)
    means = {}
    for method in ("power_of_two", EXAMPLE, "cache_aware"):
        courses = simulate(trace, method, LabConfig(decode_ranks=0)).courses
        means[method] = sum(course.first_token_s - course.request.arrival_s for course in courses) / len(courses)
    assert means[EXAMPLE] < 0.7 * means["power_of_two"], means
    assert means[EXAMPLE] < 1.2 * means["cache_aware"], means


def test_the_same_seed_gives_the_same_draws_and_another_others() -> None:
    trace = generate(60, seed=1)
    first, again, other = (simulate(trace, EXAMPLE, LabConfig(seed=seed)) for seed in (1, 1, 2))
    assert first == again != other


def test_a_policy_that_breaks_ends_the_replay_with_one_line() -> None:
    with pytest.raises(BusError, match=r"policy odd_policies:Broken failed in pick: ZeroDiv.*py:\d+") as error:
        simulate(generate(20, seed=1), "odd_policies:Broken", LabConfig())
    assert "\n" not in str(error.value)


def test_an_unknown_name_lists_the_labs_own_methods_too() -> None:
    with pytest.raises(ConfigError, match=r"'oracel' for replay \(did you mean oracle\?\)") as error:
        check_method("oracel")
    assert all(name in str(error.value) for name in METHODS)


@pytest.mark.skipif(not (ROOT / "bus").is_dir(), reason="beside compiled cores there are no sources to read")
def test_what_a_policy_reads_of_a_rank_is_written_once_and_our_own_read_no_more() -> None:
    page = (ROOT / "docs" / "own-policy.md").read_text(encoding="utf-8")
    rows = re.search(r"^\| `rank` \|.*?(?=^\| `request`)", page, re.M | re.S)
    assert rows is not None
    told = {name for row in rows[0].splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[2])} - {"rank"}
    promised = (RankLoad.__doc__ or "").split("A policy reads")[1].split("It changes none")[0]
    assert set(re.findall(r"`(\w+)`", promised)) == told
    table = LoadTable(EPOCH)
    assert all(hasattr(table.open(hello("r")), name) for name in told)
    read: set[str] = set()
    for module in (ROOT / "controller" / "policies" / "base.py", ROOT / "controller" / "policies" / "methods.py"):
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in ("rank", "best", "chosen"):
                read.add(node.attr)
    assert read <= told
    assert {"tokens", "slot", "counts_queue_only"} <= read


def test_the_pages_example_works_as_it_stands(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "own-policy.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    path = tmp_path / "longest_apart.py"
    path.write_text(code)
    (name,) = re.findall(r"^class (\w+)\(", code, re.M)
    outcome = simulate(generate(60, seed=1), f"{path}:{name}", LabConfig())
    assert len({course.prefill_rank for course in outcome.courses}) > 1
    world = World(unified_method=f"{path}:{name}")
    nodes = [hello("u", n, **BIG) for n in range(2)]  # type: ignore[arg-type]
    for node in nodes:
        world.join(node)
        world.report(node)
    world.submit(submit("a"))
    world.progress(nodes[world.dispatches()[0].dp_rank], ended=world.dispatches())
    assert "policy_faults" not in world.core.tally()

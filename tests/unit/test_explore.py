"""A replay to explore: what runs hand over, what the page has of it, and that it is packed, small and harmless."""

from __future__ import annotations

import hashlib
import json
import math
import random
from array import array
from base64 import b64encode
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from explored import Page, Unpacked

from bus.errors import ConfigError
from controller.decisions import SHOWN
from pdbus.commands.lab import Tried
from pdbus.explore import figures
from pdbus.explore.facts import LegFacts, RunFacts
from pdbus.explore.figures import Explored, Loads, ShownRun, most_different, packed, quantiles, shown_places
from pdbus.explore.packing import Pack
from pdbus.explore.page import PageFile, page
from pdbus.lab.choosers import METHODS
from pdbus.lab.compare import Result, Run, compare
from pdbus.lab.config import LabConfig
from pdbus.lab.formats import read_trace
from pdbus.lab.generator import generate
from pdbus.lab.outcome import Outcome
from pdbus.lab.sessions import generate_sessions
from pdbus.lab.simulate import simulate
from pdbus.lab.traces import Trace

HOSTILE = "</script><img src=x onerror=alert(1)>"
BOKEH = ["var Bokeh = {};"]
TRIPS = LabConfig(
    decode_method="least_cost", decode_cache=True, decode_prefills=True, link_s_per_token=2.6e-6, concurrency=12
)


def facts_of(trace: Trace, method: str, config: LabConfig) -> tuple[RunFacts, Outcome]:
    outcome = simulate(trace, method, config, journaled=True)
    assert outcome.facts is not None
    return outcome.facts, outcome


def explored(*runs: RunFacts, **more: Any) -> Explored:
    shown = [ShownRun(f"method-{number}", facts) for number, facts in enumerate(runs)]
    return Explored("replay", "a trace", shown, ["TTFT"], [[run.name, "1.0"] for run in shown], **more)


def made_up(count: int, rng: random.Random, slower: float = 1.0, ranks: int = 8) -> RunFacts:
    """Facts with as much in them as there can be: nothing repeats, so that nothing is packed better than in earnest."""
    arrived = sorted(rng.random() * 3600 for _ in range(count))
    first = [at + slower * rng.expovariate(1) for at in arrived]
    output = [1 + rng.getrandbits(9) for _ in range(count)]
    legs = {}
    for role in ("prefill", "decode"):
        legs[role] = leg = LegFacts(role, "cache_aware", "tokens")
        leg.begin(count)
        for number in range(count):
            leg.candidates[number], leg.queued[number] = ranks, rng.getrandbits(16)
            for place in range(number * SHOWN, number * SHOWN + SHOWN):
                leg.ranks[place], leg.costs[place], leg.cached[place] = rng.randrange(ranks), rng.getrandbits(17), 512
    return RunFacts(
        [(-1, number) for number in range(count)], [""] * count, [rng.getrandbits(62) for _ in range(count)],
        array("I", [rng.getrandbits(16) for _ in range(count)]), array("I", output),
        counted=array("I", range(count)), arrived_s=array("d", arrived), decided_s=array("d", arrived),
        first_token_s=array("d", first),
        finished_s=array("d", [at + tokens * rng.random() / 50 for at, tokens in zip(first, output, strict=True)]),
        cached=array("q", [rng.getrandbits(12) for _ in range(count)]),
        regret=array("q", [rng.getrandbits(14) for _ in range(count)]),
        trips=array("b", [rng.randrange(4) for _ in range(count)]),
        here_s=array("d", [rng.random() for _ in range(count)]),
        there_s=array("d", [rng.random() for _ in range(count)]), legs=legs,
        load=[array("q", [rng.getrandbits(16) for _ in range(ranks)]) for _ in range(3600)],
        decode_load=[array("q", [rng.getrandbits(5) for _ in range(ranks)]) for _ in range(3600)],
        ttft_slo_s=2.0, tpot_slo_s=0.05, prefill_ranks=ranks, decode_ranks=ranks,
    )  # fmt: skip


# --- the run ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_journal_changes_nothing_and_has_each_choice(method: str) -> None:
    trace, config = generate(40, seed=3), LabConfig(ranks=4, decode_ranks=3, controllers=2, report_loss=0.1)
    facts, outcome = facts_of(trace, method, config)
    outcome.facts = None
    assert outcome == simulate(trace, method, config)
    compares = method not in ("round_robin", "follow_bootstrap_room", "power_of_two")
    for number, course in enumerate(outcome.courses):
        assert facts.legs["prefill"].ranks[number * SHOWN] == course.prefill_rank
        assert facts.legs["decode"].ranks[number * SHOWN] == course.decode_rank
        weighed = facts.legs["prefill"].weighed(number, facts.rooms[number])
        assert weighed is not None
        assert (weighed.method, len(weighed.shown)) == (method, 4 if compares else 0)
        if compares:
            assert weighed.shown[0].cost == min(each.cost for each in weighed.shown)
        assert facts.decided_s[number] >= course.arrived_s
    says = str(facts.legs["decode"].weighed(7, facts.rooms[7]))
    assert says.startswith("total_requests, in requests at 3 candidates: decode/")
    if method == "follow_bootstrap_room":
        says = str(facts.legs["prefill"].weighed(7, facts.rooms[7]))
        assert says == f"follow_bootstrap_room: the rank of bootstrap_room {facts.rooms[7]}"


def test_what_least_cost_predicted_and_the_trip_that_it_chose() -> None:
    facts, outcome = facts_of(generate_sessions(20, seed=2), "cache_aware", TRIPS)
    here = [number for number, trip in enumerate(facts.trips) if trip == 0]
    assert len(here) > 10
    assert len(facts.counted) == len(outcome.courses)
    for number, course in zip(facts.counted, outcome.courses, strict=True):
        assert math.isfinite(facts.here_s[number])
        assert (facts.legs["prefill"].ranks[number * SHOWN] >= 0) == (course.prefill_rank >= 0)
        assert (course.prefill_rank < 0) == (number in here)
        weighed = facts.legs["decode"].weighed(number, 0)
        assert weighed is not None
        assert weighed.unit == "seconds"
    compared = [facts.legs["decode"].weighed(number, 0) for number in facts.counted]
    assert sum(each is not None and len(each.shown) > 1 for each in compared) > 0.9 * len(compared)


def test_unified_ranks_and_prefill_alone() -> None:
    trace = generate(30, seed=1)
    facts, _ = facts_of(trace, "cache_aware", LabConfig(ranks=0, decode_ranks=0, unified_ranks=3))
    assert list(facts.legs) == ["unified"]
    alone, _ = facts_of(trace, "cache_aware", LabConfig(decode_ranks=0))
    assert list(alone.legs) == ["prefill"]
    for each in (facts, alone):
        (run,) = Unpacked(packed(explored(each))).head["runs"]
        assert [leg["role"] for leg in run["legs"]] == [part["role"] for part in run["maps"]] == list(each.legs)


def test_a_request_is_the_same_one_at_another_rate() -> None:
    """Sessions that begin closer together mix otherwise: numbers of the run change, and keys do not."""
    trace = generate_sessions(12, seed=1)
    slow, fast = (facts_of(trace, "total_tokens", LabConfig(rate=rate))[0] for rate in (0.02, 2.0))
    assert slow.keys != fast.keys
    tokens = [dict(zip(each.keys, each.prompt_tokens, strict=True)) for each in (slow, fast)]
    assert tokens[0] == tokens[1]
    unpacked = Unpacked(packed(explored(slow, fast)))
    first, second = unpacked.head["runs"]
    asked = dict(zip(fast.keys, range(len(fast.keys)), strict=True))
    there = [figures.ttft_s(fast, asked[key]) for key in slow.keys]
    assert unpacked.column(second["ttft"]) == pytest.approx(there, rel=1e-6)
    assert unpacked.column(first["ttft"]) != unpacked.column(second["ttft"])


def test_runs_side_by_side_hand_over_the_same_facts() -> None:
    runs = [Run(generate(20, seed=1), method, LabConfig(), journaled=True) for method in ("oracle", "cache_aware")]
    alone, beside = compare(runs, jobs=1), compare(runs, jobs=2)
    assert all(each.facts is not None for each in alone)
    one, other = (packed(explored(*(each.facts for each in found if each.facts))) for found in (alone, beside))
    assert one == other
    plain = compare([replace(run, journaled=False) for run in runs])
    assert [each.facts for each in plain] == [None, None]


# --- what is chosen ---------------------------------------------------------------------------------------------------


def test_the_requests_in_which_methods_differ_most_are_chosen() -> None:
    assert most_different([0.5, 3.0, 0.0, 3.0, 9.0], 3) == [1, 3, 4]
    assert most_different([1.0] * 5, 2) == [0, 1]
    rng = random.Random(1)
    one = made_up(900, rng)
    other = replace(one, first_token_s=array("d", one.first_token_s))
    for number in (5, 77, 850):
        other.first_token_s[number] += 100 + number
    unpacked = Unpacked(packed(explored(one, other)))
    full = unpacked.column(unpacked.head["full"])
    assert {5, 77, 850} < set(full)
    assert len(full) == 500
    for run in unpacked.head["runs"]:
        assert len(run["why"]) == 500
        assert all(why[0].startswith("prefill: cache_aware, in tokens at 8 candidates: prefill/") for why in run["why"])
    (note,) = unpacked.head["notes"]
    assert note.startswith("The whole decision is kept for the 500 requests in which the methods differ most")


def test_of_a_single_run_the_slowest_are_chosen() -> None:
    facts = made_up(600, random.Random(2))
    facts.first_token_s[33] += 1000
    unpacked = Unpacked(packed(explored(facts)))
    assert 33 in unpacked.column(unpacked.head["full"])
    assert "in which the first token was last" in unpacked.head["notes"][0]


def test_too_many_requests_are_left_out_evenly_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown_places(10, [3], 5) == [0, 2, 3, 4, 6, 8]
    assert shown_places(10, [3], 10) == [*range(10)]
    monkeypatch.setattr(figures, "MAX_CELLS", 2_000)
    monkeypatch.setattr(figures, "FULL", 20)
    unpacked = Unpacked(packed(explored(*(made_up(3_000, random.Random(seed)) for seed in range(2)))))
    numbers = unpacked.column(unpacked.head["numbers"])
    assert set(numbers) >= {*range(0, 3_000, 3), *unpacked.column(unpacked.head["full"])}
    assert len(numbers) <= 1_020
    assert unpacked.head["notes"][0].startswith(
        f"{len(numbers):,} of 3,000 requests are here: every 3rd one, and those"
    )


def test_runs_beyond_the_most_are_in_the_table_alone() -> None:
    facts = made_up(30, random.Random(1))
    head = Unpacked(packed(explored(*[facts] * (figures.MAX_RUNS + 2)))).head
    assert (len(head["runs"]), len(head["rows"])) == (figures.MAX_RUNS, figures.MAX_RUNS + 2)
    assert head["notes"][0].startswith("2 more rows are in the table alone")


def test_a_request_that_counts_in_one_run_alone() -> None:
    one, other = made_up(40, random.Random(1)), made_up(40, random.Random(2))
    one.counted, other.counted = array("I", range(30)), array("I", range(10, 40))
    unpacked = Unpacked(packed(explored(one, other)))
    first, second = unpacked.head["runs"]
    assert [math.isnan(value) for value in unpacked.column(first["ttft"])] == [False] * 30 + [True] * 10
    assert [math.isnan(value) for value in unpacked.column(second["ttft"])] == [True] * 10 + [False] * 30
    assert unpacked.column(second["legs"][0]["rank"])[:10] == [-1] * 10


def test_quantiles_are_values_that_were_there() -> None:
    found = quantiles([3.0, 1.0, 2.0])
    assert (found[0], found[-1], set(found)) == (1.0, 3.0, {1.0, 2.0, 3.0})
    assert len(found) == len(figures.SHARES)
    assert quantiles([]) == []


def test_heat_maps_of_many_ranks_and_samples_are_means() -> None:
    facts = made_up(50, random.Random(1), ranks=300)
    unpacked = Unpacked(packed(explored(facts)))
    prompt, decode = unpacked.head["runs"][0]["maps"]
    assert (prompt["rows"], prompt["per_row"], prompt["ranks"], prompt["step"]) == (100, 3, 300, 9.0)
    values = unpacked.column(prompt["values"])
    assert len(values) == 100 * 400
    assert values[401] == round(sum(facts.load[at][rank] for at in range(9, 18) for rank in (3, 4, 5)) / 27)
    assert decode["unit"] == "requests"
    assert any("each shows the mean of neighbouring ranks" in note for note in unpacked.head["notes"])


def test_loads_are_drawn_where_there_were_several() -> None:
    def run(runs: Any) -> list[Result]:
        return compare([replace(each, trace=generate(20, seed=1)) for each in runs])

    trace = generate(20, seed=1)
    tried = Tried(run)
    tried([Run(trace, "oracle", LabConfig(concurrency=number)) for number in (2, 8, 8)])
    loads = tried.loads()
    assert loads is not None
    assert loads.x == "the number under way"
    assert [x for x, _ in loads.lines["oracle"]] == [2, 8]
    once = Tried(run)
    once([Run(trace, method, LabConfig()) for method in ("oracle", "round_robin")])
    assert once.loads() is None


# --- the file ---------------------------------------------------------------------------------------------------------


def test_columns_come_back_as_they_were_packed() -> None:
    rng, pack = random.Random(5), Pack()
    columns: list[tuple[Any, list[float]]] = [
        ("u8", [rng.randrange(256) for _ in range(7)]), ("i16", [-1, 0, 32767, *range(8)]), ("u32", [0, 2**32 - 1]),
        ("f32", []), ("i32", [-1, 2**31 - 1, 5]), ("f32", [0.5, -2.25, math.inf]),
    ]  # fmt: skip
    names = [pack.add(kind, values) for kind, values in columns]
    unpacked = Unpacked(pack.packed({"text": HOSTILE, "names": names}))
    assert unpacked.head["text"] == HOSTILE
    assert [unpacked.column(name) for name in unpacked.head["names"]] == [values for _, values in columns]
    assert all(at % 4 == 0 for _, at, _ in names)
    large = pack.add("u8", [700, 3]), pack.add("i16", [2**40])
    unpacked = Unpacked(pack.packed({}))
    assert [unpacked.column([*each]) for each in large] == [[255, 3], [2**15 - 1]]


def test_12000_requests_and_five_methods_fit_into_six_megabytes() -> None:
    """Without Bokeh, which has 1.4 MB."""
    rng = random.Random(1)
    body = page(packed(explored(*(made_up(12_000, rng, slower) for slower in (1.0, 1.1, 1.3, 2.0, 3.0)))), BOKEH)
    assert 2e6 < len(body) < 4.6e6


def test_only_the_files_own_scripts_may_run_and_nothing_may_be_loaded() -> None:
    text = page(packed(explored(made_up(20, random.Random(1)))), ["var a = '</script>';", "var b = '<!--';"]).decode()
    read = Page(text)
    scripts = [script for attributes, script in read.of("script") if "type" not in attributes]
    assert len(scripts) == 4
    assert scripts[:2] == [r"var a = '\x3c/script>';", r"var b = '\x3c!--';"]
    hashes = [f"'sha256-{b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts]
    rules = dict(rule.strip().split(" ", 1) for rule in read.policy.split(";"))
    assert rules == {
        "default-src": "'none'", "script-src": " ".join(hashes), "style-src": "'unsafe-inline'", "base-uri": "'none'",
        "form-action": "'none'", "require-trusted-types-for": "'script'", "trusted-types": "'none'",
    }  # fmt: skip
    assert read.elements.index(next(each for each in read.elements if "http-equiv" in each[1])) < min(
        place for place, (tag, *_) in enumerate(read.elements) if tag in ("script", "style")
    ), "what stands before the policy is free of it"
    assert not [attributes for _, attributes, _ in read.elements if {"src", "href", "style"} & set(attributes)]


def test_what_a_trace_says_is_nowhere_in_the_page_but_packed(tmp_path: Path) -> None:
    file = tmp_path / f"{HOSTILE.replace('/', '')}.jsonl"
    rows = [
        {"timestamp": 90 * n, "input_length": 900 + n, "output_length": 9, "rid": f"{HOSTILE}{n}"} for n in range(9)
    ]
    rows[3]["rid"] = "\ud800 half a letter"
    rows[4]["rid"] = ["no", "text"]
    rows[5]["rid"] = "x" * 5_000
    del rows[6]["rid"]
    file.write_text("\n".join(map(json.dumps, rows)))
    trace = read_trace(file)
    facts, _ = facts_of(trace, "round_robin", LabConfig(ranks=2, decode_ranks=2))
    shown = replace(explored(facts, loads=Loads(HOSTILE, {HOSTILE: [(1.0, 0.5)]})), title=trace.name)
    text = page(packed(shown), BOKEH).decode()
    assert "onerror" not in text
    head = Page(text).data.head
    assert head["title"] == trace.name
    assert head["rids"][:4] == [f"{HOSTILE}{n}" for n in range(3)] + ["? half a letter"]
    assert head["rids"][4:7] == ["['no', 'text']", "x" * 200, ""]


def test_rids_of_sessions_and_chats(tmp_path: Path) -> None:
    def rids(*rows: dict[str, Any]) -> list[str]:
        file = tmp_path / "trace.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
        return [request.rid for request in read_trace(file).requests]

    turn = {"input_length": 600, "output_length": 5, "hash_ids": [1]}
    assert rids({"session_id": "s", "timestamp": 0, **turn}, {"session_id": "s", "delay": 5, **turn}) == ["s/1", "s/2"]
    chat = {"input_length": 60, "output_length": 5}
    assert rids({"chat_id": 7, "timestamp": 0, **chat}, {"chat_id": 9, "timestamp": 2, **chat}) == ["7", "9"]
    weka = {"t": 0.0, "in": 200, "out": 5, "hash_ids": [1]}
    sessions = [{"id": name, "block_size": 64, "requests": [weka, weka]} for name in ("a", "b")]
    assert rids(*sessions) == ["a/1", "a/2", "b/1", "b/2"]
    row = {"input_length": 60, "output_length": 5}
    assert rids({"timestamp": 0, "request_id": 4, **row}, {"timestamp": 9, **row}) == ["4", ""]


def test_a_file_that_is_no_page_or_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdbus.explore.page._library", lambda: BOKEH)
    with pytest.raises(ConfigError, match=r"^--html writes a page: name a file that ends with \.html, not out\.pdf$"):
        PageFile(tmp_path / "out.pdf")
    with pytest.raises(ConfigError, match=r"^cannot write .*none/out\.html: No such file or directory$"):
        PageFile(tmp_path / "none" / "out.html")
    assert not list(tmp_path.iterdir())
    with PageFile(tmp_path / "out.html") as file:
        size = file.write(explored(made_up(20, random.Random(1))))
    assert [(each.name, each.stat().st_size) for each in tmp_path.iterdir()] == [("out.html", size)]

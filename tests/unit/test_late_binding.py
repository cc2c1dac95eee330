"""Late binding: what counts as queued, and how fast ranks are found to be."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest
from controller_world import hello

from bus.wire.messages import Load, Role
from controller.late import LateBinding
from controller.load.table import LoadTable
from controller.speeds import DecodeStepModel, queued_tokens
from nodes.own.engines.timing import SimTiming


@dataclass
class Ranks:
    """A load table, late binding, and what each rank has said."""

    role: Role = "prefill"
    late: LateBinding = field(default_factory=lambda: LateBinding(100))
    table: LoadTable = field(default_factory=lambda: LoadTable(1))
    seq: int = 0
    now: float = 0.0

    def join(self, instance: str) -> None:
        self.table.set_ready(self.table.open(hello(instance, role=self.role, max_context=0, kv_capacity=0)), True)

    def report(self, instance: str, after_s: float = 0.1, **fields: int) -> None:
        self.seq += 1
        self.now += after_s
        said = dict.fromkeys(("step", "running", "waiting", "waiting_tokens", "kv_tokens"), 0) | fields
        load = Load(seq=self.seq, kv_capacity=1000, max_running=4, **said)
        rank = self.table.ranks[instance, 0]
        self.late.speeds.observe(rank, load, self.now)
        self.table.apply(rank.key, rank.epoch, load, self.now)

    def first_token_s(self, instance: str, work: int) -> float:
        return self.late.first_token_s(self.table.ranks[instance, 0], work)


def test_a_rank_is_open_while_less_than_the_limit_is_queued_there() -> None:
    ranks = Ranks()
    ranks.join("p")
    rank = ranks.table.ranks["p", 0]
    assert not ranks.late.open(None)
    assert ranks.late.open(rank)
    ranks.table.charge(rank, 99)
    assert ranks.late.open(rank)
    ranks.table.charge(rank, 1)
    assert not ranks.late.open(rank)


def test_what_a_unified_rank_only_holds_is_not_queued() -> None:
    ranks = Ranks("unified")
    ranks.join("u")
    ranks.report("u", waiting=1, waiting_tokens=60, kv_tokens=500)
    rank = ranks.table.ranks["u", 0]
    assert (rank.tokens, queued_tokens(rank)) == (560, 60)
    assert ranks.late.open(rank)


def test_the_pace_is_that_of_what_was_computed() -> None:
    ranks = Ranks()
    ranks.join("p")
    assert ranks.first_token_s("p", 1000) == 0.0, "nobody knows yet"
    ranks.report("p", prompt_tokens_total=5000, waiting_tokens=4000, busy_us_total=1_000_000)
    ranks.report("p", prompt_tokens_total=9000, cached_tokens_total=500, waiting_tokens=0, busy_us_total=4_750_000)
    assert ranks.first_token_s("p", 1000) == pytest.approx(0.5)  # 7,500 tokens in 3.75 s
    ranks.report("p", prompt_tokens_total=10_000, cached_tokens_total=500, waiting_tokens=1000, busy_us_total=4_750_000)
    assert ranks.first_token_s("p", 1000) == pytest.approx(1.0), "behind the thousand that wait there"


def test_what_waits_and_is_cached_or_cancelled_is_not_computed() -> None:
    """A burst of prompts that are cached in part, of which some are cancelled while they wait."""
    ranks = Ranks()
    ranks.join("p")
    ranks.report("p", prompt_tokens_total=1000, admitted_tokens_total=1000, computed_tokens_total=1000, busy_us_total=1)
    burst = {"prompt_tokens_total": 81_000, "waiting_tokens": 20_000}
    ranks.report("p", admitted_tokens_total=1000, computed_tokens_total=1000, busy_us_total=2, **burst)
    done = {"admitted_tokens_total": 9000, "cached_tokens_total": 6000, "computed_tokens_total": 3000}
    ranks.report("p", prompt_tokens_total=81_000, busy_us_total=1_000_002, **done)
    assert ranks.first_token_s("p", 1000) == pytest.approx(0.5)  # 2,000 tokens in 1 s


def test_the_recent_past_counts_most_and_a_restart_not_at_all() -> None:
    ranks = Ranks()
    ranks.join("p")
    done, busy_us = 0, 0
    for us_a_token, pace in ((100, 1e-4), (300, 3e-4)):
        for _ in range(20):
            done, busy_us = done + 100_000, busy_us + 100_000 * us_a_token
            ranks.report("p", prompt_tokens_total=done, busy_us_total=busy_us)
        assert ranks.first_token_s("p", 1) == pytest.approx(pace, rel=0.01)
    ranks.report("p", prompt_tokens_total=0, busy_us_total=0)
    assert ranks.first_token_s("p", 1) == pytest.approx(3e-4, rel=0.01)


def test_decoding_alone_makes_prompts_no_slower() -> None:
    ranks = Ranks("unified")
    ranks.join("u")
    ranks.report("u", prompt_tokens_total=0, busy_us_total=1)
    ranks.report("u", prompt_tokens_total=1000, busy_us_total=500_001, running=1)
    before = ranks.first_token_s("u", 1000)
    ranks.report("u", prompt_tokens_total=1000, busy_us_total=90_500_001, running=1)
    assert ranks.first_token_s("u", 1000) == before == pytest.approx(0.5)


def test_an_engine_that_does_not_say_how_long_it_was_busy_was_so_while_prompts_waited() -> None:
    ranks = Ranks()
    ranks.join("p")
    ranks.report("p", prompt_tokens_total=4000, waiting=2, waiting_tokens=4000)
    ranks.report("p", 2.0, prompt_tokens_total=4000, waiting_tokens=0)
    ranks.report("p", 60.0, prompt_tokens_total=4000, waiting_tokens=0)
    assert ranks.first_token_s("p", 1000) == pytest.approx(0.5)


# --- steps of decode --------------------------------------------------------------------------------------------


@dataclass
class Decoding:
    """A decode rank's totals, and what its steps are found to take."""

    tells_busy: bool = True
    steps: DecodeStepModel = field(default_factory=DecodeStepModel)
    last: Load | None = None
    count: int = 0
    busy_us: int = 0

    def run(self, requests: int, tokens: int, steps: int = 10, step_s: float | None = None) -> None:
        """Two reports, and so many steps between them."""
        for done in (0, steps):
            self.count += done
            taken_s = done * (SimTiming().step_s(0, requests, tokens) if step_s is None else step_s)
            self.busy_us += round(taken_s * 1e6)
            load = Load(
                seq=1, step=self.count, running=requests, waiting=0, waiting_tokens=0, kv_tokens=tokens,
                kv_capacity=0, max_running=0, busy_us_total=self.busy_us if self.tells_busy else 0,
            )  # fmt: skip
            if self.last is not None and done:
                self.steps.observe(self.last, load, taken_s)
            self.last = load


@pytest.mark.parametrize("tells_busy", [True, False])
def test_steps_are_found_to_grow_with_requests_and_with_what_they_hold(tells_busy: bool) -> None:
    rank = Decoding(tells_busy)
    assert rank.steps.of(10, 10_000) == 0.0
    for requests, tokens in ((1, 2_000), (8, 60_000), (30, 40_000), (20, 300_000), (64, 128_000)):
        rank.run(requests, tokens)
    for requests, tokens in ((4, 10_000), (40, 200_000), (100, 400_000)):
        assert rank.steps.of(requests, tokens) == pytest.approx(SimTiming().step_s(0, requests, tokens), rel=0.01)


def test_where_all_steps_were_alike_others_are_guessed_to_be_a_little_longer() -> None:
    rank = Decoding()
    for _ in range(50):
        rank.run(32, 65_536, step_s=0.02)
    assert rank.steps.of(32, 65_536) == pytest.approx(0.02, rel=0.01)
    assert 0.02 < rank.steps.of(40, 81_920) < 0.025


def test_an_engine_that_got_slower_is_believed_before_long() -> None:
    rank = Decoding()
    for step_s in (0.01, 0.03):
        for _ in range(60):
            rank.run(32, 65_536, steps=1_000, step_s=step_s)
    assert rank.steps.of(32, 65_536) == pytest.approx(0.03, rel=0.02)


def test_one_report_of_many_steps_is_no_more_than_the_recent_past() -> None:
    rank = Decoding()
    rank.run(32, 65_536, steps=1 << 60, step_s=0.01)
    for _ in range(60):
        rank.run(32, 65_536, steps=1_000, step_s=0.03)
    assert rank.steps.of(32, 65_536) == pytest.approx(0.03, rel=0.02)


def test_a_rank_that_started_again_or_did_nothing_tells_nothing_of_steps() -> None:
    rank = Decoding()
    rank.run(4, 1_000, step_s=0.02)
    known = rank.steps.of(4, 1_000)
    last = rank.last
    assert last is not None
    for step, busy_us_total in ((0, 5), (last.step, last.busy_us_total), (last.step + 1, 0)):
        idle = msgspec.structs.replace(last, running=0, step=step, busy_us_total=busy_us_total)
        rank.steps.observe(last, idle, 9.0)
    assert rank.steps.of(4, 1_000) == known

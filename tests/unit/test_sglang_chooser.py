"""Which rank of a SGLang server gets a request: acknowledged load, any method, ranks that others chose or that died."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bus.wire.hashing import block_hashes
from bus.wire.kv_names import Cleared, Removed, Stored
from bus.wire.messages import MAX_ROOM, Ack, Beacon, Load, LoadReport, Member, Role
from controller.policies import POLICIES, Policy, PolicySettings, make_policy
from pdbus.sglang.chooser import MAX_SENT, Chooser

NONCE, INSTANCE, PAGE = 99, "s", 16


def request(tokens: int | list[int] = 10, room: int | None = 0, rid: str = "r") -> Any:
    ids = list(range(tokens)) if isinstance(tokens, int) else tokens
    return SimpleNamespace(rid=rid, input_ids=ids, bootstrap_room=room, routed_dp_rank=None)


class World:
    def __init__(self, method: str | Policy, *, dp_size: int = 2, role: Role = "prefill", page: int = PAGE,
                 now: float = 0.0) -> None:  # fmt: skip
        self.now = now
        self._seqs = [0] * dp_size
        policy = make_policy(method, PolicySettings(role=role)) if isinstance(method, str) else method
        self.chooser = Chooser(
            policy, instance=INSTANCE, role=role, dp_size=dp_size, nonce=NONCE,
            now=self.now, block_tokens=page,
        )  # fmt: skip
        self.all = list(range(dp_size))
        self.taken = [0] * dp_size

    def pick(self, tokens: int | list[int] = 10, able: list[int] | None = None, **fields: Any) -> int | None:
        picked = self.chooser.pick(request(tokens, **fields), self.all if able is None else able, self.now)
        self.chooser.table.validate()
        return picked

    def report(self, rank: int, acked: tuple[int, int], *, waiting_tokens: int = 0, running: int = 0) -> None:
        """`acked`: requests and their tokens that it has taken in."""
        self._seqs[rank] += 1
        load = Load(
            seq=self._seqs[rank], step=1, running=running, waiting=0, waiting_tokens=waiting_tokens, kv_tokens=0,
            kv_capacity=1000, max_running=16, acks=(Ack(NONCE, *acked),),
        )  # fmt: skip
        self.chooser.on_message(LoadReport(INSTANCE, rank, NONCE, self._seqs[rank], load), self.now)
        self.chooser.table.validate()

    def alive(self, *ranks: int, seconds: float) -> list[tuple[int, bool]]:
        """Time passes; the broker and these ranks speak."""
        turned: list[tuple[int, bool]] = []
        end = self.now + seconds
        while self.now < end:
            self.now += 0.25
            self.chooser.on_message(Beacon(1, 1, 0.25), self.now)
            for rank in ranks:
                self._seqs[rank] += 1
                load = Load(
                    seq=self._seqs[rank], step=1, running=0, waiting=0, waiting_tokens=0, kv_tokens=0, kv_capacity=0,
                    max_running=0, acks=(Ack(NONCE, self.chooser.ranks[rank].sent, 0),),
                )  # fmt: skip
                member = Member(INSTANCE, rank, NONCE, 1, load, "prefill", "", 2, "ready", "", False, 0, 0.25)
                self.chooser.on_message(member, self.now)
            turned += self.chooser.tick(self.now)
        return turned


# --- methods ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", sorted(POLICIES))
@pytest.mark.parametrize("role", ["prefill", "decode", "unified"])
def test_every_method_uses_every_rank_before_anything_is_heard(method: str, role: Role) -> None:
    world = World(method, dp_size=4, role=role)
    assert {world.pick(room=room) for room in range(8)} == {0, 1, 2, 3}


def test_follow_bootstrap_room_is_what_decode_computes() -> None:
    world = World("follow_bootstrap_room", dp_size=4)
    assert [world.pick(room=room) for room in (0, 5, 7, 2)] == [0, 1, 3, 2]
    assert world.pick(room=None) is None, "a request without a room is SGLang's to place"
    assert world.pick(room=MAX_ROOM + 1) is None


def test_tokens_are_what_total_tokens_goes_by() -> None:
    world = World("total_tokens")
    first = world.pick(1000)
    assert [world.pick(10) for _ in range(5)] == [1 - (first or 0)] * 5


# --- load -------------------------------------------------------------------------------------------------------------


def test_a_report_that_is_late_does_not_send_a_burst_to_one_rank() -> None:
    """Stock SGLang overwrites its counts with a snapshot that knows nothing of what is on its way."""
    world = World("total_requests")
    for _ in range(10):
        world.pick()
    for rank in (0, 1):
        world.report(rank, (0, 0))
    picked = [world.pick() for _ in range(10)]
    assert picked.count(0) == picked.count(1) == 5


def test_what_a_report_acknowledges_counts_once() -> None:
    world = World("total_tokens")
    first, second = world.pick(100), world.pick(100)
    assert {first, second} == {0, 1}
    world.report(0, (1, 100), waiting_tokens=100)
    world.report(1, (1, 100), waiting_tokens=20)
    assert [rank.tokens for rank in world.chooser.ranks] == [100, 20]
    assert [rank.outstanding for rank in world.chooser.ranks] == [0, 0]
    assert [world.pick(10) for _ in range(3)] == [1, 1, 1]


def test_the_choice_of_a_router_counts() -> None:
    world = World("total_requests")
    for _ in range(4):
        world.chooser.chosen(request(), 0, world.now)
    assert [world.pick() for _ in range(4)] == [1, 1, 1, 1]


def test_reports_of_others_change_nothing() -> None:
    """Of another server, of another start of this one, of a rank that there is not."""
    world = World("total_tokens")
    load = Load(
        seq=9, step=1, running=5, waiting=0, waiting_tokens=5000, kv_tokens=0, kv_capacity=0, max_running=0
    )  # fmt: skip
    for instance, rank, epoch in (("other", 0, NONCE), (INSTANCE, 0, 1), (INSTANCE, 7, NONCE)):
        world.chooser.on_message(LoadReport(instance, rank, epoch, 1, load), 0.0)
    assert [rank.tokens for rank in world.chooser.ranks] == [0, 0]


Ends = list[tuple[str, int, str | None, float]]


@pytest.fixture
def own_policy(tmp_path: Path) -> tuple[Policy, Ends]:
    """The policy of docs/own-policy.md, which learns from ends, and those: rid, dp_rank, code, seconds."""
    text = (Path(__file__).parents[2] / "docs" / "own-policy.md").read_text(encoding="utf-8")
    (tmp_path / "quickest.py").write_text(text.partition("```python\n")[2].partition("```")[0])
    policy: Any = make_policy(f"{tmp_path / 'quickest.py'}:Quickest")
    learn, ends = policy.policy.ended, Ends()

    def ended(rank: Any, submit: Any, end: Any, took_s: float) -> None:
        ends.append((submit.rid, rank.info.dp_rank, end and end.code, took_s))
        learn(rank, submit, end, took_s)

    policy.policy.ended = ended
    return policy, ends


def test_a_policy_that_learns_from_ends_learns_from_acknowledgements(own_policy: tuple[Policy, Ends]) -> None:
    """Rank 0 takes in what it gets within a tenth of a second, rank 1 within one."""
    policy, ends = own_policy
    world = World(policy)
    picked: list[int] = []
    coming: list[tuple[float, int]] = []
    for _ in range(40):
        rank = world.pick(100)
        assert rank is not None
        picked.append(rank)
        coming.append((world.now + (0.1, 1.0)[rank], rank))
        world.now += 0.25
        for _, taken in [each for each in coming if each[0] <= world.now]:
            world.taken[taken] += 1
            world.report(taken, (world.taken[taken], 100 * world.taken[taken]))
        coming = [each for each in coming if each[0] > world.now]
    assert len(ends) + len(coming) == 40
    assert {(rank, code, took_s) for _, rank, code, took_s in ends} == {(0, "ok", 0.25), (1, "ok", 1.0)}
    assert picked.count(0) > 30, "the slow one is tried, and then left alone"


def test_an_end_is_told_once_and_what_is_never_acknowledged_is_given_up(own_policy: tuple[Policy, Ends]) -> None:
    policy, ends = own_policy
    world = World(policy, dp_size=1)
    for number in range(MAX_SENT + 3):
        world.chooser.chosen(request(rid=f"r{number}"), 0, world.now)
    assert [(rid, code) for rid, _, code, _ in ends] == [("r0", None), ("r1", None), ("r2", None)]
    del ends[:]
    world.report(0, (5, 50))
    world.report(0, (5, 50))
    assert [(rid, code) for rid, _, code, _ in ends] == [("r3", "ok"), ("r4", "ok")]
    rank = world.chooser.ranks[0]
    assert (rank.in_flight, rank.in_flight_tokens) == (MAX_SENT - 2, 10 * (MAX_SENT - 2))


def test_a_rank_is_charged_what_it_will_have_to_compute() -> None:
    """As by a controller: it caches most of the prompt, and acknowledges all of it."""
    world = World("cache_aware")
    world.chooser.changed(1, (Stored(tuple(block_hashes(PROMPT, PAGE))),))
    assert world.pick([*PROMPT, 1, 2, 3]) == 1
    rank = world.chooser.ranks[1]
    assert rank.tokens == 3
    world.report(1, (1, len(PROMPT) + 3))
    assert (rank.tokens, rank.in_flight_tokens, rank.outstanding) == (0, 0, 0)


def test_a_prefix_is_expected_as_long_if_it_was_dispatched_before_the_first_tick() -> None:
    policy = make_policy("cache_aware", PolicySettings(role="prefill"))
    world = World(policy, now=5_000.0)
    world.pick(PROMPT)
    world.chooser.tick(world.now)
    assert policy.prefixes


# --- who lives --------------------------------------------------------------------------------------------------------


def test_a_rank_that_falls_silent_gets_nothing_until_it_is_heard_again() -> None:
    world = World("round_robin")
    assert world.alive(0, 1, seconds=2) == []
    assert world.alive(0, seconds=4) == [(1, False)]
    assert {world.pick() for _ in range(4)} == {0}
    assert world.alive(0, 1, seconds=1) == [(1, True)]
    assert {world.pick() for _ in range(4)} == {0, 1}


def test_without_a_broker_nobody_is_blamed_and_requests_are_spread() -> None:
    world = World("total_requests")
    world.alive(0, 1, seconds=2)
    for _ in range(200):
        world.now += 0.25
        assert world.chooser.tick(world.now) == []
    picked = [world.pick() for _ in range(10)]
    assert picked.count(0) == picked.count(1) == 5


def test_where_all_are_silent_sglang_chooses() -> None:
    world = World("round_robin")
    world.alive(0, 1, seconds=1)
    world.alive(seconds=5)
    assert world.pick() is None


def test_a_rank_that_sglang_has_switched_off_is_left_out() -> None:
    world = World("total_tokens", dp_size=3)
    assert {world.pick(able=[0, 2]) for _ in range(6)} == {0, 2}
    assert world.pick(able=[]) is None


# --- caches -----------------------------------------------------------------------------------------------------------

PROMPT = list(range(1000, 1000 + 20 * PAGE))


def test_a_prompt_follows_its_prefix_and_forgets_what_was_evicted() -> None:
    world = World("cache_aware")
    names = tuple(block_hashes(PROMPT, PAGE))
    world.chooser.changed(1, (Stored(names),))
    for _ in range(3):
        assert world.pick([*PROMPT, 1, 2, 3]) == 1
        world.report(1, (world.chooser.ranks[1].sent, world.chooser.ranks[1].sent_tokens))
    world.chooser.changed(1, (Removed(names),))
    assert world.pick([*PROMPT, 1, 2, 3]) == 0
    world.chooser.changed(0, (Cleared(),))
    world.report(0, (1, len(PROMPT) + 3))
    assert world.pick([*PROMPT, 4]) == 1


def test_a_prompt_of_pages_of_another_size_is_cached_nowhere() -> None:
    world = World("cache_aware", page=32)
    world.chooser.changed(1, (Stored(tuple(block_hashes(PROMPT, PAGE))),))
    assert {world.pick(PROMPT), world.pick(PROMPT)} == {0, 1}


def test_ids_that_are_no_token_ids_are_cached_nowhere() -> None:
    """SGLang writes hashes of images in their place."""
    world = World("cache_aware")
    assert {world.pick([2**40] * 32), world.pick([2**40] * 32)} == {0, 1}


def test_where_a_rank_has_said_goodbye_sglang_chooses() -> None:
    """Something of ours failed there, and the rank goes on: none may get less for that."""
    world = World("round_robin")
    world.alive(0, 1, seconds=1)
    gone = Member(INSTANCE, 1, NONCE, 5, None, "prefill", "", 2, "gone", "", False, 0, 0.25)
    assert world.chooser.on_message(gone, world.now) == 1
    assert world.chooser.on_message(gone, world.now) is None, "once"
    assert world.pick() is None

"""Sessions of requests without block hashes: the next turn goes where the last one was, while that is worth it."""

from __future__ import annotations

import pytest
from test_cache_aware import PROMPT, Table, load

from bus.wire.hashing import pack_hashes
from bus.wire.messages import Submit
from controller.costs import Costs
from controller.policies.prefix_index import PrefixIndex
from controller.policies.sessions import KEPT_S, MAX_SESSIONS, Sessions
from controller.speeds import Speeds


def turn(tokens: int, session: str = "s") -> Submit:
    return Submit("r", "prefill", tokens, 1, bootstrap_room=1, session=session)


def went(table: Table, to: int, tokens: int) -> None:
    (rank,) = [rank for rank in table.table.ranks.values() if rank.key[1] == to]
    table.policy.dispatched(rank, turn(tokens), 0.0)


@pytest.mark.parametrize(("queued", "chosen"), [(99, 1), (101, 0)])
def test_a_session_stays_while_its_prefix_saves_more_than_the_queue_costs(queued: int, chosen: int) -> None:
    table = Table(0, queued)
    went(table, 1, 100)
    assert table.pick(turn(150)) == chosen
    assert table.pick(turn(150, "another")) == 0
    assert table.pick(turn(150, "")) == 0


def test_it_is_charged_and_counted_what_the_last_turn_lacks() -> None:
    table = Table(0, 0)
    went(table, 1, 100)
    first, second = table.table.ranks.values()
    for rank in (first, second):
        rank.counts_queue_only = True
    assert [table.policy.charge(rank, turn(150)) for rank in (first, second)] == [150, 50]
    assert table.policy.work(turn(150)) == 50
    assert table.policy.work(turn(80)) == 1, "it is not longer than the prompt"
    costs = Costs()
    costs.add("prefill", table.table, table.policy.prefixes, Speeds, lambda submit: None)
    assert [costs.cached(rank, turn(150)) for rank in (first, second)] == [0, 100]
    assert costs.cached(second, turn(80)) == 79


def test_a_full_or_restarted_rank_keeps_no_session() -> None:
    table = Table(0, 0)
    went(table, 1, 100)
    rank = table.table.ranks["p", 1]
    table.table.set_ready(rank, False)
    assert table.pick(turn(150)) == 0
    table.table.set_ready(rank, True)
    assert table.pick(turn(150)) == 1
    table.policy.forgotten(rank)
    table.table.apply(rank.key, 1, load(2, 10), 0.0)
    assert table.pick(turn(150)) == 0


def test_hashes_say_more() -> None:
    table = Table(0, 0)
    went(table, 1, len(PROMPT))
    (rank, _) = table.table.ranks.values()
    table.policy.prefixes.stored(rank.slot, [1, 2, 3])
    hashed = Submit("r", "prefill", 48, 1, block_tokens=16, block_hashes=pack_hashes([1, 2, 3]), session="s")
    assert table.pick(hashed) == 0
    table.policy.dispatched(rank, hashed, 0.0)
    assert table.policy.prefixes.sessions.place("s") == (1, len(PROMPT))


def test_sessions_are_forgotten_in_time_and_bounded() -> None:
    index = PrefixIndex()
    index.sessions.went("old", 1, 10)
    index.advance(KEPT_S - 1)
    index.sessions.went("new", 2, 10)
    index.advance(KEPT_S)
    assert (index.sessions.place("old"), index.sessions.place("new")) == (None, (2, 10))
    index.validate()
    sessions = Sessions()
    for number in range(MAX_SESSIONS + 5):
        sessions.went(str(number), number % 3, number)
    assert len(sessions) == MAX_SESSIONS
    assert sessions.place("4") is None
    sessions.forget(0)
    assert sessions.place("6") is None
    assert sessions.place("7") == (1, 7)
    sessions.went("7", 2, 20)
    assert (sessions.tokens("7", 1), sessions.tokens("7", 2)) == (0, 20)
    sessions.validate()

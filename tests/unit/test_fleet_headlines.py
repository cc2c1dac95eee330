"""The headline of a fleet, one for terminal, page and status: how bad it is, how much of a role's ranks is taken, and
which role is short of room."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from status_world import rank, sample

from bus.wire.messages import QueuedKind, QueueStatus, RankStatus, Role
from pdbus.fleet.conditions import taken
from pdbus.fleet.figures import Sample
from pdbus.fleet.formatting import by_number
from pdbus.fleet.history import History
from pdbus.fleet.verdict import Level, headline_of, lines_of, short_of

ALL = "have as many requests as they can take, counting those on their way"
PAIR = QueuedKind("m", ("prefill", "decode"), 9)


def decode(number: int, kv: int = 250, running: int = 2, **fields: Any) -> RankStatus:
    load = {"running": running, "waiting": 0, "waiting_tokens": 0, "kv_tokens": kv}
    return rank("decode-0", number, load=load, **{"estimate_requests": running} | fields)


def prefill(number: int, queued: int = 100, **fields: Any) -> RankStatus:
    load = {"running": 1, "waiting": 0, "waiting_tokens": queued, "kv_tokens": 0}
    return rank("prefill-0", number, load=load, **{"estimate_requests": 1} | fields)


def seen(*ranks: RankStatus, queue: QueueStatus | None = None, **counts: int) -> History:
    made, one = History(), sample(0.0, *ranks, broker={}, **counts)
    made.add(Sample(0.0, 0.0, replace(one.status, queue=queue, events=()), one.broker))
    return made


def headline(made: History) -> tuple[Level, str]:
    return headline_of(lines_of(made, asks_broker=True), made)


@pytest.mark.parametrize(
    ("kv", "said"),
    [
        ((990, 200, 310, 250), "1 of 4 decode ranks is full, the other 3 are 25 to 31% taken"),
        ((990, 940, 930, 930), "1 of 4 decode ranks is full, the other 3 are 93 to 94% taken"),
        ((990, 980, 930, 930), "2 of 4 decode ranks are full, the other 2 are 93% taken"),
        ((990, 980, 970, 930), "3 of 4 decode ranks are full, the other is 93% taken"),
        ((990, 980, 970, 960), "All 4 decode ranks are full"),
        ((990, 1000, 1000, 1000), "All 4 decode ranks are full"),
        ((990,), "The decode rank is full"),
    ],
)
def test_ranks_are_full_beside_what_is_taken_of_the_others(kv: tuple[int, ...], said: str) -> None:
    ranks = [decode(number, held) for number, held in enumerate(kv)]
    assert headline(seen(*ranks, prefill(0))) == ("warn", said)
    lost = decode(9, 100, state="lost", report_age_s=9.0)
    assert headline(seen(*ranks, lost)) == ("bad", f"1 decode rank is lost, and {said[0].lower()}{said[1:]}")


def test_a_rank_is_taken_by_what_is_there_and_on_its_way_to_it() -> None:
    assert taken(decode(0, kv=250, running=2)) == 0.25
    assert taken(decode(0, kv=250, running=4)) == 0.5, "of its slots"
    assert taken(decode(0, kv=250, in_flight_tokens=500)) == 0.75
    assert taken(decode(0, kv=250, estimate_requests=12)) == 1.0, "some wait"
    assert taken(prefill(0, queued=600)) == 0.6
    assert taken(rank(load={"kv_capacity": 0, "max_running": 0})) is None


@pytest.mark.parametrize(
    ("ranks", "counts", "short"),
    [
        ([prefill(0), decode(0, 930), decode(1, 900)], {}, ("decode",)),
        ([prefill(0, 900), prefill(1, 990), decode(0)], {}, ("prefill",)),
        ([prefill(0, 900), decode(0, 930)], {}, ("prefill", "decode")),
        ([prefill(0), decode(0, 930), decode(1, 990, model="other")], {}, ("decode",)),
        ([prefill(0), decode(0), decode(1, 990, model="other")], {}, ("prefill", "decode")),
        ([prefill(0), decode(0)], {"ttft_slo": 1}, ("prefill",)),
        ([prefill(0), decode(0, 930)], {"ttft_slo": 1}, ("decode",)),
        ([], {}, ("prefill", "decode")),
    ],
)  # fmt: skip
def test_the_role_that_is_short_of_room_is_said(
    ranks: list[RankStatus], counts: dict[str, int], short: tuple[Role, ...]
) -> None:
    made = seen(*ranks, queue=QueueStatus(9, 3.0, (PAIR,)), **counts)
    assert made.last is not None
    assert short_of(PAIR, made.last.status) == short
    (line,) = (line for line in lines_of(made, asks_broker=False) if line.kind == "queue")
    where = " and ".join(f"a {role} rank" for role in short)
    assert line.text == f"9 requests wait at the controller, for room at {where}; the first has waited for 3.0s"


def test_requests_that_wait_are_worse_than_a_rank_that_is_full() -> None:
    queue = QueueStatus(9, 3.0, (PAIR,))
    made = seen(prefill(0), decode(0, 900, running=8), decode(1, 930), queue=queue)
    said = "Requests wait for room at a decode rank: 1 of 2 decode ranks is full, the other is 93% taken"
    assert headline(made) == ("late", said)
    assert [(line.level, line.kind) for line in lines_of(made, asks_broker=True)] == [
        ("late", "queue"),
        ("warn", "full"),
    ]
    none_full = seen(prefill(0), decode(0, 930), decode(1, 900), queue=queue)
    where = "Requests wait for room at a decode rank"
    assert headline(none_full) == ("late", f"{where}: both decode ranks are 90 to 93% taken")
    assert headline(seen(prefill(0), decode(0, 930), queue=queue)) == ("late", f"{where}: the decode rank is 93% taken")
    slots = [decode(number, 900, running=7, estimate_requests=8 + number) for number in range(3)]
    taken_all = seen(prefill(0), *slots, decode(3, 990), queue=queue)
    assert headline(taken_all) == ("late", f"{where}: all 4 decode ranks {ALL}"), "one of them is full"
    none = seen(queue=QueueStatus(9, 3.0, (PAIR,)))
    apart = "requests wait for room at a prefill rank and a decode rank"
    assert headline(none) == ("bad", f"No rank has joined this controller, and {apart}")
    assert headline(seen(prefill(0), decode(0, 930), queue=QueueStatus(9, 1.0, (PAIR,))))[0] == "well"
    cramped = rank("prefill-1", load={"kv_tokens": 990})
    both = seen(prefill(0), cramped, decode(0, 900, running=8), queue=queue)
    apart = "the decode rank is full, and 1 of 2 prefill ranks is full, the other is 12% taken"
    assert headline(both) == ("late", f"Requests wait for room at a decode rank: {apart}")
    mine = seen(decode(0), queue=QueueStatus(1, 3.0, (replace(PAIR, requests=1, pinned=True, roles=("decode",)),)))
    (line,) = lines_of(mine, asks_broker=True)
    assert line.text.startswith("a request waits at the controller, for room at a decode rank of their choice; ")


def test_a_cold_cache_of_a_rank_that_was_started_again_is_said_so() -> None:
    def prompting(number: int, hits: float, at: float, **fields: Any) -> RankStatus:
        load = {"admitted_tokens_total": int(5000 * at), "cached_tokens_total": int(5000 * at * hits)}
        return rank("prefill-0", number, load=load, **{"epoch_age_s": 9000.0} | fields)

    for restarts, begun, said in (
        (0, "it began 40s ago", "The prefix cache of 1 prefill rank is cold"),
        (1, "it was started again 40s ago", "1 prefill rank was started again, and its prefix cache is cold"),
    ):
        made = History()
        for at in range(20):
            kin = [prompting(n, 0.5, at) for n in (1, 2, 3)]
            one = sample(
                float(at), prompting(0, 0.0, at, epoch_age_s=40.0, restarts=restarts), decode(0), *kin, broker={}
            )
            made.add(Sample(one.at, one.wall, replace(one.status, events=()), one.broker))
        assert begun in made.sentences()[0]
        assert headline(made) == ("warn", said)


def test_nothing_is_said_where_there_is_a_note_alone() -> None:
    made = History()
    made.add(sample(0.0, decode(0), prefill(0), broker={}))
    assert [line.kind for line in lines_of(made, asks_broker=True)] == ["note"]
    assert headline(made)[0] == "well"


def test_ranks_that_are_given_all_that_they_can_take_are_said_so_though_they_report_less() -> None:
    queue, where = QueueStatus(9, 3.0, (PAIR,)), "Requests wait for room at a decode rank"
    given = [decode(number, 900, running=7, estimate_requests=9) for number in range(3)]
    assert headline(seen(prefill(0), *given, queue=queue)) == ("late", f"{where}: all 3 decode ranks {ALL}")
    assert headline(seen(prefill(0), *given[:2], queue=queue)) == ("late", f"{where}: both decode ranks {ALL}")
    alone = seen(prefill(0), given[0], queue=queue)
    one = "has as many requests as it can take, counting those on their way"
    assert headline(alone) == ("late", f"{where}: the decode rank {one}")


def test_where_all_is_well_it_is_said_how_much_room_there_is() -> None:
    def busy(number: int, at: float, share: float) -> RankStatus:
        load = {"waiting_tokens": 0, "kv_tokens": 0, "busy_us_total": int(1e6 * share * at) + 1, "waiting": 0}
        return rank("prefill-0", number, load=load)

    made = History()
    for at in range(12):
        ranks = [busy(0, at, 0.4), busy(1, at, 0.6), decode(0, 600), decode(1, 800)]
        made.add(sample(float(at), *ranks, broker={}))
    assert headline(made) == ("well", "All is well; decode ranks are 70% taken, prefill ranks are 50% busy")
    said = "All is well; the decode rank is 25% taken, the prefill rank is 12% taken"
    assert headline(seen(prefill(0), decode(0))) == ("well", said), "its busy time is not known yet"
    assert headline(History()) == ("well", "All is well")


def test_requests_that_are_lost_are_worse_than_a_rank_that_is() -> None:
    made = History()
    for at in range(11):
        lost = decode(1, state="lost", report_age_s=9.0)
        counts = {"done": 19_000 * at // 10, "failed_too_many": 1_100 * at, "failed_peer_lost": 3 * at}
        made.add(sample(float(at), prefill(0), decode(0), lost, broker={}, **counts))
    level, words = headline(made)
    assert level == "bad"
    lost_words = "1,100 requests/s are refused (too_many), 3.0 requests/s fail (peer_lost), 1,900/s are done"
    assert words == f"{lost_words}, and 1 decode rank is lost"
    assert lines_of(made, asks_broker=True)[0].text == (
        "11,030 of 30,030 requests that ended in the last 20 seconds failed or were refused: 11,000 with the code "
        "too_many, 30 with the code peer_lost; this began 9.0s ago"
    )


def test_the_ranks_that_are_worst_off_are_named_first_and_names_go_by_number() -> None:
    ranks = [decode(number, 960 + number) for number in (10, 2, 3)]
    ranks += [decode(number, 970) for number in (11, 9)]
    full = [line for line in lines_of(seen(*ranks), asks_broker=False) if line.kind == "full"]
    assert [line.rank and line.rank[1] for line in full] == [9, 10, 11, 3, 2]
    lost = [decode(number, state="lost") for number in (10, 2)]
    dead = [line for line in lines_of(seen(*lost, decode(1)), asks_broker=False) if line.kind == "dead"]
    assert [line.rank and line.rank[1] for line in dead] == [2, 10]
    names = [("decode-10", 0), ("decode-2", 1), ("decode-2", 0), ("a", 0)]
    assert sorted(names, key=by_number) == names[::-1]

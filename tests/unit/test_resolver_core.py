"""ResolverCore: told, computed, asked; every want ends exactly once."""

from __future__ import annotations

from typing import Any

import laws
import pytest

from bus.actions import Send
from bus.embed.resolution import ASK_AGAIN_S, FETCH_WAIT_S, QUERY_ID, TOPOLOGY_AGAIN_S, Action, Resolved, ResolverCore
from bus.wire.messages import (
    Answer,
    Beacon,
    Found,
    InstanceInfo,
    Location,
    Lost,
    MemberInfo,
    Message,
    Query,
    Topology,
    TopologyQuery,
    Unwatch,
)


def where(dp_rank: int, epoch: int = 1, instance: str = "prefill-0") -> Location:
    return Location(instance, dp_rank, epoch, f"tcp://10.0.0.7:{7000 + dp_rank}")


def instance(
    name: str = "prefill-0", *, follow: bool = False, size: int = 4, epoch: int = 1, **fields: Any
) -> InstanceInfo:
    ranks = tuple(MemberInfo(rank, epoch, "ready", where(rank).endpoint, 0.1) for rank in range(size))
    given: dict[str, Any] = {
        "instance": name, "role": "prefill", "model": "tiny", "dp_size": size, "ready": True,
        "follow_bootstrap_room": follow, "ranks": ranks,
    }  # fmt: skip
    return InstanceInfo(**(given | fields))


def sent(actions: list[Action], kind: type[Message]) -> list[Any]:
    return [each.message for each in actions if isinstance(each, Send) and isinstance(each.message, kind)]


def resolved(actions: list[Action]) -> list[Resolved]:
    return [each for each in actions if isinstance(each, Resolved)]


def teach(core: ResolverCore, now: float, *infos: InstanceInfo) -> list[Action]:
    """Answer the topology queries that are out, whichever they are."""
    out: list[Action] = []
    for query in sent(core.flush(now), TopologyQuery):
        named = tuple(info for info in infos if query.instance in ("", info.instance))
        out += core.on_message(Topology(query.id, 5, named), now)
    return out


def knowing(*infos: InstanceInfo) -> ResolverCore:
    core = laws.watched(ResolverCore())
    core.want(10**9, 0.0, deadline_s=0.001)
    teach(core, 0.0, *infos)
    core.tick(0.001)
    return core


def found(room: int, attempt: int = 1, dp_rank: int = 0) -> Found:
    return Found(where(dp_rank), attempt, (room,))


def test_all_rooms_of_a_turn_leave_in_one_query() -> None:
    core = laws.watched(ResolverCore())
    for room in (7, 8, 9):
        assert core.want(room, 0.0, deadline_s=5.0) == []
    (query,) = sent(core.flush(0.0), Query)
    assert query == Query(QUERY_ID, (7, 8, 9), 5.0)
    assert core.flush(0.001) == []
    out = core.on_message(Answer(QUERY_ID, (found(7),), (8, 9)), 0.1)
    assert out == [Resolved(7, where(0), 1, "ok", "asked")]
    assert core.on_message(Answer(QUERY_ID, (found(9), found(7))), 0.2) == [Resolved(9, where(0), 1, "ok", "asked")]
    assert core.pending == 1


def test_told_needs_no_query_when_the_topology_is_known() -> None:
    core = knowing(instance())
    out = core.want(7, 0.1, deadline_s=5.0, prefill_instance="prefill-0", dp_rank=2, attempt=3)
    assert out == [Resolved(7, where(2), 3, "ok", "told")]
    assert core.flush(0.1) == []


def test_told_waits_for_the_topology_and_asks_for_no_room() -> None:
    core = laws.watched(ResolverCore())
    assert core.want(7, 0.0, deadline_s=5.0, prefill_instance="prefill-0", dp_rank=2) == []
    assert core.want(8, 0.0, deadline_s=5.0, prefill_instance="prefill-0", dp_rank=3) == []
    out = core.flush(0.0)
    assert [message.instance for message in sent(out, TopologyQuery)] == ["prefill-0"]
    assert sent(out, Query) == []
    assert sent(core.tick(0.1), TopologyQuery) == [], "one at a time"
    (again,) = sent(core.tick(TOPOLOGY_AGAIN_S), TopologyQuery)
    out = core.on_message(Topology(again.id, 5, (instance(),)), 0.31)
    assert [(each.room, each.found_by) for each in resolved(out)] == [(7, "told"), (8, "told")]
    assert core.counts["topology_queries"] == 2


def test_told_a_rank_that_does_not_exist() -> None:
    core = knowing(instance(size=4))
    (out,) = core.want(7, 0.1, deadline_s=5.0, dp_rank=4)
    assert isinstance(out, Resolved)
    assert (out.at, out.code) == (None, "bad_rank")


def test_told_a_rank_without_saying_of_which_of_two_instances() -> None:
    core = knowing(instance("prefill-0"), instance("prefill-1"))
    (out,) = core.want(7, 0.1, deadline_s=5.0, dp_rank=0)
    assert isinstance(out, Resolved)
    assert out.code == "bad_request"


def test_computed_where_the_instance_follows_the_room() -> None:
    core = knowing(instance(follow=True, size=4), instance("decode-0", role="decode"))
    assert core.want(10, 0.1, deadline_s=5.0) == [Resolved(10, where(2), 1, "ok", "computed")]


def test_the_topology_overtakes_a_watch_and_the_broker_is_told() -> None:
    core = laws.watched(ResolverCore())
    core.want(10, 0.0, deadline_s=5.0)
    out = core.flush(0.0)
    (query,) = sent(out, TopologyQuery)
    assert sent(out, Query)
    core.on_message(Answer(QUERY_ID, (), (10,)), 0.1)
    out = core.on_message(Topology(query.id, 5, (instance(follow=True),)), 0.2)
    assert [each.found_by for each in resolved(out)] == ["computed"]
    assert sent(core.flush(0.2), Unwatch) == [Unwatch((10,))]


def test_a_missing_rank_is_looked_up_again_until_it_is_there() -> None:
    core = knowing(instance(size=4, ranks=instance(size=1).ranks, ready=False))
    assert core.want(7, 0.1, deadline_s=5.0, prefill_instance="prefill-0", dp_rank=3) == []
    asked = [query for step in range(10) for query in sent(core.tick(0.1 + step / 10), TopologyQuery)]
    assert 2 <= len(asked) <= 4
    (out,) = resolved(core.on_message(Topology(asked[-1].id, 5, (instance(),)), 1.1))
    assert out == Resolved(7, where(3), 1, "ok", "told")


def beat(core: ResolverCore, now: float) -> None:
    core.on_message(Beacon(5, 1, now), now)


def after_quiet(*infos: InstanceInfo, quiet_s: float = 60.0) -> tuple[ResolverCore, float]:
    """A core that fetched `infos` and then heard nothing but beacons."""
    core = knowing(*infos)
    beat(core, quiet_s)
    return core, quiet_s


@pytest.mark.parametrize("told", [{"dp_rank": 0}, {"dp_rank": 0, "prefill_instance": "prefill-0"}, {}])
def test_the_first_want_after_quiet_waits_for_one_fetch(told: dict[str, Any]) -> None:
    core, now = after_quiet(instance(epoch=1, size=1, follow=True))
    assert core.want(7, now, deadline_s=5.0, **told) == []
    (out,) = resolved(teach(core, now, instance(epoch=2, size=1, follow=True)))
    assert (out.at, out.age_s) == (where(0, epoch=2), 0.0)
    (out,) = resolved(core.want(8, now + 1.0, deadline_s=5.0, **told))
    assert (out.at, out.age_s) == (where(0, epoch=2), 1.0), "from then on none waits"


def test_a_rank_that_said_goodbye_is_never_given() -> None:
    core, now = after_quiet(instance(size=1))
    assert core.want(7, now, deadline_s=5.0, dp_rank=0) == []
    gone = (MemberInfo(0, 1, "gone", where(0).endpoint, 0.1),)
    assert resolved(teach(core, now, instance(size=1, ranks=gone))) == []
    assert resolved(core.tick(now + 4.9)) == []
    (out,) = resolved(core.tick(now + 5.0))
    assert out.code == "unknown_room"


def test_a_second_instance_that_joined_in_the_quiet_is_seen() -> None:
    core, now = after_quiet(instance("prefill-0", follow=True))
    assert core.want(7, now, deadline_s=5.0, prefill_instance="prefill-0") == []
    teach(core, now, instance("prefill-0", follow=True))
    assert core.want(8, now + 0.1, deadline_s=5.0, dp_rank=1) == [], "what is there was listed long ago"
    (out,) = resolved(teach(core, now + 0.1, instance("prefill-0"), instance("prefill-1")))
    assert out.code == "bad_request", "which of the two was meant nobody said"


def test_while_the_broker_is_silent_the_last_topology_is_used_and_says_its_age() -> None:
    core = knowing(instance(epoch=1))
    (out,) = resolved(core.want(7, 60.0, deadline_s=5.0, dp_rank=0))
    assert (out.at, out.age_s) == (where(0, epoch=1), 60.0)
    assert core.counts["old"] == 1


def test_a_limit_on_the_age_holds_while_the_broker_is_silent() -> None:
    core = knowing(instance(epoch=1))
    assert core.want(7, 60.0, deadline_s=5.0, dp_rank=0, max_age_s=59.0) == []
    assert resolved(core.tick(62.0)) == []
    (out,) = resolved(teach(core, 62.3, instance(epoch=2)))
    assert out.at == where(0, epoch=2)


def test_a_broker_that_beats_and_answers_no_question_is_waited_for_no_longer_than_said() -> None:
    core, now = after_quiet(instance(epoch=1))
    assert core.want(7, now, deadline_s=5.0, dp_rank=0) == []
    for step in range(1, 4):
        beat(core, now + step * FETCH_WAIT_S / 4)
        assert resolved(core.tick(now + step * FETCH_WAIT_S / 4)) == []
    (out,) = resolved(core.tick(now + FETCH_WAIT_S))
    assert (out.at, out.age_s) == (where(0, epoch=1), now + FETCH_WAIT_S)


def test_a_first_want_while_a_stopped_broker_wakes() -> None:
    """It was silent, and its beacon comes before its answer: the want after that waits for the fetch."""
    core = knowing(instance(epoch=1))
    beat(core, 60.0)
    assert core.want(7, 60.0, deadline_s=5.0, dp_rank=0) == []
    (out,) = resolved(teach(core, 60.1, instance(epoch=2)))
    assert out.at == where(0, epoch=2)


def test_a_topology_that_proved_wrong_is_not_used_again() -> None:
    core = knowing(instance(epoch=1))
    core.forget("prefill-0")
    assert core.want(7, 1.0, deadline_s=5.0, prefill_instance="prefill-0", dp_rank=0) == []
    (out,) = resolved(teach(core, 1.0, instance(epoch=2)))
    assert out.at is not None
    assert out.at.epoch == 2


def test_a_stale_attempt_is_not_taken_and_asked_for_again_after_a_pause() -> None:
    core = laws.watched(ResolverCore())
    core.want(7, 0.0, deadline_s=5.0, attempt=2)
    core.flush(0.0)
    assert core.on_message(Answer(QUERY_ID, (found(7, attempt=1),)), 0.1) == []
    assert sent(core.tick(0.11), Query) == []
    assert sent(core.tick(0.2), Query)
    assert core.on_message(Answer(QUERY_ID, (), (), (Lost(7, "prefill_failed", 1),)), 0.21) == []
    assert core.on_message(Answer(QUERY_ID, (found(7, attempt=2),)), 0.3) == [Resolved(7, where(0), 2, "ok", "asked")]


@pytest.mark.parametrize(
    "stale", [Answer(QUERY_ID, (found(7, attempt=1),)), Answer(QUERY_ID, lost=(Lost(7, "prefill_failed", 1),))]
)
def test_what_an_answer_ended_need_not_be_unwatched(stale: Answer) -> None:
    core = laws.watched(ResolverCore())
    core.want(7, 0.0, deadline_s=5.0, attempt=2)
    core.flush(0.0)
    assert core.on_message(stale, 0.1) == []
    core.cancel(7)
    assert core.flush(0.1) == []


def test_a_failed_prefill_ends_the_want_with_its_code() -> None:
    core = laws.watched(ResolverCore())
    core.want(7, 0.0, deadline_s=5.0, attempt=1)
    core.flush(0.0)
    out = core.on_message(Answer(QUERY_ID, (), (), (Lost(7, "prefill_failed", 1),)), 0.1)
    assert out == [Resolved(7, None, 0, "prefill_failed", "")]


def test_the_deadline_holds_without_a_broker_and_once() -> None:
    core = laws.watched(ResolverCore())
    core.want(7, 0.0, deadline_s=1.0)
    ended = [(step / 10, each) for step in range(30) for each in resolved(core.tick(step / 10))]
    assert ended == [(1.0, Resolved(7, None, 0, "unknown_room", ""))]
    assert core.on_message(Answer(QUERY_ID, (), (), (Lost(7, "unknown_room"),)), 3.0) == []


def test_the_brokers_deadline_does_not_come_before_ours() -> None:
    core = laws.watched(ResolverCore())
    core.want(7, 0.0, deadline_s=2.0)
    core.flush(0.0)
    assert core.on_message(Answer(QUERY_ID, (), (), (Lost(7, "unknown_room"),)), 1.9) == []
    assert sent(core.tick(1.96), Query)


def test_a_query_without_reaction_is_sent_again() -> None:
    core = laws.watched(ResolverCore())
    core.want(7, 0.0, deadline_s=30.0)
    core.flush(0.0)
    assert sent(core.tick(ASK_AGAIN_S - 0.01), Query) == []
    assert sent(core.tick(ASK_AGAIN_S), Query)


def test_a_watch_that_a_repeated_query_began_too_late_is_ended() -> None:
    core = laws.watched(ResolverCore())
    core.want(7, 0.0, deadline_s=30.0)
    core.flush(0.0)
    assert sent(core.tick(ASK_AGAIN_S), Query)
    assert resolved(core.on_message(Answer(QUERY_ID, (found(7),)), 1.1))
    core.on_message(Answer(QUERY_ID, (), (7,)), 1.2)  # its rank has dropped the room meanwhile
    assert sent(core.flush(1.2), Unwatch) == [Unwatch((7,))]


def test_a_new_broker_is_asked_for_everything_pending() -> None:
    core = laws.watched(ResolverCore())
    core.on_message(Beacon(1, 1, 0.25), 0.0)
    core.want(7, 0.0, deadline_s=30.0)
    core.want(8, 0.0, deadline_s=30.0)
    core.flush(0.0)
    core.on_message(Answer(QUERY_ID, (), (7, 8)), 0.1)
    core.on_message(Beacon(1, 2, 0.25), 0.25)
    assert sent(core.tick(0.3), Query) == []
    core.on_message(Beacon(2, 1, 0.25), 0.5)
    (query,) = sent(core.tick(0.5), Query)
    assert query.rooms == (7, 8)


def test_a_room_wanted_again_replaces_the_earlier_want() -> None:
    core = laws.watched(ResolverCore())
    core.want(7, 0.0, deadline_s=30.0, attempt=1)
    core.want(7, 0.0, deadline_s=30.0, attempt=2)
    (query,) = sent(core.flush(0.0), Query)
    assert query.rooms == (7,)
    assert core.on_message(Answer(QUERY_ID, (found(7, attempt=1),)), 0.1) == []
    assert len(core.on_message(Answer(QUERY_ID, (found(7, attempt=2),)), 0.2)) == 1
    assert core.pending == 0


def test_two_askers_of_one_room_both_get_the_answer() -> None:
    core = laws.watched(ResolverCore())
    core.want(7, 0.0, deadline_s=30.0, asker=0)
    core.want(7, 0.0, deadline_s=30.0, asker=1)
    (query,) = sent(core.flush(0.0), Query)
    assert query.rooms == (7,)
    out = core.on_message(Answer(QUERY_ID, (found(7),)), 0.1)
    assert out == [Resolved(7, where(0), 1, "ok", "asked", asker) for asker in (0, 1)]
    assert (core.pending, core.flush(0.1)) == (0, [])


def test_each_asker_of_a_room_keeps_its_own_deadline_and_attempt() -> None:
    core = laws.watched(ResolverCore())
    core.want(7, 0.0, deadline_s=1.0, attempt=1, asker=0)
    core.want(7, 0.0, deadline_s=3.0, attempt=2, asker=1)
    (query,) = sent(core.flush(0.0), Query)
    assert query.watch_s == 3.0, "until the last of them gives up"
    assert core.on_message(Answer(QUERY_ID, (found(7, attempt=1),)), 0.5) == [
        Resolved(7, where(0), 1, "ok", "asked", 0)
    ]
    core.want(7, 0.6, deadline_s=1.0, attempt=3, asker=0)
    ended = [(step / 10, each) for step in range(7, 40) for each in resolved(core.tick(step / 10))]
    assert ended == [(at, Resolved(7, None, 0, "unknown_room", "", asker)) for at, asker in ((1.6, 0), (3.0, 1))]
    assert core.pending == 0


def test_one_asker_is_told_the_rank_and_another_asks_for_it() -> None:
    core = knowing(instance())
    assert core.want(7, 0.1, deadline_s=5.0, asker=0) == []
    assert core.want(7, 0.1, deadline_s=5.0, dp_rank=2, asker=1) == [Resolved(7, where(2), 1, "ok", "told", 1)]
    core.flush(0.1)
    out = core.on_message(Answer(QUERY_ID, (found(7),)), 0.2)
    assert out == [Resolved(7, where(0), 1, "ok", "asked", 0)]


def test_a_room_is_watched_until_its_last_asker_leaves() -> None:
    core = laws.watched(ResolverCore())
    for asker in (0, 1):
        core.want(7, 0.0, deadline_s=30.0, asker=asker)
    core.flush(0.0)
    core.cancel(7, 0)
    assert sent(core.flush(0.1), Unwatch) == []
    core.cancel(7, 1)
    assert sent(core.flush(0.2), Unwatch) == [Unwatch((7,))]
    assert core.on_message(Answer(QUERY_ID, (found(7),)), 0.3) == []


def test_cancelled_is_never_heard_of_again() -> None:
    core = laws.watched(ResolverCore())
    core.want(7, 0.0, deadline_s=30.0)
    core.want(8, 0.0, deadline_s=30.0)
    core.cancel(8)
    (query,) = sent(core.flush(0.0), Query)
    assert query.rooms == (7,)
    core.cancel(7)
    assert sent(core.flush(0.1), Unwatch) == [Unwatch((7,))]
    assert core.on_message(Answer(QUERY_ID, (found(7), found(8))), 0.2) == []
    assert resolved(core.tick(100.0)) == []


def test_bad_and_too_many_rooms_end_at_once() -> None:
    core = laws.watched(ResolverCore(max_wants=1))
    assert [each.code for each in resolved(core.want(-1, 0.0, deadline_s=1.0))] == ["bad_room"]
    assert core.want(1, 0.0, deadline_s=1.0) == []
    assert [each.code for each in resolved(core.want(2, 0.0, deadline_s=1.0))] == ["too_many"]


def test_very_many_rooms_are_asked_for_in_messages_of_legal_size() -> None:
    core = laws.watched(ResolverCore())
    for room in range(10_000):
        core.want(room, 0.0, deadline_s=5.0)
    queries = sent(core.flush(0.0), Query)
    assert [len(query.rooms) for query in queries] == [4096, 4096, 1808]


def test_answers_that_nobody_asked_for_are_ignored() -> None:
    core = laws.watched(ResolverCore())
    assert core.on_message(Answer(99, (found(7),), (8,), (Lost(9, "unknown_room"),)), 0.0) == []
    assert core.on_message(Topology(99, 5, (instance(),)), 0.0) == []


def test_nothing_is_kept_of_instances_that_are_not_there() -> None:
    core = laws.watched(ResolverCore())
    for number in range(100):
        core.want(number, float(number), deadline_s=0.1, prefill_instance=f"made-up-{number}")
        for action in core.flush(float(number)):
            if number % 2 and isinstance(action, Send) and isinstance(action.message, TopologyQuery):
                core.on_message(Topology(action.message.id, 1, ()), float(number))  # else the broker is silent
        core.tick(number + 0.5)
    assert core.pending == 0
    assert len(core._fetching) + len(core._missing) <= 2

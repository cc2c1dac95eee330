"""BrokerCore: queries, watches, conflicts, resync, beacons; driven by events alone, no sockets."""

from __future__ import annotations

from itertools import pairwise

import pytest
from broker_world import EPOCH, Rank, ask, broker, publications, published, sent

from bus.actions import Note, Send
from bus.broker.core import RESTATE_AGAIN_S, RESTATE_FIRST_S, BrokerCore, BrokerLimits
from bus.broker.events import Asked, Published, Tick, Unreachable
from bus.wire.messages import (
    Answer,
    Beacon,
    BrokerStatus,
    BrokerStatusQuery,
    Conflict,
    Drop,
    Found,
    Load,
    LoadReport,
    Lost,
    Query,
    Refused,
    Resync,
    Topology,
    TopologyQuery,
    Unwatch,
)


def test_a_query_is_answered_at_once_with_what_is_known() -> None:
    """M36 M37."""
    core, rank = broker(), Rank()
    core.handle(rank.member(), 0.0)
    core.handle(rank.rooms(7, 8), 0.0)
    answer = ask(core, b"d", (7, 9, 8, 7), 1.0)
    assert answer.found == (Found(rank.location, 1, (7, 8)),)
    assert (answer.pending, answer.lost) == ((), ())
    assert core.watches.size == 0


def test_a_watch_is_answered_by_the_registration_in_one_message_per_query() -> None:
    """M38 M39."""
    core, rank = broker(), Rank()
    core.handle(rank.member(), 0.0)
    assert ask(core, b"d", (7, 8, 9, 9), 0.0, watch_s=5.0, id=3).pending == (7, 8, 9)
    assert ask(core, b"e", (8,), 0.0, watch_s=5.0).pending == (8,)
    replies = sent(core.handle(rank.rooms(7, 8), 1.0))
    assert [
        (peer, message.id, [room for found in message.found for room in found.rooms]) for peer, message in replies
    ] == [  # type: ignore[attr-defined]
        (b"d", 3, [7, 8]),
        (b"e", 1, [8]),
    ]
    assert sent(core.handle(rank.rooms(7, 8), 1.1)) == [], "answered once"
    assert sent(core.handle(Tick(), 4.9)) == []
    assert sent(core.handle(Tick(), 5.1)) == [(b"d", Answer(3, lost=(Lost(9, "unknown_room"),)))]
    assert core.watches.size == 0


def test_a_query_with_a_watch_says_what_is_known_lost_and_to_come() -> None:
    """M36 M38: in one answer."""
    core, rank = broker(), Rank()
    core.handle(rank.rooms(7, 8), 0.0)
    core.handle(rank.rooms(drop=(Drop(8, 1, "cancelled"),)), 0.0)
    lost = (Lost(8, "cancelled", 1),)
    assert ask(core, b"d", (7, 8, 9), 0.0, watch_s=5.0) == Answer(1, (Found(rank.location, 1, (7,)),), (9,), lost)


def test_a_failed_prefill_answers_watches_and_later_queries() -> None:
    """M33 M38."""
    core, rank = broker(), Rank()
    core.handle(rank.member(), 0.0)
    core.handle(rank.rooms(7), 0.0)
    ask(core, b"d", (8,), 0.0, watch_s=5.0)
    drops = (Drop(7, 1, "engine_failed"), Drop(8, 1, "prefill_failed"))
    assert sent(core.handle(rank.rooms(drop=drops), 1.0)) == [(b"d", Answer(1, lost=(Lost(8, "prefill_failed", 1),)))]
    assert ask(core, b"d", (7, 8), 1.0).lost == (Lost(7, "engine_failed", 1), Lost(8, "prefill_failed", 1))


def test_an_ok_drop_makes_a_room_unknown() -> None:
    """M33."""
    core, rank = broker(), Rank()
    core.handle(rank.rooms(7), 0.0)
    core.handle(rank.rooms(drop=(Drop(7),)), 1.0)
    assert ask(core, b"d", (7,), 1.0) == Answer(1)


def test_unwatch_and_a_lost_peer_end_watches() -> None:
    """M40."""
    core, rank = broker(), Rank()
    for id in (1, 2):
        ask(core, b"d", (7, 8), 0.0, watch_s=5.0, id=id)
        ask(core, b"e", (7, 8), 0.0, watch_s=5.0, id=id)
    core.handle(Asked(b"d", Unwatch((7,))), 0.1)
    core.handle(Unreachable(b"e"), 0.1)
    (found,) = {message.found for peer, message in sent(core.handle(rank.rooms(7, 8), 1.0)) if peer == b"d"}  # type: ignore[attr-defined]
    assert found == (Found(rank.location, 1, (8,)),)
    assert sent(core.handle(Tick(), 9.0)) == []


def test_too_many_watches_are_refused_whole() -> None:
    core = broker(max_watches_per_peer=2)
    (send,) = core.handle(Asked(b"d", Query(5, (1, 2, 3), 5.0)), 0.0)
    assert isinstance(send, Send)
    assert isinstance(send.message, Refused)
    assert (send.message.code, send.message.id, core.watches.size) == ("too_many", 5, 0)
    assert ask(core, b"d", (1, 2), 0.0, watch_s=5.0).pending == (1, 2)


def test_two_live_ranks_that_claim_one_room_are_both_told() -> None:
    """M32."""
    core, first, second = broker(), Rank(0), Rank(1)
    core.handle(first.rooms(7), 0.0)
    told = publications(core.handle(second.rooms(7), 1.0), Conflict)
    assert told == [
        Conflict("prefill-0", 1, 1, 7, 1, first.location, False),
        Conflict("prefill-0", 0, 1, 7, 1, second.location, True),
    ]
    assert ask(core, b"d", (7,), 1.0).found[0].at == first.location
    assert core.tally()["rooms_conflicts"] == 1


def test_a_restarted_ranks_rooms_vanish_and_may_be_claimed_again() -> None:
    """M19 M20."""
    core, old, other = broker(), Rank(0, epoch=1), Rank(1)
    core.handle(old.rooms(7, 8), 0.0)
    core.handle(Rank(0, epoch=2).member(), 1.0)
    assert ask(core, b"d", (7, 8), 1.0) == Answer(1)
    assert publications(core.handle(other.rooms(7), 1.1), Conflict) == []
    assert core.handle(old.rooms(9), 1.2) == [], "the old start is heard no more"
    assert ask(core, b"d", (7, 9), 1.2).found[0].at == other.location


def test_of_two_starts_that_live_the_later_begun_keeps_its_rooms_in_whichever_order_they_are_heard() -> None:
    """M19: by `started_us`, as controllers decide. A clock that was set back makes the second start the earlier one."""
    core, later, earlier = broker(), Rank(epoch=1), Rank(epoch=2)
    core.handle(later.member(started_us=20), 0.0)
    core.handle(later.rooms(7), 0.0)
    core.handle(earlier.member(started_us=10), 0.1)
    core.handle(earlier.rooms(8), 0.1)
    core.handle(earlier.member(started_us=10, state="gone"), 0.2)
    assert [found.at for found in ask(core, b"d", (7, 8), 0.2).found] == [later.location]
    assert core.tally()["rooms_ignored"] == 1

    core = broker()
    core.handle(earlier.rooms(8), 0.0)  # its member was lost
    core.handle(later.member(started_us=20), 0.1)
    core.handle(earlier.member(started_us=10), 0.1)
    core.handle(later.member(started_us=20), 0.2)
    core.handle(later.rooms(7), 0.2)
    assert [found.at for found in ask(core, b"d", (7, 8), 0.3).found] == [later.location]

    core = broker()
    core.handle(earlier.rooms(8), 0.0)
    core.handle(later.rooms(7), 0.0)  # both members were lost: the one that was heard of last
    core.handle(earlier.member(started_us=10), 0.1)
    core.handle(later.member(started_us=20), 0.2)
    assert [found.at for found in ask(core, b"d", (7, 8), 0.3).found] == [later.location]


def test_a_start_that_began_earlier_has_the_place_of_one_that_is_dead() -> None:
    """A dead start may be of a machine whose clock was ahead."""
    for lives, heard_before in ((False, False), (True, False), (True, True)):
        core, dead, alive = broker(), Rank(epoch=1), Rank(epoch=2)
        core.handle(dead.member(started_us=20, state="ready" if lives else "gone"), 0.0)
        if heard_before:  # while the dead one was not known to be so
            core.handle(alive.member(started_us=10), 0.1)
        core.handle(alive.member(started_us=10), 100.0 if lives else 0.1)
        core.handle(alive.rooms(7), 100.0)
        assert ask(core, b"d", (7,), 100.0).found[0].at == alive.location


def test_a_rank_silent_past_its_lease_gives_way_and_one_that_left_owns_nothing() -> None:
    """M20."""
    core, silent, other = broker(), Rank(0), Rank(1)
    core.handle(silent.member(), 0.0)
    core.handle(silent.rooms(7), 0.0)
    core.handle(Tick(), 3.5)
    assert ask(core, b"d", (7,), 3.5).found, "until somebody else claims it"
    core.handle(other.rooms(7), 3.6)
    assert ask(core, b"d", (7,), 3.6).found[0].at == other.location
    core.handle(other.member(state="gone"), 3.7)
    assert ask(core, b"d", (7,), 3.7) == Answer(1)


def test_a_gap_asks_for_a_restatement_ever_more_rarely_until_it_comes() -> None:
    """M18: a hole in `seq`."""
    core, rank = broker(), Rank()
    core.handle(rank.member(), 0.0)
    core.handle(rank.rooms(7), 0.0)
    rank.rooms(8)  # lost
    core.handle(rank.rooms(9), 0.0)
    asked_at = []
    for step in range(2000):
        now = step / 1000
        if publications(core.handle(Tick(), now), Resync):
            asked_at.append(now)
    assert asked_at[0] == pytest.approx(RESTATE_FIRST_S, abs=0.002)
    gaps = [later - earlier for earlier, later in pairwise(asked_at)]
    assert gaps == pytest.approx([RESTATE_AGAIN_S * factor for factor in (1, 2, 4, 8)], abs=0.002)
    core.handle(rank.rooms(7, 8, 9, snapshot=True), 2.0)
    assert ask(core, b"d", (7, 8, 9), 2.0).found[0].rooms == (7, 8, 9)
    assert not any(publications(core.handle(Tick(), 2.0 + step), Resync) for step in range(3))


def test_a_lost_last_message_shows_in_the_membership() -> None:
    """M18: a member that says it has published more than arrived."""
    core, rank = broker(), Rank()
    core.handle(rank.member(), 0.0)
    rank.rooms(7)  # lost
    core.handle(rank.member(), 0.1)
    assert publications(core.handle(Tick(), 0.2), Resync) == [Resync("prefill-0", 0, 1)]


def test_what_an_old_start_owed_is_not_asked_of_the_new_one() -> None:
    core, old = broker(), Rank(epoch=1)
    core.handle(old.member(), 0.0)
    old.rooms(7)  # lost
    core.handle(old.rooms(8), 0.0)
    core.handle(Rank(epoch=2).member(), 0.001)
    assert not any(publications(core.handle(Tick(), step / 10), Resync) for step in range(1, 30))


def test_an_unknown_publisher_is_believed_and_asked_to_introduce_itself() -> None:
    core, rank = broker(), Rank()
    core.handle(rank.rooms(7), 0.0)
    assert ask(core, b"d", (7,), 0.0).found
    assert publications(core.handle(Tick(), 0.1), Resync) == [Resync("prefill-0", 0, 1)]


def test_a_broker_that_starts_late_needs_no_second_restatement() -> None:
    core, rank = broker(), Rank()
    rank.rooms_seq = 41
    core.handle(rank.member(), 0.0)
    core.handle(rank.rooms(7, 8, snapshot=True), 0.001)
    assert publications(core.handle(Tick(), 0.1), Resync) == []
    assert ask(core, b"d", (7, 8), 0.1).found[0].rooms == (7, 8)


def test_a_hole_in_a_chunked_restatement_is_noticed() -> None:
    core, rank = broker(), Rank()
    rank.rooms_seq = 41
    core.handle(rank.member(), 0.0)
    core.handle(rank.rooms(7, snapshot=True), 0.001)
    rank.rooms(8, snapshot=True)  # lost
    core.handle(rank.rooms(9, snapshot=True), 0.001)
    assert publications(core.handle(Tick(), 0.1), Resync) == [Resync("prefill-0", 0, 1)]


def test_a_repeated_message_changes_nothing() -> None:
    core, rank = broker(), Rank()
    first = rank.rooms(7)
    core.handle(first, 0.0)
    core.handle(rank.rooms(drop=(Drop(7),)), 0.1)
    core.handle(first, 0.2)
    assert ask(core, b"d", (7,), 0.2) == Answer(1)
    assert core.tally()["rooms_repeated"] == 1


@pytest.mark.parametrize("topic", [b"rooms/prefill-0/1/", b"rooms/prefill-0/0", b"member/prefill-0/0/", b"rooms/"])
def test_a_publisher_speaks_for_the_rank_of_its_topic_alone(topic: bytes) -> None:
    """M13."""
    core, rank = broker(), Rank(0)
    forged = rank.rooms(7)
    notes = core.handle(Published(topic, forged.message), 0.0)
    assert [note.event for note in notes if isinstance(note, Note)] == ["publication.rejected"]
    assert core.handle(Published(topic, forged.message), 0.1) == [], "said once"
    assert ask(core, b"d", (7,), 0.0) == Answer(1)
    assert core.tally()["topic_mismatches"] == 2


def test_loads_are_none_of_its_business() -> None:
    core = broker()
    load = Load(seq=1, step=0, running=0, waiting=0, waiting_tokens=0, kv_tokens=0, kv_capacity=0, max_running=0)
    assert core.handle(published(LoadReport("prefill-0", 0, 1, 1, load)), 0.0) == []
    assert core.tally()["ranks"] == 0


def test_contradicting_members_are_refused_once_in_the_log() -> None:
    core = broker()
    core.handle(Rank(0).member(), 0.0)
    events = [core.handle(Rank(1).member(dp_size=8), 0.1) for _ in range(2)]
    assert [len(each) for each in events] == [1, 0]
    assert core.tally()["members_dp_size_mismatch"] == 2


def test_topology_and_status_answer_with_the_id_of_the_question() -> None:
    core, rank = broker(), Rank()
    core.handle(rank.member(dp_size=1), 0.0)
    (send,) = core.handle(Asked(b"d", TopologyQuery(9, "prefill-0")), 0.5)
    assert isinstance(send, Send)
    assert isinstance(send.message, Topology)
    assert (send.message.id, send.message.broker_epoch) == (9, EPOCH)
    assert send.message.instances[0].ready
    assert send.message.instances[0].ranks[0].age_s == pytest.approx(0.5)
    core = broker(40.0)
    core.handle(rank.member(dp_size=1), 41.0)
    (send,) = core.handle(Asked(b"d", BrokerStatusQuery(4)), 42.0)
    assert isinstance(send, Send)
    assert isinstance(send.message, BrokerStatus)
    assert (send.message.id, send.message.uptime_s, send.message.counts["ranks"]) == (4, 2.0, 1)


def test_beacons_come_at_their_interval() -> None:
    core = BrokerCore(BrokerLimits(beacon_s=0.25), EPOCH, 0.0)
    beacons = [
        (step / 40, message) for step in range(81) for message in publications(core.handle(Tick(), step / 40), Beacon)
    ]
    assert [at for at, _ in beacons] == pytest.approx([step * 0.25 for step in range(9)], abs=0.026)
    assert [message.seq for _, message in beacons] == list(range(1, 10))  # type: ignore[attr-defined]


def test_rooms_over_the_publishers_limit_are_refused_and_counted() -> None:
    core, rank = broker(max_rooms_per_publisher=2), Rank()
    core.handle(rank.rooms(1, 2, 3), 0.0)
    assert [found.rooms for found in ask(core, b"d", (1, 2, 3), 0.0).found] == [(1, 2)]
    assert core.tally()["rooms_refused"] == 1

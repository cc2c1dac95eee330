"""A controller's events, where they happen; its queue as a status has it; and statuses that are sent in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from controller_world import World, hello, peer_of, submit

from bus.rights import Known
from bus.wire import codec
from bus.wire.messages import (
    CONTROLLER_TO_CLIENT,
    MAX_EVENTS,
    Beacon,
    Bye,
    DrainRank,
    QueuedKind,
    Refused,
    Status,
    StatusQuery,
)
from bus.wire.status import RANKS_PER_MESSAGE, join
from controller.config import ControllerConfig
from controller.core import ControllerCore
from controller.event_log import FLOOD_S, EventLog
from controller.events import FromClient, FromNode, NextPart, Published, Tick, ToClient, Unreachable

U = hello("u", dp_size=2)
V = hello("u", 1, dp_size=2)


@pytest.fixture
def world() -> World:
    return World(lease_s=3.0)


def events(world: World, start: int = 0) -> list[tuple[str, str, str, bool]]:
    """What happened, to which rank, why."""
    return [
        (each.what, f"{each.instance}/{each.dp_rank}" if each.instance else "", each.phrase, each.bad)
        for each in world.core.events.since(start)
    ]


def words(world: World) -> list[str]:
    return [what for what, *_ in events(world)]


def test_events_are_numbered_and_asked_for_from_a_number_on(world: World) -> None:
    world.join(U)
    world.join(V)
    whole = world.core.events.since(0)
    assert [each.number for each in whole] == [1, 2, 3]
    assert [each.what for each in whole] == ["started", "joined", "joined"]
    assert (whole[2].instance, whole[2].dp_rank, whole[2].phrase) == ("u", 1, "unified of m")
    for start, expected in ((0, 3), (1, 3), (2, 2), (3, 1), (4, 0), (99, 0)):
        world.feed(FromClient("op", StatusQuery(start, events_from=start)))
        answer = world.answers(Status)[-1]
        assert answer.events == whole[3 - expected :]
        assert codec.decode(codec.encode(answer), CONTROLLER_TO_CLIENT) == answer
    world.feed(FromClient("op", StatusQuery(9)))
    assert world.answers(Status)[-1].events is None


def test_a_lost_rank_is_suspected_first_and_its_requests_are_counted(world: World) -> None:
    world.join(U)
    world.report(U)
    world.submit(submit())
    world.feed(Unreachable(peer_of(U)))
    world.pass_time(1.0)
    assert events(world)[2:] == [
        ("suspect", "u/0", "its connection is gone; it may come back; 1 request ran there", True),
        ("lost", "u/0", "it did not connect again; 1 request ran there", True),
        ("failed", "", "1 request", True),
    ]
    world.join(U, peer="again")
    world.report(U)
    world.feed(Tick())
    assert events(world)[-1] == ("ready", "u/0", "it was lost", False)


@pytest.mark.parametrize(
    ("happens", "expected"),
    [
        (lambda w: w.pass_time(3.5), ("lost", "u/0", "nothing came over its connection for a lease", True)),
        (lambda w: w.feed(FromNode(peer_of(U), Bye("u", 0, 1))), ("gone", "u/0", "it said goodbye", False)),
        (lambda w: w.join(hello("u", dp_size=2, state="draining")), ("draining", "u/0", "by its own word", False)),
        (lambda w: w.join(hello("u", dp_size=2, epoch=5), peer="new"), ("restarted", "u/0", "unified of m", True)),
    ],
)  # fmt: skip
def test_each_change_of_a_rank_says_why(
    world: World, happens: Callable[[World], None], expected: tuple[Any, ...]
) -> None:
    world.join(U)
    world.report(U)
    happens(world)
    assert expected in events(world)


def test_an_order_to_drain_says_whose_it_is(world: World) -> None:
    world.join(U)
    admin = Known(b"op")
    admin.key = "admins/ann"
    world.feed(FromClient(admin, DrainRank(1, "u", 0)))
    assert events(world)[2:] == [
        ("drain_ordered", "u/0", "ordered by admins/ann", False),
        ("draining", "u/0", "an operator's order", False),
    ]


def test_a_broker_that_is_heard_no_more_and_one_that_was_restarted(world: World) -> None:
    world.feed(Published(Beacon(1, 1, 0.5)))
    world.pass_time(3.0)
    assert words(world) == ["started"]
    world.pass_time(2.0)
    world.feed(Published(Beacon(2, 1, 0.5)))
    assert words(world) == ["started", "broker_silent", "broker_heard", "broker_restarted"]


def test_a_pause_of_the_controller_itself_is_no_silence_of_the_broker(world: World) -> None:
    world.feed(Published(Beacon(1, 1, 0.5)))
    world.pass_time(1.0)
    world.now += 30
    world.feed(Tick())
    world.feed(Published(Beacon(1, 2, 0.5)))
    world.pass_time(1.0)
    assert words(world) == ["started"]


def test_settings_that_were_reloaded_are_named(world: World) -> None:
    world.core.reconfigure(ControllerConfig(bus="ipc:///x/bus", controller="ipc:///x/c", settle_s=0.0, hang_s=7.0))
    world.feed(Tick())
    assert events(world)[-1][2] == "settings changed: hang_s"


def test_what_comes_thousands_of_times_is_one_event_with_its_count() -> None:
    log = EventLog(0.0)
    for tenth in range(36_000):  # an hour of ten failures a second
        log.count(tenth / 10, {"failed_overloaded": tenth + 1, "done": tenth})
    kept = log.since(0)
    assert kept[0].phrase == "1 request"
    assert {(each.what, each.code, each.bad) for each in kept} == {("failed", "overloaded", True)}
    assert 60 <= len(kept) < 3600 / FLOOD_S[1] + 10
    told = sum(int(each.phrase.split()[0]) for each in kept)
    assert 36_000 - 10 * FLOOD_S[1] <= told <= 36_000
    log.count(9000.0, {"failed_overloaded": 36_001})
    log.count(9001.0, {"failed_overloaded": 36_002})
    assert [each.at_us for each in log.since(0)][-2:] == [9000 * 10**6, 9001 * 10**6], "after a rest at once again"


def test_the_last_thousand_are_kept_and_any_phrase_fits() -> None:
    log = EventLog(1.7e9)
    for _ in range(MAX_EVENTS + 500):
        log.add(5.0, "policy_failed", ("n" * 64, 4095), "c" * 99, "\U0001f600\ud800" * 500, bad=True)
    kept = log.since(0)
    assert [kept[0].number, kept[-1].number, len(kept)] == [501, MAX_EVENTS + 500, MAX_EVENTS]
    assert log.since(1400) == kept[899:]
    status = Status(1, "c", 1, 0.0, {}, {}, (), events=kept)
    frame = codec.encode(status)
    assert len(frame) < 1 << 19
    assert codec.decode(frame, CONTROLLER_TO_CLIENT) == status


def test_the_queue_is_said_by_model_priority_and_key(world: World) -> None:
    world.join(U)
    for number in range(48):
        client = Known(b"%d" % number)
        client.key = f"clients/c{min(number, 11)}"
        world.submit(submit(f"r{number}", priority=number % 2, model="m" if number % 4 else ""), peer=client)
    world.now += 2.0
    world.feed(FromClient("op", StatusQuery(1)))
    queue = world.answers(Status)[-1].queue
    assert queue is not None
    assert queue.requests == world.core.life.queue.requests == sum(kind.requests for kind in queue.kinds)
    waiting = list(world.core.life.queue)
    assert len(waiting) == queue.requests == 40, "eight have a place"
    assert queue.oldest_s == 2.0
    assert queue.kinds == (QueuedKind("m", ("unified",), 40),)
    assert queue.priorities == ((1, 20), (0, 20))
    assert queue.keys[0] == ("clients/c11", sum(each.client == "clients/c11" for each in waiting))
    assert len(queue.keys) == min(10, len({each.client for each in waiting}))


def test_a_clients_key_sees_neither_events_nor_queue(world: World) -> None:
    world.join(U)
    client = Known(b"cl")
    client.key = "clients/bob"
    world.feed(FromClient(client, StatusQuery(1, events_from=0)))
    (answer,) = world.answers(Status)
    assert (answer.events, answer.queue, answer.counts) == (None, None, {})
    assert answer.total == len(answer.ranks) == 1


def many(ranks: int) -> ControllerCore:
    core = World(max_ranks=ranks).core
    for n in range(ranks):
        core.handle(FromNode(n, hello("many", n, dp_size=ranks)), 1.0)
    return core


def parts_of(core: ControllerCore, *peers: str, tick: bool = False) -> dict[str, list[Any]]:
    """Each turn's answer, by peer, until all are whole."""
    seen: dict[str, list[Any]] = {peer: [] for peer in peers}
    while core.unfinished:
        turn = [a for a in core.handle(Tick() if tick else NextPart(), 2.0) if isinstance(a, ToClient)]
        assert len(turn) == 1
        seen[turn[0].peer].append(turn[0].message)
    return seen


def test_a_large_status_is_made_a_part_in_each_turn_and_askers_take_turns() -> None:
    core = many(3 * RANKS_PER_MESSAGE + 1)
    for peer in ("a", "b"):
        assert not core.handle(FromClient(peer, StatusQuery(7, events_from=0)), 2.0)
    seen = parts_of(core, "a", "b")
    for parts in seen.values():
        assert [len(part.ranks) for part in parts] == [RANKS_PER_MESSAGE] * 3 + [1]
        assert [part.events is not None for part in parts] == [False, False, False, True]
        whole = None
        for part in parts:
            whole = join(whole, part)
        assert whole is not None
        assert [rank.dp_rank for rank in whole.ranks] == list(range(whole.total))


def test_a_core_without_a_loop_of_ours_goes_on_with_its_ticks() -> None:
    core = many(RANKS_PER_MESSAGE + 1)
    core.handle(FromClient("a", StatusQuery(7)), 2.0)
    assert [part.remaining for part in parts_of(core, "a", tick=True)["a"]] == [1, 0]


def test_a_rank_that_is_forgotten_meanwhile_and_one_that_comes_do_not_break_the_parts() -> None:
    core = many(2 * RANKS_PER_MESSAGE)
    core.handle(FromClient("a", StatusQuery(7)), 2.0)
    core.handle(NextPart(), 2.0)
    last = core.table.ranks["many", 2 * RANKS_PER_MESSAGE - 1]
    core.handle(FromNode(2 * RANKS_PER_MESSAGE - 1, Bye("many", last.key[1], last.epoch)), 2.0)
    for _ in range(3):
        core.handle(Tick(), 2.0 + core.config.forget_s + 100.0)
    (rest,) = parts_of(core, "a")["a"] or [None]
    assert rest is None or len(rest.ranks) == RANKS_PER_MESSAGE


def test_a_question_that_is_repeated_takes_the_place_of_its_first_answer() -> None:
    """Parts of two answers with one id would be mixed up."""
    core = many(2 * RANKS_PER_MESSAGE)
    core.handle(FromClient("a", StatusQuery(7)), 2.0)
    core.handle(NextPart(), 2.0)
    core.handle(FromClient("a", StatusQuery(7)), 2.0)
    assert [part.remaining for part in parts_of(core, "a")["a"]] == [RANKS_PER_MESSAGE, 0]


def refused(core: ControllerCore, peer: Any, questions: int) -> int:
    answers = [a for number in range(questions) for a in core.handle(FromClient(peer, StatusQuery(number)), 2.0)]
    assert all(isinstance(each, ToClient) and isinstance(each.message, Refused) for each in answers)
    assert all(each.message.code == "too_many" for each in answers)
    return len(answers)


def test_open_answers_are_bounded() -> None:
    core = many(RANKS_PER_MESSAGE + 1)
    assert [refused(core, peer, 20) for peer in "abcdefgh"] == [12] * 8
    assert refused(core, "i", 1) == 1, "64 are open"


def test_one_asker_leaves_answers_for_others_whatever_it_connects_with() -> None:
    core = many(RANKS_PER_MESSAGE + 1)
    connections = [Known(name) for name in (b"1", b"2", b"3")]
    for each in connections:
        each.key = "admins/one"
    assert [refused(core, each, 4) for each in connections] == [0, 0, 4]
    assert refused(core, "another", 8) == 0

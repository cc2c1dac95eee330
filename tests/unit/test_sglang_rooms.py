"""A decode rank under the plugin: rooms found by the bus, SGLang's own query where there is none, what is given up."""

from __future__ import annotations

from typing import Any

import pytest

from bus.wire.codes import Code
from bus.wire.messages import MAX_ROOM, Beacon, Location, Member
from pdbus.sglang.rank import BROKER_LOST_S
from pdbus.sglang.rooms import OTHERS_S, UNHEARD_S, PrefillBus, RankLiveness

GONE = BROKER_LOST_S + 1
LOST_S = 15.0


class FakeFinder:
    def __init__(self) -> None:
        self.silent_s = 0.0
        self.wanted: list[tuple[int, ...]] = []
        self._found: dict[int, Location] = {}
        self._lost: dict[int, Code] = {}

    def want(self, *rooms: int, deadline_s: float) -> None:
        self.wanted.append(rooms)

    def find(self, room: int, dp_rank: int) -> None:
        self._found[room] = Location("p", dp_rank, 1, "")

    def lose(self, room: int, code: Code) -> None:
        self._lost[room] = code

    def poll(self) -> dict[int, Location]:
        found, self._found = self._found, {}
        return found

    def lost(self) -> dict[int, Code]:
        lost, self._lost = self._lost, {}
        return lost


class World:
    def __init__(self, shared: bool = False) -> None:
        self.finder = FakeFinder()
        self.now = 100.0
        self.asked: list[list[int]] = []
        self.http: dict[str, int] = {}
        self.lives = RankLiveness(LOST_S)
        self.bus = PrefillBus(self.finder, self.lives, room_s=300, shared=shared, clock=lambda: self.now)

    def find(self, *rooms: int) -> dict[str, int]:
        def query(asked: list[int]) -> dict[str, int]:
            self.asked.append(asked)
            return {str(room): self.http[str(room)] for room in asked if str(room) in self.http}

        return self.bus.find(rooms, query)


@pytest.fixture
def world() -> World:
    return World()


def test_a_room_is_wanted_once_and_found_without_http(world: World) -> None:
    assert world.find(1, 2) == {}
    assert world.find(1, 2, 3) == {}
    world.finder.find(2, 1)
    assert world.find(1, 2, 3) == {"2": 1}
    assert world.finder.wanted == [(1, 2), (3,)]
    assert world.bus.where(2) == ("p", 1)
    assert not world.asked


def test_a_room_that_comes_again_is_wanted_again(world: World) -> None:
    """SGLang computes a retracted request's prompt anew, under its room."""
    world.find(1)
    world.finder.find(1, 0)
    assert world.find(1) == {"1": 0}
    world.find(1)
    assert world.finder.wanted == [(1,), (1,)]


def test_a_broker_that_is_not_heard_has_a_moment_and_then_http_is_asked(world: World) -> None:
    """So the first rooms of a server with the plugin cost no query; one without it is asked a little later."""
    world.finder.silent_s = float("inf")
    world.http = {"1": 1}
    assert world.find(1) == {}
    world.now += BROKER_LOST_S
    assert world.find(1) == {"1": 1}
    assert world.asked == [[1]]


def test_a_room_the_bus_found_before_it_died_is_not_asked_for(world: World) -> None:
    world.find(1, 2)
    world.finder.find(1, 0)
    world.now, world.finder.silent_s = 200.0, GONE
    world.http = {"2": 1}
    assert world.find(1, 2) == {"1": 0, "2": 1}
    assert world.asked == [[2]]


def test_on_a_bus_of_many_servers_some_may_not_be_there_and_are_asked_now_and_then() -> None:
    world = World(shared=True)
    for _ in range(5):
        world.find(1)
    assert not world.asked
    world.now += OTHERS_S
    world.http = {"1": 0}
    assert world.find(1) == {"1": 0}
    assert world.asked == [[1]]


@pytest.mark.parametrize("room", [-1, MAX_ROOM + 1])
def test_a_room_that_the_bus_cannot_carry_is_asked_for(world: World, room: int) -> None:
    world.http = {str(room): 1}
    assert world.find(room) == {str(room): 1}
    assert not world.finder.wanted


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("unknown_room", "no prefill rank has registered it within 300 s"),
        ("prefill_failed", "its prefill failed"),
        ("cancelled", "cancelled"),
    ],
)
def test_a_lost_room_is_given_up_with_its_reason_once(world: World, code: Code, says: str) -> None:
    world.find(1, 2)
    world.finder.lose(1, code)
    world.find(1, 2)
    assert world.bus.lost() == {1: f"bootstrap_room 1: {says}"}
    assert world.bus.lost() == {}


def test_nothing_is_given_up_while_no_broker_is_heard(world: World) -> None:
    """It is wanted anew: the broker that comes back is told of what lives."""
    world.find(1)
    world.finder.lose(1, "unknown_room")
    world.finder.silent_s = GONE
    world.find(1)
    assert world.bus.lost() == {}
    world.finder.silent_s = 0.0
    world.find(1)
    assert world.finder.wanted == [(1,), (1,)]


def test_too_many_wants_are_asked_again_and_not_given_up(world: World) -> None:
    world.find(1)
    world.finder.lose(1, "too_many")
    world.find(1)
    assert world.bus.lost() == {}
    world.find(1)
    assert world.finder.wanted == [(1,), (1,)]


def test_what_comes_for_a_request_that_has_gone_is_nothing(world: World) -> None:
    world.find(1, 2)
    world.find(2)
    world.finder.find(1, 0)
    world.finder.lose(1, "prefill_failed")
    assert world.find(2) == {}
    assert world.bus.lost() == {}


# --- who lives --------------------------------------------------------------------------------------------------------


def member(dp_rank: int) -> Member:
    return Member("p", dp_rank, 1, 1, None, "prefill", "", 2, "ready", "", False, 0, 0.25)


def run(lives: RankLiveness, start: float, end: float, *messages: Any) -> None:
    now = start
    while now < end:
        for message in messages:
            lives.on_message(message, now)
        now += 0.25


def test_a_rank_that_is_silent_while_others_speak_is_lost_and_comes_back() -> None:
    lives = RankLiveness(LOST_S)
    run(lives, 0, 5, Beacon(1, 1, 0.25), member(0), member(1))
    run(lives, 5, 5 + LOST_S, Beacon(1, 1, 0.25), member(0))
    assert lives.lost() == frozenset()
    run(lives, 5 + LOST_S, 6 + LOST_S, Beacon(1, 1, 0.25), member(0))
    assert lives.lost() == {("p", 1)}
    lives.on_message(member(1), 30.0)
    assert lives.lost() == frozenset()


def test_nobody_is_blamed_for_a_broker_that_was_away() -> None:
    lives = RankLiveness(LOST_S)
    run(lives, 0, 5, Beacon(1, 1, 0.25), member(0), member(1))
    run(lives, 60, 60 + LOST_S, Beacon(2, 1, 0.25), member(0))
    assert lives.lost() == frozenset()
    run(lives, 60 + LOST_S, 62 + LOST_S, Beacon(2, 1, 0.25), member(0))
    assert lives.lost() == {("p", 1)}


def test_with_no_news_at_all_nobody_is_lost() -> None:
    lives = RankLiveness(LOST_S)
    run(lives, 0, 5, Beacon(1, 1, 0.25), member(0), member(1))
    assert lives.lost() == frozenset()


def test_a_rank_of_which_nothing_was_ever_heard_is_lost_when_a_room_was_found_there(world: World) -> None:
    """It died before this decode rank first asked; the broker still knows the room."""
    world.find(1)
    world.finder.find(1, 0)
    world.find(1)
    run(world.lives, world.now, world.now + LOST_S, Beacon(1, 1, 0.25))
    assert world.lives.lost() == frozenset()
    run(world.lives, world.now + LOST_S, world.now + LOST_S + 1, Beacon(1, 1, 0.25))
    assert world.lives.lost() == {("p", 0)}


def test_a_rank_that_leaves_the_bus_is_no_dead_one_and_its_rooms_are_asked_for(world: World) -> None:
    """Something of ours failed there; it prefills on, and registers as SGLang does."""
    gone = Member("p", 1, 1, 1, None, "prefill", "", 2, "gone", "", False, 0, 0.25)
    run(world.lives, 0, 5, Beacon(1, 1, 0.25), member(0), member(1))
    world.lives.on_message(gone, 5.0)
    world.lives.expect(("p", 1), 5.0)
    run(world.lives, 5, 10 + 2 * LOST_S, Beacon(1, 1, 0.25), member(0))
    assert world.lives.lost() == frozenset()
    world.find(1)
    world.now += OTHERS_S
    world.http = {"1": 1}
    assert world.find(1) == {"1": 1}
    assert world.asked == [[1]]
    world.lives.on_message(member(1), 10 + 2 * LOST_S)
    world.find(2)
    world.now += OTHERS_S
    assert world.find(2) == {}
    assert world.asked == [[1]], "it is back"


def test_a_room_that_the_bus_does_not_know_for_long_is_asked_for_elsewhere_too(world: World) -> None:
    """A rank may have left before anything was heard of it here."""
    world.find(1)
    world.now += UNHEARD_S - 1
    assert world.find(1, 2) == {}
    assert not world.asked
    world.now += 1.5
    world.http = {"1": 0}
    assert world.find(1, 2) == {"1": 0}
    assert world.asked == [[1]]

"""A pair at two controllers is tried again: its decode leg may be at a rank before its prefill leg is, which waits."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from controller_world import pd, submit
from legs_world import Rank, World

from bus.embed.resolution import QUERY_ID, Resolved, ResolverCore
from bus.wire.messages import Accepted, Answer, Cancel, Failed, Found, Location, Lost, Submit
from nodes.link.actions import Locate
from nodes.link.host import Host
from pdbus.client.core import ClientCore, Patience
from pdbus.client.options import Controllers, make_request

PROMPT = [5, 6, 7, 8, 9]
C, P = "ipc:///c.clients", "ipc:///p.clients"
AT = Location("prefill-0", 0, 1, "ipc:///p0")


def test_a_decode_leg_waits_for_the_room_of_its_own_try() -> None:
    """M94."""
    world = World()
    prefill, decode = Rank(world, "prefill", "p"), Rank(world, "decode", "d")
    dead = Rank(world, "prefill", "dead")
    dead.dead, world.rooms[5] = True, (dead.location, 1)  # of the former try
    decode.read("r", attempt=2)
    decode.dispatch("r", PROMPT, attempt=2, pair_attempt=2)
    world.run(6.0)
    prefill.dispatch("r.prefill", PROMPT, attempt=3, pair_attempt=2)  # its controller has begun it again
    world.run(5.0)
    assert len(decode.tokens["r"]) == 6


def test_who_says_no_try_takes_what_there_is() -> None:
    """M94: a peer of release 0.1.0, whose controllers may have counted apart."""
    world = World()
    prefill, decode = Rank(world, "prefill", "p"), Rank(world, "decode", "d")
    prefill.dispatch("r.prefill", PROMPT)
    decode.read("r", attempt=2)
    decode.dispatch("r", PROMPT, attempt=2)
    world.run(5.0)
    assert len(decode.tokens["r"]) == 6


@pytest.mark.parametrize(
    "old", [Answer(QUERY_ID, (Found(AT, 1, (5,)),)), Answer(QUERY_ID, lost=(Lost(5, "fenced", 1),))]
)
def test_a_process_asks_again_for_the_room_of_that_try(old: Answer) -> None:
    """M94."""
    ended: list[Any] = []
    host: Any = SimpleNamespace(now=1.0, resolver=ResolverCore(), _resolve=ended.extend)
    Host.locate(host, 0, Locate(5, "", None, 30.0, "", 2))
    assert host.resolver.on_message(old, 1.1) == []
    newest = Answer(QUERY_ID, (Found(AT, 2, (5,)),))
    (found,) = host.resolver.on_message(newest, 1.2)
    assert isinstance(found, Resolved)
    assert (found.attempt, found.at) == (2, AT)
    assert ended == []


def test_a_client_says_as_which_try_it_submits_both_legs() -> None:
    """M94: whatever attempts their controllers have made of them since."""
    core, now = ClientCore(Patience(3, 10.0), random.Random(1)), 100.0
    request = make_request(PROMPT, {"rid": "r"}, Controllers(C, P), random.Random(2))

    def submits(actions: Any) -> list[tuple[int, int]]:
        messages = [action.message for action in actions if hasattr(action, "message")]
        return [(each.attempt, each.pair_attempt) for each in messages if isinstance(each, Submit)]

    assert submits(core.begin(request, now)) == [(1, 1), (1, 1)]
    room = request.main.bootstrap_room
    assert room is not None
    core.received(C, Accepted("r", 3, room, None, None), now)  # it waits there, as the third attempt by now
    assert submits(core.tick(now + 1.1)) == [(3, 1), (1, 1)]
    actions = core.received(P, Failed("r.prefill", 1, "prefill_failed", "it has died", True), now + 1.2)
    assert Cancel("r", room) in [getattr(action, "message", None) for action in actions]
    assert submits(core.tick(now + 1.5)) == [(4, 4), (4, 4)]


def test_a_request_at_one_controller_says_none() -> None:
    core = ClientCore(Patience(3, 10.0), random.Random(1))
    (send,) = core.begin(make_request(PROMPT, {}, Controllers(C, None), random.Random(2)), 1.0)
    assert send.message.pair_attempt == 0  # type: ignore[union-attr]


def test_a_controller_passes_it_on() -> None:
    world = pd()
    world.submit(submit("r", leg="decode", bootstrap_room=5, attempt=3, pair_attempt=2))
    (dispatch,) = world.dispatches()
    assert (dispatch.attempt, dispatch.pair_attempt) == (3, 2)

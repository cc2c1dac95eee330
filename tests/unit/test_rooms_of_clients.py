"""With keys a room is its client's: another key that names it reads, frees, ends and blocks nothing (M87)."""

from __future__ import annotations

from typing import Any

import pytest
from controller_world import pd, submit
from legs_world import PROMPT, VOCAB, Rank, World
from msgspec.structs import replace

from bus.rights import Known
from bus.wire.messages import Accepted, Failed, KvDone, KvFail, KvMeta, KvPull
from nodes.link.rooms import ByRoom
from nodes.link.sender import PARK_S
from nodes.own.engines.sim import sim_generate

OTHER = [40 + n for n in range(len(PROMPT))]
ALICE, BOB = "clients/alice", "clients/bob"
PROMPTS = {ALICE: PROMPT, BOB: OTHER}


def known(key: str) -> Known:
    peer = Known(key.encode())
    peer.key = key
    return peer


class Pair:
    """A prefill and a decode rank, and what each client asks for in the one room 5, by its own rid."""

    def __init__(self) -> None:
        self.world = World()
        self.p, self.d = Rank(self.world, "prefill", "p"), Rank(self.world, "decode", "d")

    def prefill(self, client: str, rid: str = "", **rest: Any) -> None:
        self.p.dispatch(rid or client, PROMPTS.get(client, PROMPT), client=client, **rest)

    def decode(self, client: str, rid: str = "", *, told: bool = True, **rest: Any) -> None:
        rid = rid or client
        self.d.read(rid, rest.get("attempt", 1))
        where = {"prefill": self.p.location} if told else {}
        self.d.dispatch(rid, PROMPTS.get(client, PROMPT), client=client, **where, **rest)

    def right(self, client: str, rid: str = "") -> bool:
        return self.d.tokens[rid or client] == sim_generate(PROMPTS.get(client, PROMPT), 6, VOCAB)

    def as_by_a_release_that_says_no_client(self, rank: Rank) -> None:
        """What `rank` sends is as 0.1.0's: so it is read by one of today."""
        deliver = rank._deliver
        rank._deliver = lambda to, message, data: deliver(to, replace(message, client=""), data)  # type: ignore[method-assign]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Pair:
    """Streams are read without keys here: what is looked at is how the KV cache comes."""
    monkeypatch.setattr("nodes.link.streams.owns", lambda peer, owner: True)
    return Pair()


@pytest.mark.parametrize("order", ["ab|ab", "ab|ba", "aA|bB", "AB|ab", "Ab|Ba"])
def test_two_clients_that_name_one_room_each_get_their_own_answer(pair: Pair, order: str) -> None:
    """M87: whoever comes first on either side (capitals: the decode leg), a pull that is parked among them."""
    first, second = order.split("|")
    said = [*first, *second]
    for letter in said:
        client = ALICE if letter in "aA" else BOB
        (pair.decode if letter.isupper() else pair.prefill)(client)
    for letter in "AB":
        if letter not in said:
            pair.decode(ALICE if letter == "A" else BOB)
    for letter in "ab":
        if letter not in said:
            pair.prefill(ALICE if letter == "a" else BOB)
    pair.world.run(2.0)
    for client in (ALICE, BOB):
        assert pair.right(client)
        assert pair.p.code(client) == pair.d.code(client) == "ok"
    assert pair.p.idle()
    assert pair.d.idle()
    assert not pair.p.core.counts["kv_client_unsaid"]


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("told", [True, False])
def test_a_decode_leg_of_another_key_gets_no_kv_cache_and_costs_its_owner_nothing(
    pair: Pair, told: bool, before: bool
) -> None:
    """M87: lone legs, told where or found by the bus; before the prefill leg comes, and after."""
    if before:
        pair.decode(BOB, told=told)
        pair.world.run(0.5)
    pair.prefill(ALICE)
    pair.world.run(0.5)
    if not before:
        pair.decode(BOB, told=told)
    pair.world.run(0.5)
    pair.decode(ALICE, told=told)
    pair.world.run(2.0)
    assert pair.right(ALICE)
    assert pair.p.code(ALICE) == pair.d.code(ALICE) == "ok"
    pair.world.run(PARK_S + 1.0)
    assert pair.d.code(BOB) == "unknown_room"
    assert pair.d.tokens[BOB] == []


def test_what_another_key_says_of_a_room_ends_nothing(pair: Pair) -> None:
    """M68 M87"""
    pair.prefill(ALICE)
    pair.world.run(0.5)
    now = pair.world.now
    pair.p.core.pulled(b"d", KvPull(5, 1, pair.p.epoch, 0, 0, client=ALICE), now)
    for code in ("ok", "cancelled"):
        assert pair.p.core.pulled(b"d", KvDone(5, 1, code, BOB), now) == []  # type: ignore[arg-type]
    pair.decode(ALICE)
    for message in (KvFail(5, 1, "kv_failed", client=BOB), KvMeta(5, 1, 3, 1, 1, 4, "x", client=BOB)):
        assert pair.d.core.kv_message(message, b"", now) == []
    pair.world.run(2.0)
    assert pair.right(ALICE)


def test_a_room_that_failed_is_remembered_for_its_client_alone(pair: Pair) -> None:
    """M66 M87"""
    pair.prefill(BOB, max_tokens=200, deadline_s=0.01)
    pair.world.run(0.2)
    assert pair.p.code(BOB) == "deadline"
    pair.decode(ALICE)
    pair.decode(BOB)
    pair.world.run(0.2)
    pair.prefill(ALICE)
    pair.world.run(2.0)
    assert pair.right(ALICE)
    assert pair.d.code(BOB) == "deadline"


def test_another_attempt_of_ones_own_takes_the_place_of_the_first_beside_another_clients(pair: Pair) -> None:
    """M87 M49: a retry, one that is resumed, and a controller that takes over what runs."""
    pair.prefill(BOB)
    pair.world.run(0.2)
    pair.prefill(ALICE)
    pair.prefill(ALICE, attempt=2)
    pair.decode(ALICE, attempt=2)
    pair.prefill(ALICE, attempt=2, controller_epoch=8, number=1)
    pair.world.run(1.0)
    assert pair.right(ALICE)
    assert (pair.p.code(ALICE), pair.p.code(ALICE, 2)) == ("fenced", "ok")
    more = [*PROMPT, *sim_generate(PROMPT, 2, VOCAB)]
    for rank in (pair.p, pair.d):
        where = {"prefill": pair.p.location} if rank is pair.d else {}
        rank.dispatch(ALICE, more, client=ALICE, attempt=3, offset=2, max_tokens=4, **where)
    pair.decode(BOB)
    pair.world.run(1.0)
    assert pair.d.code(ALICE, 3) == "ok"
    assert pair.right(BOB)


def test_a_room_leaves_the_bus_with_the_last_leg_in_it(pair: Pair) -> None:
    """Whoever's: the broker knows rooms alone, of the highest attempt."""
    pair.prefill(BOB, attempt=3)
    pair.prefill(ALICE)
    pair.decode(BOB, attempt=3)
    pair.world.run(1.0)
    assert pair.right(BOB)
    assert pair.p.dropped == []
    pair.decode(ALICE, told=False)
    pair.world.run(1.0)
    assert pair.right(ALICE), "found under another client's attempt, it is fetched under its own"
    assert [(drop.attempt, drop.code) for drop in pair.p.dropped] == [(3, "ok")]


@pytest.mark.parametrize(("of_prefill", "of_decode"), [(ALICE, ""), ("", ALICE), ("", "")])
def test_a_dispatchers_leg_is_anybodys(pair: Pair, of_prefill: str, of_decode: str) -> None:
    """M87: it says no key, as where there are none."""
    pair.decode(of_decode, "decode")
    pair.prefill(of_prefill, "prefill")
    pair.world.run(2.0)
    assert pair.right(ALICE, "decode")
    pair.prefill(ALICE, "one")
    pair.prefill("", "two")
    pair.world.run(0.2)
    assert pair.p.code("two") == "duplicate_room", "so one room does not do for two of these"


@pytest.mark.parametrize("old", ["prefill", "decode", "both"])
def test_who_does_not_say_a_client_is_not_checked_and_counted(pair: Pair, old: str) -> None:
    """M87 M9: release 0.1.0, on either side."""
    for rank in (pair.p, pair.d):
        if old in (rank.core.role, "both"):
            pair.as_by_a_release_that_says_no_client(rank)
    pair.decode(ALICE)
    pair.prefill(ALICE)
    pair.world.run(2.0)
    assert pair.right(ALICE)
    assert bool(pair.p.core.counts["kv_client_unsaid"]) == (old != "prefill")
    assert pair.d.core.counts["kv_client_unsaid"] or old == "decode"


def test_who_does_not_say_which_of_two_clients_gets_neithers(pair: Pair) -> None:
    """M87"""
    pair.as_by_a_release_that_says_no_client(pair.d)
    pair.prefill(ALICE)
    pair.prefill(BOB)
    pair.world.run(0.2)
    pair.decode(BOB)
    pair.world.run(PARK_S + 1.0)
    assert pair.d.code(BOB) == "unknown_room"
    assert pair.d.tokens[BOB] == []


def test_at_a_controller_a_room_is_its_clients() -> None:
    """M87"""
    world = pd()
    alice, bob = known(ALICE), known(BOB)
    for peer in (bob, alice):
        world.submit(submit(f"of {peer.key}", "pair", bootstrap_room=7), peer=peer)
        assert len(world.answers(Accepted, peer)) == 1
    world.submit(submit("again", "pair", bootstrap_room=7), peer=alice)
    (failed,) = world.answers(Failed, alice)
    assert failed.code == "duplicate_room"


def test_the_table_of_rooms() -> None:
    table: ByRoom[str] = ByRoom()
    table.put(1, ALICE, "alice's")
    assert (table.find(1, ALICE), table.find(1, BOB), table.find(1, ""), table.find(2, "")) == (
        "alice's", None, "alice's", None,
    )  # fmt: skip
    table.put(1, BOB, "bob's")
    assert (table.find(1, ""), table.all(1)) == (None, ["alice's", "bob's"])
    table.put(1, "", "anybody's")
    assert (table.find(1, ""), table.find(1, "clients/c"), table.find(1, BOB)) == ("anybody's", "anybody's", "bob's")
    table.put(1, ALICE, "newer")
    table.pop_oldest()
    assert list(table) == ["anybody's", "newer"]
    for client in ("", ALICE, ALICE):
        table.pop(1, client)
    assert (len(table), table.all(1), table.find(1, "")) == (0, [], None)

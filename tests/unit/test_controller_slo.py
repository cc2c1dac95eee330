"""The controller with the queue order `slo`: prompts bind late, and those that can be in time go first."""

from __future__ import annotations

from typing import Any

import pytest
from controller_world import World, hello, submit

from bus.errors import ConfigError
from bus.rights import Known
from bus.wire.hashing import pack_hashes
from bus.wire.kv_names import Stored
from bus.wire.messages import Accepted, Cancel, Dispatch, Failed, Hello, Sent
from controller.config import ControllerConfig
from controller.events import CacheChanged, FromClient, Published, Tick
from controller.requests.slos import SloClass, parse_slo_class

P = hello("p", role="prefill", dp_size=1, kv_capacity=100_000, max_context=100_000, max_running=64)
D = hello("d", role="decode", dp_size=1, kv_capacity=100_000, max_context=100_000, max_running=64)
U = hello("u", dp_size=1, kv_capacity=100_000, max_context=100_000, max_running=64)
PACE = {"prompt_tokens_total": 10_000, "busy_us_total": 10_000_000}  # 1 ms a token


class SloWorld(World):
    """One prefill and one decode rank, 1 ms a prompt token, which has `busy` tokens queued."""

    def __init__(self, *nodes: Hello, **settings: Any) -> None:
        methods = {"prefill_method": "total_tokens", "unified_method": "total_tokens"}
        super().__init__(**(methods | {"queue_order": "slo", "late_tokens": 100} | settings))
        self.acks: dict[str, tuple[int, int]] = {}
        for node in nodes or (P, D):
            self.join(node)
            self.say(node)
            self.say(node, **PACE)

    def say(self, node: Hello, waiting_tokens: int = 0, **more: int) -> None:
        """`node` has taken in all it was sent, and `waiting_tokens` of it wait."""
        mine = self.dispatches(node)
        acks = ((77, len(mine), sum(each.charge for each in mine)),) if mine else ()
        fields = PACE | {"prompt_tokens_total": PACE["prompt_tokens_total"] + waiting_tokens} | more
        if self.seqs.get((node.instance, 0, 1), 0) == 0:
            fields = dict.fromkeys(PACE, 0)
        self.report(node, acks=acks, waiting_tokens=waiting_tokens, **fields)

    def ask(self, rid: str, tokens: int, **more: Any) -> None:
        self.submit(submit(rid, "pair", tokens, **more))

    def order(self, node: Hello = P) -> list[str]:
        """What `node` gets, as it runs dry again and again."""
        before = len(self.dispatches(node))
        for _ in range(50):
            self.say(node)
        return [each.rid for each in self.dispatches(node)[before:]]


def test_a_prompt_goes_at_once_where_nothing_waits() -> None:
    world = SloWorld()
    world.ask("a", 5000)
    assert [each.rid for each in world.dispatches(P)] == ["a"]
    assert world.answers(Accepted)


def test_a_prompt_waits_until_a_rank_has_nearly_nothing_queued() -> None:
    world = SloWorld()
    world.ask("a", 500)
    world.ask("b", 10)
    assert [each.rid for each in world.dispatches()] == ["a", "a"]
    world.say(P, 100)
    assert len(world.dispatches(P)) == 1
    world.say(P, 99)
    assert [each.rid for each in world.dispatches(P)] == ["a", "b"]


def test_short_ones_that_can_be_in_time_go_first_and_hopeless_ones_last_by_arrival() -> None:
    world = SloWorld(ttft_slo_s=2.0)
    world.ask("busy", 500)
    for rid, tokens, more in (
        ("hopeless", 2500, {}),
        ("long", 1500, {}),
        ("short", 300, {}),
        ("patient", 1600, {"ttft_slo_s": 60.0}),
        ("impatient", 100, {"ttft_slo_s": 0.05}),
        ("first of all", 1700, {"priority": 1}),
    ):
        world.ask(rid, tokens, **more)
    assert world.order() == ["first of all", "short", "long", "patient", "hopeless", "impatient"]


def test_time_makes_hopeless() -> None:
    world = SloWorld(ttft_slo_s=2.0)
    world.ask("busy", 500)
    world.ask("long", 1500)
    world.ask("short", 300)
    world.say(P, 400)
    world.pass_time(1.0, alive=(P, D))
    world.ask("new", 900)
    assert world.order() == ["short", "new", "long"]


def test_work_is_what_is_not_cached() -> None:
    world = SloWorld(prefill_method="cache_aware")
    world.feed(CacheChanged(("p", 0), (Stored(tuple(range(1, 101))),)))
    world.ask("busy", 500)
    world.ask("plain", 200)
    world.ask("cached", 1610, block_tokens=16, block_hashes=pack_hashes(range(1, 101)))
    assert world.order() == ["cached", "plain"]


def test_a_request_is_overtaken_by_so_much_work_and_no_more() -> None:
    world = SloWorld(overtake_tokens=1000)
    world.ask("busy", 500)
    world.ask("long", 1900)
    for number in range(10):
        world.ask(f"s{number}", 250)
    assert world.order() == ["s0", "s1", "s2", "s3", "long", "s4", "s5", "s6", "s7", "s8", "s9"]


def test_what_cannot_be_in_time_is_refused_at_once_where_asked_for() -> None:
    world = SloWorld(shed="hopeless", ttft_slo_s=2.0)
    world.ask("busy", 500)
    world.ask("hopeless", 2500)
    world.ask("waits", 1500)
    (failed,) = world.answers(Failed)
    assert (failed.rid, failed.code, failed.retryable) == ("hopeless", "overloaded", True)
    assert failed.retry_after_s > 0
    world.pass_time(1.0, alive=(P, D))
    assert [each.rid for each in world.answers(Failed)] == ["hopeless", "waits"]
    assert "in time" in failed.message
    assert world.core.life.queue.requests == 0


def test_a_decode_rank_is_sought_before_the_prompt_is_sent() -> None:
    """So that no KV cache waits for a rank that takes it."""
    small = hello("d", role="decode", kv_capacity=1000, max_context=1000)
    world = SloWorld(P, small)
    world.ask("a", 900)
    world.say(P)
    world.say(small, kv_tokens=1000)
    world.ask("b", 90)
    assert [each.rid for each in world.dispatches(P)] == ["a"]
    world.say(small)
    assert [each.rid for each in world.dispatches(P)] == ["a", "b"]


class Decodes:
    """A decode rank's steps: 8 ms, and 2 (`more_ms`) for each request of 1000 tokens."""

    def __init__(self, world: SloWorld, node: Hello = D, more_ms: float = 2.0) -> None:
        self.world, self.node, self.more_ms = world, node, more_ms
        self.step, self.busy_us = 0, PACE["busy_us_total"]
        for requests in (1, 4, 10):
            self.say(requests)
            self.say(requests, steps=100)

    def say(self, requests: int, steps: int = 0) -> None:
        """It has taken in all it was sent, holds so many requests, and has done so many steps more."""
        self.step += steps
        self.busy_us += round(1000 * steps * (8 + self.more_ms * requests))
        load = {"running": requests, "kv_tokens": 1000 * requests}
        self.world.say(self.node, **load, step=self.step, busy_us_total=self.busy_us)


def test_a_request_waits_while_steps_would_get_longer_than_its_slo() -> None:
    world = SloWorld(tpot_slo_s=0.021)
    rank = Decodes(world)
    world.ask("patient", 1_000, tpot_slo_s=1.0)
    assert [each.rid for each in world.dispatches(P)] == ["patient"]
    world.say(P)
    for requests in (8, 6):
        rank.say(requests)
        world.ask(f"waits {requests}", 1_000)
        assert len(world.dispatches(P)) == 1
    rank.say(5)
    world.say(P)
    assert [each.rid for each in world.dispatches(D)] == ["patient", "waits 8"], "a seventh would be one too many"


def test_an_idle_rank_takes_what_no_rank_can_do_in_time() -> None:
    world = SloWorld(tpot_slo_s=0.001)
    Decodes(world).say(0)
    world.ask("a", 1_000)
    world.say(P)
    world.ask("b", 1_000)
    assert [each.rid for each in world.dispatches(D)] == ["a"]


def test_where_the_methods_rank_is_too_slow_the_one_with_the_fewest_tokens_decodes() -> None:
    other = hello("e", role="decode", dp_size=1, kv_capacity=100_000, max_context=100_000, max_running=64)
    world = SloWorld(P, D, other, tpot_slo_s=0.021, decode_method="total_requests")
    Decodes(world)
    world.say(D, running=1, kv_tokens=90_000)
    world.say(other, running=2, kv_tokens=2_000)
    world.ask("a", 1_000)
    assert [len(world.dispatches(node)) for node in (D, other)] == [0, 1]


def test_unified_ranks_bind_late_by_what_is_queued_and_not_by_what_they_hold() -> None:
    world = SloWorld(U)
    world.say(U, kv_tokens=50_000, running=3)
    world.submit(submit("a", prompt_tokens=500))
    world.submit(submit("b", prompt_tokens=10))
    assert [each.rid for each in world.dispatches()] == ["a"]
    world.say(U, 99, kv_tokens=50_000, running=4)
    assert [each.rid for each in world.dispatches()] == ["a", "b"]


@pytest.mark.parametrize("how", [{"routed_dp_rank": 0, "disagg_prefill_dp_rank": 0}, {"bootstrap_room": 7}])
def test_who_can_go_to_one_rank_only_goes_there_at_once(how: dict[str, int]) -> None:
    method = "follow_bootstrap_room" if "bootstrap_room" in how else "total_tokens"
    world = SloWorld(prefill_method=method)
    world.ask("busy", 500, bootstrap_room=1)
    world.ask("fixed", 500, **how)
    assert [each.rid for each in world.dispatches(P)] == ["busy", "fixed"]


def test_a_resumed_request_has_had_its_first_token() -> None:
    world = SloWorld(ttft_slo_s=2.0)
    world.ask("busy", 500)
    world.ask("new", 2900)
    world.ask("resumed", 3000, offset=20, attempt=2)
    assert world.order() == ["resumed", "new"]


def test_who_goes_away_leaves_nothing() -> None:
    world = SloWorld()
    world.ask("busy", 500)
    world.ask("a", 300)
    world.feed(FromClient("client", Cancel("a"), ()))
    world.feed(FromClient("client", Cancel("busy"), ()))
    world.assert_empty()


def test_it_is_counted_whose_first_token_came_in_time() -> None:
    world = SloWorld(ttft_slo_s=2.0)
    world.ask("in time", 50)
    world.ask("late", 10)
    first, second = world.dispatches(D)
    world.progress(D, started=[first])
    world.pass_time(2.5, alive=(P, D))
    world.progress(D, started=[second, first])
    assert (world.core.counts["ttft_slo_kept"], world.core.counts["ttft_slo_missed"]) == (1, 1)


def test_controllers_that_share_ranks_bind_with_their_ticks() -> None:
    """One report would be leave for all of them to fill the same rank."""
    world = SloWorld()
    world.feed(Published(Sent("other", 99, 1, ())))
    world.ask("busy", 500)
    world.ask("waits", 10)
    world.say(P)
    assert [each.rid for each in world.dispatches(P)] == ["busy"]
    world.feed(Tick())
    assert [each.rid for each in world.dispatches(P)] == ["busy", "waits"]


CLASSES = (SloClass("interactive", 0.5, 0.021), SloClass("alice", 3.0))


def ask_as(world: SloWorld, key: str, rid: str, tokens: int, **more: Any) -> None:
    peer = Known(b"c")
    peer.key = key
    world.feed(FromClient(peer, submit(rid, "pair", tokens, **more), (b"\0\0\0\0" * tokens, b"")))


def test_the_class_of_a_request_says_when_its_first_token_is_due() -> None:
    """At 1 ms a token 900 tokens can be there after 0.9 s."""
    for said, in_time in (
        ({}, True),
        ({"slo_class": "interactive"}, False),
        ({"slo_class": "interactive", "ttft_slo_s": 2.5}, True),
    ):
        world = SloWorld(slo_classes=CLASSES, ttft_slo_s=2.0)
        world.say(P, 1_000)
        world.ask("asked", 900, **said)
        world.ask("longer", 950, ttft_slo_s=9.0)
        assert world.order() == (["asked", "longer"] if in_time else ["longer", "asked"]), said


def test_who_names_no_class_is_of_the_one_named_as_its_key() -> None:
    for key, said, in_time in (
        ("clients/alice", {}, True),
        ("clients/alice", {"slo_class": "interactive"}, False),
        ("clients/bob", {}, False),
    ):
        world = SloWorld(slo_classes=CLASSES, ttft_slo_s=0.8)
        world.say(P, 1_000)
        ask_as(world, key, "asked", 900, **said)
        ask_as(world, key, "longer", 950, ttft_slo_s=9.0)
        assert world.order() == (["asked", "longer"] if in_time else ["longer", "asked"]), (key, said)


def test_the_class_of_a_request_says_how_long_a_further_token_may_take() -> None:
    world = SloWorld(slo_classes=CLASSES)
    rank = Decodes(world)
    rank.say(8)
    world.ask("waits", 1_000, slo_class="interactive")
    assert not world.dispatches(D)
    rank.say(5)
    assert [each.rid for each in world.dispatches(D)] == ["waits"]


def test_a_class_that_nobody_knows_is_refused_where_classes_count() -> None:
    for classes, known in ((CLASSES, "alice, interactive"), ((), "none")):
        world = SloWorld(slo_classes=classes)
        world.ask("a", 10, slo_class="urgent")
        (failed,) = world.answers(Failed)
        assert (failed.code, failed.message) == ("bad_request", f"no slo_class 'urgent' is known here ({known})")
        assert not world.dispatches(P)
    world = SloWorld(queue_order="arrival")
    world.ask("a", 10, slo_class="urgent")
    assert [each.rid for each in world.dispatches(P)] == ["a"]


def test_slo_classes_are_read_from_the_command_line() -> None:
    assert parse_slo_class("interactive=0.5,0.03") == SloClass("interactive", 0.5, 0.03)
    assert parse_slo_class("batch=60") == SloClass("batch", 60.0)
    for text in ("", "batch", "batch=", "batch=0", "batch=1,2,3", "batch=-1", "batch=inf", "a b=1", "x" * 33 + "=1"):
        with pytest.raises(ConfigError, match=r"like interactive=0\.5,0\.03"):
            parse_slo_class(text)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"slo_classes": CLASSES}, "slo_classes need the queue order slo"),
        ({"queue_order": "slo", "slo_classes": CLASSES * 2}, "alice is there twice"),
        ({"queue_order": "random"}, "queue_order is one of arrival, slo"),
        ({"queue_order": "slo", "shed": "all"}, "shed is one of never, hopeless"),
        ({"shed": "hopeless"}, "needs the queue order slo"),
        ({"late_tokens": 0}, "late_tokens must be greater than 0"),
        ({"overtake_tokens": 0}, "overtake_tokens must be greater than 0"),
        ({"ttft_slo_s": float("inf")}, "ttft_slo_s must be greater than 0"),
        ({"tpot_slo_s": -0.1}, "tpot_slo_s must not be negative"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ControllerConfig(**settings)


def test_a_status_says_the_slos_where_they_count() -> None:
    slos = {"ttft_slo_s": 3.0, "tpot_slo_s": 0.5}
    for world, said in ((SloWorld(**slos), (3.0, 0.5)), (World(**slos), (0.0, 0.0))):
        status = world.core.status(1, 0.0)
        assert (status.ttft_slo_s, status.tpot_slo_s) == said


def test_the_order_of_arrival_is_as_it_was() -> None:
    world = World(prefill_method="total_tokens")
    for node in (P, D):
        world.join(node)
        world.report(node)
    for number in range(20):
        world.submit(submit(f"r{number}", "pair", 4000 - number))
    assert [each.rid for each in world.sent(Dispatch, P)] == [f"r{number}" for number in range(20)]


def test_each_request_with_an_slo_for_its_first_token_is_kept_missed_or_exempt_once() -> None:
    world = SloWorld(ttft_slo_s=2.0, shed="hopeless", queue_requests=2)
    counts = world.core.counts

    def slos() -> tuple[int, int, int]:
        return counts["ttft_slo_kept"], counts["ttft_slo_missed"], counts["ttft_slo_exempt"]

    world.ask("a", 500)
    (leg,) = world.dispatches(D)
    world.progress(D, started=[leg])
    world.progress(D, ended=[leg])
    assert slos() == (1, 0, 0)
    world.say(P, 500)
    world.ask("shed at once", 2500)
    assert slos() == (1, 1, 0)
    world.ask("cancelled", 100)
    world.feed(FromClient("client", Cancel("cancelled")))
    assert slos() == (1, 1, 1)
    world.ask("nonsense", 100, bootstrap_room=-1)
    world.ask("too long", 10**6)
    assert slos() == (1, 1, 3)
    world.ask("late", 100, deadline_s=0.1)
    world.pass_time(0.2, alive=(P, D))
    assert slos() == (1, 2, 3)
    for rid in ("x", "y", "no room"):
        world.ask(rid, 100)
    assert slos() == (1, 3, 3)
    world.ask("y", 100, attempt=2)
    assert slos() == (1, 3, 4)
    world.submit(submit("lone", "decode", 100, disagg_prefill_dp_rank=0))  # has none
    world.ask("resumed", 100, offset=3)  # likewise
    for action in world.core.shutdown(world.now):
        assert action
    assert slos() == (1, 5, 4)
    assert counts["submitted"] == counts["done"] + counts["failed"] + counts["superseded"]


def test_between_ticks_nothing_overtakes_what_waits_in_another_lane() -> None:
    world = SloWorld()
    world.feed(Published(Sent("other", 99, 1, ())))
    world.ask("busy", 500)
    world.ask("waits", 10)
    world.say(P)
    world.submit(submit("another lane", "prefill", 10))
    world.submit(submit("pinned", "prefill", 10, routed_dp_rank=0))
    world.submit(submit("other ranks", "decode", 10, disagg_prefill_dp_rank=0))
    assert [each.rid for each in world.dispatches(P)] == ["busy", "pinned"]
    world.feed(Tick())
    assert [each.rid for each in world.dispatches(P)] == ["busy", "pinned", "waits", "another lane"]


class Wishing(SloWorld):
    """A decode rank with a request in it, and one that waits for steps which no batch has."""

    def __init__(self, client: str = "", more_ms: float = 2.0, **settings: Any) -> None:
        super().__init__(ttft_slo_s=1e6, **settings)
        self.rank = Decodes(self, more_ms=more_ms)
        self.rank.say(1)
        ask_as(self, client, "wishes", 1, tpot_slo_s=1e-6)

    def run(self, seconds: float) -> list[str]:
        """What goes to the prefill rank meanwhile, its decode rank as it is."""
        before, until = len(self.dispatches(P)), self.now + seconds
        while self.now < until:
            self.pass_time(min(0.5, until - self.now), alive=(P, D))
            self.rank.say(1)
            self.say(P)
        return [each.rid for each in self.dispatches(P)[before:]]


def test_a_wish_counts_for_no_less_than_a_step_alone() -> None:
    """Where steps take no longer with more requests, as they measure, it waits for nothing."""
    assert [each.rid for each in Wishing(more_ms=-0.1).dispatches(P)] == ["wishes"]
    world = Wishing()
    assert not world.dispatches(P)
    world.rank.say(0)
    assert [each.rid for each in world.dispatches(P)] == ["wishes"], "an idle rank always can"


def test_a_wish_holds_up_what_else_its_client_has_for_a_while_and_then_counts_for_nothing() -> None:
    world = Wishing()
    world.ask("behind", 100)
    assert world.run(4.9) == []
    assert world.run(0.2) == ["wishes", "behind"]
    assert world.core.counts["tpot_slo_given_up"] == 1


def test_wishes_hold_up_half_of_the_time_at_most() -> None:
    world = Wishing()
    for number in range(3):
        world.ask(f"wishes too {number}", 1, tpot_slo_s=1e-6)
    world.ask("behind", 100)
    assert len(world.run(5.1)) == 5
    world.ask("wishes meanwhile", 1, tpot_slo_s=1e-6)
    assert world.run(0.1) == ["wishes meanwhile"]
    world.run(5.0)
    world.ask("wishes again", 1, tpot_slo_s=1e-6)
    world.ask("behind again", 100)
    assert world.run(4.9) == []
    assert world.run(0.2) == ["wishes again", "behind again"]


def test_a_wish_holds_up_no_other_client() -> None:
    world = Wishing("clients/mallory")
    for number in range(3):
        ask_as(world, "clients/alice", f"a{number}", 20)
        ask_as(world, "clients/mallory", f"m{number}", 20)
    assert world.run(1.0) == ["a0", "a1", "a2"]


def test_the_controllers_own_slo_holds_for_all() -> None:
    world = Wishing(tpot_slo_s=0.011)
    world.ask("behind", 100)
    assert world.run(12.0) == []
    world.rank.say(0)
    assert world.dispatches(P)[0].rid == "wishes"

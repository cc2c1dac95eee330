"""A role that was served and is not any more is missed for as long as nobody says that it should be gone."""

from __future__ import annotations

from typing import Any

import pytest
from controller_world import World, hello

from bus.errors import ConfigError
from bus.wire.messages import Bye, Drain, DrainRole, Hello, Status
from controller.config import ControllerConfig
from controller.events import FromClient, FromNode, Unreachable
from controller.observe import collect
from pdbus.fleet.figures import trouble_of

FORGET_S = 60.0


def prefill(name: str = "p", **said: Any) -> Hello:
    return hello(name, role="prefill", dp_size=1, **said)


def decode(name: str = "d", **said: Any) -> Hello:
    return hello(name, role="decode", dp_size=1, **said)


class Cluster(World):
    """`ready` joins a rank, `killed` ends it without a word, `left` after its goodbye."""

    def __init__(self, *expect: str) -> None:
        super().__init__(expect=expect, forget_s=FORGET_S)
        self.alive: list[Hello] = []

    def ready(self, *nodes: Hello) -> None:
        for node in nodes:
            self.join(node)
            self.alive.append(node)
            self.report(node)
        self.pass_time(0.1, alive=self.alive)

    def killed(self, node: Hello) -> None:
        self.alive.remove(node)
        self.feed(Unreachable(self.core.members.known((node.instance, 0)).peer))

    def left(self, node: Hello) -> None:
        self.alive.remove(node)
        self.feed(FromNode(self.core.members.known((node.instance, 0)).peer, Bye(node.instance, 0, node.epoch)))

    def forgotten(self) -> None:
        for _ in range(int(FORGET_S) + 10):
            for node in self.alive:
                self.report(node)
            self.pass_time(1.0, alive=self.alive)

    @property
    def trouble(self) -> list[str]:
        return trouble_of(self.core.status(1, self.now))

    def served(self) -> dict[tuple[str, str], float]:
        """As Prometheus has it."""
        core = self.core
        ranks, liveness = core.members.ranks.values(), core.health.liveness
        counts = core.happened(), core.alive()
        metrics = collect(*counts, ranks, liveness, core.config.methods, core.regret, self.now, core.wanted)
        (metric,) = [each for each in metrics if each.name == "pdbus_controller_wanted_ready"]
        return {(each.labels["role"], each.labels["model"]): each.value for each in metric.samples}  # type: ignore[misc]


def test_a_role_whose_last_rank_was_killed_is_missed_after_it_is_forgotten() -> None:
    world = Cluster()
    p, d = prefill(), decode()
    world.ready(p, d)
    assert (world.trouble, world.core.unready) == ([], "")
    world.killed(d)
    assert world.trouble[1:] == ["no decode rank is ready"]
    world.forgotten()
    assert [rank.instance for rank in world.core.status(1, world.now).ranks] == ["p"]
    assert world.trouble == [world.core.unready] == ["no decode rank is ready"]
    assert world.served() == {("decode", "m"): 0, ("prefill", "m"): 1}
    world.ready(decode("other"))
    assert (world.trouble, world.core.unready) == ([], "")


def test_a_role_that_is_scaled_to_nothing_is_not_missed() -> None:
    world = Cluster()
    ranks = [decode("d-0"), decode("d-1")]
    world.ready(prefill(), *ranks)
    for rank in ranks:
        world.left(rank)
    assert (world.trouble, world.core.unready) == ([], "")
    assert world.served() == {("prefill", "m"): 1}
    world.forgotten()
    assert world.trouble == []


def test_a_model_that_is_retired_is_not_missed_and_one_that_is_lost_is_named() -> None:
    world = Cluster()
    old, new = decode("old", model="m1"), decode("new", model="m2")
    world.ready(old, new)
    world.left(old)
    assert world.trouble == []
    older = decode("older", model="m1", epoch=2)
    world.ready(older)
    world.killed(new)
    world.forgotten()
    assert world.trouble == ["no decode rank of m2 is ready"]
    assert "decode" in world.core.unready
    assert world.served() == {("decode", "m1"): 1, ("decode", "m2"): 0}


@pytest.mark.parametrize("was_ready", [True, False])
def test_a_rollout_whose_new_rank_dies_is_no_goodbye(was_ready: bool) -> None:
    world = Cluster()
    old, new = decode("old"), decode("new", state="ready" if was_ready else "starting")
    world.ready(prefill(), old, new)
    world.killed(new)
    world.left(old)
    world.forgotten()
    assert world.trouble == ["no decode rank is ready"]
    world.ready(decode("new", epoch=3))  # the same pod, once more
    assert world.trouble == []
    world.left(world.alive[-1])
    assert world.trouble == []


def test_what_is_declared_outlives_a_controller_and_all_goodbyes() -> None:
    world = Cluster("prefill", "decode:m")
    assert world.trouble == [
        "no decode rank is ready",
        "no prefill rank is ready",
        "no rank has joined this controller",
    ]
    p, d = prefill(), decode()
    world.ready(p)
    assert world.trouble == [world.core.unready] == ["no decode rank is ready"]
    world.ready(d)
    assert (world.trouble, world.core.unready) == ([], "")
    world.left(d)
    assert world.trouble == ["no decode rank is ready"]
    assert world.served() == {("decode", "m"): 0, ("prefill", ""): 1, ("prefill", "m"): 1}


def test_an_operator_says_that_a_role_should_be_gone() -> None:
    """As after a rank that never came back: goodbyes of others do not end that."""
    world = Cluster()
    lost, last = decode("lost"), decode("last")
    world.ready(prefill(), lost, last)
    world.killed(lost)
    world.left(last)
    world.forgotten()
    assert world.trouble == ["no decode rank is ready"]
    world.feed(FromClient("op", DrainRole(7, "decode")))
    (answer,) = world.answers(Status)
    assert answer.id == 7
    assert world.trouble == []
    world.ready(decode("again", epoch=4))
    world.killed(world.alive[-1])
    world.forgotten()
    assert world.trouble == ["no decode rank is ready"]


def test_a_role_is_drained_of_one_model_or_of_all() -> None:
    world = Cluster()
    world.ready(decode("a", model="m1"), decode("b", model="m2"), prefill())
    world.feed(FromClient("op", DrainRole(1, "decode", "m1")))
    assert [each.peer for each in world.to_nodes if isinstance(each.message, Drain)] == ["a/0@1"]
    assert not world.core.table.ranks["a", 0].ready
    assert world.core.table.ranks["b", 0].ready
    world.feed(FromClient("op", DrainRole(2, "decode")))
    assert not world.core.table.ranks["b", 0].ready


@pytest.mark.parametrize("text", ["", "nobody", "prefill,decode", "decode:" + "m" * 129])
def test_what_cannot_be_expected_is_said_in_a_line(text: str) -> None:
    with pytest.raises(ConfigError, match="expect"):
        ControllerConfig(expect=(text,))

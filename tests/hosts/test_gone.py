"""A whole host is gone at once, without a FIN or RST, and comes back: at its address, or a node at another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from fault_rig import Rig
from hosts_world import Load, World, addresses, state
from netns import Network

from bus.runtime.sockets import Sockets


@contextmanager
def gone(world: World, name: str, load: Load, address: str = "") -> Iterator[None]:
    """While this lasts. On entry nobody believes to be connected with it any more; on exit its part is READY again."""
    before = world.hosts[name].address
    world.hosts[name].vanish()
    try:
        load.until(lambda: not world.linked(before), f"nobody is connected with {name}")
        yield
    finally:
        world.hosts[name].come_back(address)
        world.begin(name).ready()


@pytest.mark.parametrize("width", [8, 0], ids=["busy", "idle"])
@pytest.mark.parametrize("back", ["same", "another"])
@pytest.mark.parametrize("node", ["prefill-0", "decode-0"])
def test_a_nodes_host(world: World, rig: Rig, other: Rig, node: str, back: str, width: int) -> None:
    """Its connections are half-open: each peer finds out by itself, whether it has something to say to it or not."""
    part, load = f"{node}/0", Load(rig, width)
    rig.ended(*(rig.begin() for _ in range(4)))  # so that all are connected with all
    if width:
        load.runs_at(part)
    restarts = getattr(rig.rank(part), "restarts", 0)
    with gone(world, node, load, "" if back == "same" else addresses()[node].replace("10.0.0.", "10.0.1.")):
        load.until(lambda: state(rig, part) == state(other, part) == "lost", "it is lost")
    load.until(lambda: state(rig, part) == state(other, part) == "ready", "it is ready again")
    assert getattr(rig.rank(part), "restarts", 0) == restarts + 1
    load.width = 8
    load.runs_at(part)
    load.end()
    if back == "another":
        world.net.readdress(world.hosts[node], addresses()[node])
        world.begin(node).ready()


def test_the_brokers_host(world: World, rig: Rig) -> None:
    load = Load(rig)
    with gone(world, "broker", load):
        load.until(lambda: all(rank.report_age_s > 4 for rank in rig.status().ranks), "all reports are old")
        load.ends(10)
        assert {rank.state for rank in rig.status().ranks} == {"ready"}
    load.until(lambda: all(rank.report_age_s < 2 for rank in rig.status().ranks), "reports come again")
    load.end(undisturbed=True)


def test_one_of_two_controllers_hosts(world: World, rig: Rig, other: Rig) -> None:
    """Clients of the other notice nothing. Its own read on what streams, and wait with the rest until it is back."""
    load = Load(rig)
    streams = [other.begin(60, 400) for _ in range(4)]
    for rid in streams:
        other.got(rid, 5)
    with gone(world, "controller-1", load):
        late = [other.begin() for _ in range(4)]
        other.ended(*streams)
        load.ends(10)
        assert not other.results.keys() & set(late)
    other.ended(*late)
    assert {other.results[rid].attempts for rid in streams} == {1}
    other.check()
    load.end(undisturbed=True)


def test_the_clients_own_link(world: World, rig: Rig) -> None:
    """`ip link set eth0 down`, and up again: here it is the client's machine that knows."""
    load = Load(rig)
    load.ends(4)
    world.hosts["client"].link("down")
    try:
        load.until(lambda: not world.linked(addresses()["client"]), "nobody is connected with it")
    finally:
        world.hosts["client"].link("up")
    load.ends(8)
    load.end()


@pytest.mark.usefixtures("able")
def test_who_connects_to_a_host_that_does_not_answer_tries_anew_soon() -> None:
    """The kernel alone would try less and less often, so that a link that was long cut would seem so long after."""
    with Network() as net:
        near, far = net.host("near", "10.0.0.1"), net.host("far", "10.0.0.2")
        with net.cut((far, near)), near.inside(), Sockets() as sockets:
            sockets.dealer("tcp://10.0.0.2:5560")
            tried: set[str] = set()  # from these ports

            def thrice() -> bool:
                tried.update(own for own, _ in near.connections("syn-sent"))
                return len(tried) > 2

            World.until(thrice, "it has tried three times")

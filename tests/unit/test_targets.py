"""Where the metrics of all parts are: as parts say it, as the controller knows it, and as Prometheus reads it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable

import pytest
from controller_world import World, hello, peer_of, submit
from msgspec.structs import replace
from status_world import rank
from test_probes import HOST, Part, ask

from bus.endpoints import advertised
from bus.rights import Known
from bus.runtime import probes
from bus.wire.messages import Beacon, Bye, Scraped, Sent, Status, StatusQuery
from controller.events import FromClient, FromNode, Published, Tick
from controller.observe import SCRAPED_S
from pdbus.commands.targets import _text


@pytest.mark.parametrize(
    ("host", "base", "address"),
    [
        ("127.0.0.1", "tcp://10.0.0.1:5550", "127.0.0.1:9100"),
        ("0.0.0.0", "tcp://10.0.0.1:5550", "10.0.0.1:9100"),
        ("::", "tcp://[fd00::1]:5550", "[fd00::1]:9100"),
        ("::1", "ipc:///x", "[::1]:9100"),
        ("0.0.0.0", "tcp://node-3", "node-3:9100"),
        ("", "tcp://10.0.0.1:5560#controller-1", "10.0.0.1:9100"),
        ("0.0.0.0", "ipc:///x", f"{socket.gethostname()}:9100"),
        ("0.0.0.0", "tcp://0.0.0.0:5550", f"{socket.gethostname()}:9100"),
    ],
)
def test_a_part_says_an_address_that_others_can_use(host: str, base: str, address: str) -> None:
    assert advertised(host, 9100, base) == address
    assert advertised(host, 0, base) == ""


def test_a_controller_knows_ranks_by_hello_and_the_others_by_the_bus() -> None:
    world = World(metrics_port=9101)
    world.join(replace(hello("u"), metrics="10.0.0.2:9102"))
    world.join(hello("u", 1))
    world.feed(Published(Beacon(1, 1, 0.25, "10.0.0.1:9100")))
    world.feed(Published(Sent("controller-1", 5, 1, (), "10.0.0.1:9105")))
    world.feed(Published(Sent("controller-0", 77, 1, (), "somebody's:1")))
    status = world.core.status(1, world.now)
    assert [each.metrics for each in status.ranks] == ["10.0.0.2:9102", ""]
    own = Scraped("controller", "controller-0", "127.0.0.1:9101")
    others = (Scraped("broker", "", "10.0.0.1:9100"), Scraped("controller", "controller-1", "10.0.0.1:9105"))
    assert status.scraped == (*others, own)
    world.report(world.rank(hello("u")).info)
    world.submit(submit())
    world.now += 2.0
    world.feed(Tick())
    assert {message.metrics for message in world.published if isinstance(message, Sent)} == {own.metrics}
    world.feed(Published(Beacon(2, 1, 0.25)))
    assert world.core.status(1, world.now).scraped == (others[1], own), "a broker without metrics took its place"
    assert world.core.status(1, world.now + SCRAPED_S).scraped == (own,)


def test_a_client_is_told_none() -> None:
    world = World(metrics_port=9101)
    world.join(replace(hello("u"), metrics="10.0.0.2:9102"))
    client = Known(b"c")
    client.key = "clients/alice"
    world.feed(FromClient(client, StatusQuery(1)))
    (seen,) = world.answers(Status)
    assert (seen.scraped, [each.metrics for each in seen.ranks]) == ((), [""])


def test_targets_are_one_a_process_with_the_labels_of_its_metrics() -> None:
    ranks = (
        rank("prefill-0", 0, metrics="10.0.0.2:9102"), rank("prefill-0", 1, metrics="10.0.0.2:9102"),
        rank("decode-0", 0, metrics="10.0.0.3:9102", state="lost"), rank("decode-0", 1, metrics="x:1", state="gone"),
        rank("decode-0", 2),
    )  # fmt: skip
    scraped = (Scraped("broker", "", "10.0.0.1:9100"), Scraped("controller", "controller-0", "10.0.0.1:9101"))
    status = Status(1, "controller-0", 1, 1.0, {}, {}, ranks, scraped=scraped)
    assert json.loads(_text(status)) == [
        {"targets": ["10.0.0.1:9100"], "labels": {"part": "broker", "instance": "broker"}},
        {"targets": ["10.0.0.1:9101"], "labels": {"part": "controller", "instance": "controller-0"}},
        {"targets": ["10.0.0.3:9102"],
         "labels": {"part": "node", "instance": "decode-0", "role": "decode", "dp_rank": "0"}},
        {"targets": ["10.0.0.2:9102"],
         "labels": {"part": "node", "instance": "prefill-0", "role": "prefill", "dp_rank": "0,1"}},
    ]  # fmt: skip


def test_those_of_a_controller_are_the_same_as_of_its_status() -> None:
    world = World(metrics_port=9101)
    infos = [replace(hello("u", n, dp_size=3), metrics=f"10.0.0.2:{9102 + n // 2}") for n in (2, 0, 1)]
    for info in infos:
        world.join(info)
    made = world.core.targets(world.now)
    found = {each["targets"][0]: each["labels"].get("dp_rank") for each in made()}
    assert found == {"127.0.0.1:9101": None, "10.0.0.2:9102": "0,1", "10.0.0.2:9103": "2"}
    assert made() == json.loads(_text(world.core.status(1, world.now)))
    world.feed(FromNode(peer_of(infos[0]), Bye("u", 2, infos[0].epoch)))
    assert len(world.core.targets(world.now)()) == 2, "it has said goodbye"
    assert len(made()) == 3, "as it was then"


def test_a_port_answers_with_targets_where_there_are_any_to_tell() -> None:
    part = Part()
    told: list[dict[str, object]] = [{"targets": ["a:1"], "labels": {"part": "broker"}}]
    makers: set[int] = set()

    def page(made: list[dict[str, object]]) -> Callable[[], list[dict[str, object]]]:
        def make() -> list[dict[str, object]]:
            makers.add(threading.get_ident())
            return made

        return make

    stop = probes.serve(part.loop, HOST, part.port, part.gather, lambda: "", lambda: page(list(told)))
    try:
        status, text = ask(part.port, "/targets")
        assert (status, json.loads(text)) == (200, told)
        told.append({"targets": ["b:2"], "labels": {}})
        part.turn(probes.GATHER_S)
        assert json.loads(ask(part.port, "/targets")[1]) == told
        assert makers
        assert threading.get_ident() not in makers, "no page is made on the loop's thread"
        assert ask(part.port, "/x") == (404, "here are /metrics, /targets, /health and /ready\n")
    finally:
        stop()
        part.loop.close()

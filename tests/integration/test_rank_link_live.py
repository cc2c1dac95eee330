"""A rank link with its thread and sockets, beside a broker and controllers: life, ranks, threads, keys."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bus.broker import Broker, BrokerConfig
from bus.errors import PartFailed, RequestFailed
from bus.runtime.keys import add_key, give_key, new_keys
from bus.runtime.ports import free_ports
from bus.wire.codec import encode
from bus.wire.messages import Accepted, Done, Params
from controller import Dispatcher
from controller.config import ControllerConfig
from controller.shell import Controller
from nodes.link import Cancel, Draining, RankFacts, RankLink, Start
from pdbus.client import Client

WAIT_S = 60.0
FACTS = RankFacts(model="m", max_context=4096, block_tokens=16)
PROMPT = [bytes(16), encode(Params())]


class Place:
    """Addresses for one bus and one controller."""

    def __init__(self, folder: str) -> None:
        self.bus, self.controller, self.data = f"ipc://{folder}/b", f"ipc://{folder}/c", f"ipc://{folder}"

    def link(self, **changes: Any) -> RankLink:
        settings: dict[str, Any] = {
            "controllers": [self.controller], "role": "unified", "instance": "mine", "facts": FACTS, "data": self.data,
        }  # fmt: skip
        return RankLink(self.bus, **(settings | changes))

    def config(self, **changes: Any) -> ControllerConfig:
        return ControllerConfig(bus=self.bus, controller=self.controller, unified_method="total_tokens", **changes)


@pytest.fixture
def place() -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="pd") as folder:
        yield Place(folder)


class Scheduler:
    """Says the prompt again from a thread of its own, while another polls: an engine's two loops."""

    def __init__(self, link: RankLink) -> None:
        self.link = link
        self.seen: list[int] = []  # dp_ranks
        self._legs: list[Any] = []
        self._came = threading.Condition()
        self._threads = [threading.Thread(target=each) for each in (self._poll, self._compute)]

    def __enter__(self) -> Scheduler:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.link.stop()
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()

    def _poll(self) -> None:
        while not self.link.drained:
            orders = self.link.poll(0.5)
            with self._came:
                self._legs += [order.leg for order in orders if isinstance(order, Start)]
                self._came.notify()
        with self._came:
            self._legs.append(None)
            self._came.notify()

    def _compute(self) -> None:
        while True:
            with self._came:
                self._came.wait_for(lambda: self._legs)
                leg = self._legs.pop(0)
            if leg is None:
                return
            self.seen.append(leg.dp_rank)
            for token in leg.prompt:
                self.link.output(leg, [token])
            self.link.finish(leg, "stop")


def until(true: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def ready(client: Client, count: int) -> None:
    until(lambda: sum(rank.state == "ready" for rank in client.status().ranks) == count, f"{count} ranks are ready")


def serves(client: Client, requests: int = 8) -> None:
    streams = [client.generate_tokens([n + 1, 7, 8], max_tokens=3, leg="unified") for n in range(requests)]
    assert [stream.tokens() for stream in streams] == [[n + 1, 7, 8] for n in range(requests)]


def test_several_ranks_in_one_link_polled_and_computed_by_different_threads(place: Place) -> None:
    with (
        Broker(BrokerConfig(place.bus)), Controller(place.config()),
        place.link(dp_ranks=(0, 2), dp_size=3) as link, Scheduler(link) as scheduler,
        Client(place.controller) as client,
    ):  # fmt: skip
        assert link.wait_ready(WAIT_S)
        ready(client, 2)
        serves(client)
        assert set(scheduler.seen) == {0, 2}
        until(lambda: all(rank.load and not rank.load.running for rank in client.status().ranks), "the ranks are idle")
        link.drain()
        until(lambda: link.drained, "it drains")


def test_a_controller_that_comes_late_finds_the_rank(place: Place) -> None:
    with Broker(BrokerConfig(place.bus)), place.link() as link, Scheduler(link):
        assert not link.wait_ready(0.1)
        with Controller(place.config()), Client(place.controller) as client:
            assert link.wait_ready(WAIT_S)
            ready(client, 1)
            serves(client, 2)


def test_a_later_start_of_the_rank_fences_this_one_which_says_why_and_drains(place: Place) -> None:
    with (
        Broker(BrokerConfig(place.bus)), Controller(place.config()), place.link() as first,
        Client(place.controller) as client,
    ):  # fmt: skip
        assert first.wait_ready(WAIT_S)
        ready(client, 1)
        stream = client.generate_tokens([1, 2, 3], max_tokens=3, leg="unified")
        (order,) = first.poll(WAIT_S)
        assert isinstance(order, Start)
        assert first.left is None
        with place.link() as second, Scheduler(second):
            assert second.wait_ready(WAIT_S)
            until(lambda: first.left is not None, "the first hears of it")
            assert "started again elsewhere" in str(first.left)
            assert stream.tokens() == [1, 2, 3], "the request goes on at the other"
            until(lambda: first.drained, "the first drains by itself")
            assert {type(order) for order in first.poll()} == {Cancel, Draining}
            assert second.left is None


def test_an_engine_that_died_ends_its_requests_and_the_link_says_why(place: Place) -> None:
    with (
        Broker(BrokerConfig(place.bus)), Controller(place.config()), place.link() as link,
        Client(place.controller, retries=0) as client,
    ):  # fmt: skip
        ready(client, 1)
        assert link.wait_ready(WAIT_S)
        stream = client.generate_tokens([1, 2], max_tokens=2, leg="unified")
        assert link.poll(WAIT_S)
        link.die("CUDA error: an illegal memory access")
        with pytest.raises(RequestFailed) as failure:
            stream.tokens()
        assert failure.value.code == "peer_lost"
        until(lambda: link.drained, "it drains by itself")
        assert "mine/0: its engine died: CUDA error" in str(link.left)


def test_every_call_says_so_once_the_links_thread_has_failed(place: Place) -> None:
    with Broker(BrokerConfig(place.bus)), Controller(place.config()), place.link() as link:
        assert link.wait_ready(WAIT_S)

        def fail() -> None:
            raise RuntimeError("a bug of ours")

        waiting: list[BaseException] = []

        def wait() -> None:
            try:
                while True:
                    link.poll(WAIT_S)
            except PartFailed as failure:
                waiting.append(failure)

        waiter = threading.Thread(target=wait)
        waiter.start()
        link.loop.call_threadsafe(fail)
        waiter.join(WAIT_S)
        assert "a bug of ours" in str(waiting)
        assert link.drained, "whoever loops until then ends"
        report = partial(link.report, running=0, waiting=0, waiting_tokens=0)
        for call in (link.poll, link.drain, partial(link.die, "x"), report):
            with pytest.raises(PartFailed, match="a bug of ours"):
                call()


def test_keys_over_tcp(place: Place, tmp_path: Path) -> None:
    new_keys(tmp_path / "cluster", ("mine",))
    add_key(tmp_path / "cluster", "clients", "alice")
    give_key(tmp_path / "cluster", "clients", "alice", tmp_path / "alice")
    keys = str(tmp_path / "cluster")
    base = free_ports("127.0.0.1", 5)
    place.bus, place.controller = f"tcp://127.0.0.1:{base}", f"tcp://127.0.0.1:{base + 3}"
    with (
        Broker(BrokerConfig(place.bus, keys=keys)), Controller(place.config(keys=keys)),
        place.link(data="tcp://127.0.0.1", keys=keys) as link, Scheduler(link),
        place.link(data="tcp://127.0.0.1", instance="plain") as plain,
        Client(place.controller, keys=tmp_path / "alice") as client,
    ):  # fmt: skip
        assert link.wait_ready(WAIT_S)
        ready(client, 1)
        serves(client, 4)
        assert not plain.wait_ready(0.1), "who has no keys gets nowhere"
        assert [rank.instance for rank in client.status().ranks] == ["mine"]


def test_a_link_and_a_dispatcher_in_another_with_start_as_new(place: Place) -> None:
    """The ranks that live on take what the new dispatcher numbers from 1; the link is not drained from the start."""
    link = place.link()
    dispatcher = Dispatcher(place.config(with_broker=True))
    ran: list[str] = []

    def serve() -> None:
        while not link.drained:
            for order in link.poll(0.5):
                if isinstance(order, Start):
                    ran.append(order.leg.rid)
                    link.output(order.leg, [7])
                    link.finish(order.leg, "stop")

    def run(rids: list[str]) -> None:
        until(lambda: any(rank.state == "ready" for rank in dispatcher.status().ranks), "the rank is ready")
        for rid in rids:
            assert dispatcher.dispatch(rid, PROMPT, max_tokens=1, continue_on_disconnect=True)
        ended: list[Any] = []
        while len(ended) < len(rids):
            answers = dispatcher.poll(WAIT_S)
            assert answers, "a request never ends"
            ended += [each for each in answers if not isinstance(each, Accepted)]
        assert [(each.rid, type(each)) for each in ended] == [(rid, Done) for rid in rids]

    lives = iter("abcd")
    for _ in range(2):
        with link:
            assert not link.drained
            thread = threading.Thread(target=serve)
            thread.start()
            for _ in range(2):
                with dispatcher:
                    assert link.wait_ready(WAIT_S)
                    life = next(lives)
                    run([f"{life}{number}" for number in range(3)])
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert ran == [f"{life}{number}" for life in "abcd" for number in range(3)]

"""Parts on threads of their own: a failed start leaves nothing open, and a failed thread is known to all who call."""

from __future__ import annotations

import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bus import Broker, BrokerConfig, ConfigError, Load, PartFailed, Publisher, Resolver, StartError
from bus.endpoints import ControllerAddress
from bus.runtime.service import Service
from bus.runtime.sockets import Sockets
from bus.wire.messages import Failed, StatusQuery
from controller import ControllerConfig, Dispatcher
from controller.shell import Controller
from pdbus.client.channel import Channel
from pdbus.client.options import Where, make_request, patience
from pdbus.client.output import Result
from pdbus.client.request import Request

WAIT_S = 30.0


@pytest.fixture
def folder() -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="pd")
    yield f"ipc://{path}"
    shutil.rmtree(path)


def publisher(folder: str) -> Publisher:
    return Publisher(f"{folder}/bus", instance="p", dp_rank=0, role="prefill")


def resolver(folder: str) -> Resolver:
    return Resolver(f"{folder}/bus")


def broker(folder: str) -> Broker:
    return Broker(f"{folder}/bus")


def config(folder: str, **settings: Any) -> ControllerConfig:
    return ControllerConfig(bus=f"{folder}/bus", controller=f"{folder}/c", **settings)


def controller(folder: str) -> Controller:
    return Controller(config(folder))


def a_request(part: Channel) -> Request:
    return make_request([1, 2], {}, Where("ipc:///x", None), part.rng)


def channel(folder: str) -> Channel:
    return Channel([ControllerAddress(f"{folder}/c").clients], patience(0, WAIT_S))


def break_down(part: Service) -> None:
    """Its thread meets a bug of ours, and ends."""

    def bug() -> None:
        raise ZeroDivisionError("a bug")

    thread = part._thread
    assert thread is not None
    part.loop.call_threadsafe(bug)
    thread.join(WAIT_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("make", [publisher, resolver, broker, controller, channel])
def test_a_failed_start_closes_what_it_opened(
    make: Callable[[str], Service], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That no context stays open is `conftest.no_open_contexts`."""
    made: list[Any] = []
    original = Sockets._connect

    def fails(self: Sockets, socket: Any, endpoint: str) -> Any:
        made.append(original(self, socket, endpoint))
        raise StartError("no such host")

    monkeypatch.setattr(Sockets, "_connect", fails)
    with pytest.raises(StartError, match="no such host"):
        make(folder).start()
    assert made
    assert all(socket.closed for socket in made)
    monkeypatch.undo()
    make(folder).start().stop()  # nor does an endpoint stay taken


def test_a_taken_metrics_port_leaves_nothing_behind(folder: str) -> None:
    """It is the last thing that a part opens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = int(taken.getsockname()[1])
        taken.listen()
        for part in (
            Controller(config(folder, with_broker=True, metrics_port=port)),
            Broker(BrokerConfig(f"{folder}/bus", metrics_port=port)),
        ):
            with pytest.raises(StartError, match="choose another --metrics-port"):
                part.start()
    Dispatcher(config(folder, with_broker=True)).controller.start().stop()


CALLS: list[tuple[Callable[[str], Any], dict[str, Callable[[Any], object]]]] = [
    (
        publisher,
        {
            "register": lambda part: part.register(1),
            "drop": lambda part: part.drop(1),
            "report": lambda part: part.report(
                Load(seq=0, step=0, running=0, waiting=0, waiting_tokens=0, kv_tokens=0, kv_capacity=0, max_running=0),
            ),
            "set_state": lambda part: part.set_state("draining"),
            "set_follow": lambda part: part.set_follow(True),
            "take_conflicts": lambda part: part.take_conflicts(),
            "wait_ready": lambda part: part.wait_ready(WAIT_S),
        },
    ),
    (
        resolver,
        {
            "want": lambda part: part.want(1),
            "poll": lambda part: part.poll(),
            "lost": lambda part: part.lost(),
            "wait": lambda part: part.wait(WAIT_S),
            "wait again": lambda part: part.wait(10 * WAIT_S),
            "wait_ready": lambda part: part.wait_ready(WAIT_S),
        },
    ),
    (broker, {"raise_if_failed": lambda part: part.raise_if_failed()}),
    (controller, {"submit_local": lambda part: part.submit_local(StatusQuery(0))}),
    (
        channel,
        {"ask": lambda part: part.ask("x", StatusQuery), "begin": lambda part: part.begin(a_request(part), print)},
    ),
]


@pytest.mark.parametrize(("make", "calls"), CALLS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_failed_thread_is_known_to_all_who_call(
    make: Callable[[str], Service], calls: dict[str, Callable[[Service], object]], folder: str
) -> None:
    part = make(folder)
    if part._thread is None:
        part.start()
    assert part.failure is None
    break_down(part)
    assert isinstance(part.failure, ZeroDivisionError)
    for call in calls.values():
        with pytest.raises(PartFailed, match=f"the {part.part} of this process has failed: ZeroDivisionError: a bug"):
            call(part)
    again = make(folder)  # its endpoints are free
    if again._thread is None:
        again.start()
    again.stop()
    part.stop()


def test_who_waits_for_a_part_that_fails_wakes(folder: str) -> None:
    parts: list[Publisher | Resolver] = [publisher(folder).start(), resolver(folder).start()]
    for part in parts:
        woken: list[BaseException] = []

        def wait(part: Publisher | Resolver = part, woken: list[BaseException] = woken) -> None:
            try:
                part.wait_ready(10 * WAIT_S)
            except PartFailed as error:
                woken.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        break_down(part)
        waiting.join(WAIT_S)
        assert woken, part.part
        part.stop()


def test_what_was_found_before_the_failure_is_still_handed_out(folder: str) -> None:
    with resolver(folder) as part:
        part.want(7, deadline_s=0.0)
        assert part.wait(WAIT_S)
        break_down(part)
        assert part.lost() == {7: "unknown_room"}
        with pytest.raises(PartFailed):
            part.lost()


def test_a_dispatcher_ends_what_its_failed_controller_had(folder: str) -> None:
    with Dispatcher(config(folder, with_broker=True)) as dispatcher:
        assert dispatcher.dispatch("a", [bytes(4), b""], max_tokens=1)
        break_down(dispatcher.controller)
        assert isinstance(dispatcher.failure, ZeroDivisionError)
        (answer,) = dispatcher.poll(WAIT_S)
        assert isinstance(answer, Failed)
        assert (answer.rid, answer.retryable) == ("a", True)
        for call in (
            dispatcher.poll,
            dispatcher.status,
            lambda: dispatcher.cancel("a"),
            lambda: dispatcher.dispatch("b", [bytes(4), b""], max_tokens=1),
        ):
            with pytest.raises(PartFailed):
                call()


def test_a_controller_does_not_outlive_the_broker_inside_it(folder: str) -> None:
    with Dispatcher(config(folder, with_broker=True)) as dispatcher:
        assert dispatcher.controller._broker is not None
        break_down(dispatcher.controller._broker)
        with pytest.raises(PartFailed, match="the broker of this process has failed: ZeroDivisionError"):
            dispatcher.poll(WAIT_S)


def test_a_client_that_broke_ends_every_request_also_those_it_never_began(folder: str) -> None:
    where = Where(ControllerAddress(f"{folder}/c").clients, None)
    part = channel(folder)
    ends: dict[str, object] = {}
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        go.wait(WAIT_S)
        raise ZeroDivisionError("a bug")

    for rid in ("begun", "queued"):
        request = make_request([1, 2], {"rid": rid}, where, part.rng, leg="unified")
        part.begin(request, lambda update, rid=rid: ends.setdefault(rid, update))
        if rid == "begun":
            part.loop.call_threadsafe(hold)
            assert held.wait(WAIT_S)
    asked = part.ask(where.decode, StatusQuery)
    go.set()
    with pytest.raises(PartFailed):
        asked.result(WAIT_S)
    assert part._thread is not None
    part._thread.join(WAIT_S)
    assert all(isinstance(ends[rid], Result) for rid in ("begun", "queued"))
    part.stop()


def test_a_bad_argument_opens_nothing(folder: str) -> None:
    with pytest.raises(ConfigError):
        Publisher(f"{folder}/bus", instance="p", dp_rank=3, dp_size=2, role="prefill")

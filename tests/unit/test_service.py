"""Parts on threads of their own: a failed start leaves nothing open, and a failed thread is known to all who call."""

from __future__ import annotations

import asyncio
import inspect
import os
import queue
import shutil
import signal
import socket
import tempfile
import threading
import time
import warnings
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import zmq

from bus import Broker, BrokerConfig, ConfigError, Load, PartFailed, Publisher, Resolver, StartError
from bus.broker.core import BrokerCore
from bus.endpoints import ControllerAddress
from bus.runtime.service import Service
from bus.wire import codec
from bus.wire.hashing import token_bytes
from bus.wire.messages import Done, Failed, Params, Status, StatusQuery, Submit
from controller import ControllerConfig, Dispatcher
from controller.dispatcher import SubmitFields
from controller.shell import Controller
from pdbus.client import AsyncClient, Client
from pdbus.client.channel import Channel
from pdbus.client.options import Controllers, make_request, patience
from pdbus.client.output import Result
from pdbus.client.request import Request

WAIT_S = 30.0


@pytest.fixture
def folder() -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="pd")
    yield f"ipc://{path}"
    shutil.rmtree(path)


def publisher(folder: str) -> Publisher:
    return Publisher(f"{folder}/bus", instance="p", dp_rank=0, role="prefill", endpoint="tcp://p:1")


def resolver(folder: str) -> Resolver:
    return Resolver(f"{folder}/bus")


def broker(folder: str) -> Broker:
    return Broker(f"{folder}/bus")


def config(folder: str, **settings: Any) -> ControllerConfig:
    return ControllerConfig(bus=f"{folder}/bus", controller=f"{folder}/c", **settings)


def controller(folder: str) -> Controller:
    return Controller(config(folder))


def a_request(part: Channel) -> Request:
    return make_request([1, 2], {}, Controllers("ipc:///x", None), part.rng)


def channel(folder: str) -> Channel:
    return Channel([ControllerAddress(f"{folder}/c").clients], patience(0, WAIT_S))


def break_down(part: Service) -> None:
    """Its thread meets a bug of ours, and ends."""

    def bug() -> None:
        running.put(threading.current_thread())
        raise ZeroDivisionError("a bug")

    running: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()
    part.loop.call_threadsafe(bug)
    thread = running.get(timeout=WAIT_S)
    thread.join(WAIT_S)
    assert not thread.is_alive()


def in_a_forked_child(body: Callable[[], object]) -> str:
    """What `body` says there: `repr` of what it returns or raises. Empty when it took longer than WAIT_S."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks beside threads
        child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(WAIT_S))
        try:
            said = repr(body())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode()[:4096])
        os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


def runs(part: Service) -> bool:
    """A client's channel starts by itself."""
    return any(thread.name == f"pdbus-{part.part}" for thread in threading.enumerate())


def serving(make: Callable[[str], Service], folder: str) -> Service:
    part = make(folder)
    return part if runs(part) else part.start()


PARTS = [publisher, resolver, broker, controller, channel]


@pytest.mark.parametrize("make", PARTS)
def test_a_failed_start_closes_what_it_opened(
    make: Callable[[str], Service], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That no context stays open is `conftest.nothing_is_left`."""
    made: list[Any] = []
    original = zmq.Socket.connect

    def fails(self: Any, endpoint: str) -> Any:
        if self.type not in (zmq.PUB, zmq.SUB, zmq.DEALER):
            return original(self, endpoint)  # between threads of ours
        made.append(self)
        raise StartError("no such host")

    monkeypatch.setattr(zmq.Socket, "connect", fails)
    with pytest.raises(StartError, match="no such host"):
        make(folder).start()
    assert made
    assert all(socket.closed for socket in made)
    monkeypatch.undo()
    serving(make, folder).stop()  # nor does an endpoint stay taken


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
        {
            "ask": lambda part: part.ask("x", StatusQuery, Status),
            "begin": lambda part: part.begin(a_request(part), print),
        },
    ),
]


@pytest.mark.parametrize(("make", "calls"), CALLS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_failed_thread_is_known_to_all_who_call(
    make: Callable[[str], Service], calls: dict[str, Callable[[Service], object]], folder: str
) -> None:
    part = serving(make, folder)
    assert part.failure is None
    break_down(part)
    assert isinstance(part.failure, ZeroDivisionError)
    for call in calls.values():
        with pytest.raises(PartFailed, match=f"the {part.part} of this process has failed: ZeroDivisionError: a bug"):
            call(part)
    serving(make, folder).stop()  # its endpoints are free
    part.stop()


@pytest.mark.parametrize("make", PARTS)
def test_a_part_that_serves_is_not_started_again(make: Callable[[str], Service], folder: str) -> None:
    part = serving(make, folder)
    loop = part.loop
    with pytest.raises(StartError, match="serves already"):
        part.start()
    assert part.loop is loop
    part.raise_if_failed()
    answered = threading.Event()
    part.loop.call_threadsafe(answered.set)
    assert answered.wait(WAIT_S)
    part.stop()


@pytest.mark.parametrize("make", PARTS)
def test_threads_stop_a_part_one_after_another(make: Callable[[str], Service], folder: str) -> None:
    """The other one comes at the worst moment: after the part was found to serve, before its thread is waited for."""
    part = serving(make, folder)
    loop = part.loop
    ends: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def stop() -> None:
        try:
            part.stop()
            ends.put(None)
        except BaseException as error:
            ends.put(error)

    class Beside:
        def call_threadsafe(self, function: Callable[[], None]) -> None:
            if not others:
                others.append(threading.Thread(target=stop))
                others[0].start()
                others[0].join(0.2)  # one that does not wait for this one is over by then
            loop.call_threadsafe(function)

        def __getattr__(self, name: str) -> Any:
            return getattr(loop, name)

    others: list[threading.Thread] = []
    beside: Any = Beside()
    part.loop = beside
    stop()
    assert [ends.get(timeout=WAIT_S) for _ in range(2)] == [None, None]
    others[0].join(WAIT_S)


@pytest.mark.parametrize("make", PARTS)
def test_a_parts_own_thread_does_not_stop_it(make: Callable[[str], Service], folder: str) -> None:
    part = serving(make, folder)
    said: queue.SimpleQueue[str] = queue.SimpleQueue()

    def on_its_thread() -> None:
        for call in (part.stop, part.start):
            try:
                call()
            except RuntimeError as error:
                said.put(str(error))

    part.loop.call_threadsafe(on_its_thread)
    assert "own thread" in said.get(timeout=WAIT_S)
    assert "own thread" in said.get(timeout=WAIT_S)
    part.stop()


@pytest.mark.parametrize(("make", "calls"), CALLS[:-1], ids=lambda value: getattr(value, "__name__", ""))
def test_where_a_part_cannot_start_again_every_call_says_so(
    make: Callable[[str], Service],
    calls: dict[str, Callable[[Service], object]],
    folder: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(self: Any, *_: object) -> None:
        raise StartError("no such host")

    part = make(folder).start()
    part.stop()
    monkeypatch.setattr(type(part), "_open", fails)
    with pytest.raises(StartError, match="no such host"):
        part.start()
    began = time.monotonic()
    for call in calls.values():
        with pytest.raises(PartFailed, match="was stopped"):
            call(part)
    assert time.monotonic() - began < WAIT_S, "no call waits for a part that is not there"
    monkeypatch.undo()
    part.start().stop()


@pytest.mark.parametrize(("make", "calls"), CALLS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_forked_child_leaves_its_parents_part_alone(
    make: Callable[[str], Service], calls: dict[str, Callable[[Service], object]], folder: str
) -> None:
    part = serving(make, folder)
    files = sorted(os.listdir(folder.removeprefix("ipc://")))

    def child() -> None:
        for call in calls.values():
            with pytest.raises(PartFailed, match="in a forked child, make another"):
                call(part)
        part.stop()
        part.__exit__(None, None, None)

    assert in_a_forked_child(child) == "None"
    assert sorted(os.listdir(folder.removeprefix("ipc://"))) == files
    part.raise_if_failed()
    part.stop()


def test_a_forked_child_takes_no_lock_that_its_parent_held(folder: str) -> None:
    parts = [publisher(folder).start(), resolver(folder).start()]
    with Dispatcher(config(folder, with_broker=True)) as dispatcher, parts[1]._lock, dispatcher._arrived:
        waits: list[Callable[[], object]] = [parts[1].poll, parts[1].lost, dispatcher.poll, dispatcher.status]
        for call in waits:
            assert in_a_forked_child(call).startswith("PartFailed: this ")
    for part in parts:
        part.stop()


def test_a_part_is_started_anew_in_a_forked_child(folder: str) -> None:
    part = publisher(folder).start()
    part.register(1)
    before = part.epoch

    def child() -> object:
        with part:
            part.register(2)
            return part.epoch != before, part.failure

    assert in_a_forked_child(child) == "(True, None)"
    with broker(folder):
        assert part.wait_ready(WAIT_S)
    part.stop()
    here = Dispatcher(config(folder, with_broker=True))
    with here:
        there = f"{folder}/child"

        def dispatch() -> object:
            object.__setattr__(here.controller.config, "bus", f"{there}-bus")
            object.__setattr__(here.controller.config, "controller", f"{there}-c")
            with here:
                return here.status(WAIT_S).ranks

        assert in_a_forked_child(dispatch) == "()"
        assert here.status(WAIT_S).ranks == ()


def test_clients_and_their_streams_in_a_forked_child(folder: str) -> None:
    with Client(f"{folder}/c", connect_timeout_s=WAIT_S) as client:
        stream = client.generate_tokens([1], leg="pair", model="m")

        def child() -> object:
            client.close()
            stream.cancel()
            return client.status()

        assert in_a_forked_child(child).startswith("PartFailed: this client is the parent process's")
        assert in_a_forked_child(lambda: stream.result).startswith("PartFailed: this client is the parent process's")
        stream.cancel()
        assert stream.result.finish == "cancelled"


def test_an_asynchronous_client_in_a_forked_child(folder: str) -> None:
    async def run() -> None:
        async with AsyncClient(f"{folder}/c", connect_timeout_s=WAIT_S) as client:
            stream = await client.generate_tokens([1], leg="pair", model="m")

            async def close() -> object:
                stream.cancel()
                await client.close()
                return client._closed

            calls: list[Callable[[], Any]] = [client.status, stream.wait, close]
            said = [in_a_forked_child(lambda call=call: asyncio.run(call())) for call in calls]
            assert said[0].startswith("PartFailed: this client is the parent process's")
            assert said[1].startswith("PartFailed: this client is the parent process's")
            assert said[2] == "False"
            stream.cancel()
            assert (await stream.wait()).finish == "cancelled"

    asyncio.run(run())


def test_what_is_submitted_beside_a_close_ends_or_is_refused(folder: str) -> None:
    """The client is closed at the worst moment: after it was found open, before the thread was told."""
    part = channel(folder)
    loop = part.loop
    ends: queue.SimpleQueue[object] = queue.SimpleQueue()

    class Late:
        def call_threadsafe(self, function: Callable[[], None]) -> None:
            if not closing:
                closing.append(threading.Thread(target=part.stop))
                closing[0].start()
                closing[0].join(0.2)  # a stop that does not wait for this call is over by then
            loop.call_threadsafe(function)

        def __getattr__(self, name: str) -> Any:
            return getattr(loop, name)

    closing: list[threading.Thread] = []
    late: Any = Late()
    part.loop = late
    part.begin(a_request(part), ends.put)
    end = ends.get(timeout=WAIT_S)
    assert isinstance(end, Result)
    assert end.finish == "cancelled"
    closing[0].join(WAIT_S)
    with pytest.raises(RuntimeError, match="closed"):
        part.begin(a_request(part), print)


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


def test_a_controller_does_not_outlive_the_broker_inside_it(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    with Dispatcher(config(folder, with_broker=True)) as dispatcher:
        monkeypatch.setattr(BrokerCore, "handle", bug)
        with pytest.raises(PartFailed, match="the broker of this process has failed: ZeroDivisionError"):
            dispatcher.poll(WAIT_S)


def test_a_client_that_broke_ends_every_request_also_those_it_never_began(folder: str) -> None:
    where = Controllers(ControllerAddress(f"{folder}/c").clients, None)
    part = channel(folder)
    ends: dict[str, object] = {}
    held, go = queue.SimpleQueue[threading.Thread](), threading.Event()

    def hold() -> None:
        held.put(threading.current_thread())
        go.wait(WAIT_S)
        raise ZeroDivisionError("a bug")

    for rid in ("begun", "queued"):
        request = make_request([1, 2], {"rid": rid}, where, part.rng, leg="unified")
        part.begin(request, lambda update, rid=rid: ends.setdefault(rid, update))
        if rid == "begun":
            part.loop.call_threadsafe(hold)
            thread = held.get(timeout=WAIT_S)
    asked = part.ask(where.decode, StatusQuery, Status)
    go.set()
    with pytest.raises(PartFailed):
        asked.result(WAIT_S)
    thread.join(WAIT_S)
    assert all(isinstance(ends[rid], Result) for rid in ("begun", "queued"))
    part.stop()


def test_a_bad_argument_opens_nothing(folder: str) -> None:
    with pytest.raises(ConfigError):
        Publisher(f"{folder}/bus", instance="p", dp_rank=3, dp_size=2, role="prefill")


# --- another `with` -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "calls"), CALLS[:4], ids=lambda value: getattr(value, "__name__", ""))
def test_between_two_starts_every_call_says_so_and_in_the_second_it_serves(
    make: Callable[[str], Service], calls: dict[str, Callable[[Service], object]], folder: str
) -> None:
    part = make(folder)
    with part:
        first: Any = part
        epochs = [getattr(first, "epoch", 0)]
    for call in calls.values():
        with pytest.raises(PartFailed, match=f"the {part.part} of this process was stopped: start it again"):
            call(part)
    with part:
        part.raise_if_failed()
        epochs.append(getattr(first, "epoch", 1))
    assert epochs[0] != epochs[1], "peers would take what it says for repeats"


def test_a_part_that_failed_can_start_again(folder: str) -> None:
    with broker(folder), publisher(folder) as part:
        break_down(part)
        part.stop()
        with part:
            assert part.wait_ready(WAIT_S)
            part.register(7)


def test_a_publisher_and_a_resolver_in_another_with_start_as_new(folder: str) -> None:
    with broker(folder):
        part, finder = publisher(folder), resolver(folder)
        for room in (1, 2):
            with part, finder:
                assert part.wait_ready(WAIT_S)
                part.register(room)
                finder.want(room, deadline_s=WAIT_S)
                assert finder.wait(WAIT_S)
                assert finder.poll()[room].epoch == part.epoch
        assert (part.counts["registered"], finder.counts["asked"]) == (2, 2), "it counts on"


def test_what_a_stopped_resolver_had_not_found_is_lost(folder: str) -> None:
    with resolver(folder) as part:
        part.want(1, 2, deadline_s=10 * WAIT_S)
    assert part.lost() == {1: "shutting_down", 2: "shutting_down"}
    with pytest.raises(PartFailed):
        part.lost()


# --- numbers and names of all kinds ---------------------------------------------------------------------------------


class Text(str):
    """A string of some other library."""


class Number:
    """An integer of some other library."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


@pytest.mark.parametrize(
    ("room", "more", "code"),
    [
        ("a room", {}, "bad_room"),
        (1.5, {}, "bad_room"),
        (None, {}, "bad_room"),
        (2**63, {}, "bad_room"),
        (6, {"prefill_instance": "\ud800"}, "bad_request"),
        (6, {"prefill_instance": "no name"}, "bad_request"),
        (6, {"prefill_instance": 5}, "bad_request"),
        (6, {"prefill_instance": {}}, "bad_request"),
        (6, {"prefill_instance": None}, "bad_request"),
        (6, {"dp_rank": "0"}, "bad_request"),
        (6, {"attempt": 1.5}, "bad_request"),
        (6, {"deadline_s": "soon"}, "bad_request"),
        (6, {"deadline_s": 10**400}, "bad_request"),
        (6, {"max_age_s": None}, "bad_request"),
    ],
)
def test_a_resolver_answers_for_whatever_was_wanted(room: Any, more: dict[str, Any], code: str, folder: str) -> None:
    with resolver(folder) as part:
        part.want(room, **more)
        assert part.wait(WAIT_S)
        assert part.lost() == {room: code}
        part.want([], deadline_s=0.0)  # type: ignore[arg-type]  # there is nothing to say it under
        assert part.counts["invalid"] == 1
        part.want(7, deadline_s=0.0)
        assert part.wait(WAIT_S)


def test_integers_of_other_libraries_are_rooms(folder: str) -> None:
    five: Any = Number(5)
    with broker(folder), publisher(folder) as part, resolver(folder) as finder:
        part.register(five)
        part.register("x")  # type: ignore[arg-type]
        finder.want(five, deadline_s=WAIT_S)
        assert finder.wait(WAIT_S)
        assert finder.poll().keys() == {5}
        assert part.counts["invalid"] == 1


def test_strings_of_other_libraries_are_names(folder: str) -> None:
    with broker(folder), publisher(folder) as part, resolver(folder) as finder:
        part.register(5)
        finder.want(5, deadline_s=WAIT_S, prefill_instance=Text("p"))
        assert finder.wait(WAIT_S)
        assert finder.poll().keys() == {5}


def test_a_publisher_counts_what_is_no_text(folder: str) -> None:
    odd: Any = "\ud800"
    with broker(folder), publisher(folder) as part:
        part.set_state(odd)
        part.drop(1, code=odd)
        part.report(odd)
        part.register(7)
        with resolver(folder) as finder:
            finder.want(7, deadline_s=WAIT_S)
            assert finder.wait(WAIT_S)
            assert finder.poll().keys() == {7}
        assert part.counts["invalid"] == 3


def test_a_publisher_that_was_not_started_has_never_heard_the_broker(folder: str) -> None:
    assert publisher(folder).silent_s == float("inf")


# --- what a Dispatcher takes ends exactly once ----------------------------------------------------------------------

PROMPT = [bytes(16), codec.encode(Params())]


def ends(dispatcher: Dispatcher) -> list[Done | Failed]:
    return [answer for answer in dispatcher.poll() if isinstance(answer, Done | Failed)]


def test_what_is_handed_over_beside_a_stop_ends_once_or_is_refused(folder: str) -> None:
    dispatcher = Dispatcher(config(folder, with_broker=True))
    taken: list[str] = []
    begun = threading.Event()

    def hand_over() -> None:
        with suppress(PartFailed):
            while True:
                rid = f"r{len(taken)}"
                if dispatcher.dispatch(rid, PROMPT, max_tokens=1):
                    taken.append(rid)
                begun.set()

    with dispatcher:
        thread = threading.Thread(target=hand_over)
        thread.start()
        assert begun.wait(WAIT_S)
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert sorted(answer.rid for answer in ends(dispatcher)) == sorted(taken)
    for call in (dispatcher.poll, dispatcher.status, lambda: dispatcher.cancel("r0")):
        with pytest.raises(PartFailed, match="was stopped"):
            call()


def test_what_a_stop_finds_half_handed_over_is_refused(folder: str) -> None:
    """After the dispatcher was found to serve, before the request counts as taken."""

    class Stops(list[bytes]):
        def __iter__(self) -> Iterator[bytes]:
            dispatcher.__exit__(None, None, None)
            return super().__iter__()

    dispatcher = Dispatcher(config(folder, with_broker=True))
    with dispatcher, pytest.raises(PartFailed, match="was stopped"):
        dispatcher.dispatch("r", Stops(PROMPT), max_tokens=1)
    with pytest.raises(PartFailed, match="was stopped"):
        dispatcher.poll()


@pytest.mark.parametrize("wait", ["poll", "status"])
def test_who_waits_for_a_dispatchers_answers_wakes_when_it_is_stopped(wait: str, folder: str) -> None:
    woken: list[BaseException] = []
    waiting = threading.Event()
    with Dispatcher(config(folder, with_broker=True)) as dispatcher:
        dispatcher.controller._submit = lambda *_: None  # type: ignore[method-assign]  # nothing is answered

        def ask() -> None:
            waiting.set()
            try:
                getattr(dispatcher, wait)(10 * WAIT_S)
            except PartFailed as error:
                woken.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        assert waiting.wait(WAIT_S)
    thread.join(WAIT_S)
    assert woken


def test_a_dispatcher_that_was_not_started_says_so(folder: str) -> None:
    dispatcher = Dispatcher(config(folder))
    for call in (dispatcher.status, lambda: dispatcher.cancel("a"), lambda: dispatcher.dispatch("a", [], max_tokens=1)):
        with pytest.raises(PartFailed, match="the controller of this process was not started yet"):
            call()


@pytest.mark.parametrize(
    "frames",
    [
        [[5, 6, 7, 8], PROMPT[1]],
        [PROMPT[0], Params()],
        ["text", PROMPT[1]],
        [None, None],
        [array("d", [0.5]), PROMPT[1]],
        [array("q", [5]), PROMPT[1]],
        [],
        PROMPT[:1],
        [*PROMPT, b"x"],
    ],
    ids=str,
)
def test_a_wrong_frame_fails_its_own_request_alone(frames: Any, folder: str) -> None:
    with Dispatcher(config(folder, with_broker=True)) as dispatcher:
        assert dispatcher.dispatch("bad", frames, max_tokens=1)
        (answer,) = ends(dispatcher) or [each for each in dispatcher.poll(WAIT_S) if isinstance(each, Done | Failed)]
        assert (answer.rid, getattr(answer, "code", "")) in {("bad", "bad_request"), ("bad", "empty_prompt")}
        assert dispatcher.status(WAIT_S).ranks == (), "its thread has had all of that, and serves"


@pytest.mark.parametrize(
    "wrong",
    [
        {"rid": "x" * 129},
        {"rid": "\ud800"},
        {"max_tokens": "x"},
        {"avoid": (("e", 0),)},
        {"trace": "00-1"},
        {"deadline_s": object()},
        {"block_tokens": 2**64},
        {"block_tokens": 16, "frames": [b"\5\0\0", PROMPT[1]]},
        {"block_hashes": "text", "block_tokens": 16},
    ],
)
def test_a_wrong_argument_to_a_dispatcher_fails_its_own_request_alone(wrong: dict[str, Any], folder: str) -> None:
    given: dict[str, Any] = {"rid": "bad", "frames": PROMPT, "max_tokens": 1, **wrong}
    with Dispatcher(config(folder, with_broker=True, settle_s=0.0), max_handed_over=1) as dispatcher:
        assert dispatcher.dispatch(**given)
        (answer,) = ends(dispatcher) or [each for each in dispatcher.poll(WAIT_S) if isinstance(each, Done | Failed)]
        assert answer.rid == given["rid"], "under the whole of it, or it keeps its place"
        assert dispatcher.dispatch("next", PROMPT, max_tokens=1)
        for nobody in (["x"], None, 5, "unknown"):
            dispatcher.cancel(nobody)  # type: ignore[arg-type]
        assert dispatcher.status(WAIT_S).ranks == (), "its thread has had all of that, and serves"


def test_a_dispatcher_takes_each_field_of_a_submit_and_no_other(folder: str) -> None:
    named = inspect.signature(Dispatcher.dispatch).parameters.keys() | SubmitFields.__annotations__.keys()
    assert named - {"self", "frames", "fields"} == set(Submit.__struct_fields__)
    with pytest.raises(TypeError, match="dispatch has no argument 'max_token'"):
        Dispatcher(config(folder)).dispatch("r", PROMPT, max_tokens=1, max_token=2)  # type: ignore[call-arg]


def test_a_prompt_may_be_anything_that_has_a_buffer_of_32_bit_integers(folder: str) -> None:
    ids = memoryview(array("i", [5, 0, 6, 0, 7, 0, 8, 0]))[::2]  # with gaps
    seen: list[tuple[Submit, list[bytes]]] = []
    with Dispatcher(config(folder, with_broker=True)) as dispatcher:
        dispatcher.controller._submit = lambda *given: seen.append(given)  # type: ignore[method-assign,arg-type]
        assert dispatcher.dispatch("a", [ids, PROMPT[1]], max_tokens=1)  # type: ignore[list-item]
    ((submit, frames),) = seen
    assert (submit.prompt_tokens, frames[0]) == (4, token_bytes([5, 6, 7, 8]))

"""Drive every public call of every part that others embed with whatever a program may hand over.

python -m fuzz_api --seconds 20 --seed 1
python -m fuzz_api --seeds 1:61

The calls are read off what the packages export. Each example takes one part through a life (not started, serving,
started twice, stopped, serving again, beside its stop, stopped and called from several threads, in a forked child) and
calls it with values of other types, sizes and alphabets. A call returns, or raises what is documented, within
PATIENCE_S; the part lives on; and what a Dispatcher has taken ends exactly once. A failure is told with the seed that
draws its calls again.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import importlib
import inspect
import math
import os
import sys
import tempfile
import threading
import time
import warnings
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack, contextmanager, suppress
from fractions import Fraction
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from bus import Broker, BrokerConfig, BusError, Load, Publisher, Resolver, StartError
from bus.runtime.service import Service
from bus.wire import codec
from bus.wire.messages import Accepted, Cancel, Params, StatusQuery, Submit
from controller import Controller, ControllerConfig, Dispatcher
from nodes.link import RankFacts, RankLink, Start
from pdbus.client import AsyncClient, AsyncStream, Client, Stream

Call: TypeAlias = tuple[str, tuple[Any, ...], dict[str, Any]]  # method, arguments by place, and by name
Plan: TypeAlias = list[Call]

PACKAGES = ("bus", "controller", "nodes", "nodes.link", "pdbus", "pdbus.client")
PATIENCE_S = 10.0
# What the docstrings and docs/api.md promise to a caller who hands over nonsense.
DOCUMENTED = (BusError, TimeoutError, TypeError, ValueError, OverflowError)
CLOSED = (*DOCUMENTED, RuntimeError)  # a client that is closed says so with RuntimeError
ELSEWHERE = {
    "Node": "a process of its own: tests/integration/test_nodes_live.py",
    "Cluster": "starts processes: tests/integration/test_pytest_plugin.py",
    "AsyncStream": "what AsyncClient gives: driven through it",
}
# A part's life is driven here; the rest is for a program that runs the part's loop itself (`Service.open`).
LIFE = {"start", "stop", "open", "close", "leave", "handle", "submit_checked", "reconfigure"}

NUMBERS = [-1, 0, 1, 2, 2**31, 2**63 - 1, 2**63, 2**64, 10**30, -(10**30), True]
FLOATS = [0.5, 1e308, math.inf, -math.inf, math.nan]
TEXTS = ["", "e", "p", "r1", "\ud800", "\0", "ü" * 70, "x" * 3000, "ready", "draining", "ok"]
BUFFERS = [b"", b"\5\0\0\0" * 4, bytearray(8), memoryview(b"abcd"), array("i", [1, 2]), array("d", [1.0])]
OTHERS = [None, (), [], {}, [1, 2], ("e", 0), (("e", 0),), {"a": 1}, object(), print, Params(), codec.encode(Params())]
ARRAYS = [np.int64(5), np.float32(0.5), np.arange(4), np.arange(8, dtype=np.int32)[::2], np.array(7)]


class Text(str):
    """msgspec encodes no subclass of str, and none of int."""


class Whole(int):
    pass


KINDS = [Text("r1"), Text("e"), np.str_("r2"), Whole(1), np.bool_(True), Fraction(1, 2), Fraction(2)]
ODD = [*NUMBERS, *FLOATS, *TEXTS, *BUFFERS, *OTHERS, *ARRAYS, *KINDS]
PROMPT = [b"\5\0\0\0" * 4, codec.encode(Params())]
LOAD = Load(seq=0, step=0, running=0, waiting=0, waiting_tokens=0, kv_tokens=0, kv_capacity=0, max_running=0)
GOOD: dict[str, list[Any]] = {
    "rid": ["r1", "r2", "r3"], "frames": [PROMPT], "max_tokens": [1, 8], "leg": ["unified", "pair"], "load": [LOAD],
    "bootstrap_room": [None, 5], "room": [1, 2], "rooms": [1, 2, 3], "attempt": [1, 2], "code": ["ok", "engine_failed"],
    "deadline_s": [0.0, 0.5], "ids": [[1, 2], [3]], "text": ["hello"], "instance": ["e"], "dp_rank": [0, None],
    "message": [StatusQuery(1), Cancel("r1"), Submit(rid="r9", leg="unified", prompt_tokens=4, max_tokens=1)],
    "timeout_s": [0.0, 0.01],
}  # fmt: skip
OPTIONS = ["max_tokens", "rid", "deadline_s", "priority", "stop", "oops"]
WAITS = {"timeout_s"}  # none of these may be long: the driver waits for each call
ODD_WAITS = [0.0, -1.0, -math.inf, math.nan, "soon", 10**400, np.float32(0.0), object()]


class Place:
    """A bus with a controller and a rank, beside which parts are driven."""

    def __init__(self, folder: str) -> None:
        self.bus, self.controller, self.folder = f"ipc://{folder}/b", f"ipc://{folder}/c", folder
        self.number = 0

    def fresh(self) -> str:
        self.number += 1
        return f"ipc://{self.folder}/{self.number}"

    def dispatcher(self) -> Dispatcher:
        return Dispatcher(ControllerConfig(bus=self.bus, controller=self.fresh(), settle_s=0.0))

    def link(self, instance: str) -> RankLink:
        facts = RankFacts(model="m", max_context=4096, max_running=8)
        return RankLink(
            self.bus, controllers=[self.controller], role="unified", instance=instance, facts=facts,
            data=f"ipc://{self.folder}",
        )  # fmt: skip


PARTS: dict[str, Callable[[Place], Any]] = {
    "Broker": lambda place: Broker(BrokerConfig(place.fresh())),
    "Publisher": lambda place: Publisher(place.bus, instance="p", dp_rank=0, role="prefill", endpoint="tcp://p:1"),
    "Resolver": lambda place: Resolver(place.bus),
    "Controller": lambda place: Controller(ControllerConfig(bus=place.bus, controller=place.fresh())),
    "Dispatcher": Place.dispatcher,
    "RankLink": lambda place: place.link("driven"),
    "Client": lambda place: Client(place.controller, connect_timeout_s=0.05, retries=0),
    "AsyncClient": lambda place: AsyncClient(place.controller, connect_timeout_s=0.05, retries=0),
}


def exported() -> dict[str, type]:
    """The classes that the packages export and that have a life."""
    found: dict[str, type] = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            one = getattr(module, name)
            alive = inspect.isclass(one) and (hasattr(one, "__enter__") or hasattr(one, "__aenter__"))
            if alive or (inspect.isclass(one) and issubclass(one, Service)):
                found[name] = one
    return found


def calls_of(kind: type) -> list[str]:
    return [name for name, _ in inspect.getmembers(kind) if not name.startswith("_") and name not in LIFE]


def value(name: str) -> st.SearchStrategy[Any]:
    if name in WAITS:
        return st.sampled_from([*GOOD[name], *ODD_WAITS])
    good = GOOD.get(name, [])
    return st.sampled_from([*good * 12, *ODD]) if good else st.sampled_from(ODD)


@st.composite
def a_call(
    draw: st.DrawFn, name: str, parameters: tuple[inspect.Parameter, ...]
) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """(method, positional arguments, named ones); of those with defaults some."""
    args: list[Any] = []
    named: dict[str, Any] = {}
    for each in parameters:
        if each.kind is each.VAR_POSITIONAL:
            args += draw(st.lists(value(each.name), max_size=3))
        elif each.kind is each.VAR_KEYWORD:
            for option in draw(
                st.lists(st.sampled_from(["max_tokens", "rid", "deadline_s", "priority", "stop", "oops"]), max_size=2)
            ):
                named[option] = draw(value(option))
        elif each.default is each.empty or each.name in WAITS or draw(st.integers(0, 9)) == 0:
            named[each.name] = draw(value(each.name))
    return name, tuple(args), named


def plans(kind: type) -> st.SearchStrategy[Plan]:
    each: list[st.SearchStrategy[Any]] = []
    for name in calls_of(kind):
        function = inspect.getattr_static(kind, name)
        if callable(function):
            each.append(a_call(name, tuple(inspect.signature(function).parameters.values())[1:]))
        else:
            each.append(st.just((name, (), {})))
    return st.lists(st.one_of(each), min_size=1, max_size=6)


class Driver:
    """Calls one part, and knows what it has taken."""

    def __init__(self, part: Any) -> None:
        self.part = part
        self.taken: Counter[Any] = Counter()
        self.ended: Counter[Any] = Counter()
        self.legs: list[Any] = []
        self.streams: list[Stream] = []

    def run(self, plan: Plan) -> None:
        for name, args, named in plan:
            began = time.monotonic()
            try:
                self._note(name, args, self._call(name, args, named), named)
            except CLOSED:
                pass
            took_s = time.monotonic() - began
            assert took_s < PATIENCE_S, f"{name}{args}{named} took {took_s:.1f} s"

    def _call(self, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        found = getattr(self.part, name)
        if not callable(found):
            return found
        if isinstance(self.part, RankLink) and "leg" in named and self.legs:
            named = {**named, "leg": self.legs[-1]}
        result = found(*args, **named)
        return asyncio.run(asyncio.wait_for(_whole(result), PATIENCE_S)) if inspect.isawaitable(result) else result

    def _note(self, name: str, args: tuple[Any, ...], result: Any, named: dict[str, Any]) -> None:
        if isinstance(self.part, Dispatcher):
            if name == "dispatch" and result:
                self.taken[named["rid"]] += 1
            elif name == "poll":
                self.ended.update(each.rid for each in result if not isinstance(each, Accepted))
        elif isinstance(result, Stream):
            self.streams.append(result)
        elif isinstance(self.part, RankLink) and name == "poll":
            self.legs = [*self.legs, *(each.leg for each in result if isinstance(each, Start))]

    def check(self) -> None:
        assert getattr(self.part, "failure", None) is None, f"it failed: {self.part.failure!r}"

    def settle(self) -> None:
        """All that a Dispatcher has taken has ended, once; and so have the streams of a client that is closed."""
        _join([_begin(partial(getattr, stream, "result")) for stream in self.streams])
        if isinstance(self.part, Dispatcher):
            with suppress(BusError):
                self._note("poll", (), self.part.poll(), {})
            assert self.taken == self.ended, f"taken {self.taken}, ended {self.ended}"


@contextmanager
def serving(part: Any) -> Iterator[None]:
    if isinstance(part, AsyncClient):
        try:
            yield
        finally:
            _stop(part)
    else:
        with part:
            yield


def live(name: str, place: Place, way: str, plan: Plan, more: Plan) -> None:
    """One part through one life; `way` says when it is called."""
    part = PARTS[name](place)
    driver = Driver(part)
    if way == "before":
        driver.run(plan)
    with serving(part):
        if way == "fork":
            _in_a_child(lambda: driver.run(plan))
        elif way == "threads":
            _join([_begin(partial(driver.run, each)) for each in (plan, more)])
        beside = [_begin(partial(driver.run, more))] if way == "beside" else []
        if way in ("serving", "between", "again"):
            driver.run(plan)
        if way == "twice":
            _start_again(part)
            driver.run(plan)
        if way == "stops":
            _join([_begin(partial(driver.run, plan)), *(_begin(partial(_stop, part)) for _ in range(2))])
        driver.check()
    _join(beside)
    if way == "between":
        driver.run(more)
    driver.settle()
    if way in ("between", "again") and name not in ("Client", "AsyncClient"):  # which are closed once
        with part:
            driver.run(more)
            driver.check()
        driver.settle()


async def _whole(call: Awaitable[Any]) -> Any:
    """With the stream that it gives, which is its event loop's."""
    given_ = await call
    if isinstance(given_, AsyncStream):
        given_.cancel()
        return await given_.wait()
    return given_


def _start_again(part: Any) -> None:
    """A part that serves goes on to; clients have no start of their own."""
    try:
        if hasattr(part, "stop") or isinstance(part, Dispatcher):
            part.__enter__()
            raise AssertionError("it was started while it served")
    except StartError:
        pass


def _stop(part: Any) -> None:
    if isinstance(part, AsyncClient):
        asyncio.run(part.close())
    elif isinstance(part, Client):
        part.close()
    else:
        part.__exit__(None, None, None)


def _begin(what: Callable[[], object]) -> Future[None]:
    """On a thread of its own."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            what()
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done


def _join(running: list[Future[None]]) -> None:
    for each in running:
        try:
            each.result(PATIENCE_S)
        except FutureTimeout:
            faulthandler.dump_traceback(sys.__stderr__)  # where it is
            raise AssertionError("a call never returned") from None


def _in_a_child(run: Callable[[], None]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, from Python 3.12 on
        pid = os.fork()
    if pid == 0:
        try:
            run()
            os._exit(0)
        except BaseException as error:
            os.write(2, f"in a forked child: {type(error).__name__}: {error}\n".encode())
            os._exit(1)
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert status == 0, "a call in a forked child raised what is not documented"
            return
        time.sleep(0.002)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    raise AssertionError("a call in a forked child never returned")


WAYS = ("before", "serving", "between", "again", "beside", "threads", "fork", "twice", "stops")


def examples(name: str, kind: type, place: Place, number: int, ran: Counter[str]) -> None:
    plan = plans(kind)

    @seed(number)
    @settings(
        max_examples=7, deadline=None, database=None, suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,), print_blob=False,
    )  # fmt: skip
    @given(st.sampled_from(WAYS), plan, plan)
    def example(way: str, calls: Plan, more: Plan) -> None:
        live(name, place, way, calls, more)
        ran[name] += 1

    try:
        example()
    except BaseException as error:
        error.add_note(f"part {name}: python -m fuzz_api --seed {number}")
        raise


def drive(place: Place, seeds: Iterable[int]) -> Counter[str]:
    """Drive each part with each of the seeds: lives by part."""
    kinds = exported()
    left_out = kinds.keys() - PARTS.keys() - ELSEWHERE.keys()
    assert not left_out, f"exported, and driven nowhere: {left_out}"
    ran: Counter[str] = Counter()
    for number in seeds:
        for name in PARTS:
            examples(name, kinds[name], place, number, ran)
    return ran


def seeds_for(seconds: float, first: int) -> Iterator[int]:
    """Seeds from `first` on, until that time is over; one at least."""
    until = time.monotonic() + seconds
    yield first
    while time.monotonic() < until:
        first += 1
        yield first


def serve(link: RankLink) -> None:
    while not link.drained:
        for order in link.poll(0.2):
            if isinstance(order, Start):
                link.output(order.leg, [7])
                link.finish(order.leg, "length")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--seconds", type=float, default=20.0)
    arguments.add_argument("--seed", type=int, default=1, help="the first")
    arguments.add_argument("--seeds", metavar="FROM:TO", help="these, however long they take, and not TO itself")
    given_ = arguments.parse_args()
    fixed = range(*map(int, given_.seeds.split(":"))) if given_.seeds else None
    began, driven = time.monotonic(), []

    def seeds() -> Iterator[int]:
        for number in fixed or seeds_for(given_.seconds, given_.seed):
            driven.append(number)
            yield number

    with tempfile.TemporaryDirectory(prefix="pd") as folder, ExitStack() as exits:
        place = Place(folder)
        exits.enter_context(Controller(ControllerConfig(bus=place.bus, controller=place.controller, with_broker=True)))
        link = exits.enter_context(place.link("e"))
        threading.Thread(target=serve, args=(link,), daemon=True).start()
        assert link.wait_ready(30.0)
        ran = drive(place, seeds())
    took_s = time.monotonic() - began
    print(f"seeds {driven[0]} to {driven[-1]}, {took_s:.0f} s: {sum(ran.values())} lives, none broken: {dict(ran)}")


if __name__ == "__main__":
    main()

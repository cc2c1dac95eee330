"""Drive every public call of every part that others embed with whatever a program may hand over.

python -m fuzz_api --seconds 20 --seed 1
python -m fuzz_api --seeds 1:61

The calls are read off what the packages export. Each example makes one part, with odd arguments too, takes it through
a life (not started, serving, started twice, stopped, serving again, beside its stop, stopped and called from several
threads, started and stopped in any order, in a forked child) and calls it with values of other types, sizes and
alphabets. A call returns, or raises what is documented, within PATIENCE_S; the part lives on; and what a Dispatcher has
taken ends exactly once. Parts without a start are called one call after the other, and their own invariants hold after
each. A failure is told with the seed that draws its calls again.
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
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import is_dataclass
from fractions import Fraction
from functools import partial
from itertools import zip_longest
from typing import Any, TypeAlias

import msgspec
import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from bus import (
    Broker,
    BrokerConfig,
    BusError,
    Load,
    Publisher,
    PublisherCore,
    Resolved,
    Resolver,
    ResolverCore,
    StartError,
)
from bus.wire import codec
from bus.wire.messages import (
    Accepted,
    Ack,
    Answer,
    Beacon,
    Bye,
    Cancel,
    Conflict,
    Hello,
    InstanceInfo,
    Location,
    MemberInfo,
    Params,
    Resync,
    Sent,
    SentTo,
    StatusQuery,
    Submit,
    Topology,
)
from controller import Controller, ControllerConfig, ControllerCore, Dispatcher, LoadTable
from controller.dispatcher import SubmitFields
from controller.events import (
    CacheChanged,
    ClientGone,
    EngineLoad,
    FromClient,
    FromNode,
    Published,
    Tick,
    Undelivered,
    Unreachable,
)
from controller.load.groups import Metric
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
    "Opened": "what a Node has made",
    "Cluster": "starts processes: tests/integration/test_pytest_plugin.py",
    "Stream": "what Client gives: driven through it",
    "AsyncStream": "what AsyncClient gives: driven through it",
    "Leg": "what RankLink gives, whose calls are the link's own: driven through it",
    "Policy": "what others write: tests/unit/test_policies_plugged_in.py",
    "PrefixPolicy": "likewise",
    "Runner": "likewise: tests/unit/test_foreign_runner.py",
    "EngineKind": "likewise: tests/integration/test_engine_from_outside.py",
    "Options": "the named arguments of generate",
}
# Begin and end a part: called in any order by the way "orders", and by each other way as it says.
LIFE = ("start", "stop", "open", "close", "reconfigure", "__enter__", "__exit__")

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


CHANGED: list[Any] = [
    {},
    {"max_rooms": 5},
    {"beacon_s": 0.5},
    {"max_rooms": "5"},
    {"beacon_s": None},
    {"oops": 1},
    {5: 5},
]


class Seat:
    """The record of a table's rank `n`, as it is when the call is made."""

    def __init__(self, n: int) -> None:
        self.n = n


def _hello(n: int, epoch: int = 1) -> Hello:
    return Hello(
        instance="e", dp_rank=n, epoch=epoch, role="unified", model="m", dp_size=4, state="ready", endpoint="",
        max_context=8192, kv_capacity=100_000, max_running=4, block_tokens=16,
    )  # fmt: skip


NOW = [0.0, 1.0, 2.0, 60.0]
ME = 7
RANK: dict[str, Any] = {"instance": "p", "dp_rank": 0, "epoch": 5}
TOPOLOGY = InstanceInfo("p", "prefill", "m", 1, True, False, (MemberInfo(0, 5, "ready", "tcp://p:1", 0.0),))
GOOD_ALONE: dict[str, dict[str, list[Any]]] = {
    "LoadTable": {
        "rank": [Seat(0), Seat(1), Seat(2)], "info": [_hello(0), _hello(1), _hello(2), _hello(1, 2)],
        "key": [("e", 0), ("e", 1), ("e", 2)], "epoch": [1, 1, 2], "now": NOW, "tokens": [5, 5, 100], "ready": [True],
        "load": [replace(LOAD, seq=seq, running=1, kv_tokens=seq, acks=(Ack(ME, 1, 5),)) for seq in (1, 2, 3)],
        "sent": [Sent("o", 9, seq, (SentTo("e", 0, 1, seq, seq),)) for seq in (1, 2)], "role": ["unified"],
        "since": [-1, 0], "interval_s": [0.1], "model": ["", "m"], "instance": ["", "e"],
    },
    "PublisherCore": {
        "room": [1, 2, 3], "attempt": [1, 2], "now": NOW, "code": ["ok"], "state": ["ready", "draining", "gone"],
        "flag": [True, False], "message": [
            Beacon(1, 1, 1.0), Beacon(2, 1, 1.0), Resync(**RANK),
            Conflict(**RANK, room=1, attempt=1, other=Location("q", 0, 5, ""), kept=False),
        ],
    },
    "ResolverCore": {
        "room": [1, 2, 3], "now": NOW, "asker": [0, 1], "code": ["shutting_down"], "deadline_s": [0.5, 30.0],
        "message": [Beacon(1, 1, 1.0), Beacon(2, 1, 1.0), Topology(2, 1, (TOPOLOGY,)), Topology(3, 1, (TOPOLOGY,)),
                    Answer(1, (), (1, 2))],
    },
    "ControllerCore": {
        "now": NOW, "id": [1], "config": [ControllerConfig(), ControllerConfig(attempts=5)],
        "event": [
            Tick(), FromClient(b"c", StatusQuery(1)), FromClient(b"c", Cancel("r1")), FromNode(b"n", _hello(0)),
            FromClient(b"c", Submit(rid="r1", leg="unified", prompt_tokens=4, max_tokens=1), PROMPT),
            FromNode(b"n", Bye("e", 0, 1)), Published(Beacon(1, 1, 1.0)), Unreachable(b"n"), ClientGone(b"c", "r1"),
            FromNode(b"n", object()), FromClient(b"c", object()), Published(None), EngineLoad(("e", 0), LOAD),
            CacheChanged(("e", 0), ()), EngineLoad(("e", 0), {}), CacheChanged(5, 5), Undelivered(b"n", 5),
            FromNode([], Tick()),
        ],
    },
}  # fmt: skip
GOOD_MADE: dict[str, list[Any]] = {
    "bus": ["ipc:///tmp/pdx/b"], "controller": ["ipc:///tmp/pdx/c"], "address": ["ipc:///tmp/pdx/b"],
    "base": ["ipc:///tmp/pdx/b", "tcp://h:5550"], "controller_epoch": [ME], "instance": ["p"],
    "model": ["m"], "dp_size": [1], "dp_rank": [0],
    "config": [ControllerConfig(), BrokerConfig("ipc:///tmp/pdx/b")], "epoch": [5], "now": [0.0],
    "n": [1, 2], "facts": [RankFacts(model="m", max_context=4096, max_running=8)], "controllers": [["ipc:///tmp/pdx/c"]],
    "prefill": [1], "decode": [1], "endpoint": ["tcp://p:1"], "role": ["prefill"],
}  # fmt: skip


def _table() -> LoadTable:
    table = LoadTable(ME)
    for n in range(3):
        table.set_ready(table.open(_hello(n)), True)
    return table


ALONE: dict[str, Callable[[], Any]] = {
    "LoadTable": _table,
    "PublisherCore": lambda: PublisherCore(**RANK, role="prefill", model="m", dp_size=1, endpoint="tcp://p:1"),
    "ResolverCore": ResolverCore,
    "ControllerCore": lambda: ControllerCore(ControllerConfig(settle_s=0.0), 5, 0.0),
}
LATE = 1e11  # later than any time that is drawn and taken


def _table_serves(table: LoadTable) -> None:
    rank = table.open(_hello(3))
    assert table.apply(rank.key, 1, replace(LOAD, seq=1), LATE) is rank
    table.set_ready(rank, True)
    table.charge(rank, 5)
    table.end(rank, 5)
    table.validate()
    assert table.group("unified").least(Metric.TOKENS) is not None
    codec.encode(Sent("me", ME, 1, table.counters()))


def _publisher_serves(core: PublisherCore) -> None:
    core.register(77, 1, LATE)
    core.report(LOAD, LATE)
    _sendable([*core.tick(LATE), *core.flush(LATE + 60.0)])
    assert core.due_s(LATE) >= 0.0


def _resolver_serves(core: ResolverCore) -> None:
    out = [*core.want(77, LATE, deadline_s=1.0), *core.flush(LATE), *core.tick(LATE + 4000.0)]
    _sendable(out)
    assert any(isinstance(each, Resolved) and each.room == 77 for each in out)
    assert core.pending == 0


def _controller_serves(core: ControllerCore) -> None:
    out = core.handle(FromClient(b"c", StatusQuery(77)), LATE)
    assert out, "it answers no more"
    _sendable(out)
    _sendable(core.shutdown(LATE))
    core.validate()


SERVES: dict[str, Callable[[Any], None]] = {
    "LoadTable": _table_serves, "PublisherCore": _publisher_serves, "ResolverCore": _resolver_serves,
    "ControllerCore": _controller_serves,
}  # fmt: skip


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


def exported() -> dict[str, Any]:
    """What the packages export and can be called: classes but for errors and messages, and functions."""
    found: dict[str, Any] = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            one = getattr(module, name)
            if callable(one) and not (inspect.isclass(one) and issubclass(one, (BaseException, msgspec.Struct))):
                found[name] = one
    return found


def made() -> dict[str, Any]:
    """Settings, records and functions: all that neither lives nor is said to be driven elsewhere."""
    return {
        name: one for name, one in exported().items() if not {name} & (PARTS.keys() | ALONE.keys() | ELSEWHERE.keys())
    }


def calls_of(kind: type) -> list[str]:
    life = () if kind.__name__ in ALONE else LIFE
    return [name for name, _ in inspect.getmembers(kind) if not name.startswith("_") and name not in life]


def value(name: str, more: Mapping[str, list[Any]]) -> st.SearchStrategy[Any]:
    if name in WAITS:
        return st.sampled_from([*GOOD[name], *ODD_WAITS])
    good = more.get(name) or GOOD.get(name, [])
    return st.sampled_from([*good * (60 // len(good)), *ODD]) if good else st.sampled_from(ODD)


@st.composite
def a_call(
    draw: st.DrawFn, name: str, parameters: tuple[inspect.Parameter, ...], good: Mapping[str, list[Any]]
) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """(method, positional arguments, named ones); of those with defaults some."""
    args: list[Any] = []
    named: dict[str, Any] = {}
    for each in parameters:
        if each.kind is each.VAR_POSITIONAL:
            args += draw(st.lists(value(each.name, good), max_size=3))
        elif each.kind is each.VAR_KEYWORD:
            fields = [*SubmitFields.__annotations__, "oops"] if name == "dispatch" else OPTIONS
            for option in draw(st.lists(st.sampled_from(fields), max_size=2)):
                named[option] = draw(value(option, good))
        elif each.default is each.empty or each.name in WAITS or draw(st.integers(0, 9)) == 0:
            named[each.name] = draw(value(each.name, good))
    return name, tuple(args), named


def plans(kind: type, most: int = 6) -> st.SearchStrategy[Plan]:
    good = GOOD_ALONE.get(kind.__name__, {})
    each: list[st.SearchStrategy[Any]] = []
    for name in calls_of(kind):
        function = inspect.getattr_static(kind, name)
        if inspect.isfunction(function):
            each.append(a_call(name, _parameters(function)[1:], good))
        else:
            each.append(st.just((name, (), {})))
    return st.lists(st.one_of(each), min_size=1, max_size=most) if each else st.just([])


def orders(kind: type) -> st.SearchStrategy[Plan]:
    """What begins and ends it, in any order, now and then with an argument that it does not take."""
    each: list[st.SearchStrategy[Any]] = []
    for name in (name for name in LIFE if hasattr(kind, name)):
        ends = (None, None, None) if name == "__exit__" else ()
        usual = st.just((name, ends, {}))
        odd = a_call(name, _parameters(inspect.getattr_static(kind, name))[1:], {"changed": CHANGED})
        more = st.tuples(st.just(name), st.tuples(st.sampled_from(ODD)), st.just({}))
        each.append(odd if name == "reconfigure" else st.one_of(usual, usual, usual, odd, more))
    return st.lists(st.one_of(each), min_size=2, max_size=8) if each else st.just([])


def _parameters(function: Any) -> tuple[inspect.Parameter, ...]:
    return tuple(inspect.signature(function).parameters.values())


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


def live(name: str, place: Place, way: str, plan: Plan, more: Plan, order: Plan | None = None) -> None:
    """One part through one life; `way` says when it is called."""
    part = PARTS[name](place)
    driver = Driver(part)
    if way == "before":
        driver.run(plan)
    if way == "orders":
        driver.run(_mixed(order or [], plan))
        _stop(part)
        driver.settle()
        if name in ("Client", "AsyncClient"):  # which are closed once
            return
    with serving(part):
        if way == "fork":
            _in_a_child(lambda: driver.run(plan))
        elif way == "threads":
            _join([_begin(partial(driver.run, each)) for each in (plan, more)])
        beside = [_begin(partial(driver.run, more))] if way == "beside" else []
        if way in ("serving", "between", "again", "orders"):
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


def _mixed(first: Plan, second: Plan) -> Plan:
    """Of each one in turn."""
    return [call for pair in zip_longest(first, second) for call in pair if call is not None]


def alone(name: str, plan: Plan) -> None:
    """One part without a start: after each call its invariants hold, what it gives can be sent, and it serves on."""
    part = ALONE[name]()
    seats: dict[Any, Any] = {}  # of a rank that has left, its last record
    for method, args, named in plan:
        seats |= getattr(part, "ranks", {})
        named = {key: seats.get(("e", each.n)) if isinstance(each, Seat) else each for key, each in named.items()}
        result = None
        with suppress(*DOCUMENTED):
            found = getattr(part, method)
            result = found(*args, **named) if callable(found) else None
        _sendable(result)
        if hasattr(part, "validate"):
            part.validate()
    SERVES[name](part)


def _sendable(result: Any) -> None:
    for each in result if isinstance(result, (list, tuple)) else ():
        if hasattr(each, "message"):
            codec.encode(each.message)


def make(kind: Any, call: Call, plan: Plan) -> None:
    """Settings, records and functions, and the making of parts."""
    _, args, named = call
    try:
        one = kind(*args, **named)
    except DOCUMENTED:
        return
    for method, args, named in plan:
        with suppress(*DOCUMENTED):
            found = getattr(one, method)
            if callable(found):
                found(*args, **named)
    if isinstance(one, Client | AsyncClient):  # which serve from then on
        _stop(one)


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


WAYS = ("before", "serving", "between", "again", "beside", "threads", "fork", "twice", "stops", "orders")


def examples(name: str, number: int, strategies: Sequence[st.SearchStrategy[Any]], run: Callable[..., None]) -> int:
    """Run what is drawn with the seed `number`; returns how many."""
    ran = 0

    @seed(number)
    @settings(
        max_examples=7, deadline=None, database=None, suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,), print_blob=False,
    )  # fmt: skip
    @given(st.tuples(*strategies))
    def example(drawn: tuple[Any, ...]) -> None:
        nonlocal ran
        run(*drawn)
        ran += 1

    try:
        example()
    except BaseException as error:
        error.add_note(f"{name}: python -m fuzz_api --seed {number}")
        raise
    return ran


def drive(place: Place, seeds: Iterable[int]) -> Counter[str]:
    """Drive all that is exported with each of the seeds: lives by part."""
    kinds = exported()
    rest = made()
    assert all(inspect.isfunction(one) or is_dataclass(one) for one in rest.values()), "a part that is driven nowhere"
    making = [
        st.tuples(
            st.just(name), a_call(name, _parameters(kinds[name]), GOOD_MADE),
            plans(kinds[name]) if name in rest and inspect.isclass(kinds[name]) else st.just([]),
        )
        for name in (*rest, *PARTS, *ALONE)
    ]  # fmt: skip
    ran: Counter[str] = Counter()
    for number in seeds:
        for name in PARTS:
            kind = kinds[name]
            plan = plans(kind)
            lives = (st.sampled_from(WAYS), plan, plan, orders(kind))
            ran[name] += examples(name, number, lives, partial(live, name, place))
        for name in ALONE:
            ran[name] += examples(name, number, (plans(kinds[name], 12),), partial(alone, name))
        ran["made"] += examples("made", number, (st.one_of(making),), lambda drawn: make(kinds[drawn[0]], *drawn[1:]))
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

"""The plugin's three sides over real sockets, with SGLang's objects played by plain ones: what a fleet of it can be.

SGLang's own classes and servers are in tests/real_sglang.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import zmq

from bus.runtime.keys import add_key, new_keys
from bus.runtime.ports import free_ports
from pdbus.sglang import engine
from pdbus.sglang.controller import ControllerSide
from pdbus.sglang.engine import Server
from pdbus.sglang.hooking import Sides
from pdbus.sglang.rooms import FORGET_S
from pdbus.sglang.scheduler import SchedulerSide
from pdbus.sglang.server import ServerSide
from pdbus.sglang.settings import Settings, read

WAIT_S = 20.0
PREFILL = Server(role="prefill", dp_size=2, nodes=1, host="127.0.0.1", bootstrap_port=0, head="", elastic=False)


def until(true: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + WAIT_S
    while not (found := true()):
        assert time.monotonic() < end, f"waited until {what}"
        time.sleep(0.01)
    return found


class Controller(SimpleNamespace):
    """SGLang's, as far as it is touched."""

    def __init__(self) -> None:
        super().__init__(
            recv_from_tokenizer=None, workers=["socket 0", "socket 1"], status=[True, True], _active_workers=[0, 1],
            refresh_load_budget_on_dispatch=True, dispatching=self.stock, by_sglang=[], routed=[], server_args=None,
        )  # fmt: skip

    def stock(self, request: Any) -> None:
        self.by_sglang.append(request.rid)

    def maybe_external_dp_rank_routing(self, request: Any) -> bool:
        self.routed.append(request.rid)
        return True


class Fleet:
    """A prefill server of two ranks; this process is its main, its DP controller and its rank 1."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, here: Server, **environ: str) -> None:
        self.here = here
        self.settings = settings_of(**environ)
        self.sent: list[tuple[Any, str]] = []
        monkeypatch.setattr(engine, "server", lambda: self.here)
        monkeypatch.setattr(engine, "dp_rank", lambda: 1)
        monkeypatch.setattr(engine, "page_size", lambda _controller: 16)
        monkeypatch.setattr(engine, "kv_events", lambda *_: None)
        monkeypatch.setattr(engine, "is_health_check", lambda request: request.rid.startswith("HEALTH"))
        modules = {
            "sglang.srt.managers.io_struct": {"sock_send": lambda socket, each: self.sent.append((socket, each.rid))},
            "sglang.srt.disaggregation.base.conn": {"KVPoll": SimpleNamespace(Failed=0, Success=4)},
        }
        for name, members in modules.items():
            parts = name.split(".")
            for end in range(1, len(parts)):
                monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
            module = ModuleType(name)
            vars(module).update(members)
            monkeypatch.setitem(sys.modules, name, module)
        self.sides = Sides(ServerSide(self.settings, {}), SchedulerSide(self.settings), ControllerSide(self.settings))
        self.decode = SchedulerSide(settings_of(**environ | {"PDBUS_SGLANG_INSTANCE": "d0"}))
        self.address = f"127.0.0.1:{here.bootstrap_port}"
        self.queried: list[int] = []

    def query(self, _address: str, rooms: list[int]) -> dict[str, int]:
        """SGLang's own."""
        self.queried += rooms
        return {}

    def register(self, room: int) -> list[Any]:
        """What went SGLang's way."""
        manager = SimpleNamespace(attn_tp_rank=0, attn_cp_rank=0, pp_rank=0)
        stock: list[Any] = []
        sender = SimpleNamespace(kv_mgr=manager, bootstrap_room=room, bootstrap_server_url=self.address)
        self.sides.scheduler.register_room(stock.append, sender)
        return stock

    def find(self, room: int) -> int:
        def found() -> Any:
            ranks = self.decode.find_rooms(self.query, self.address, [room])
            return [ranks[str(room)]] if str(room) in ranks else None

        (rank,) = until(found, f"room {room} is found")
        return int(rank)

    def stop(self) -> None:
        for side in (*self.sides, self.decode):
            side.stop()


def settings_of(**environ: str) -> Settings:
    return read({"PDBUS_SGLANG_METHOD": "total_tokens", "PDBUS_SGLANG_DRAWN": "5"} | environ)


@pytest.fixture
def port() -> int:
    """A bootstrap port whose bus is free too."""
    return free_ports("127.0.0.1", 3) - 100


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """Socket files want short paths."""
    with tempfile.TemporaryDirectory(prefix="pd") as path:
        yield Path(path)


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch, port: int) -> Iterator[Callable[..., Fleet]]:
    made: list[Fleet] = []

    def make(here: Server | None = None, **environ: str) -> Fleet:
        made.append(Fleet(monkeypatch, here or with_port(PREFILL, port), **environ))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def with_port(server: Server, port: int, **changes: Any) -> Server:
    return Server(
        **{name: getattr(server, name) for name in server.__dataclass_fields__} | {"bootstrap_port": port} | changes
    )


def request(rid: str, tokens: int = 10, routed: int | None = None) -> Any:
    return SimpleNamespace(rid=rid, input_ids=list(range(tokens)), bootstrap_room=0, routed_dp_rank=routed)


# --- rooms ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::", "localhost"])
def test_a_room_meets_over_a_broker_beside_the_bootstrap_server(
    fleet: Callable[..., Fleet], port: int, host: str
) -> None:
    made = fleet(with_port(PREFILL, port, host=host))
    made.address = f"[::1]:{port}" if ":" in host else f"127.0.0.1:{port}"
    assert made.sides.server.start_broker(lambda: "bootstrap") == "bootstrap"
    made.register(7)
    assert made.find(7) == 1
    assert made.queried == []


def test_a_room_meets_with_keys(fleet: Callable[..., Fleet], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    new_keys(keys, ["p0"])
    add_key(keys, "nodes", "d0")
    made = fleet(PDBUS_SGLANG_KEYS=str(keys), PDBUS_SGLANG_INSTANCE="p0")
    made.sides.server.start_broker(lambda: None)
    made.register(7)
    assert made.find(7) == 1
    stranger = SchedulerSide(settings_of())
    try:
        assert stranger.find_rooms(made.query, made.address, [7]) == {}
    finally:
        stranger.stop()


def test_an_exposed_broker_without_keys_is_warned_of(
    fleet: Callable[..., Fleet], port: int, caplog: pytest.LogCaptureFixture
) -> None:
    fleet(with_port(PREFILL, port, host="0.0.0.0")).sides.server.start_broker(lambda: None)
    (line,) = [each.getMessage() for each in caplog.records if "pdbus.broker.exposed" in each.getMessage()]
    assert "PDBUS_SGLANG_KEYS" in line


def test_a_prefill_server_without_the_plugin_is_asked_sglangs_way(fleet: Callable[..., Fleet]) -> None:
    made = fleet()
    until(lambda: made.decode.find_rooms(made.query, made.address, [7]) == {} and made.queried, "it is asked over HTTP")


def test_a_broker_that_can_not_be_leaves_the_server_as_it_is(
    fleet: Callable[..., Fleet], port: int, caplog: pytest.LogCaptureFixture
) -> None:
    made = fleet()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as taken:
        taken.bind(f"tcp://127.0.0.1:{port + 100}")
        assert made.sides.server.start_broker(lambda: "bootstrap") == "bootstrap"
    assert "is taken" in caplog.text
    assert "Traceback" not in caplog.text


def test_of_a_ranks_processes_one_registers(fleet: Callable[..., Fleet]) -> None:
    made = fleet()
    manager = SimpleNamespace(attn_tp_rank=1, attn_cp_rank=0, pp_rank=0)
    stock: list[Any] = []
    made.sides.scheduler.register_room(stock.append, SimpleNamespace(kv_mgr=manager))
    assert stock == []
    assert made.sides.scheduler.rank is None


@pytest.mark.parametrize("bad", ["report", "register", "count", "publisher"])
def test_a_rank_of_which_ours_fails_leaves_the_bus_and_all_goes_sglangs_way(
    fleet: Callable[..., Fleet], bad: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its rooms by HTTP under its own number, and the DP controller's choice with SGLang's own loads: a rank whose last
    load is repeated for ever, or that is only silent, would get nothing."""
    made = fleet()
    made.sides.server.start_broker(lambda: None)
    controller = taken_over(made)
    side = made.sides.scheduler
    by_http: list[tuple[str, int]] = []
    assert made.register(1) == []
    assert made.find(1) == 1
    side._http = Posted(by_http)  # type: ignore[assignment]

    def fail(*_args: Any) -> None:
        raise ZeroDivisionError

    scheduler = SimpleNamespace(load_snapshot_writer=object())
    if bad == "publisher":
        publisher = side._publisher
        assert publisher is not None
        publisher.loop.call_threadsafe(fail)
        until(lambda: publisher.failure, "its thread has failed")
    elif bad == "count":
        monkeypatch.setattr(engine, "is_health_check", fail)
        made.sides.scheduler.count(scheduler, request("r"))
    else:
        monkeypatch.setattr(side.rank, bad, fail)
        made.sides.scheduler.report(None, scheduler)
    assert made.register(2) == []
    assert made.register(3) == []
    assert {room for _, room in by_http} == {1, 2, 3}
    assert caplog.text.count("pdbus.rank.left_the_bus") == 1

    until(lambda: made.sides.controller.chooser.left == {1}, "it said goodbye")  # type: ignore[union-attr]
    controller.dispatching(request("a"))
    assert controller.by_sglang == ["a"]
    assert controller.refresh_load_budget_on_dispatch is True
    until(lambda: "rank 1 has left the bus" in caplog.text, "it is said")
    asked = until(lambda: made.decode.find_rooms(made.query, made.address, [3]) == {} and made.queried, "HTTP is asked")
    assert asked == [3]


class Posted:
    """Rooms registered with SGLang's HTTP server."""

    def __init__(self, posted: list[tuple[str, int]]) -> None:
        self._posted = posted

    def __call__(self, address: str, room: int) -> None:
        self._posted.append((address, room))

    def stop(self) -> None:
        pass


def test_where_not_even_http_can_be_rooms_are_registered_as_sglang_does(
    fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fleet()
    made.register(1)

    def fail(*_args: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(made.sides.scheduler.rank, "register", fail)
    made.sides.scheduler._http = SimpleNamespace(stop=lambda: None)  # type: ignore[assignment]
    assert len(made.register(2)) == 1
    assert len(made.register(3)) == 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"elastic": True}, "elastic EP"),
        ({"on_ray": True}, "--use-ray"),
        ({"switches_roles": True}, "--enable-pd-role-switch"),
        ({"method": "follow_bootstrap_room"}, "name another --load-balance-method"),
    ],
)
def test_where_not_all_can_be_done_nothing_is_and_one_line_says_why(
    fleet: Callable[..., Fleet], port: int, changes: Any, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = fleet(with_port(PREFILL, port, **changes))
    assert made.sides.server.start_broker(lambda: "bootstrap") == "bootstrap"
    assert made.sides.server.brokers == {}
    controller = taken_over(made)
    assert controller.dispatching == controller.stock
    assert controller.refresh_load_budget_on_dispatch is True
    assert len(made.register(1)) == 1
    made.decode.find_rooms(made.query, made.address, [1])
    assert made.queried == [1]
    (line,) = [each.getMessage() for each in caplog.records]
    assert "pdbus.plugin.off" in line
    assert says in line


def test_a_prefill_server_that_no_request_names_is_let_go_of(fleet: Callable[..., Fleet]) -> None:
    made = fleet()
    for port in (1, 2, 3):
        made.decode.find_rooms(made.query, f"127.0.0.1:{port}", [1])
    made.decode._decoding["127.0.0.1:2"].named_at -= FORGET_S + 1  # type: ignore[union-attr]
    made.decode.find_rooms(made.query, "127.0.0.1:4", [1])
    assert list(made.decode._decoding) == ["127.0.0.1:1", "127.0.0.1:3", "127.0.0.1:4"]


# --- dispatch ---------------------------------------------------------------------------------------------------------


def taken_over(made: Fleet) -> Controller:
    controller = Controller()
    made.sides.controller.make_controller(lambda _controller: None, controller)
    return controller


def test_the_dp_controller_picks_by_what_its_ranks_publish(fleet: Callable[..., Fleet]) -> None:
    made = fleet()
    made.sides.server.start_broker(lambda: None)
    controller = taken_over(made)
    for rid, tokens in (("a", 500), ("b", 10), ("c", 10)):
        controller.dispatching(request(rid, tokens))
    first = made.sent[0][0]
    assert [socket for socket, _ in made.sent[1:]] == [controller.workers[controller.workers.index(first) - 1]] * 2
    controller.dispatching(request("d", routed=1))
    assert controller.routed == ["d"]
    assert controller.by_sglang == []
    assert controller.refresh_load_budget_on_dispatch is False
    assert sum(rank.sent for rank in made.sides.controller.chooser.ranks) == 4  # type: ignore[union-attr]
    made.register(1)
    scheduler = SimpleNamespace(load_snapshot_writer=object())
    made.sides.scheduler.count(scheduler, request("HEALTH"))
    made.sides.scheduler.count(scheduler, request("d"), mm_input_error=None)
    fields = ("num_running_reqs", "num_waiting_reqs", "num_waiting_uncached_tokens", "num_used_tokens",
              "num_total_tokens", "max_total_num_tokens", "max_running_requests", "total_prefill_uncached_tokens",
              "total_prefill_busy_us")  # fmt: skip
    made.sides.scheduler.report(SimpleNamespace(**dict.fromkeys(fields, 0)), scheduler, force=True)
    rank = made.sides.controller.chooser.ranks[1]  # type: ignore[union-attr]
    until(lambda: rank.acked == 1, "its report has come")


@pytest.mark.parametrize("page", [16, 0])
def test_ranks_that_keep_no_cache_draw_no_prompt(
    fleet: Callable[..., Fleet], page: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As decode ranks without --disaggregation-decode-enable-radix-cache; it would cost balance and save nothing."""
    made = fleet(PDBUS_SGLANG_METHOD="cache_aware")
    monkeypatch.setattr(engine, "page_size", lambda _controller: page)
    controller = taken_over(made)
    for rid, tokens in (("a", 500), ("b", 10), ("again", 500)):
        controller.dispatching(request(rid, tokens))
    at = {rid: socket for socket, rid in made.sent}
    assert at["again"] == at["a" if page else "b"]
    assert ("pdbus.caches.none" in caplog.text) is (page == 0)


@pytest.mark.parametrize(("weight", "stays"), [("", False), ("4", True)])
def test_a_weight_says_how_long_a_prompt_stays_with_its_cache(
    fleet: Callable[..., Fleet], port: int, weight: str, stays: bool
) -> None:
    """At decode: its rank is to hold 800 tokens more than the other, and caches 500 of them."""
    made = fleet(
        with_port(PREFILL, port, role="decode"), PDBUS_SGLANG_METHOD="cache_aware", PDBUS_SGLANG_CACHE_WEIGHT=weight
    )
    controller = taken_over(made)
    controller.dispatching(request("a", 500, routed=0))
    controller.dispatching(SimpleNamespace(rid="other", input_ids=[7] * 300, bootstrap_room=0, routed_dp_rank=0))
    controller.dispatching(request("again", 500))
    ((socket, _),) = made.sent
    assert (socket == controller.workers[0]) is stays


@pytest.mark.parametrize(
    ("changes", "environ", "says"),
    [
        ({"nodes": 2, "head": "10.0.0.1:5000"}, {}, "PDBUS_SGLANG_NONCE"),
        ({"nodes": 2, "role": "decode"}, {"PDBUS_SGLANG_NONCE": "9"}, "PDBUS_SGLANG_BUS"),
        ({}, {"PDBUS_SGLANG_METHOD": "nonsense"}, "unknown load_balance_method"),
    ],
)
def test_where_the_choice_can_not_be_ours_it_stays_sglangs_in_one_line(
    fleet: Callable[..., Fleet], port: int, changes: Any, environ: Any, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = fleet(with_port(PREFILL, port, **changes), **environ)
    controller = taken_over(made)
    assert controller.dispatching == controller.stock
    (line,) = [each.getMessage() for each in caplog.records if "pdbus.dispatch.by_sglang" in each.getMessage()]
    assert says in line
    assert "Traceback" not in caplog.text


def test_a_loop_that_has_much_to_do_feeds_its_watchdog(fleet: Callable[..., Fleet]) -> None:
    """With each request: its socket may not be empty for longer than the watchdog waits."""
    made = fleet()
    done: list[Any] = []

    class Leave(Exception):
        pass

    def take(each: bytes) -> None:
        if each == b"leave":
            raise Leave
        done.append(each)

    with zmq.Context() as context, context.socket(zmq.PAIR) as ours, context.socket(zmq.PAIR) as theirs:
        ours.bind("inproc://loop")
        theirs.connect("inproc://loop")
        for each in (b"a", b"b", b"leave"):
            theirs.send(each)
        controller = SimpleNamespace(
            recv_from_tokenizer=ours, _request_dispatcher=take,
            soft_watchdog=SimpleNamespace(feed=lambda: done.append("fed")),
        )  # fmt: skip
        vars(sys.modules["sglang.srt.managers.io_struct"])["sock_recv"] = lambda socket, flags: socket.recv(flags)
        with pytest.raises(Leave):
            made.sides.controller.event_loop(lambda _controller: None, controller)
    assert done == ["fed", b"a", "fed", b"b", "fed"]


def test_several_machines_that_share_a_nonce_dispatch_by_it(fleet: Callable[..., Fleet], port: int) -> None:
    made = fleet(with_port(PREFILL, port, nodes=2, head="127.0.0.1:5000"), PDBUS_SGLANG_NONCE="9")
    assert taken_over(made).dispatching is not None
    assert made.sides.controller.watch is not None
    assert made.sides.controller.watch.address.base == f"tcp://127.0.0.1:{port + 100}"


def test_a_choice_that_fails_is_sglangs_and_its_loop_lives(
    fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = fleet()
    controller = taken_over(made)

    def fail(*_args: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(made.sides.controller.chooser, "pick", fail)
    with caplog.at_level(logging.ERROR):
        for rid in "ab":
            controller.dispatching(request(rid))
    assert controller.by_sglang == ["a", "b"]
    assert caplog.text.count("pdbus.dispatch.by_sglang") == 1


def test_servers_that_nobody_asks_for_rooms_have_a_broker_of_their_own(
    fleet: Callable[..., Fleet], port: int, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDBUS_DIR", str(short_dir))
    made = fleet(with_port(PREFILL, port, role="decode"))
    made.sides.server.start_broker(lambda: None)
    (broker,) = made.sides.server.brokers.values()
    assert broker.address.base == f"ipc://{short_dir}/sglang-0000000000000005"
    taken_over(made)
    assert made.sides.controller.watch is not None
    assert made.sides.controller.watch.address == broker.address

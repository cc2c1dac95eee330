"""SGLang's real classes in this process, hooked by its own registry, with a real broker between them. No model runs.

What is replaced is what starts processes, computes or speaks to a peer; each replacement stands where it is made.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from servers import ROOT, free_port_with, until

from benchmarks import peers_sides
from benchmarks.harness import Scope, Workspace
from benchmarks.sglang_parts import CONFIG, Hosted, Manager
from benchmarks.sglang_parts import generate as tokenized
from bus import Resolver
from controller.policies import POLICIES
from pdbus.edge import fields
from pdbus.sglang import engine, seams
from pdbus.sglang.controller import ControllerSide
from pdbus.sglang.settings import read

sys.path.insert(0, str(ROOT / "tests" / "support"))
from engines_fields import refused_at_defaults
from sglang_skeleton import RECORDED, skeleton

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]

PAGE = 16
WAIT_S = 60.0


# --- the wheel --------------------------------------------------------------------------------------------------------


def test_the_wheel_is_as_recorded() -> None:
    """The record is what every other run of the tests knows of SGLang."""
    assert list(seams.mismatches(engine.sources())) == []
    assert skeleton(engine.sources()) == RECORDED.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("kind", "body", "name"),
    [
        (fields.Chat, {"messages": [{"role": "user", "content": "a"}]}, "ChatCompletionRequest"),
        (fields.Completion, {"prompt": "a"}, "CompletionRequest"),
        (fields.Generate, {"text": "a"}, "GenerateReqInput"),
        (fields.Tokenize, {"prompt": "a"}, "TokenizeRequest"),
        (fields.Detokenize, {"tokens": [1]}, "DetokenizeRequest"),
    ],
)
def test_an_edge_takes_each_field_of_sglangs_at_its_default(kind: type, body: dict[str, Any], name: str) -> None:
    """Its load generator and libraries send them so."""
    from sglang.srt.entrypoints.openai import protocol
    from sglang.srt.managers import io_struct

    assert refused_at_defaults(kind, body, getattr(protocol, name, None) or getattr(io_struct, name)) == {}


def test_installing_pdbus_changes_no_version_that_is_installed(tmp_path: Path) -> None:
    report = tmp_path / "report"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--no-index", "--no-build-isolation",
         "--report", str(report), str(ROOT)],
        check=True, timeout=300,
    )  # fmt: skip
    assert [each["metadata"]["name"] for each in json.loads(report.read_text())["install"]] == ["pdbus"]


PAGES_OF_DECODE = """
import sys
from types import SimpleNamespace
from sglang.srt.server_args import prepare_server_args
from pdbus.sglang import engine
for flags in ((), ("--disaggregation-decode-enable-radix-cache",)):
    args = prepare_server_args(
        ["--model-path", sys.argv[1], "--device", "cpu", "--attention-backend", "torch_native", "--page-size", "16",
         "--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "mooncake", *flags]
    )
    args.resolve_once()
    print("page", engine.page_size(SimpleNamespace(server_args=args)))
"""


def test_a_decode_server_has_a_cache_to_go_by_where_it_was_told_to_keep_one(tmp_path: Path) -> None:
    """As SGLang resolves its own flags; in a process of its own, since that may be done once."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    command = [sys.executable, "-c", PAGES_OF_DECODE, str(tmp_path)]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    assert [line for line in said.splitlines() if line.startswith("page ")] == ["page 0", "page 16"]


# --- a server in this process -----------------------------------------------------------------------------------------


class World(Hosted):
    """A prefill server of two ranks: its DP controller, whose workers' sockets end here, and rank 1's scheduler."""

    def __init__(self, folder: Path) -> None:
        self.context = zmq.Context()
        self.ranks = [self.context.socket(zmq.PULL) for _ in range(2)]
        endpoints = [f"tcp://127.0.0.1:{pull.bind_to_random_port('tcp://127.0.0.1')}" for pull in self.ranks]
        self.bootstrap_port = free_port_with(100, 101, 102)
        super().__init__(
            folder, endpoints, self.bootstrap_port, "total_tokens", page=PAGE, PDBUS_SGLANG_ROOM_S="2"
        )  # fmt: skip
        self.tokenizer = self.context.socket(zmq.PUSH)
        self.tokenizer.bind(self.ports.scheduler_input_ipc_name)
        self.scheduler = self._scheduler()

    def _scheduler(self) -> Any:
        """A Scheduler that was never started: only what the hooked methods use."""
        from sglang.srt.managers.load_snapshot import LoadSnapshot
        from sglang.srt.managers.scheduler import Scheduler

        scheduler = object.__new__(Scheduler)
        scheduler._handle_generate_request = lambda *_args, **_kwargs: None
        scheduler.load_snapshot_writer = SimpleNamespace(
            publish_counter=0, publish_interval=1, write=lambda _load: None
        )
        self.snapshot = LoadSnapshot(dp_rank=1)
        scheduler.load_inquirer = SimpleNamespace(get_loads=lambda: self.snapshot)
        return scheduler

    def take_over(self, method: str) -> ControllerSide:
        """Another method for the same controller, as at a start with it."""
        side = ControllerSide(read(self.environ | {"PDBUS_SGLANG_METHOD": method}))
        side.make_controller(lambda _controller: None, self.controller)
        assert side.chooser is not None
        return side

    def dispatched(self, *requests: Any) -> list[int]:
        """Where the real controller sends them."""
        for request in requests:
            self.controller._request_dispatcher(request)
        ranks = {request.rid: rank for rank, request in (self.arrived() for _ in requests)}
        return [ranks[request.rid] for request in requests]

    def arrived(self) -> tuple[int, Any]:
        from sglang.srt.managers.io_struct import sock_recv

        poller = zmq.Poller()
        for pull in self.ranks:
            poller.register(pull, zmq.POLLIN)
        ((pull, _), *_) = poller.poll(WAIT_S * 1000)
        return self.ranks.index(pull), sock_recv(pull)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("classes")
    os.environ["PDBUS_DIR"] = str(folder / "run")
    made = World(folder)
    yield made
    made.stop()


def generate(rid: str, tokens: int | list[int] = 10, room: int = 0, **also: Any) -> Any:
    return tokenized(rid, list(range(tokens)) if isinstance(tokens, int) else tokens, room, **also)


# --- the DP controller ------------------------------------------------------------------------------------------------


def test_prefill_registers_rooms_whatever_sglang_would_resolve_auto_to(world: World) -> None:
    """`auto` is follow_bootstrap_room there, which registers nothing and has decode compute another rank than ours."""
    from sglang.srt.arg_groups.model_override_base import resolving_view

    assert resolving_view(world.args).load_balance_method == "round_robin"


@pytest.mark.parametrize("method", sorted(POLICIES))
def test_each_method_on_the_real_controller(world: World, method: str) -> None:
    side = world.take_over(method)
    try:
        requests = [generate(f"{method}-{n}", 10, room=n) for n in range(8)]
        ranks = world.dispatched(*requests)
        assert sorted(ranks) == [0, 0, 0, 0, 1, 1, 1, 1]
        if method == "follow_bootstrap_room":
            assert ranks == [request.bootstrap_room % 2 for request in requests]
        if method in ("total_tokens", "cache_aware"):
            (long,) = world.dispatched(generate("long", list(range(1000, 1000 + 600))))
            assert world.dispatched(*(generate(f"s{n}", 10) for n in range(3))) == [1 - long] * 3
            if method == "cache_aware":
                again = list(range(1000, 1000 + 600))
                assert world.dispatched(generate("again", [*again, 1])) == [long]
    finally:
        side.stop()


def test_a_batch_and_the_rank_of_a_router_are_charged(world: World) -> None:
    from sglang.srt.managers.io_struct import BatchTokenizedGenerateReqInput

    side = world.take_over("total_requests")
    try:
        chosen = [generate(f"c{n}", routed_dp_rank=1) for n in range(4)]
        assert world.dispatched(*chosen) == [1] * 4
        world.controller._request_dispatcher(
            BatchTokenizedGenerateReqInput(batch=[generate(f"b{n}") for n in range(4)])
        )
        assert [world.arrived()[0] for _ in range(4)] == [0] * 4
        with pytest.raises(ValueError, match="is not active"):
            world.controller._request_dispatcher(generate("no", routed_dp_rank=7))
        assert [rank.sent for rank in side.chooser.ranks] == [4, 4]  # type: ignore[union-attr]
    finally:
        side.stop()


def test_health_checks_go_sglangs_way_and_count_on_neither_side(world: World) -> None:
    from sglang.srt.managers.utils import HEALTH_CHECK_RID_PREFIX

    side = world.take_over("total_requests")
    try:
        assert sorted(world.dispatched(*(generate(f"{HEALTH_CHECK_RID_PREFIX}_{n}") for n in range(2)))) == [0, 1]
        assert [rank.sent for rank in side.chooser.ranks] == [0, 0]  # type: ignore[union-attr]
    finally:
        side.stop()


def test_a_rank_acknowledges_what_its_real_scheduler_took_in(world: World) -> None:
    """Dispatch, ingest and report by SGLang's own methods, over a real broker; the estimate follows."""
    side = world.take_over("total_tokens")
    try:
        rank = side.chooser.ranks[1]  # type: ignore[union-attr]
        from sglang.srt.managers.utils import HEALTH_CHECK_RID_PREFIX

        world.scheduler.handle_generate_request(generate(f"{HEALTH_CHECK_RID_PREFIX}_0", 3))
        base = world.sides.scheduler.rank._dispatches  # type: ignore[union-attr]
        world.scheduler.publish_load_snapshot(force=True)
        until(lambda: rank.load is not None, "its first report is there", WAIT_S)
        world.controller._request_dispatcher(generate("a", 500, routed_dp_rank=1))
        assert (rank.requests, rank.tokens) == (1, 500)
        world.scheduler.handle_generate_request(world.arrived()[1])
        assert world.sides.scheduler.rank._dispatches == base + 1  # type: ignore[union-attr]
        world.snapshot.num_running_reqs, world.snapshot.num_total_tokens = 1, 70
        world.snapshot.num_used_tokens = 30
        world.scheduler.publish_load_snapshot(force=True)
        until(lambda: (rank.requests, rank.tokens, rank.in_flight) == (1, 40, 0), "the report counts it, once", WAIT_S)
    finally:
        side.stop()


def test_the_real_loop_dispatches_and_sleeps(world: World) -> None:
    from sglang.srt.managers.io_struct import sock_send

    side = world.take_over("round_robin")
    stopping = threading.Event()

    class Leave(Exception):
        pass

    def feed() -> None:
        if stopping.is_set():
            raise Leave

    def serve() -> None:
        try:
            world.controller.event_loop()
        except Leave:
            used.append(time.thread_time())

    used: list[float] = []
    watchdog, world.controller.soft_watchdog = world.controller.soft_watchdog, SimpleNamespace(feed=feed)
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        for n in range(20):
            request = generate(f"l{n}")
            request.wrap_pickle_fields()
            sock_send(world.tokenizer, request)
        assert {world.arrived()[0] for _ in range(20)} == {0, 1}
        time.sleep(1.0)  # idle: what is measured
    finally:
        stopping.set()
        thread.join(30)
        world.controller.soft_watchdog = watchdog
        side.stop()
    assert used[0] < 0.5, "asking again and again takes all of the time"


# --- rooms ------------------------------------------------------------------------------------------------------------


def sender(world: World, room: int, manager: Manager | None = None) -> Any:
    from sglang.srt.disaggregation.common.conn import CommonKVSender

    return CommonKVSender(manager or Manager(), world.address, room)


class Queue:
    """A decode rank's real DecodePreallocQueue over real receivers; what comes after a rank is found is recorded."""

    def __init__(self, world: World) -> None:
        from sglang.srt.disaggregation.common.conn import CommonKVReceiver
        from sglang.srt.disaggregation.decode import DecodePreallocQueue

        class Receiver(CommonKVReceiver):
            def init(self, prefill_dp_rank: int) -> None:
                self.prefill_dp_rank = prefill_dp_rank

        self._world, self._receiver = world, Receiver
        self.manager = Manager()
        self.manager.addr_to_rooms_tracker = defaultdict(set)
        info = SimpleNamespace(dp_size=2, follow_bootstrap_room=False)
        self.manager.prefill_info_table = {world.address: info}
        self.manager.try_ensure_parallel_info = lambda _address: True
        self.prefetched: list[Any] = []
        self.manager._ensure_prefill_recompute_executor = lambda: SimpleNamespace(submit=self._submit)
        self.real = queue = object.__new__(DecodePreallocQueue)
        queue.kv_manager = self.manager
        queue.queue, queue.pending_reqs, queue.transfer_queue = [], [], SimpleNamespace(queue=[])
        queue._prefill_dp_rank_queries, queue._ensure_retry_count, queue._ensure_last_attempt_time = {}, {}, {}
        queue._ensure_retry_interval, queue._max_ensure_retries = -1.0, 15

    def _submit(self, *call: Any) -> Future[Any]:
        self.prefetched.append(call)
        done: Future[Any] = Future()
        done.set_result({})
        return done

    def add(self, room: int) -> Any:
        from sglang.srt.disaggregation.decode import DecodeRequest

        request = SimpleNamespace(
            bootstrap_host="127.0.0.1", bootstrap_port=self._world.bootstrap_port, bootstrap_room=room,
            disagg_prefill_dp_rank=None, rid=str(room),
        )  # fmt: skip
        receiver = self._receiver(self.manager, self._world.address, room)
        decode_request = DecodeRequest(req=request, kv_receiver=receiver)
        self.real.pending_reqs.append(decode_request)
        self.real.queue.append(decode_request)
        return receiver

    def turn(self) -> None:
        """As a scheduler's loop does."""
        self.real.prefetch_prefill_dp_rank_queries()
        self.real._resolve_pending_reqs()


def test_a_room_is_found_by_its_real_rank_and_costs_the_scheduler_no_wait(world: World) -> None:
    """In plain DP SGLang registers rank 0 for every rank; this is rank 1."""
    queue = Queue(world)
    sender(world, 99)  # puts the rank on the bus, if nothing has yet
    until(lambda: world.sides.scheduler.rank.broker_alive, "the rank has heard the broker", WAIT_S)
    receivers = [queue.add(room) for room in range(100, 120)]
    for room in range(100, 120):
        sender(world, room)

    def resolved() -> bool:
        queue.turn()
        return not queue.real.pending_reqs

    until(resolved, "all rooms are found", WAIT_S)
    assert {receiver.prefill_dp_rank for receiver in receivers} == {1}
    assert queue.prefetched == [], "nothing is asked over HTTP"
    by_http = {int(room) for room in world.bootstrap_server.room_to_dp_rank}
    assert not by_http & set(range(100, 120)), "nothing is registered over HTTP"
    manager = Manager()
    began = time.thread_time()
    for room in range(1000, 1100):
        sender(world, room, manager)
    assert time.thread_time() - began < 0.5


@pytest.mark.parametrize("failed", [True, False])
def test_a_cleared_sender_drops_its_room(world: World, failed: bool) -> None:
    from sglang.srt.disaggregation.base.conn import KVPoll

    room = 200 + failed
    with Resolver(f"tcp://127.0.0.1:{world.bootstrap_port + 100}") as resolver:
        made = sender(world, room)
        resolver.want(room)
        assert resolver.wait(WAIT_S)
        assert resolver.poll()[room].dp_rank == 1
        made.conclude_state = KVPoll.Failed if failed else KVPoll.Success
        made.clear()

        def lost() -> Any:
            resolver.want(room, deadline_s=0.05)
            assert resolver.wait(WAIT_S)
            resolver.poll()
            return resolver.lost()

        assert until(lost, "the room is gone", WAIT_S) == {room: "prefill_failed" if failed else "unknown_room"}


def test_a_room_that_is_never_registered_aborts_its_receiver_with_the_reason(world: World) -> None:
    from sglang.srt.disaggregation.base.conn import KVPoll

    queue = Queue(world)
    receiver = queue.add(300)
    until(lambda: queue.turn() or receiver.poll() == KVPoll.Failed, "it is given up", WAIT_S)
    assert "no prefill rank has registered it within 2 s" in queue.manager.failure_records[300]


def test_what_waits_for_a_rank_that_died_ends_with_the_reason(world: World) -> None:
    """After its room was found, when stock SGLang would wait for its timeout of 300 s."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    queue = Queue(world)
    receiver = queue.add(400)
    sender(world, 400)
    until(lambda: queue.turn() or not queue.real.pending_reqs, "its room is found", WAIT_S)
    known = world.sides.scheduler._decoding
    decoding = known[world.address]
    assert decoding is not None
    instance = world.sides.scheduler.settings.name
    try:
        known[world.address] = SimpleNamespace(rooms=decoding.rooms, lost_ranks={(instance, 0)})  # type: ignore[assignment]
        queue.turn()
        assert receiver.poll() == KVPoll.Bootstrapping, "another rank's death is nothing to it"
        known[world.address] = SimpleNamespace(rooms=decoding.rooms, lost_ranks={(instance, 1)})  # type: ignore[assignment]
        queue.turn()
    finally:
        known[world.address] = decoding
    assert receiver.poll() == KVPoll.Failed
    assert f"prefill rank 1 of {instance} has died" in queue.manager.failure_records[400]


# --- as a peer of ours in a benchmark ---------------------------------------------------------------------------------


def test_the_benchmark_runs_its_dp_controller_in_both_serializations() -> None:
    with Workspace() as space:
        for sized in peers_sides.PEERS["sglang"].start(space, Scope(quick=True), sys.executable):
            for tokens in peers_sides.TOKENS:
                side = sized(tokens)
                with side.awake():
                    cpu_us, per_s = side.burst(40)
                    assert cpu_us < 1e6 / per_s * os.cpu_count()
                    assert side.one_way(40) > 0
                    side.path.client.ask(do="burst", count=40, window=8, **side.asked)
                    assert all(node.ask(do="take") == [] for node in side.path.nodes), "nobody asked how long they took"

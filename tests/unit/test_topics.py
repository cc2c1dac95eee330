"""Topics: one per kind and rank, and no rank's prefix matches another's."""

from __future__ import annotations

import pytest

from bus.wire import topics
from bus.wire.messages import Beacon, Conflict, Load, LoadReport, Location, Member, Message, Ping, Resync, Rooms, Sent

LOAD = Load(seq=1, step=1, running=0, waiting=0, waiting_tokens=0, kv_tokens=0, kv_capacity=100, max_running=4)


@pytest.mark.parametrize(
    ("message", "topic"),
    [
        (LoadReport("p-0", 3, 9, 1, LOAD), b"load/p-0/3/"),
        (Rooms("p-0", 3, 9, 1, None, "ipc:///x"), b"rooms/p-0/3/"),
        (
            Member("p.0", 10, 9, 1, None, "prefill", "m", 16, "ready", "ipc:///x", False, 0, 1.0),
            b"member/p.0/10/",
        ),
        (Sent("controller-0", 9, 1, ()), b"sent/controller-0/"),
        (Beacon(9, 1, 0.25), b"beacon/"),
        (Resync("p-0", 3, 9), b"to/p-0/3/"),
        (Conflict("p-0", 3, 9, 5, 1, Location("p-1", 0, 8, "ipc:///y"), True), b"to/p-0/3/"),
    ],
)
def test_topic_of_each_kind(message: Message, topic: bytes) -> None:
    """M12 M13."""
    assert topics.of(message) == topic


def test_a_rank_is_not_a_prefix_of_another() -> None:
    assert not topics.for_rank(topics.LOAD, "p", 10).startswith(topics.for_rank(topics.LOAD, "p", 1))
    assert not topics.for_rank(topics.LOAD, "p-1", 0).startswith(topics.for_rank(topics.LOAD, "p", 0))


def test_what_is_not_a_publication_has_no_topic() -> None:
    with pytest.raises(AssertionError):
        topics.of(Ping(1))

"""What a controller's sockets tell its core of clients that are gone."""

from __future__ import annotations

from typing import Any

import pytest

from bus.runtime.sockets import Sockets
from bus.wire.messages import Done, Failed, Message
from controller.config import ControllerConfig
from controller.core import ControllerCore
from controller.events import ToClient
from controller.traffic import Traffic


def ignore(*_: Any) -> None: ...


@pytest.mark.parametrize(
    ("message", "counted"),
    [(Done("r", 1, ()), 0), (Failed("r", 1, "no_rank", "no rank", True), 1)],
    ids=["who has its tokens", "who waits for an answer"],
)
def test_a_client_that_leaves_before_done_was_not_turned_away(message: Message, counted: int) -> None:
    """It has its last token from the rank already; what else finds nobody is shown as refused."""
    config = ControllerConfig(bus="ipc:///x/bus", controller="ipc:///x/c")
    core = ControllerCore(config, 1, 0.0)
    with Sockets() as sockets:
        clients = sockets.router("inproc://clients")
        traffic = Traffic(core, lambda: 0.0, clients, clients, clients, None, ignore, ignore)
        traffic._outbox.append(ToClient(b"gone", message))
        traffic.carry_out()
    assert core.counts["clients_unreachable"] == counted

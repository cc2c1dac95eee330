"""What a controller's sockets tell its core of peers that are gone."""

from __future__ import annotations

from typing import Any

import pytest
from controller_world import hello

from bus.runtime.sockets import Sockets
from bus.wire.messages import Done, Failed, Message, Ping
from controller.config import ControllerConfig
from controller.core import ControllerCore
from controller.events import FromNode, ToClient, ToNode
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


def test_a_node_whose_connection_is_gone_is_known_by_the_first_message_to_it() -> None:
    """Not a lease later, when it has been silent for so long."""
    core = ControllerCore(ControllerConfig(bus="ipc:///x/bus", controller="ipc:///x/c"), 1, 0.0)
    core.handle(FromNode(b"gone", hello("u", 0)), 0.0)
    assert not core.members.suspects
    with Sockets() as sockets:
        nodes = sockets.router("inproc://nodes")
        traffic = Traffic(core, lambda: 0.0, nodes, nodes, nodes, None, ignore, ignore)
        traffic._outbox.append(ToNode(b"gone", Ping(1)))
        traffic.carry_out()
    assert [rank.key for rank in core.members.suspects] == [("u", 0)]

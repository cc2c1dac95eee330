"""The public names: the client library, clusters, and names for embedding. Each module is loaded at its first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pdbus.names import check_names

if TYPE_CHECKING:
    from bus.broker import Broker, BrokerConfig
    from bus.embed.publisher import Publisher
    from bus.embed.resolver import Resolver
    from bus.errors import BusError, ConfigError, PeerLost, RequestFailed, StartError
    from controller.config import ControllerConfig
    from controller.dispatcher import Dispatcher
    from controller.shell import Controller
    from pdbus.client import AsyncClient, Client, Piece, Result
    from pdbus.launcher import Cluster, ClusterSpec

_HOMES = {
    "AsyncClient": "pdbus.client",
    "Broker": "bus.broker.shell",
    "BrokerConfig": "bus.broker.shell",
    "BusError": "bus.errors",
    "Client": "pdbus.client",
    "Cluster": "pdbus.launcher",
    "ClusterSpec": "pdbus.launcher",
    "ConfigError": "bus.errors",
    "Controller": "controller.shell",
    "ControllerConfig": "controller.config",
    "Dispatcher": "controller.dispatcher",
    "PeerLost": "bus.errors",
    "Piece": "pdbus.client",
    "Publisher": "bus.embed.publisher",
    "RequestFailed": "bus.errors",
    "Resolver": "bus.embed.resolver",
    "Result": "pdbus.client",
    "StartError": "bus.errors",
}

__all__ = [
    "AsyncClient",
    "Broker",
    "BrokerConfig",
    "BusError",
    "Client",
    "Cluster",
    "ClusterSpec",
    "ConfigError",
    "Controller",
    "ControllerConfig",
    "Dispatcher",
    "PeerLost",
    "Piece",
    "Publisher",
    "RequestFailed",
    "Resolver",
    "Result",
    "StartError",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'pdbus' has no attribute {name!r}")
    check_names()
    return getattr(import_module(home), name)

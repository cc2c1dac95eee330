"""The bus connects the processes that serve a model: ranks (engine processes) publish their load and rooms, and the
broker forwards this and answers which prefill rank has a request's room. This package knows neither nodes nor
controller.

It hands out the names that an engine embeds. The cores for a loop of its own are in `bus.embed.checked`, the wire is in
`bus.wire.messages` and `docs/protocol.md`. Names are loaded when they are first used, so importing the package is
cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bus.broker import Broker, BrokerConfig
    from bus.embed.checked import PublisherCore, ResolverCore
    from bus.embed.publisher import Publisher
    from bus.embed.resolution import Resolved
    from bus.embed.resolver import Resolver
    from bus.endpoints import BusAddress, ControllerAddress, default_bus, default_controller
    from bus.errors import BusError, ConfigError, PartFailed, PeerLost, ProtocolError, RequestFailed, StartError
    from bus.wire.messages import Ack, Conflict, Load, Location

_HOMES = {
    "Broker": "broker",
    "BrokerConfig": "broker",
    "BusAddress": "endpoints",
    "ControllerAddress": "endpoints",
    "default_bus": "endpoints",
    "default_controller": "endpoints",
    "BusError": "errors",
    "ConfigError": "errors",
    "PartFailed": "errors",
    "PeerLost": "errors",
    "ProtocolError": "errors",
    "RequestFailed": "errors",
    "StartError": "errors",
    "Ack": "wire.messages",
    "Conflict": "wire.messages",
    "Load": "wire.messages",
    "Location": "wire.messages",
    "PublisherCore": "embed.checked",
    "Publisher": "embed.publisher",
    "Resolved": "embed.resolution",
    "ResolverCore": "embed.checked",
    "Resolver": "embed.resolver",
}

__all__ = [
    "Ack",
    "Broker",
    "BrokerConfig",
    "BusAddress",
    "BusError",
    "ConfigError",
    "Conflict",
    "ControllerAddress",
    "Load",
    "Location",
    "PartFailed",
    "PeerLost",
    "ProtocolError",
    "Publisher",
    "PublisherCore",
    "RequestFailed",
    "Resolved",
    "Resolver",
    "ResolverCore",
    "StartError",
    "default_bus",
    "default_controller",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'bus' has no attribute {name!r}")
    return getattr(import_module(f"bus.{home}"), name)

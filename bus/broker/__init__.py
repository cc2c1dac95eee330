"""The bootstrap broker: rooms with a TTL, watches and topology. `core` decides; `shell` has the sockets."""

from bus.broker.shell import Broker, BrokerConfig

__all__ = ["Broker", "BrokerConfig"]

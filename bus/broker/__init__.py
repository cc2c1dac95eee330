"""The bootstrap broker: it forwards publications, keeps rooms (each with a TTL), watches and topology, and answers
questions about them. `core` decides; `shell` has the sockets."""

from bus.broker.shell import Broker, BrokerConfig

__all__ = ["Broker", "BrokerConfig"]

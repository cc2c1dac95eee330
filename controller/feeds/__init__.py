"""The feeds of foreign engines: KV-cache events and loads, straight from their sockets.

Parsers and sequence tracking are pure; `controller.feeds.engine` owns the sockets.
"""

from controller.feeds.settings import EngineSettings, parse_engine

__all__ = ["EngineSettings", "parse_engine"]

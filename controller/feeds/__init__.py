"""The feeds of ranks: KV-cache events of our nodes, and KV-cache events and loads of foreign engines (SGLang, vLLM),
straight from their sockets.

Parsers and sequence tracking are pure; `controller.feeds.engine` owns the sockets.
"""

from controller.feeds.settings import EngineSettings, parse_engine

__all__ = ["EngineSettings", "parse_engine"]

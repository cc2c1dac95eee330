"""`--engine KIND=ENDPOINT,key=value,...`: the engines whose events are followed. This module owns the option's form
and checks.
"""

from __future__ import annotations

from dataclasses import dataclass

from bus.endpoints import check_base
from bus.errors import ConfigError

KINDS = ("sglang", "vllm")
_FORM = "KIND=tcp://HOST:PORT[,dp_size=N][,instance=NAME][,replay=PORT][,load=PORT]"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The feeds of one engine: rank r publishes KV events on `port` + r, answers replays on `replay` + r, and publishes
    its load on `load` + r (a `replay` or `load` of 0: it does not). The controller knows its ranks as those of
    `instance`."""

    kind: str
    host: str
    port: int
    instance: str
    dp_size: int = 1
    replay: int = 0
    load: int = 0

    def endpoint(self, port: int, dp_rank: int) -> str:
        """Return the endpoint of rank `dp_rank`, where `port` is the port of rank 0 for events, replays or load."""
        return f"tcp://{self.host}:{port + dp_rank}"


def parse_engine(text: str) -> EngineSettings:
    """Return the settings in the option's text. Raises ConfigError, with the right form, for any other text."""
    first, *rest = text.split(",")
    kind, _, address = first.partition("=")
    if kind not in KINDS:
        raise ConfigError(f"--engine {text!r}: the kind is {' or '.join(KINDS)} ({_FORM})")
    if not address.startswith("tcp://"):
        raise ConfigError(f"--engine {text!r}: an engine is at tcp://HOST:PORT ({_FORM})")
    check_base(address)
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    numbers = {"dp_size": 1, "replay": 0, "load": 0}
    instance = kind
    for part in rest:
        key, _, value = part.partition("=")
        if key == "instance" and value:
            instance = value
        elif key in numbers and value.isdecimal():
            numbers[key] = int(value)
        else:
            raise ConfigError(f"--engine {text!r}: {part!r} is not understood ({_FORM})")
    if not 1 <= numbers["dp_size"] <= 4096:
        raise ConfigError(f"--engine {text!r}: dp_size must lie in 1..4096")
    if kind == "vllm" and numbers["load"]:
        raise ConfigError(f"--engine {text!r}: vLLM publishes no load")
    settings = EngineSettings(kind, host, int(port), instance, **numbers)
    for base in (settings.port, settings.replay, settings.load):
        if base + settings.dp_size - 1 > 65_535:
            raise ConfigError(f"--engine {text!r}: port {base} + dp_size goes past 65535")
    return settings

"""The plugin's settings, from environment variables, read once in each process. Pure: the environment is an
argument."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bus.endpoints import check_base
from bus.errors import ConfigError
from bus.wire.messages import MAX_ROOM, NAME

SWITCH = "PDBUS_SGLANG"
METHOD = "PDBUS_SGLANG_METHOD"
CACHE_WEIGHT = "PDBUS_SGLANG_CACHE_WEIGHT"
BUS = "PDBUS_SGLANG_BUS"
KEYS = "PDBUS_SGLANG_KEYS"
INSTANCE = "PDBUS_SGLANG_INSTANCE"
HTTP = "PDBUS_SGLANG_HTTP"
NONCE = "PDBUS_SGLANG_NONCE"
DRAWN = "PDBUS_SGLANG_DRAWN"  # set by a server's first process for its children: the nonce it drew
NAMED = "PDBUS_SGLANG_NAMED"  # set for the children: the --load-balance-method that the operator named
ROOM_S = "PDBUS_SGLANG_ROOM_S"
LOST_S = "PDBUS_SGLANG_LOST_S"

DAY_S = 86_400.0
_WORDS = {"on": True, "1": True, "true": True, "off": False, "0": False, "false": False}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings. `nonce` is one number for all processes of one start of a server (0: the main process has not drawn
    it yet); with it, ranks and DP controller recognise counts of the same start. `nonce_given` says that the operator
    set it, so that all machines of a server have the same."""

    on: bool = False
    method: str = ""  # of load balancing; empty: SGLang's own --load-balance-method, by our loads
    named: str = ""  # its value before SGLang resolved it; empty: auto
    cache_weight: float = 1.0  # cache_aware: worth of a token that a rank caches, in tokens of load
    bus: str = ""  # the bus of an external broker; empty: each server has its own
    keys: str = ""
    instance: str = ""  # the server's name on the bus; empty: from the nonce
    http: bool = False  # register rooms with SGLang's HTTP server as well, for decode servers without the plugin
    nonce: int = 0
    nonce_given: bool = False
    room_s: float = 300.0  # a room that stays unregistered for this long ends its request
    lost_s: float = 15.0  # a prefill rank silent for this long ends the requests that wait for it

    @property
    def name(self) -> str:
        """The server's name on the bus."""
        return self.instance or f"sglang-{self.nonce:016x}"


def read(environ: Mapping[str, str]) -> Settings:
    """Return the settings in these environment variables. Raises ConfigError for invalid values; while the plugin is
    off, nothing is checked and the defaults are returned."""
    method = environ.get(METHOD, "").strip()
    on = _switch(environ, SWITCH, bool(method))
    if not on:
        return Settings()
    bus, instance = environ.get(BUS, ""), environ.get(INSTANCE, "")
    if bus:
        check_base(bus)
    if instance and NAME.fullmatch(instance) is None:
        raise ConfigError(f"{INSTANCE}={instance!r}: a name has 1 to 64 letters, digits, '.', '_' and '-'")
    if environ.get(KEYS) and not instance:
        raise ConfigError(f"{KEYS} needs {INSTANCE}: the name of this server's key")
    return Settings(
        on=True,
        method=method,
        named=environ.get(NAMED, ""),
        cache_weight=_number(environ, CACHE_WEIGHT, Settings.cache_weight, 0.0, 1000.0, "a number"),
        bus=bus,
        keys=environ.get(KEYS, ""),
        instance=instance,
        http=_switch(environ, HTTP, False),
        nonce=_nonce(environ.get(NONCE) or environ.get(DRAWN, "")),
        nonce_given=bool(environ.get(NONCE)),
        room_s=_number(environ, ROOM_S, Settings.room_s, 1.0, DAY_S, "seconds"),
        lost_s=_number(environ, LOST_S, Settings.lost_s, 5.0, DAY_S, "seconds"),  # an idle rank publishes once a second
    )


def _switch(environ: Mapping[str, str], name: str, default: bool) -> bool:
    word = environ.get(name, "").strip().lower()
    if word and word not in _WORDS:
        raise ConfigError(f"{name}={word!r}: give on or off")
    return _WORDS[word] if word else default


def _number(environ: Mapping[str, str], name: str, default: float, least: float, most: float, what: str) -> float:
    text = environ.get(name, "")
    try:
        number = float(text) if text else default
    except ValueError:
        number = -1.0
    if not least <= number <= most:
        raise ConfigError(f"{name}={text!r}: {what}, between {least:g} and {most:g}")
    return number


def _nonce(text: str) -> int:
    if not text:
        return 0
    if not text.isdecimal() or not 1 <= int(text) <= MAX_ROOM:
        raise ConfigError(f"{NONCE}={text!r}: a whole number from 1 to {MAX_ROOM}, the same on all nodes of one server")
    return int(text)

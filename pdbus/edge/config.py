"""Settings of an edge. Owns names, defaults and checks."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bus.defaults import WAIT_S
from bus.errors import ConfigError
from pdbus.text.find import Places


@dataclass(frozen=True, slots=True)
class EdgeConfig:
    """ConfigError for what cannot be meant."""

    http: str = "127.0.0.1:8000"  # where it listens; port 0: a free one
    controller: str = ""  # its base address; empty: the default
    keys: str = ""  # directory of CURVE keys, for tcp to the cluster
    key_name: str = ""  # of its own key there, a client's; empty: edge, else the only one
    api_keys: str = ""  # file of bearer keys; empty: who reaches the port may use it
    tls_cert: str = ""  # with tls_key: PEM files; empty: plain HTTP
    tls_key: str = ""
    tokenizers: Places = field(default_factory=dict)
    sampling_defaults: Literal["model", "openai"] = "model"  # whose count where a request says nothing
    chat_max_tokens: int = 0  # of an answer to a chat that says nothing; 0: what fits, or the model's own
    cors_origins: tuple[str, ...] = ()  # whose pages may call it from a browser; "*": all
    wait_s: float = WAIT_S  # for the controller to appear at the start
    drain_s: float = 60.0  # how long requests may take to finish when it is told to leave
    max_requests: int = 1024  # answers under way at once; beyond that 429
    max_body_bytes: int = 16 << 20  # beyond that 413
    max_head_bytes: int = 64 << 10  # of the request line and headers; beyond that the connection is closed
    receive_s: float = 30.0  # for a client to send its request,
    send_s: float = 60.0  # and to take a piece of its answer when it has stopped reading
    max_time_s: float = 600.0  # for a request from submit to end, whatever deadline it says
    keep_alive_s: float = 75.0  # how long an idle connection is kept

    def __post_init__(self) -> None:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("--tls-cert and --tls-key go together")
        for path in filter(None, (self.tls_cert, self.tls_key)):
            if not Path(path).is_file():
                raise ConfigError(f"{path} is no file")
        if min(self.max_requests, self.max_body_bytes, self.max_head_bytes) < 1:
            raise ConfigError("limits of an edge must be at least 1")
        _ = self.address

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of `http`, which may be a port alone."""
        host, colon, port = self.http.rpartition(":")
        if not port.isdecimal() or int(port) > 65535 or (colon and not host):
            raise ConfigError(f"{self.http!r}: give --http a port, or a host and a port like 127.0.0.1:8000")
        return host.strip("[]") or "127.0.0.1", int(port)

    @property
    def exposed(self) -> bool:
        """Whether other machines may reach it."""
        host = self.address[0]
        try:
            return not ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host != "localhost"

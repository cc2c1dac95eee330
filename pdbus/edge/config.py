"""Settings of an HTTP edge (`pdbus serve`). Owns names, defaults and checks."""

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
    """The settings of an edge. Raises ConfigError for invalid values."""

    http: str = "127.0.0.1:8000"  # where it listens; port 0: a free one
    controller: str = ""  # its base address; empty: the default
    keys: str = ""  # directory of CURVE keys, for tcp to the cluster
    key_name: str = ""  # the name of its own key there (a client's); empty: edge, else the only one
    viewer_keys: str = ""  # directory of CURVE keys with a viewer's, for /fleet; empty: `keys`
    api_keys: str = ""  # file of bearer keys; empty: everyone who reaches the port may use it
    tls_cert: str = ""  # with tls_key: PEM files; empty: plain HTTP
    tls_key: str = ""
    tokenizers: Places = field(default_factory=dict)
    sampling_defaults: Literal["model", "openai"] = "model"  # the defaults for parameters that a request leaves out
    chat_max_tokens: int = 0  # for chats without a maximum; 0: what fits, or the model's own maximum
    cors_origins: tuple[str, ...] = ()  # origins of pages that may call it from a browser; "*": all
    wait_s: float = WAIT_S  # how long to wait for the controller at the start
    drain_s: float = 60.0  # how long requests may take to finish when it leaves
    max_requests: int = 1024  # answers in progress at once; more get 429
    max_body_bytes: int = 16 << 20  # of a request; longer ones get 413
    max_head_bytes: int = 64 << 10  # of request line and headers; longer ones close the connection
    receive_s: float = 30.0  # how long a client may take to send its request
    send_s: float = 60.0  # how long a client may stop reading its answer
    max_time_s: float = 600.0  # from submit to end of a request, whatever its deadline is
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
        """The host and port of `http`, which may be a port alone (then 127.0.0.1). Raises ConfigError for anything
        else."""
        host, colon, port = self.http.rpartition(":")
        if not port.isdecimal() or int(port) > 65535 or (colon and not host):
            raise ConfigError(f"{self.http!r}: give --http a port, or a host and a port like 127.0.0.1:8000")
        return host.strip("[]") or "127.0.0.1", int(port)

    @property
    def exposed(self) -> bool:
        """True if other machines may reach it."""
        host = self.address[0]
        try:
            return not ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host != "localhost"

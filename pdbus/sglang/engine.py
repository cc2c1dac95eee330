"""The facts about this process, from SGLang's own settings. Only this module and `seams` know SGLang's Python.

SGLang is imported in functions, when it runs and has imported the hooked modules itself.
"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bus.errors import ConfigError
from bus.wire.messages import Role
from controller.feeds import EngineSettings
from pdbus.sglang import addresses
from pdbus.sglang.settings import Settings

_ROLES: dict[str, Role] = {"prefill": "prefill", "decode": "decode"}


def sources() -> Path:
    """Return the folder of SGLang's runtime (`sglang/srt`); the working directory if SGLang is not installed."""
    spec = find_spec("sglang")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]) / "srt" if places else Path()


def rust_server() -> bool:
    """Return true if SGLang's server is the Rust one, which does not use the hooked functions."""
    return os.environ.get("SGLANG_RUST_SERVER", "").strip().lower() in ("1", "true", "yes", "y", "on", "t")


def imported(module: str) -> bool:
    """Return true if this process has imported the module (its name below `sglang.srt`)."""
    return f"sglang.srt.{module}" in sys.modules


@dataclass(frozen=True, kw_only=True)
class Server:
    """The SGLang server that this process belongs to, by its settings."""

    role: Role
    dp_size: int
    nodes: int  # machines
    host: str
    bootstrap_port: int
    head: str  # `host:port` where a server's machines meet; empty for one machine
    elastic: bool
    on_ray: bool = False
    switches_roles: bool = False
    method: str = ""  # its --load-balance-method, as SGLang resolved it

    @property
    def why_not(self) -> str:
        """The reason why the plugin leaves this server to SGLang; empty: it takes part."""
        if self.elastic:
            return "elastic EP: ranks come and go"
        if self.on_ray:
            return "--use-ray: SGLang loads no plugin where its ranks run"
        if self.switches_roles:
            return "--enable-pd-role-switch: where a rank's rooms are asked for goes by the role it started with"
        if self.role == "prefill" and self.dp_size > 1 and self.method == "follow_bootstrap_room":
            return (
                "its settings were resolved before plugins were loaded, and say follow_bootstrap_room for rooms: name "
                "another --load-balance-method"
            )
        return ""

    @property
    def bootstrap_host(self) -> str:
        """The host of SGLang's bootstrap server, seen from here."""
        return self.head.rpartition(":")[0] if self.head else self.host

    def bus(self, settings: Settings) -> str:
        """Return the address of the bus of this server's ranks: the one in `settings`, or a derived one. Raises
        ConfigError where it cannot be derived."""
        if settings.bus:
            return settings.bus
        if self.role == "prefill":
            return addresses.near(self.bootstrap_host, self.bootstrap_port)
        if self.nodes > 1:
            raise ConfigError("its ranks are on several machines: name a broker for them with PDBUS_SGLANG_BUS")
        return addresses.of_file(settings.nonce)

    def own_broker(self, settings: Settings) -> str:
        """Return the address that this server's main process binds a broker to; empty: it starts none. Raises
        ConfigError where it cannot be derived."""
        if settings.bus or self.dp_size == 1 or (self.role != "prefill" and self.nodes > 1):
            return ""
        if self.role == "prefill":
            return addresses.to_bind(self.host, self.bootstrap_port, _address_of)
        return addresses.of_file(settings.nonce)


def server() -> Server:
    """Return the server of this process. SGLang must have set its configuration in this process already."""
    from sglang.srt.runtime_context import get_device, get_disagg, get_parallel, get_serving

    parallel, disagg = get_parallel(), get_disagg()
    return Server(
        role=_ROLES.get(disagg.disaggregation_mode, "unified"),
        dp_size=int(parallel.num_dp_ranks),
        nodes=int(parallel.nnodes),
        host=get_serving().host,
        bootstrap_port=int(disagg.disaggregation_bootstrap_port),
        head=parallel.dist_init_addr or "",
        elastic=parallel.max_ep_size is not None,
        on_ray=bool(get_device().use_ray),
        switches_roles=bool(disagg.enable_pd_role_switch),
        method=str(parallel.load_balance_method),
    )


def left_to_sglang(view: Any) -> bool:
    """Return true if `view`, SGLang's settings while it resolves them, belongs to a server that the plugin leaves to
    SGLang (`Server.why_not`)."""
    return view.max_ep_size is not None or bool(view.use_ray) or bool(view.enable_pd_role_switch)


def dp_rank() -> int:
    """Return the rank number of this scheduler process."""
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().dp_rank or 0)


def speaks(scheduler: Any) -> bool:
    """Return true if this process speaks for its rank. A rank may have several processes; this is the one that gets
    requests from the DP controller and publishes load."""
    return scheduler.load_snapshot_writer is not None


def page_size(controller: Any) -> int:
    """Return the tokens in a page of the ranks' prefix caches; 0: unknown, or they keep none."""
    from sglang.srt.arg_groups.model_override_base import resolving_view

    view = resolving_view(controller.server_args)
    return 0 if view.disable_radix_cache else int(view.page_size or 0)


def kv_events(controller: Any, instance: str, here: Server) -> EngineSettings | None:
    """Return where the ranks publish changes of their prefix caches (--kv-events-config); None if they publish nothing,
    or not over tcp, or run on several machines."""
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.disaggregation.kv_events import KVEventsConfig

    text = resolving_view(controller.server_args).kv_events_config
    config = KVEventsConfig.from_cli(text) if text else None
    if config is None or config.publisher != "zmq" or config.format != "default" or here.nodes > 1:
        return None
    host, port = _tcp(config.endpoint)
    _, replay = _tcp(config.replay_endpoint or "")
    return EngineSettings("sglang", host, port, instance, here.dp_size, replay) if port else None


def _tcp(endpoint: str) -> tuple[str, int]:
    """Return host and port of a bound endpoint, seen from the same machine; port 0: not a tcp endpoint."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not endpoint.startswith("tcp://") or not port.isdecimal():
        return "", 0
    return ("127.0.0.1" if host in ("*", "0.0.0.0", "") else "[::1]" if host in ("::", "[::]") else host), int(port)


def is_health_check(request: Any) -> bool:
    """Return true for a health check, which schedulers may answer without ingesting it as a request."""
    from sglang.srt.managers.utils import is_health_check_generate_req

    return bool(is_health_check_generate_req(request))


def _address_of(name: str) -> str:
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(f"cannot resolve {name!r}, the host of this server ({error.strerror})") from None

"""What is hooked in a server's main process: the broker beside the bootstrap server, and SGLang's own method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bus import Broker, BrokerConfig
from bus.endpoints import is_exposed
from bus.errors import BusError
from bus.runtime.logs import get_logger
from pdbus.sglang import engine
from pdbus.sglang.settings import Settings

log = get_logger("sglang")


class ServerSide:
    """The main process; the broker lives as long as it does."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.broker: Broker | None = None

    def stop(self) -> None:
        """For tests; the process ends with everything in it."""
        if self.broker is not None:
            self.broker.stop()

    def start_broker(self, original: Callable[[], Any]) -> Any:
        """Around start_disagg_service, which starts the bootstrap server where there is one."""
        started = original()
        settings = self.settings
        try:
            here = engine.server()
            address = here.own_broker(settings)
            if address and self.broker is None:
                if is_exposed(address) and not settings.keys:
                    log.warning(
                        "pdbus.broker.exposed", address=address, risk="no keys: name a directory in PDBUS_SGLANG_KEYS"
                    )
                self.broker = Broker(BrokerConfig(address, keys=settings.keys)).start()
            method = settings.method or engine.own_method()
            log.info(
                "pdbus.plugin.on", role=here.role, ranks=here.dp_size, method=method, broker=address or settings.bus
            )
        except BusError as error:
            log.warning("pdbus.broker.not_started", why=str(error))
        except Exception:  # of ours, and no reason for the server not to start
            log.exception("pdbus.broker.not_started")
        return started

    @staticmethod
    def choose_method(server_args: Any, previous: Callable[[Any], None]) -> None:
        """SGLang's step that resolves `--load-balance-method`. What it calls follow_bootstrap_room would have prefill
        register nothing and decode compute ranks; the rank is ours to choose, so rooms are registered."""
        from sglang.srt.arg_groups.model_override_base import resolving_view
        from sglang.srt.arg_groups.overrides import declare_resolution

        previous(server_args)
        view = resolving_view(server_args)
        if view.disaggregation_mode == "prefill" and view.load_balance_method == "follow_bootstrap_room":
            declare_resolution(server_args, "pdbus", load_balance_method="round_robin")

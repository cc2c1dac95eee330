"""The hooks in a server's main process: the broker beside the bootstrap server, and the choice of SGLang's method.
A nonce is the number drawn at a server's start, which its processes share; a room is SGLang's number of a request."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import replace
from typing import Any, Protocol

from bus import Broker, BrokerConfig
from bus.endpoints import is_exposed
from bus.errors import BusError
from bus.runtime.epochs import new_epoch
from bus.runtime.logs import get_logger
from pdbus.sglang import engine
from pdbus.sglang.settings import DRAWN, NAMED, Settings

log = get_logger("sglang")


class _Side(Protocol):
    settings: Settings


class ServerSide:
    """The hooks in the main process of one or several SGLang servers. Brokers, by address in `brokers`, live as long as
    the process. Child processes get their settings through `environ`."""

    def __init__(self, settings: Settings, environ: MutableMapping[str, str]) -> None:
        self.settings = settings
        self.others: tuple[_Side, ...] = ()  # the other hooks of this process, which share the settings
        self.brokers: dict[str, Broker] = {}
        self._environ = environ

    def stop(self) -> None:
        """Stop the brokers, for tests; otherwise they end with the process."""
        for broker in self.brokers.values():
            broker.stop()

    def start_broker(self, original: Callable[[], Any]) -> Any:
        """Run SGLang's start_disagg_service (`original`, which starts the bootstrap server where there is one), start
        this server's broker, and return what SGLang's function returned. Errors of ours are logged."""
        started = original()
        settings = self.settings
        try:
            here = engine.server()
            if here.why_not:
                log.warning("pdbus.plugin.off", why=here.why_not)
                return started
            address = here.own_broker(settings)
            if address and address not in self.brokers:
                if is_exposed(address) and not settings.keys:
                    log.warning(
                        "pdbus.broker.exposed", address=address, risk="no keys: name a directory in PDBUS_SGLANG_KEYS"
                    )
                self.brokers[address] = Broker(BrokerConfig(address, keys=settings.keys)).start()
            method = settings.method or settings.named or here.method
            log.info(
                "pdbus.plugin.on", role=here.role, ranks=here.dp_size, method=method, broker=address or settings.bus
            )
        except BusError as error:
            log.warning("pdbus.broker.not_started", why=str(error))
        except Exception:  # an error of ours must not stop the server
            log.exception("pdbus.broker.not_started")
        return started

    def choose_method(self, server_args: Any, previous: Callable[[Any], None]) -> None:
        """Run SGLang's step that resolves `--load-balance-method` (`previous`), once for each server, and give that
        server its nonce. Where it resolves to follow_bootstrap_room on a prefill server, set round_robin instead: with
        SGLang's own, prefill would register no rooms and decode would compute ranks, but we choose the rank."""
        from sglang.srt.arg_groups.model_override_base import resolving_view
        from sglang.srt.arg_groups.overrides import declare_resolution

        view = resolving_view(server_args)
        named = "" if view.load_balance_method == "auto" else str(view.load_balance_method)
        nonce = self.settings.nonce if self.settings.nonce_given else new_epoch()
        self._environ.update({DRAWN: str(nonce), NAMED: named})
        for side in (self, *self.others):
            side.settings = replace(self.settings, nonce=nonce, named=named)
        previous(server_args)
        view = resolving_view(server_args)
        follows = view.disaggregation_mode == "prefill" and view.load_balance_method == "follow_bootstrap_room"
        if follows and not engine.left_to_sglang(view):
            declare_resolution(server_args, "pdbus", load_balance_method="round_robin")

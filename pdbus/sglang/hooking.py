"""Hooks the functions of an SGLang process; none when the plugin is off, or when SGLang differs from `seams`.

Never raises, because SGLang would go on without the plugin anyway.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import MutableMapping
from importlib import metadata
from typing import NamedTuple

from bus.errors import BusError, ConfigError
from bus.runtime.epochs import new_epoch
from bus.runtime.logs import Logger
from controller.policies import resolve
from pdbus.sglang import engine
from pdbus.sglang.controller import ControllerSide
from pdbus.sglang.scheduler import SchedulerSide
from pdbus.sglang.seams import HOOKS, TESTED, mismatches
from pdbus.sglang.server import ServerSide
from pdbus.sglang.settings import DRAWN, Settings, read

# The version whose sources a process has compared; empty: nothing was hooked. Child processes rely on it.
CHECKED = "PDBUS_SGLANG_CHECKED"
MAIN = "managers.disagg_service"  # hooked even in a process that has not imported it yet

log = Logger("sglang.pdbus")  # loaded before SGLang's logging is set up; under this name warnings show


class Sides(NamedTuple):
    """The hooks by the kind of process that uses them. Each process has all three, and SGLang calls one."""

    server: ServerSide
    scheduler: SchedulerSide
    controller: ControllerSide


def hook(environ: MutableMapping[str, str]) -> Sides | None:
    """Hook this process as `environ` says, and store there what child processes need. Return the hooks; None where
    nothing was hooked. The first process logs the reason: the main process, or a `multiprocessing` child in which a
    program starts a server."""
    heir = multiprocessing.parent_process() is not None and CHECKED in environ
    if heir and not environ[CHECKED]:
        return None
    try:
        settings = read(environ)
        if not settings.on:
            return None
        if engine.rust_server():
            raise ConfigError("SGLANG_RUST_SERVER goes other ways than those it knows")
        if settings.method:
            resolve(settings.method, "unified")
        if not heir:
            _prepare(environ)
        return _register(read(environ), environ)
    except BusError as error:
        environ[CHECKED] = ""
        log.warning("pdbus.plugin.off", why=str(error))
        return None


def _prepare(environ: MutableMapping[str, str]) -> None:
    """Check SGLang's sources, and draw the nonce that all processes of this start share. (Each server whose settings
    are resolved later draws its own nonce; a program may have resolved them before.)"""
    version = metadata.version("sglang")
    wrong = list(mismatches(engine.sources()))
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise ConfigError(f"SGLang {version} is not as it knows it (tested: {', '.join(TESTED)}): {wrong[0]}{more}")
    environ[CHECKED] = version
    environ[DRAWN] = str(new_epoch())


def _register(settings: Settings, environ: MutableMapping[str, str]) -> Sides:
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    sides = Sides(ServerSide(settings, environ), SchedulerSide(settings), ControllerSide(settings))
    sides.server.others = (sides.scheduler, sides.controller)
    for seam in HOOKS:
        if seam.module == MAIN or engine.imported(seam.module):
            (function,) = (getattr(side, seam.does) for side in sides if hasattr(side, seam.does))
            HookRegistry.register(seam.target, function, HookType(seam.kind))
    register_resolution_hook("handle_load_balance_method")(sides.server.choose_method)
    return sides

"""The engines that a node can run, by the name that `--engine` takes: their needs and settings, and how to open them.

This module owns the registry and knows no engine. An engine is named here (BUILT_IN) or, from outside, by an entry
point of the group `pdbus.engines`. The name leads to an EngineKind, which is imported when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import click

from bus.errors import ConfigError
from bus.runtime.loop import Loop
from bus.runtime.metrics import Metric
from nodes.config import NodeConfig
from nodes.link.runner import Runner

if TYPE_CHECKING:
    NameChoice: TypeAlias = click.Choice[str]
else:
    NameChoice = click.Choice  # takes no subscript before click 8.2

GROUP = "pdbus.engines"
BUILT_IN = {
    "torch": "nodes.own.kinds:TORCH",
    "numpy": "nodes.own.kinds:NUMPY",
    "sim": "nodes.own.kinds:SIM",
    "vllm": "nodes.vllm.kind:VLLM",
}
Progress: TypeAlias = Callable[[str, float], None]


@dataclass(frozen=True)
class Opened:
    """An engine that is loaded. `figures` is called for each page of metrics, on the loop's thread."""

    runners: Sequence[Runner]  # one for each rank of the node, in their order
    step_tokens: int  # the most tokens that one step computes
    figures: Callable[[], Iterable[Metric]] = tuple  # returns the engine's own metrics


@dataclass(frozen=True, kw_only=True)
class Demo:
    """The way `pdbus demo` runs an engine: the number of ranks of each role, its models, the seconds that a start may
    take, its own arguments, environment variables for the nodes, and the engine of ours (`torch` or `numpy`) that
    computes every answer again for comparison."""

    models: tuple[str, ...]
    ranks: int = 2
    start_timeout_s: float = 120.0
    arguments: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    reference: str = "torch"


def nothing_to_prepare(model: str, progress: Progress) -> None:
    """Do nothing: the `prepare` of an engine that needs none."""


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    """An engine, as the node, `pdbus up`, `calibrate`, `replay` and `demo` need to know it.

    - `settings(options, arguments)` returns the value of `NodeConfig.engine`, from the node's options (by name) and the
      arguments after `--`. Raises ConfigError for invalid ones.
    - `opened(config, loop, progress)` is for a `with` block: it loads the engine, calling `progress(what, fraction)`
      meanwhile, and closes it at the end of the block. The runners' events come on the thread of `loop`. Raises
      ConfigError or StartError when the engine cannot start.
    - `prepare(model, progress)` prepares the machine for `model`; it is called once, before any rank loads the model.
      Raises ConfigError if something is not installed, or the model is unknown.
    - `max_running`, `chunk_tokens`: the defaults of these options.
    - `our_options`: true if it takes the options of our own engines (`--kv-tokens`, `--sim-...`); if false, they are
      refused.
    - `decode_cache`: true if its decode ranks can keep KV caches (`--decode-cache`).
    - `takes_arguments`: true if it gets the arguments after `--`; if false, they are refused.
    - `needs_model`: true if `--model` must be given.
    - `first_at_decode`: true if its decode ranks compute the first token themselves; if false, they pass on the one
      that the prefill rank computed.
    - `front`: the HTTP server that `pdbus up` starts by default; `vllm` is vLLM's own server in front of the bus.
    """

    settings: Callable[[Mapping[str, Any], Sequence[str]], Any]
    opened: Callable[[NodeConfig, Loop, Progress], AbstractContextManager[Opened]]
    prepare: Callable[[str, Progress], None] = nothing_to_prepare
    max_running: int = 64
    chunk_tokens: int = 512
    our_options: bool = False
    decode_cache: bool = False
    takes_arguments: bool = False
    needs_model: bool = False
    first_at_decode: bool = False
    front: Literal["light", "vllm"] = "light"
    demo: Demo | None = None


def names() -> tuple[str, ...]:
    """Return the names of all engines, those from outside last."""
    return (*BUILT_IN, *sorted(_outside()))


def kind_of(name: str) -> EngineKind:
    """Return the engine with this name; its module is imported. Raises ConfigError if there is no such engine, or if it
    cannot be imported."""
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        kind: EngineKind = getattr(import_module(module), attribute)
        return kind
    entry = _outside().get(name)
    if entry is None:
        raise ConfigError(f"there is no engine {name!r}; choose one of {', '.join(names())}")
    try:
        found = entry.load()
    except Exception as error:  # a foreign module may raise anything
        raise ConfigError(f"the engine {name!r} ({entry.value}) cannot be loaded: {error}") from error
    if not isinstance(found, EngineKind):
        raise ConfigError(f"the engine {name!r} ({entry.value}) is no nodes.EngineKind")
    return found


def check_arguments(name: str, arguments: Sequence[str]) -> None:
    """Raise ConfigError if `arguments` (what follows `--`) are given for an engine that takes none."""
    if arguments and not kind_of(name).takes_arguments:
        taking = ", ".join(each for each in BUILT_IN if kind_of(each).takes_arguments)
        raise ConfigError(f"{arguments[0]!r}: only --engine {taking} takes arguments of the engine's own")


class EngineName(NameChoice):
    """A click option type: the name of an engine, except those in `without`. Only the built-in names are listed in the
    help; those from outside are looked up when one is given."""

    def __init__(self, *without: str) -> None:
        super().__init__([name for name in BUILT_IN if name not in without])
        self._without = without

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value in self.choices:
            return str(value)
        known = [name for name in names() if name not in self._without]
        return click.Choice(known).convert(value, param, ctx)


@cache
def _outside() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP) if entry.name not in BUILT_IN}

"""The settings of a command: its options, which the environment and a file (TOML) may give as well.

`command` replaces `click.command` and knows no setting by itself. A value comes from the first of these that has it:
the flag; the environment, as `PDBUS_<SECTION>_<OPTION>`; the file that `--config` names, in the table `[<section>]`;
the default. Settings that all parts of a cluster have in common (`SHARED`) may stand in `[cluster]`, and without a
section in the environment. This module owns these names, and where each value came from.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import click
from click.core import ParameterSource

from bus.errors import ConfigError

SECTIONS = {  # every table that a file may have, and whose it is
    "cluster": "all of them",
    "broker": "`python -m bus`",
    "controller": "`python -m controller`",
    "node": "`python -m nodes.prefill`, `.decode` and `.unified`",
    "prefill": "`python -m nodes.prefill`, before `node`",
    "decode": "`python -m nodes.decode`, before `node`",
    "unified": "`python -m nodes.unified`, before `node`",
    "up": "`pdbus up`",
    "serve": "`pdbus serve`",
    "generate": "`pdbus generate`",
    "status": "`pdbus status`",
    "top": "`pdbus top`",
    "trace": "`pdbus trace`",
    "record": "`pdbus record`",
    "targets": "`pdbus targets`",
    "drain": "`pdbus drain`",
}
SHARED = ("bus", "controller", "keys", "log-level", "metrics-host", "otlp-endpoint")
_ALONE = ("watch-parent", "help", "config", "print-config")  # flags and nothing else
# What Kubernetes puts into the environment for a Service that is named like a part.
_OF_KUBERNETES = re.compile(r"SERVICE_(HOST|PORT\w*)|PORT(_\d+_\w+)?")
_FILE, _PLACES, _PRINT, _ARGUMENTS = (f"pdbus.settings.{name}" for name in ("file", "places", "print", "arguments"))


def command(
    *sections: str, reloads: Iterable[str] = (), cls: type[click.Command] | None = None, **attributes: Any
) -> Callable[[Callable[..., Any]], click.Command]:
    """Return a decorator that makes a click command (of class `cls`, else `Command`) whose options are settings of
    `sections`; the last section wins. The settings named in `reloads` may change while the command runs
    (`bus.runtime.reload`)."""
    return click.command(cls=cls or Command, sections=sections, reloads=reloads, **attributes)


def config_file() -> str:
    """Return the path given with `--config` to the running command, or an empty string."""
    return str(click.get_current_context().meta.get(_FILE, ""))


def settings_of(command: click.Command) -> Iterator[tuple[str, click.Option]]:
    """Give the options of `command` that file and environment may set, each with its name in a file (`room-ttl-s`)."""
    for option in command.params:
        if isinstance(option, click.Option):
            name = max(option.opts, key=len).removeprefix("--")
            if name not in _ALONE:
                yield name, option


def reread(ctx: click.Context) -> dict[str, Any]:
    """Read file and environment again, and return all parameters with which the command would be called now, by name.
    ConfigError or click.UsageError where it would not start."""
    command = ctx.command
    assert isinstance(command, Command)
    command.check_environment()
    return command.make_context(ctx.info_name, list(ctx.meta[_ARGUMENTS]), parent=ctx.parent).params


def reloadable(ctx: click.Context) -> dict[str, str]:
    """Return the parameters of the running command that may change while it runs, each with the name of its setting."""
    command = ctx.command
    assert isinstance(command, Command)
    return {str(command.settings[name].name): name for name in command.reloads}


def names(ctx: click.Context, parameters: Iterable[str]) -> list[str]:
    """Return the setting names of these parameters."""
    command = ctx.command
    assert isinstance(command, Command)
    return [name for name, option in command.settings.items() if option.name in set(parameters)]


class Command(click.Command):
    """A click command that reads its options from file and environment too, and has `--config` and `--print-config`;
    `command` makes it."""

    def __init__(
        self, *arguments: Any, sections: tuple[str, ...], reloads: Iterable[str] = (), **attributes: Any
    ) -> None:
        super().__init__(*arguments, **attributes)
        assert set(sections) <= SECTIONS.keys()
        self.sections = sections
        self.settings = dict(settings_of(self))
        self.reloads = tuple(reloads)
        assert set(self.reloads) <= self.settings.keys()
        for name, option in self.settings.items():
            option.envvar = variables(sections, name)
        self.params += [
            click.Option(
                ["--config"], metavar="FILE", envvar="PDBUS_CONFIG", is_eager=True, expose_value=False,
                callback=self._read, help="Settings from a TOML file; environment and flags go before them.",
            ),
            click.Option(
                ["--print-config"], is_flag=True, is_eager=True, expose_value=False, callback=_remember,
                help="Show every setting and where it came from, and leave.",
            ),
        ]  # fmt: skip

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does; an invalid value from file or environment is a UsageError that names the place."""
        ctx.meta[_ARGUMENTS] = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.BadParameter as error:
            at = next((each for each in self.settings.items() if each[1] is error.param), None)
            if at is None or (place := self._place(ctx, at[1])) in ("default", "flag"):
                raise
            raise click.UsageError(f"{place}: {at[0]}: {error.message}", ctx) from None

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, or with `--print-config` print its settings and where each came from. ConfigError as for
        `check_environment`."""
        self.check_environment()
        if not ctx.meta.get(_PRINT):
            return super().invoke(ctx)
        click.echo(f"[{self.sections[-1]}]")
        for name, option in self.settings.items():
            value = ctx.params[option.name or ""]
            given = f"{name} = {_toml(value)}" if value is not None else f"# {name} is not set"
            click.echo(f"{given.ljust(40)}  # {self._place(ctx, option)}")
        return None

    def _read(self, ctx: click.Context, option: click.Parameter, path: str | None) -> None:
        """Store the file's values where click looks for defaults."""
        if not path:
            return
        ctx.meta[_FILE], ctx.meta[_PLACES], values = path, {}, {}
        for table, name, value in _values(path, self.sections, self.settings):
            option = self.settings[name]
            assert option.name is not None
            values[option.name] = _as_text(option, value, f"{path}: [{table}] {name}")
            ctx.meta[_PLACES][option.name] = f"{path} [{table}]"
        ctx.default_map = values

    def _place(self, ctx: click.Context, option: click.Parameter) -> str:
        assert option.name is not None
        source = ctx.get_parameter_source(option.name)
        if source is ParameterSource.ENVIRONMENT:
            names = [option.envvar] if isinstance(option.envvar, str) else option.envvar or ()
            return "$" + next(name for name in names if os.environ.get(name))
        if source is ParameterSource.DEFAULT_MAP:
            return str(ctx.meta[_PLACES][option.name])
        return "flag" if source is ParameterSource.COMMANDLINE else "default"

    def check_environment(self) -> None:
        """Raise ConfigError for an environment variable of one of our sections that is no setting."""
        known = {name for setting in self.settings for name in variables(self.sections, setting)}
        for variable in sorted(os.environ.keys() - known):
            for section in self.sections:
                rest = variable.removeprefix(f"PDBUS_{section.upper()}_")
                if rest != variable and not _OF_KUBERNETES.fullmatch(rest):
                    raise ConfigError(f"${variable}: no such setting{_nearest(variable, known, '$')}")


def variables(sections: Iterable[str], name: str) -> list[str]:
    """Return the environment variables for a setting, the one that wins first."""
    option = name.replace("-", "_").upper()
    own = [f"PDBUS_{section.upper()}_{option}" for section in reversed(tuple(sections))]
    return own + ([f"PDBUS_{option}"] if name in SHARED else [])


def _remember(ctx: click.Context, option: click.Parameter, value: bool) -> None:
    ctx.meta[_PRINT] = value


def _values(path: str, sections: tuple[str, ...], settings: Iterable[str]) -> Iterator[tuple[str, str, Any]]:
    """Return (table, setting, value) of the file, the winning ones last. ConfigError for an entry that is not
    allowed."""
    try:
        with open(path, "rb") as file:
            tables = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no TOML: {error}") from None
    for table, content in tables.items():
        if not isinstance(content, dict):
            raise ConfigError(f"{path}: {table} stands in no table: put it into [cluster] or [{sections[-1]}]")
        if table not in SECTIONS:
            raise ConfigError(f"{path}: there is no table [{table}]{_nearest(table, SECTIONS)}")
    for table in ("cluster", *sections):
        known = SHARED if table == "cluster" else tuple(settings)
        for key, value in tables.get(table, {}).items():
            name = key.replace("_", "-")
            if name not in known:
                raise ConfigError(f"{path}: [{table}] has no setting {key}{_nearest(name, known)}")
            if name in settings:
                yield table, name, value


def _as_text(option: click.Option, value: Any, where: str) -> Any:
    """Return a value as command line text, so that it is checked in the same way."""
    values = value if isinstance(value, list) and option.multiple else [value]
    if any(isinstance(each, bool) != option.is_flag or isinstance(each, list | dict) for each in values):
        wanted = "true or false" if option.is_flag else "a number or a text"
        raise ConfigError(f"{where} takes {wanted}{', or a list of them' if option.multiple else ''}")
    texts = [each if option.is_flag else str(each) for each in values]
    return texts if option.multiple else texts[0]


def _nearest(name: str, known: Iterable[str], mark: str = "") -> str:
    close = difflib.get_close_matches(name, sorted(known), 1, 0.5)
    return f"; did you mean {mark}{close[0]}?" if close else ""


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f") if isinstance(value, str) else repr(value)

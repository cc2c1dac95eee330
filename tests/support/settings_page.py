"""docs/configuration.md, from its mark on: every setting of every command, as the command lines themselves have them.

`make settings` writes it; a test compares.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import click

from bus.__main__ import main as broker
from bus.endpoints import runtime_dir
from bus.runtime.settings import SHARED, settings_of, variables
from controller.__main__ import main as controller
from nodes.main import command as node
from pdbus.cli import COMMANDS

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
MARK = "<!-- From here on: make settings -->\n"


def commands() -> dict[str, click.Command]:
    """By the title of their sections in the document, those that have settings."""
    found = {"python -m bus": broker, "python -m controller": controller, "python -m nodes.prefill": node("prefill")}
    found |= {"python -m nodes.decode": node("decode"), "python -m nodes.unified": node("unified")}
    for name, (module, attribute, _) in COMMANDS.items():
        found[f"pdbus {name}"] = getattr(import_module(module), attribute)
    return {title: command for title, command in found.items() if hasattr(command, "sections")}


SHARED_ROWS = {
    "bus": "The broker: ipc:///dir/bus or tcp://host:port (three ports). Default: ipc://$PDBUS_DIR/bus.",
    "controller": "The controller: ipc:///dir/controller or tcp://host:port (two ports); a node takes several. Default: ipc://$PDBUS_DIR/controller.",
    "keys": "Directory of CURVE keys (pdbus keys new DIR); none: plain.",
    "log-level": "What to log, on stderr (the parts: at once after SIGHUP).",
    "metrics-host": "The address of the metrics port.",
    "otlp-endpoint": "Export spans of traced requests to this OTLP/HTTP collector.",
}


def page() -> str:
    """Return the page from its mark on. A setting that several parts share has one row, in the first table."""
    assert SHARED_ROWS.keys() == set(SHARED), "a row for each shared setting"
    shared = [
        f"| `{name}`{'*' if name == 'log-level' else ''} | `PDBUS_{name.replace('-', '_').upper()}` | {text} |"
        for name, text in SHARED_ROWS.items()
    ]
    parts = ["\n".join(["## Shared settings\n", "Table `[cluster]`, or that of the part.\n",
                        "| setting | environment | what |", "|---|---|---|", *shared, ""])]  # fmt: skip
    for title, command in commands().items():
        if title in ("python -m nodes.decode", "python -m nodes.unified"):
            continue  # as prefill, but for the name
        sections: tuple[str, ...] = command.sections  # type: ignore[attr-defined]
        title = title.replace("nodes.prefill", "nodes.prefill, .decode, .unified")
        tables = " or ".join(f"`[{section}]`" for section in reversed(sections))
        tables = tables.replace("`[prefill]`", "`[prefill]`, `[decode]`, `[unified]`")
        rows = [
            f"| {_name(name, command)} | {', '.join(f'`{each}`' for each in _variables(sections, name))} "
            f"| {_default(option)} | {_help(option)} |"
            for name, option in settings_of(command)
            if name not in SHARED
        ]
        parts.append(
            "\n".join([f"## {title}\n", f"Table {tables}.\n", "| setting | environment | default | what |",
                       "|---|---|---|---|", *rows, ""])
        )  # fmt: skip
    return "\n".join(parts)


def _name(name: str, command: click.Command) -> str:
    return f"`{name}`{'*' if name in command.reloads else ''}"  # type: ignore[attr-defined]


def _variables(sections: tuple[str, ...], name: str) -> list[str]:
    shared = [f"PDBUS_{name.replace('-', '_').upper()}"] if name in SHARED else []
    return shared or variables(sections[:1], name)


def _default(option: click.Option) -> str:
    default: Any = option.show_default if isinstance(option.show_default, str) else option.default
    if isinstance(default, tuple):
        default = " ".join(default)
    if not isinstance(default, str | int | float) or default == "":
        return ""
    text = str(default).lower() if isinstance(default, bool) else str(default)
    return f"`{text.replace(str(runtime_dir()), '$PDBUS_DIR')}`"


def _help(option: click.Option) -> str:
    return (option.help or option.human_readable_name).replace("|", "\\|").replace("  [default: ", " [default: ")


def main() -> None:
    PAGE.write_text(PAGE.read_text(encoding="utf-8").partition(MARK)[0] + MARK + "\n" + page(), encoding="utf-8")


if __name__ == "__main__":
    main()

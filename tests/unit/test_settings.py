"""Settings of a command: flag before environment before file before default, and what a file must not say."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import settings_page
from click.testing import CliRunner, Result

from bus.errors import ConfigError
from bus.runtime import cli, settings
from pdbus.launcher.addresses import Addresses
from pdbus.launcher.spec import ClusterSpec


@settings.command("node", "decode")
@click.argument("rest", nargs=-1)
@click.option("--bus", default="ipc:///usual/bus")
@click.option("--lease-s", type=cli.Seconds(), default=3.0)
@click.option("--slots", "max_running", type=int, default=None)
@click.option("--rank", "ranks", multiple=True, default=("0",))
@click.option("--quiet", is_flag=True)
@cli.watch_parent_option
def part(**chosen: Any) -> None:
    for name, value in chosen.items():
        print(f"{name}={value!r}")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(file: str = "", *arguments: str, **env: str) -> Result:
    if file:
        Path("c.toml").write_text(file, encoding="utf-8")
        arguments = ("--config", "c.toml", *arguments)
    return CliRunner().invoke(part, arguments, env=env)


def chosen(*arguments: str, **env: str) -> dict[str, str]:
    result = run(*arguments, **env)
    assert result.exit_code == 0, (result.output, result.exception)
    return dict(line.split("=", 1) for line in result.output.splitlines())


def test_each_place_goes_before_the_next() -> None:
    assert chosen()["lease_s"] == "3.0"
    file = "[cluster]\nbus = 'ipc:///shared'\n[node]\nlease-s = 4\nslots = 7\n"
    assert (chosen(file)["lease_s"], chosen(file)["bus"], chosen(file)["max_running"]) == (
        "4.0",
        "'ipc:///shared'",
        "7",
    )
    assert chosen(file + "[decode]\nlease_s = 5.5\n")["lease_s"] == "5.5"
    assert chosen(file, PDBUS_NODE_LEASE_S="6", PDBUS_BUS="ipc:///env")["lease_s"] == "6.0"
    assert chosen(file, PDBUS_NODE_LEASE_S="6", PDBUS_DECODE_LEASE_S="7")["lease_s"] == "7.0"
    assert chosen(file, PDBUS_BUS="ipc:///env")["bus"] == "'ipc:///env'"
    assert chosen(file, PDBUS_BUS="ipc:///env", PDBUS_NODE_BUS="ipc:///own")["bus"] == "'ipc:///own'"
    assert chosen(file, "--lease-s", "8", PDBUS_NODE_LEASE_S="6")["lease_s"] == "8.0"
    assert chosen(PDBUS_LEASE_S="6")["lease_s"] == "3.0", "not shared: it needs its table's name"


def test_flags_and_several_values() -> None:
    assert chosen("[node]\nquiet = true\nrank = ['1', 2]\n") | {"bus": ""} == {
        "rest": "()", "bus": "", "lease_s": "3.0", "max_running": "None", "ranks": "('1', '2')", "quiet": "True",
        "watch_parent": "False",
    }  # fmt: skip
    assert chosen("[node]\nrank = '1-3'\n")["ranks"] == "('1-3',)"
    assert chosen(PDBUS_NODE_RANK="4 5", PDBUS_NODE_QUIET="1")["ranks"] == "('4', '5')"
    assert chosen(PDBUS_NODE_RANK="4 5", PDBUS_NODE_QUIET="1")["quiet"] == "True"


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("[node]\nlease = 3", "c.toml: [node] has no setting lease; did you mean lease-s?"),
        ("[node]\nzzz = 3", "c.toml: [node] has no setting zzz"),
        ("[nodes]\nlease-s = 3", "c.toml: there is no table [nodes]; did you mean node?"),
        ("lease-s = 3", "c.toml: lease-s stands in no table: put it into [cluster] or [decode]"),
        ("[cluster]\nlease-s = 3", "c.toml: [cluster] has no setting lease-s"),
        ("[node]\nwatch-parent = true", "c.toml: [node] has no setting watch-parent"),
        ("[node]\nconfig = 'x'", "c.toml: [node] has no setting config"),
        ("[node]\nquiet = 'yes'", "c.toml: [node] quiet takes true or false"),
        ("[node]\nlease-s = true", "c.toml: [node] lease-s takes a number or a text"),
        ("[node]\nlease-s = [1]", "c.toml: [node] lease-s takes a number or a text"),
        ("[node]\nrank = [[1]]", "c.toml: [node] rank takes a number or a text, or a list of them"),
        ("[node", "c.toml is no TOML: "),
    ],
)
def test_what_a_file_must_not_say_is_one_line(file: str, says: str) -> None:
    error = run(file).exception
    assert isinstance(error, ConfigError)
    assert str(error).startswith(says)
    assert "\n" not in str(error)


def test_tables_of_other_parts_are_theirs() -> None:
    assert chosen("[controller]\nwhatever = 1\n[cluster]\nmetrics-host = '0.0.0.0'\n")["lease_s"] == "3.0"


@pytest.mark.parametrize(
    ("file", "env", "says"),
    [
        ("[node]\nslots = 1.5", {}, "c.toml [node]: slots: '1.5' is not a valid integer."),
        ("[node]\nslots = 1", {"PDBUS_NODE_SLOTS": "x"}, "$PDBUS_NODE_SLOTS: slots: 'x' is not a valid integer."),
    ],
)
def test_a_bad_value_says_where_it_stands(file: str, env: dict[str, str], says: str) -> None:
    result = run(file, **env)
    assert result.exit_code == 2
    assert says in result.output


def test_a_variable_that_is_no_setting_is_an_error_unless_kubernetes_made_it() -> None:
    error = run(PDBUS_NODE_LEASES="3").exception
    assert isinstance(error, ConfigError)
    assert str(error) == "$PDBUS_NODE_LEASES: no such setting; did you mean $PDBUS_NODE_LEASE_S?"
    made = {"PDBUS_NODE_SERVICE_HOST": "10.0.0.1", "PDBUS_NODE_SERVICE_PORT_DATA": "1", "PDBUS_NODE_PORT": "tcp://h:1",
            "PDBUS_NODE_PORT_5560_TCP": "tcp://h:1", "PDBUS_NODE_PORT_5560_TCP_ADDR": "h"}  # fmt: skip
    assert chosen(PDBUS_CONTROLLER_LEASE_S="not mine", PDBUS_DIR="/x", **made)["lease_s"] == "3.0"


def test_a_file_that_is_not_there() -> None:
    error = CliRunner().invoke(part, [], env={"PDBUS_CONFIG": "/nowhere.toml"}).exception
    assert isinstance(error, ConfigError)
    assert str(error) == "cannot read /nowhere.toml: No such file or directory"


def test_print_config_is_a_file_with_the_same_settings_and_says_where_each_came_from() -> None:
    file = "[cluster]\nbus = 'ipc:///sh\"ared'\n[node]\nrank = [1, 2]\n"
    printed = run(file, "--print-config", "--lease-s", "8", PDBUS_NODE_QUIET="1")
    assert printed.exit_code == 0, printed.output
    assert tomllib.loads(printed.output) == {
        "decode": {"bus": 'ipc:///sh"ared', "lease-s": 8.0, "rank": ["1", "2"], "quiet": True}
    }
    lines = [line for line in printed.output.splitlines() if " = " in line]
    places = {line.split(" = ")[0]: line.rpartition("# ")[2] for line in lines}
    assert places == {
        "bus": "c.toml [cluster]",
        "lease-s": "flag",
        "rank": "c.toml [node]",
        "quiet": "$PDBUS_NODE_QUIET",
    }
    assert "# slots is not set" in printed.output
    again = run(printed.output, "--print-config")
    assert tomllib.loads(again.output) == tomllib.loads(printed.output)


@pytest.mark.parametrize("title", settings_page.commands())
def test_every_command_prints_its_settings(title: str) -> None:
    command = settings_page.commands()[title]
    needed = {"pdbus generate": ["TEXT"], "pdbus drain": ["decode-0/1"], "pdbus trace": ["r"]}
    needed["pdbus record"] = ["10s", "out.json"]
    result = CliRunner().invoke(command, ["--print-config", *needed.get(title, [])])
    assert result.exit_code == 0, (result.output, result.exception)
    (table,) = tomllib.loads(result.output).values()
    assert {"keys", "controller" if title != "python -m bus" else "bus"} <= table.keys()


def test_the_document_has_every_setting() -> None:
    text = settings_page.PAGE.read_text(encoding="utf-8")
    assert text.partition(settings_page.MARK)[2].strip() == settings_page.page().strip(), "run: make settings"
    for section in settings.SECTIONS:
        assert f"`[{section}]`" in text, section
    for name in settings.SHARED:
        assert f"`{name}`" in text


def test_a_cluster_gives_its_file_on_to_its_parts() -> None:
    at = Addresses("ipc:///x/bus", {"controller-0": "ipc:///x/controller"}, "ipc:///x")
    for part_spec in ClusterSpec(prefill=1, decode=1, engine="sim", http="0", config="c.toml").parts(at):
        assert "--config c.toml" in " ".join(part_spec.args), part_spec.name
    assert not any("--config" in each.args for each in ClusterSpec(prefill=1, decode=1, engine="sim").parts(at))


def test_up_gives_its_file_on(tmp_path: Path) -> None:
    """Up to the first part that reads it."""
    file = tmp_path / "c.toml"
    file.write_text("[up]\nmodel = 'sim'\n[broker]\nroom-ttl = 5\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pdbus", "up", "--config", str(file)],
        capture_output=True, text=True, check=False, timeout=120, env={"PDBUS_DIR": str(tmp_path), "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 2, "it would not help to start it again"
    assert f"{file}: [broker] has no setting room-ttl; did you mean room-ttl-s?" in done.stderr

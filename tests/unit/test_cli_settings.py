"""What every command line of ours refuses, and how it says so."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from bus.__main__ import main as broker
from bus.endpoints import unresolved, why_silent
from bus.errors import ConfigError
from bus.runtime.cli import printable
from controller.__main__ import main as controller
from controller.config import ControllerConfig
from nodes.main import command
from pdbus.cli import COMMANDS, pdbus


def durations() -> Iterator[tuple[str, click.Command, str]]:
    """Every option in seconds of every command."""
    context = click.Context(pdbus)
    subcommands = {f"pdbus {name}": pdbus.get_command(context, name) for name in COMMANDS}
    programs = {"bus": broker, "controller": controller, "nodes.decode": command("decode"), **subcommands}
    for program, each in programs.items():
        assert each is not None
        for parameter in each.params:
            for option in parameter.opts:
                if option.endswith(("-s", "-s-per-token")):
                    yield program, each, option


DURATIONS = list(durations())


def test_the_durations_are_found() -> None:
    found = {option for *_, option in DURATIONS}
    assert {"--wait-s", "--drain-s", "--deadline-s", "--beacon-s", "--slo-ttft-s", "--sim-base-s"} <= found


@pytest.mark.parametrize(
    ("each", "option"), [pytest.param(each, option, id=f"{program} {option}") for program, each, option in DURATIONS]
)
def test_a_duration_is_a_number_of_seconds(each: click.Command, option: str) -> None:
    for value in ("nan", "inf", "-inf", "-1", "1e300"):
        result = CliRunner().invoke(each, [f"{option}={value}"])
        assert result.exit_code == 2, value
        assert f"Invalid value for '{option}'" in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["replay", "--chunk-tokens", "many"], "'many' is not a valid integer. (see pdbus replay --help)"),
        (["generate"], "Missing argument 'TEXT'. (see pdbus generate --help)"),
        (["keys", "add", "a", "client"], "Missing argument 'NAME'. (see pdbus keys add --help)"),
        (
            ["keys", "give", "a", "client", "b", "c"],
            "a/allow/clients/b.key is missing: no client of that name",
        ),
        (["keys", "revoke", "a", "node", "b"], "a/allow/nodes/b.key is missing: no node of that name is allowed"),
        (["keys", "add", "a", "node", "b"], "a holds no list of keys; make one with: pdbus keys new a"),
        (["nothing"], "No such command 'nothing'. (see pdbus --help)"),
        (["drain", f"decode-0/{10**24}"], "name a rank like decode-0/1"),
        (["trace", "\udcff"], "a rid is text in UTF-8"),
        (["up", "--front", "light"], "--front light says what serves --http: give that too"),
        (["up", "--model", "sim", "--prefill", str(10**20)], "prefill ranks must be 0 to 4096, in 1 to 4096 instances"),
        (["status", "--controller", "tcp://nosuch.invalid:5560"], "error: cannot resolve host 'nosuch.invalid' ("),
        (["status", "--controller", "tcp://127.0.0.1:1", "--wait-s", "0.1"], "if it uses keys, pass --keys DIR"),
    ],
)
def test_an_error_says_in_one_line_what_to_do(arguments: list[str], says: str) -> None:
    command_line = [sys.executable, "-P", "-m", "pdbus", *arguments]
    done = subprocess.run(command_line, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode in (1, 2)
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("part", ["controller", "nodes.unified"])
def test_a_part_says_that_the_bus_has_a_host_nobody_knows(part: str) -> None:
    with tempfile.TemporaryDirectory(prefix="pd") as place:  # the path of a socket is short
        where = ["--controller", f"ipc://{place}/c", "--bus", "tcp://nosuch.invalid:5550", "--wait-s", "0.1"]
        node = ["--engine", "sim", "--data", f"ipc://{place}"] if part != "controller" else []
        command_line = [sys.executable, "-P", "-m", part, *where, *node]
        done = subprocess.run(command_line, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 3
    assert "cannot resolve host 'nosuch.invalid'" in done.stderr.splitlines()[-1]


def test_what_to_look_at_when_nobody_answers() -> None:
    assert why_silent("ipc:///tmp/pdx/c", "") == "is it running there?"
    assert why_silent("tcp://127.0.0.1:1", "") == "is it running there? if it uses keys, pass --keys DIR"
    assert why_silent("tcp://127.0.0.1:1", "k") == "is it running there, and does it list the keys in k?"
    for address in ("tcp://127.0.0.1:1", "tcp://[::1]:1", "tcp://127.0.0.1:0;127.0.0.1:1", "ipc:///x:1"):
        assert unresolved(address) == ""
    assert unresolved(f"tcp://{'x' * 64}:1").startswith("cannot resolve host")


def test_printable() -> None:
    assert printable("a\x1b[31mb\x07\x9b\x7f\r\u202ec") == "a\\x1b[31mb\\x07\\x9b\\x7f\\r\\u202ec"
    assert printable("tab\tline\nümlaut 🚀 \u200f") == "tab\tline\nümlaut 🚀 \u200f"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_an_embedded_controller_refuses_them_too(value: float) -> None:
    with pytest.raises(ConfigError, match="lease_s must be greater than 0 and finite"):
        ControllerConfig(lease_s=value)


LEAVES = """
import builtins, os, signal, click
from bus.runtime import cli
class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
        kill(pid, number)
@click.command()
def command():
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    builtins.late = Late()  # which the interpreter drops after it has given its signals up
cli.run(command, "leaver")
"""


def test_a_second_sigterm_while_the_interpreter_ends_is_no_crash() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")

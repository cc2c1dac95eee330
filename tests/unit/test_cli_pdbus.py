"""The `pdbus` command without a cluster: help, bad settings, what importing costs."""

from __future__ import annotations

import importlib
import io
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import click
import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console
from status_world import rank, sample

from bus import build
from bus.errors import BusError, ConfigError
from bus.runtime.keys import load_keys
from bus.wire.messages import BrokerStatus, ControllerEvent, Load, QueuedKind, QueueStatus, RankStatus, Status
from pdbus.cli import COMMANDS, pdbus
from pdbus.commands.drain import silence_of
from pdbus.commands.generate import _show
from pdbus.commands.status import _requests, _row, _show_events, as_dict
from pdbus.commands.status import _show as _show_status
from pdbus.commands.up import up
from pdbus.fleet.figures import Sample
from pdbus.fleet.history import History


def run(*arguments: str) -> click.testing.Result:
    return CliRunner().invoke(pdbus, arguments)


def test_the_version_says_which_build_it_is() -> None:
    said = "compiled cores" if build.CORES == "compiled" else "pure Python"
    assert run("--version").output == f"pdbus, version {version('pdbus')}, {said}\n"


def test_help_names_every_command_and_loads_none() -> None:
    code = (
        "import sys\nfrom pdbus.cli import pdbus\n"
        "try:\n    pdbus(['--help'])\nexcept SystemExit as done:\n    assert not done.code\n"
        "heavy = {'torch', 'numpy', 'zmq', 'nodes', 'controller', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        assert f"\n  {name} " in done.stdout


def test_up_starts_with_the_methods_that_the_policies_page_recommends() -> None:
    defaults = {option.name: option.default for option in up.params}
    assert (defaults["prefill_method"], defaults["decode_method"]) == ("cache_aware", "total_requests")
    assert defaults["unified_method"] == "cache_aware"
    page = " ".join((Path(__file__).parents[2] / "docs" / "policies.md").read_text(encoding="utf-8").split())
    assert "`pdbus up` starts with `cache_aware` for prefill and unified ranks and `total_requests` for decode" in page


@pytest.mark.parametrize("name", ["up", "generate", "status", "drain", "keys"])
def test_each_command_has_help(name: str) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["up", "--prefill", "2", "--decode", "0"], "needs prefill and decode ranks"),
        (["up", "--decode-method", "fastest"], "unknown load_balance_method 'fastest' for decode"),
        (["up", "--prefill-method", "prefill_round_robin_balance"], "use --prefill-method round_robin"),
        (["generate", "x", "--controller", "here"], "starts with ipc:// or tcp://"),
        (["generate", "x", "--prefill-controller", "ipc:///tmp/pdx/p"], "go together"),
        (["status", "--bus", "tcp://host"], "needs a host and a port"),
        (["drain", "decode-0"], "name a rank like decode-0/1"),
        (["drain"], "name a rank like decode-0/1, or a role with --role"),
        (["drain", "decode-0/1", "--role", "decode"], "name a rank like decode-0/1, or a role with --role"),
        (["drain", "decode-0/1", "--model", "m"], "name a rank like decode-0/1, or a role with --role"),
        (["drain", "--role", "router"], "--role router: choose prefill, decode, unified"),
    ],
)
def test_bad_settings_are_one_clear_line(arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert isinstance(result.exception, ConfigError)
    assert words in str(result.exception)
    assert "\n" not in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "code", "retryable"),
    [(["--wait-s", "0.1"], "no_controller", True), (["--decode-controller", "ipc:///tmp/pdx/d"], "bad_request", False)],
)
def test_generate_tells_a_failure_as_json_too(arguments: list[str], code: str, retryable: bool) -> None:
    result = run("generate", "hi", "--json", "--controller", "ipc:///tmp/pdx/c", *arguments)
    assert isinstance(result.exception, BusError)
    told = json.loads(result.stdout)
    assert told == {"code": code, "message": str(result.exception), "retryable": retryable, "rid": ""}


def test_without_arguments_it_shows_its_help_as_it_is() -> None:
    for arguments in ([], ["keys"]):
        done = subprocess.run(
            [sys.executable, "-m", "pdbus", *arguments], capture_output=True, text=True, check=False, timeout=60
        )
        told = done.stdout + done.stderr
        assert "error:" not in told
        assert "\nCommands:\n" in told


def test_help_tells_the_usual_places() -> None:
    for module in ("bus", "controller", "nodes.decode"):
        told = subprocess.run(
            [sys.executable, "-m", module, "--help"],
            capture_output=True, text=True, check=True, timeout=120, env=os.environ | {"PDBUS_DIR": "/d"},
        ).stdout  # fmt: skip
        assert "(dynamic)" not in told
        assert "ipc:///d/bus" in told


@pytest.mark.parametrize(
    ("shell", "code", "stdout", "stderr"),
    [
        ("PYTHONIOENCODING=ascii {}", 0, "caf? ?\n", ""),
        ("{} >&-", 0, "", ""),
        ("{} > /dev/full", 1, "", "prog: error: cannot write the output: No space left on device\n"),
    ],
)
@pytest.mark.parametrize("flush", [True, False])
def test_output_that_cannot_be_written_is_no_traceback(
    shell: str, code: int, stdout: str, stderr: str, flush: bool
) -> None:
    program = (
        "import click; from bus.runtime import cli; "
        f"cli.run(click.command()(lambda: print('caf\\u00e9 \\U0001f680', flush={flush})), 'prog')"
    )
    line = shell.format(f'{shlex.quote(sys.executable)} -c "{program}"')
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False, timeout=120, env=buffered)
    assert (done.returncode, done.stdout, done.stderr) == (code, stdout, stderr)


def test_an_answer_is_whole_without_its_line_of_facts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Answer:
        prompt_ids = (1, 2)
        result = SimpleNamespace(
            prefill=None, decode=None, found_by="", ids=(3,), ttft_s=0.1, tpot_s=0.0, finish="stop", attempts=1
        )

        def __iter__(self) -> Iterator[SimpleNamespace]:
            yield SimpleNamespace(text="hello", ids=(3,))

    full = open("/dev/full", "w", buffering=1, encoding="utf-8")  # noqa: SIM115
    monkeypatch.setattr("sys.stderr", full)
    _show(Answer(), as_json=False, tokens=False)  # type: ignore[arg-type]
    assert capsys.readouterr().out == "hello\n"
    with pytest.raises(OSError, match="No space left"):
        full.close()


@pytest.mark.parametrize("name", ["../x", "", ".hidden", "a/b", "a b", "x" * 65])
def test_a_clients_name_stays_within_the_list(name: str, tmp_path: Path) -> None:
    assert run("keys", "new", str(tmp_path / "keys")).exit_code == 0
    before = sorted(tmp_path.rglob("*"))
    result = run("keys", "add", str(tmp_path / "keys"), "client", name)
    assert isinstance(result.exception, ConfigError)
    assert "the name of a key has" in str(result.exception)
    assert sorted(tmp_path.rglob("*")) == before


def test_keys_are_made_given_away_listed_and_revoked(tmp_path: Path) -> None:
    def keys(*arguments: str) -> str:
        result = run("keys", *arguments)
        assert result.exit_code == 0, result.output
        return result.output

    home, out = str(tmp_path / "keys"), str(tmp_path / "alice")
    keys("new", home, "prefill-0")
    assert "pdbus keys give" in keys("add", home, "client", "alice")
    assert f"use --keys {out}" in keys("give", home, "client", "alice", out)
    assert load_keys(out, "admins", "clients").name == "clients/alice"
    names = [line.split()[:2] for line in keys("list", home).splitlines()]
    assert names == [
        ["broker", "broker"], ["controller", "controller-0"], ["node", "prefill-0"], ["client", "alice"],
        ["client", "edge"],
        ["admin", "operator"],
    ]  # fmt: skip
    keys("revoke", home, "client", "alice")
    assert "alice" not in keys("list", home)


def test_the_front_door_is_cheap_and_complete() -> None:
    code = (
        "import sys, pdbus\n"
        "heavy = {'torch', 'numpy', 'zmq', 'msgspec', 'rich', 'nodes', 'controller'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    package = importlib.import_module("pdbus")
    for name in package.__all__:
        assert getattr(package, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        package.nothing  # noqa: B018


def seen_once(seen: Status, broker: BrokerStatus | None = None) -> tuple[Sample, History]:
    history, taken = History(), Sample(1.0, 2.0, seen, broker)
    history.add(taken)
    return taken, history


def printed(seen: Status, events: bool = False) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    _show_status(console, *seen_once(seen), bus="ipc:///b", keys="")
    if events:
        _show_events(console, seen)
    return console.export_text()


def test_status_names_full_ranks_what_waits_and_events() -> None:
    queue = QueueStatus(3, 2.5, (QueuedKind("m", ("prefill", "decode"), 3),), ((1, 1), (0, 2)), (("clients/al", 3),))
    events = (ControllerEvent(7, 10**15, "lost", "decode-0", 1, "time", "its connection\x1b is gone", True),)
    seen = sample(0.0, rank(load={"running": 8}), rank("prefill-0")).status
    seen = msgspec.structs.replace(seen, queue=queue, events=events)
    text = printed(seen, events=True)
    for words in (
        "~ decode-0/0 is full: 8 of 8 run slots are in use, and 1 request waits",
        "queue: the first for 2.5s, 3 for prefill+decode of m, priority 1: 1, priority 0: 2, clients/al 3",
        "7 2001-09-09 ",
        "rank: decode-0/1 is lost: its connection\\x1b is gone",
        "* Requests wait for room at a decode rank: the decode rank is full",
        "* 3 requests wait at the controller, for room at a decode rank; the first has waited for 2.5s",
    ):
        assert words in text, text
    said = as_dict(*seen_once(seen))
    assert said["conditions"] == ["decode-0/0 is full: 8 of 8 run slots are in use, and 1 request waits"]
    assert said["trouble"] == [], "it serves"
    assert (said["verdict"]["level"], len(said["verdict"]["lines"])) == ("late", 2)
    assert said["verdict"]["lines"][1]["rank"] == ("decode-0", 0)
    assert said["controller"]["queue"]["keys"] == [["clients/al", 3]]
    assert said["controller"]["events"][0]["number"] == 7


def test_status_of_an_older_controller_says_that_it_keeps_no_events() -> None:
    old = printed(sample(0.0, rank(), rank("prefill-0"), queue_requests=2).status, events=True)
    assert "events: - (this controller is older than this pdbus, and keeps none)" in old
    client = printed(sample(0.0, rank(endpoint="")).status, events=True)
    assert "events: - (they are for a viewer's or an admin's key)" in client


def test_status_as_json_names_every_field() -> None:
    load = Load(seq=1, step=2, running=3, waiting=4, waiting_tokens=5, kv_tokens=6, kv_capacity=7, max_running=8)
    rank = RankStatus(
        "decode-0", 1, "decode", "sim", "ready", 9, "ipc:///d", 100, 0.5, load, 1, 20, 8, 46, 1, 5, 4, 0
    )  # fmt: skip
    seen = Status(1, "controller-0", 2, 3.0, {"decode": "total_tokens"}, {"done": 4}, (rank,))
    told = json.loads(json.dumps(as_dict(*seen_once(seen, BrokerStatus(1, 2, 3.0, {"rooms_alive": 0})))))
    (first,) = told["controller"]["ranks"]
    assert {
        "role",
        "state",
        "epoch",
        "report_age_s",
        "load",
        "in_flight_requests",
        "estimate_tokens",
        "ended_total",
    } <= (first.keys())
    assert first["load"]["kv_tokens"] == 6
    assert told["broker"]["counts"] == {"rooms_alive": 0}
    assert as_dict(*seen_once(seen))["broker"] is None
    assert silence_of(rank) == "it has been silent for 0 s"
    assert silence_of(msgspec.structs.replace(rank, report_age_s=-1.0)) == "it never reported"


def test_status_tells_how_many_first_tokens_came_in_time_where_an_slo_counts() -> None:
    counts = {"ttft_slo": 6, "ttft_slo_kept": 3, "ttft_slo_missed": 1, "ttft_slo_exempt": 2}
    assert "first tokens in time: kept 3, missed 1, exempt 2" in _requests(sample(0.0, **counts).status)
    assert "in time" not in _requests(sample(0.0, done=3).status)


def test_memory_whose_size_nobody_said_has_no_share_in_use() -> None:
    for capacity, shown in ((0, "-"), (1000, "25%")):
        load = {"kv_tokens": 250, "kv_capacity": capacity}
        assert _row(rank("toy", role="unified", load=load))["KV"] == shown

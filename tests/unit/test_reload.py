"""SIGHUP: what may change does, what can't is named, and a file with a mistake changes nothing."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import click
import pytest
from click.testing import CliRunner
from controller_world import World, hello, submit
from structlog.testing import capture_logs

from bus.broker import Broker, BrokerConfig
from bus.errors import ConfigError
from bus.runtime import cli, logs, reload, settings
from bus.runtime.reload import Reload
from bus.wire.messages import Failed
from pdbus.edge.config import EdgeConfig
from pdbus.edge.server import Server

Script: TypeAlias = Callable[[Callable[[str], list[Any]], list[dict[str, Any]]], None]


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reload, "_has_terminal", lambda: False)


def running(path: Path, script: Script, *flags: str, refuse: str = "", first: str = "[node]\nslots = 4\n") -> None:
    """A command with a file, and `script(rewrite, applied)`: `rewrite(text)` is a new file and a SIGHUP, and returns
    what was logged."""
    file = path / "c.toml"
    file.write_text(first, encoding="utf-8")
    applied: list[dict[str, Any]] = []

    def apply(changed: dict[str, Any]) -> None:
        if refuse in changed:
            raise ConfigError(f"{refuse} can't be that")
        applied.append(changed)

    @settings.command("node", reloads=("slots", "lease-s", "log-level"))
    @click.option("--slots", "max_running", type=int, default=1)
    @click.option("--lease-s", type=cli.Seconds(), default=3.0)
    @click.option("--bus", default="ipc:///b")
    @cli.log_level_option
    def part(**chosen: Any) -> None:
        again = Reload(apply, lambda: applied.append({"left": True}))

        def rewrite(text: str) -> list[Any]:
            file.write_text(text, encoding="utf-8")
            with capture_logs() as said:
                again()
            return [(line["event"], line) for line in said]

        script(rewrite, applied)

    result = CliRunner().invoke(part, ["--config", str(file), *flags], catch_exceptions=False)
    assert result.exit_code == 0, result.output


def test_what_may_change_does_and_what_cannot_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    levels: list[str] = []
    monkeypatch.setattr(logs, "set_level", levels.append)

    def script(rewrite: Callable[[str], list[Any]], applied: list[dict[str, Any]]) -> None:
        (said,) = rewrite("[node]\nslots = 8\nlog-level = 'debug'\n")
        assert said[0] == "settings.reloaded"
        assert said[1]["changed"] == {"slots": 8, "log-level": "debug"}
        assert (applied, levels) == ([{"max_running": 8, "log_level": "debug"}], ["debug"])
        fixed, said = rewrite("[cluster]\nbus = 'ipc:///other'\n[node]\nslots = 8\nlog-level = 'debug'\n")
        assert (fixed[0], fixed[1]["settings"], fixed[1]["log_level"]) == (
            "settings.need_restart", ["bus"], "warning",
        )  # fmt: skip
        assert said[1]["changed"] == {}
        (said,) = rewrite("")
        assert said[1]["changed"] == {"slots": 1, "log-level": "info"}, "back to the defaults"

    running(tmp_path, script)


def test_a_mistake_in_the_file_changes_nothing_and_says_what_it_is(tmp_path: Path) -> None:
    def script(rewrite: Callable[[str], list[Any]], applied: list[dict[str, Any]]) -> None:
        for text, why in (
            ("[node", "is no TOML"),
            ("[node]\nslot = 8\n", "has no setting slot; did you mean slots?"),
            ("[node]\nslots = 8\nlease-s = 'x'\n", "lease-s"),
            ("[node]\nslots = 9\nlease-s = 7\n", "lease_s can't be that"),
        ):
            (said,) = rewrite(text)
            assert said[0] == "settings.kept"
            assert why in said[1]["why"]
            assert said[1]["log_level"] == "error"
        assert not applied
        (said,) = rewrite("[node]\nslots = 8\n")
        assert said[1]["changed"] == {"slots": 8}
        (tmp_path / "c.toml").unlink()
        (tmp_path / "c.toml").mkdir()

    running(tmp_path, script, refuse="lease_s")


def test_flags_go_before_the_file_as_at_the_start(tmp_path: Path) -> None:
    def script(rewrite: Callable[[str], list[Any]], applied: list[dict[str, Any]]) -> None:
        (said,) = rewrite("[node]\nslots = 8\nlease-s = 5\n")
        assert said[1]["changed"] == {"lease-s": 5.0}

    running(tmp_path, script, "--slots", "2")


@pytest.mark.parametrize("ignored", [False, True])
def test_the_end_of_its_terminal_ends_it_unless_that_was_to_be_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ignored: bool
) -> None:
    there = [True]
    monkeypatch.setattr(reload, "_has_terminal", lambda: there[0])
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)

    def script(rewrite: Callable[[str], list[Any]], applied: list[dict[str, Any]]) -> None:
        assert rewrite("[node]\nslots = 8\n")
        there[0] = False
        rewrite("[node]\nslots = 9\n")
        assert applied[-1] == ({"max_running": 9} if ignored else {"left": True})

    try:
        running(tmp_path, script)
    finally:
        signal.signal(signal.SIGHUP, before)


# --- what the parts make of it ------------------------------------------------------------------------------------


def config_of(world: World, **changes: Any) -> None:
    from dataclasses import replace

    world.core.reconfigure(replace(world.core.config, **changes))


def test_a_controller_goes_by_its_new_limits_from_then_on() -> None:
    world = World(queue_requests=1, request_overcommit=0.25)
    node = hello("u", dp_size=1)
    world.join(node)
    world.report(node)
    world.submit(submit("a"))
    world.submit(submit("b"))
    world.submit(submit("c"))
    assert [failed.code for failed in world.answers(Failed)] == ["overloaded"]
    config_of(world, queue_requests=2, attempts=1, hang_s=33.0, trace_bytes=0)
    world.submit(submit("d"))
    assert len(world.answers(Failed)) == 1
    (dispatch,) = world.dispatches()
    world.progress(node, ended=[dispatch], code="engine_failed")
    assert world.answers(Failed)[-1].rid == "a", "one attempt is all"
    assert world.core.health.hang_s == 33.0
    assert not len(world.core.life.table.history)
    with pytest.raises(ConfigError, match="shed hopeless needs the queue order slo"):
        config_of(world, shed="hopeless")


def test_a_broker_takes_as_many_rooms_as_it_is_told_now(tmp_path: Path) -> None:
    broker = Broker(BrokerConfig(f"ipc://{tmp_path}/bus"))
    with broker:
        broker.reconfigure({"max_rooms": 3, "beacon_s": 0.5, "log_level": "debug"})
        assert (broker.core.rooms.max_rooms, broker.core.limits.beacon_s) == (3, 0.5)
        with pytest.raises(ConfigError):
            broker.reconfigure({"beacon_s": 0.0})
        assert broker.core.limits.beacon_s == 0.5


def test_an_edge_and_its_server_go_by_the_new_settings() -> None:
    from edge_world import World as EdgeWorld

    edge = EdgeWorld().edge
    server = Server(EdgeConfig(http="0"), edge)
    server.reconfigure({"max_requests": 1, "drain_s": 7.0, "log_level": "debug"})
    assert (edge._config.max_requests, server.config.timeout_graceful_shutdown) == (1, 7)
    with pytest.raises(ConfigError):
        server.reconfigure({"max_requests": 0})
    assert edge._config.max_requests == 1


def test_settings_that_may_change_are_settings() -> None:
    """Each command's own list; a wrong name would fail when the module is imported."""
    import settings_page

    reloads: Mapping[str, tuple[str, ...]] = {
        title: command.reloads  # type: ignore[attr-defined]
        for title, command in settings_page.commands().items()
        if command.reloads  # type: ignore[attr-defined]
    }
    nodes = {f"python -m nodes.{role}" for role in ("prefill", "decode", "unified")}
    assert reloads.keys() == {"python -m bus", "python -m controller", "pdbus serve"} | nodes
    assert all("log-level" in names for names in reloads.values())
    text = settings_page.PAGE.read_text(encoding="utf-8")
    for names in reloads.values():
        for name in names:
            assert f"| `{name}`* |" in text

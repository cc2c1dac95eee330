"""`pdbus generate --json` when it is cancelled or called wrongly: one object on stdout all the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bus.runtime import cli
from pdbus.client import Piece, Result
from pdbus.commands import generate


class Interrupted:
    """A stream in the midst of which Ctrl-C comes."""

    prompt_ids = (1, 2)
    result = Result("r", "cancelled", (5,), 1, None, None, None, "", 0.1, 0.2, "cancelled", "cancelled by the caller")

    def __iter__(self) -> Iterator[Piece]:
        yield Piece((5,), "a")
        raise KeyboardInterrupt


def test_what_came_before_it_was_cancelled_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    stream: Any = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        generate._show(stream, as_json=True, tokens=False)
    said = json.loads(capsys.readouterr().out)
    assert (said["rid"], said["finish"], said["code"], said["text"], said["ids"]) == (
        "r",
        "cancelled",
        "cancelled",
        "a",
        [5],
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tokens", "5 6", "--max-tokens", "x"], "--max-tokens"),
        (["--no-such-option", "text"], "--no-such-option"),
        ([], "TEXT"),
        (["text", "--config", "/nonexistent.toml"], "/nonexistent.toml"),
        (["text", "--leg", "third"], "--leg"),
    ],
)
def test_what_it_cannot_be_called_with_is_json_too(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for given, shows in ((["--json", *arguments], True), ([*arguments, "--raw"], False)):
        monkeypatch.setattr("sys.argv", ["pdbus generate", *given])
        with pytest.raises(SystemExit) as left:
            cli.run(generate.generate, "pdbus generate")
        assert left.value.code == 2
        out, err = capsys.readouterr()
        assert says in err
        assert len(err.splitlines()) == 1
        if shows:
            said = json.loads(out)
            assert said.keys() == {"code", "message", "retryable", "rid"}
            assert (said["code"], said["retryable"], said["rid"]) == ("bad_request", False, "")
            assert says in said["message"]
        else:
            assert out == ""


def test_a_wrong_variable_is_json_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["pdbus generate", "--json", "text"])
    for name, value in (("PDBUS_GENERATE_WAIT_S", "x"), ("PDBUS_GENERATE_WIAT_S", "1")):
        monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit):
            cli.run(generate.generate, "pdbus generate")
        assert name in json.loads(capsys.readouterr().out)["message"]
        monkeypatch.delenv(name)


def test_what_was_cancelled_before_it_was_sent_is_json_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "wait_for_controller", interrupted)
    monkeypatch.setattr(generate, "leave_on_signals", lambda: None)
    monkeypatch.setattr("sys.argv", ["pdbus generate", "--json", "--controller", f"ipc://{tmp_path}/none", "text"])
    with pytest.raises(SystemExit) as left:
        cli.run(generate.generate, "pdbus generate")
    assert left.value.code == 130
    assert json.loads(capsys.readouterr().out)["code"] == "cancelled"

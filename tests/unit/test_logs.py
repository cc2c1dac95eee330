"""Where events go: to structlog where it is configured, else to `logging`; and no part ends because of it."""

from __future__ import annotations

import io
import logging
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from bus.runtime import logs

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def unconfigured() -> Iterator[None]:
    """Structlog as a host that does not use it has it."""
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def run(script: str) -> tuple[str, str]:
    """What a host that is this script prints to stdout and stderr."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout, done.stderr


EMBEDS = """
    import logging, sys, tempfile
    from bus import Broker, Publisher
    from controller import ControllerConfig, Dispatcher
    {setup}
    with tempfile.TemporaryDirectory(prefix="pd") as folder:
        base = f"ipc://{{folder}}/bus"
        config = ControllerConfig(
            bus=base, controller=f"ipc://{{folder}}/c", with_broker=True, decode_method="minimum_tokens"
        )
        with Dispatcher(config), Publisher(base, instance="p", dp_rank=0, role="prefill") as publisher:
            publisher.register("no room")
            publisher.wait_ready(30)
"""


def test_embedded_parts_print_nothing_by_themselves() -> None:
    assert run(EMBEDS.format(setup="")) == ("", "")


def test_a_host_that_uses_logging_gets_the_events_there() -> None:
    stdout, stderr = run(EMBEDS.format(setup="logging.basicConfig(level=logging.INFO)"))
    assert stdout == ""
    assert re.search(r"^WARNING:pdbus\.controller:method\.deprecated .*use='total_tokens'", stderr, re.M)
    assert re.search(r"^INFO:pdbus\.broker:broker\.started address=", stderr, re.M)


def test_a_host_that_uses_structlog_gets_the_events_there() -> None:
    setup = "import structlog; structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))"
    stdout, stderr = run(EMBEDS.format(setup=setup))
    assert stdout == ""
    assert "method.deprecated" in stderr


def test_the_command_logs_to_stderr() -> None:
    command = [sys.executable, "-P", "-m", "pdbus", "up", "--prefill", "0", "--decode-method", "minimum_tokens"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert "method.deprecated" in done.stderr


def test_a_record_carries_the_keys_and_the_place(caplog: pytest.LogCaptureFixture) -> None:
    log = logs.get_logger("node").bind(dp_rank=3, cause="first")
    with caplog.at_level(logging.INFO, "pdbus"):
        log.debug("unheard")
        log.info("rank.drained", cause="100 % sure")  # its own key wins
        try:
            raise ValueError("no")
        except ValueError:
            log.exception("rank.failed")
    drained, failed = caplog.records
    assert drained.name == "pdbus.node"
    assert drained.getMessage() == "rank.drained dp_rank=3 cause='100 % sure'"
    assert drained.fields == {"dp_rank": 3, "cause": "100 % sure"}  # type: ignore[attr-defined]
    assert Path(drained.pathname) == Path(__file__)
    assert failed.exc_info is not None
    assert isinstance(failed.exc_info[1], ValueError)


def test_what_cannot_be_written_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        monkeypatch.setattr(sys, "stderr", closed)
        logs.configure("info", part="test")
        before = logs.lost()
        logs.get_logger("test").info("nobody.reads")
        logs.get_logger("test").debug("not.wanted")
        assert logs.lost() == before + 1
        with pytest.raises(BrokenPipeError):
            closed.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), writing)  # so that closing it has somewhere to write


def test_nothing_that_a_peer_says_controls_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    said = Terminal()
    monkeypatch.setattr(sys, "stderr", said)
    logs.configure("info", part="test")
    for rid in ("\x1b[1A\x1b[2Kkey.revoked:mallory", "\u202e\x9b2K\x07\x85\u2028", "a\nb\rc"):
        logs.get_logger("test").warning("request.failed", rid=rid)
    assert said.getvalue().count("\n") == 3
    shown = re.sub(r"\x1b\[[0-9;]*m", "", said.getvalue()).replace("\n", "")  # the renderer's own colours
    assert shown.isprintable()
    assert "key.revoked:mallory" in shown


def test_nobody_else_makes_a_logger() -> None:
    files = [path for name in ("bus", "nodes", "controller", "pdbus") for path in (ROOT / name).rglob("*.py")]
    made = {path.name for path in files if re.search(r"structlog|logging\.getLogger", path.read_text("utf-8"))}
    assert made == {"logs.py", "seams.py"}, "the latter sets a filter for a logger of vLLM's"

"""Ctrl-C while a program starts: exit code 130 and no traceback, wherever it strikes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Says each import, from the first one of a main that takes its time, as one byte on a pipe; at INTERRUPT_AT it raises
# SIGINT itself, so that the signal strikes exactly there.
SITE = """
import os, signal, sys
begun = False
def hook(event, arguments):
    global begun
    if event == "import":
        begun = begun or arguments[0] == "click"
        if begun and "SAY_IMPORTS" in os.environ:
            os.write(int(os.environ["SAY_IMPORTS"]), b".")
        if arguments[0] == os.environ.get("INTERRUPT_AT"):
            os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(hook)
"""
PROGRAMS = {
    "broker": ("bus",),
    "controller": ("controller",),
    "node": ("nodes.prefill", "--engine", "sim"),
    "status": ("pdbus", "status", "--wait-s", "60"),
    "generate": ("pdbus", "generate", "hi", "--wait-s", "60"),
    "demo": ("pdbus", "demo", "--model", "tiny"),
}


def start(tmp_path: Path, program: str, **settings: str) -> subprocess.Popen[str]:
    (tmp_path / "sitecustomize.py").write_text(SITE)
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return subprocess.Popen(
        [sys.executable, "-P", "-m", *PROGRAMS[program]],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"PYTHONPATH": path, "PDBUS_DIR": str(tmp_path / "d")} | settings,
        pass_fds=[int(settings["SAY_IMPORTS"])] if "SAY_IMPORTS" in settings else (),
    )  # fmt: skip


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate(timeout=120)
    return process.returncode, errors


@pytest.mark.parametrize(
    ("program", "module"),
    [
        *((program, module) for program in PROGRAMS for module in ("click", "structlog", "zmq", "msgspec")),
        *((program, "rich.console") for program in ("status", "generate", "demo")),
        ("status", "pdbus.client"),
        ("node", "nodes.main"),
        ("demo", "pdbus.demo"),
    ],
)
def test_an_interrupt_within_an_import_is_quiet(tmp_path: Path, program: str, module: str) -> None:
    assert end(start(tmp_path, program, INTERRUPT_AT=module)) == (130, "")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_terminals_interrupt_is_quiet_after_any_number_of_imports(tmp_path: Path, program: str) -> None:
    for imports in range(1, 100, 14):
        reader, writer = os.pipe()
        with open(reader, "rb", buffering=0) as said:
            process = start(tmp_path, program, SAY_IMPORTS=str(writer))
            os.close(writer)
            for _ in range(imports):
                assert said.read(1), "it ended by itself"
            os.killpg(process.pid, signal.SIGINT)
            code, errors = end(process)
        assert code in (0, 130)  # 0: a part that served by then, and was stopped
        assert "Traceback" not in errors
        assert "KeyboardInterrupt" not in errors


def workers_of(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in listed if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text()]


def replay() -> tuple[subprocess.Popen[str], list[int]]:
    """A long one, as soon as both of its workers are there: they are importing."""
    command = [sys.executable, "-P", "-m", "pdbus", "replay", "--jobs", "2", "--methods", "total_tokens,oracle"]
    process = subprocess.Popen(
        [*command, "--duration-s", "3600"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    until = time.monotonic() + 60
    while len(workers := workers_of(process.pid)) < 2:
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.002)
    return process, workers


def test_a_worker_of_a_replay_that_dies_is_one_line() -> None:
    process, workers = replay()
    os.kill(workers[0], signal.SIGKILL)
    code, errors = end(process)
    assert code == 1
    assert "error: the process that replayed total_tokens ended without a result" in errors
    assert "Traceback" not in errors


def test_the_workers_of_a_replay_leave_the_interrupt_to_it() -> None:
    for _ in range(5):
        process, workers = replay()
        os.killpg(process.pid, signal.SIGINT)
        began = time.monotonic()
        code, errors = end(process)
        assert code == 130
        assert re.fullmatch(r"(replaying up to .* runs, 2 at once)?", errors.strip()), errors
        assert time.monotonic() - began < 30, "it waited for what nobody wants any more"
        assert not any(Path(f"/proc/{pid}").exists() for pid in workers)

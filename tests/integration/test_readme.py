"""What the README says to type over several machines, typed in its order on this one."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bus.runtime.ports import free_ports
from nodes.own.engines.sim import sim_generate
from pdbus.text.models import text_for

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
SIM = ["--engine", "sim", "--model", "sim", "--sim-timing", "zero"]


def commands(block: str) -> list[list[str]]:
    """Each command of a block of shell, continued lines joined."""
    return [
        line
        for text in block.replace("\\\n", " ").splitlines()
        if (line := shlex.split(text.rstrip("& "), comments=True))
    ]


@contextmanager
def started(command: list[str], directory: Path) -> Iterator[None]:
    """A part that has said READY, as its machine's terminal runs it; gone at the end."""
    part = subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, text=True)
    try:
        assert part.stdout is not None
        line = part.stdout.readline()
        assert line.startswith("READY "), f"{command} ended: {line!r}"
        yield
    finally:
        part.terminate()
        part.communicate(timeout=120)


def test_several_machines_serve_a_client(tmp_path: Path) -> None:
    (block,) = [text for text in re.findall(r"^```sh\n(.*?)^```$", README, re.M | re.S) if "nodes.prefill" in text]
    base = free_ports("127.0.0.1", 5)
    here = re.sub(r"10\.0\.0\.\d", "127.0.0.1", block).replace(":5550", f":{base}").replace(":5560", f":{base + 3}")
    answer = ""
    with ExitStack() as parts:
        for program, *arguments in commands(here):
            if program == "scp":
                continue  # the machines share this folder
            command = [sys.executable, "-P", *(["-m", "pdbus"] if program == "pdbus" else []), *arguments]
            if program == "python":
                engine = SIM if arguments[1].startswith("nodes.") else []  # seconds, not a model's minutes
                parts.enter_context(started(command + engine, tmp_path))
                continue
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == 0, done.stderr
            answer = done.stdout if arguments[0] == "generate" else answer
    prompt = text_for("sim").encode("What is a load balancer?")
    assert answer == text_for("sim").decode(sim_generate(prompt, 128)) + "\n"

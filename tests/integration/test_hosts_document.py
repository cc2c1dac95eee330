"""What docs/hosts.md says to type over several machines, typed in its order on this one."""

from __future__ import annotations

import os
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from typed import Typed

from nodes.own.engines.sim import sim_generate
from pdbus.text.models import text_for

PAGE = (Path(__file__).parents[2] / "docs" / "hosts.md").read_text(encoding="utf-8")
SIM = ["--engine", "sim", "--model", "sim", "--sim-timing", "zero"]  # seconds, not a model's minutes


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
    net = ".".join(str(random.SystemRandom().randrange(1, 255)) for _ in range(2))
    page = re.sub(r"10\.0\.0\.(\d)", rf"127.{net}.\1", PAGE)
    typed = dict(re.findall(r"^```sh\n# (\S+)\n(.*?)^```", page, re.M | re.S))
    asked = next(text for text in re.findall(r"^```(?:sh)?\n(.*?)^```", page, re.M | re.S) if "pdbus generate" in text)
    for host in typed:
        (tmp_path / host).mkdir()
    scp = tmp_path / "scp"
    scp.write_text(f'#!/bin/sh\nexec cp -r "$2" {tmp_path}/$(echo $3 | tr : /)\n')
    scp.chmod(0o755)
    warm = Typed()
    env = {**os.environ, "PATH": f"{tmp_path}:{warm.folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def run(script: str) -> str:
        done = subprocess.run(
            ["sh", "-ec", script], cwd=tmp_path / "client", env=env, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    with ExitStack() as parts:
        parts.callback(warm.close)
        run(typed.pop("client"))
        for host, line in typed.items():
            program, *arguments = shlex.split(line.replace("\\\n", " "))
            command = [sys.executable, "-P", *([] if program == "python" else ["-m", "pdbus"]), *arguments]
            engine = SIM if arguments[1].startswith("nodes.") else []
            parts.enter_context(started(command + engine, tmp_path / host))
        answers = {line.split()[1]: run(line) for line in asked.splitlines()}
    prompt = text_for("sim").encode("What is a load balancer?")
    assert answers["generate"] == text_for("sim").decode(sim_generate(prompt, 128)) + "\n"
    assert all(f"{instance}/0" in answers["status"] for instance in typed if instance.startswith(("prefill", "decode")))
    assert '"finish_reason":"length"' in next(said for said in answers.values() if said.startswith("{"))

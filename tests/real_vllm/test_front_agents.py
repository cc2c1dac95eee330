"""The libraries of agents, set up as docs/agents.md says, against vLLM's own server in front of scripted ranks, and the
page's one machine. Coding agents themselves: test_coders.py.
"""

from __future__ import annotations

import json
import sys
import tempfile
import urllib.request
from pathlib import Path

import pytest
from docs_commands import commands
from engine_venv import python_of
from front_server import ENV, Front
from part_process import PartProcess
from scripted_front import at, one, typed

from bus.runtime.ports import free_ports

pytestmark = pytest.mark.timeout(900)

HERE = Path(__file__).parent


def test_the_libraries(coder: Front, home: Path) -> None:
    python = python_of(
        "front-clients", "clients of OpenAI's and Anthropic's APIs", HERE / "clients.txt", takes="a minute, 300 MB"
    )
    (home / "libraries.py").write_text(at(coder.port, one("from anthropic import")))
    _, sessions = typed(coder, home, "python libraries.py", python.parent)
    assert len(sessions) == 5
    assert {session.partition("/")[2] for session in sessions} == {"trip-1"}


def test_one_machine(tmp_path: Path) -> None:
    """The page's line, with a small model on our own engine."""
    port = free_ports("127.0.0.1", 1)
    (line,) = (words for words in commands(at(port, one("pdbus up"))) if words[1] == "up")
    small = {"vllm": "numpy", "/models/Qwen3-8B": "smollm2"}
    line = [small.get(word, word) for word in line] + ["--front", "vllm"]
    body = {
        "model": "coder",
        "temperature": 0,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    }
    with tempfile.TemporaryDirectory(prefix="pd") as sockets:
        up = PartProcess([sys.executable, "-P", "-m", *line], tmp_path / "log", {**ENV, "PDBUS_DIR": sockets})
        try:
            up.until_ready()
            asked = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/chat/completions",
                json.dumps(body).encode(),
                {"content-type": "application/json"},
            )
            with urllib.request.urlopen(asked, timeout=120) as answer:
                said = json.load(answer)["choices"][0]["message"]["content"]
            assert said == "The capital of France is Paris."
        finally:
            up.process.terminate()
            up.process.wait(60)
            up.close()

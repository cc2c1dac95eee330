"""Loops of forced tool calls (forced_clients.py) through `vllm serve`, and what holds of each."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from engine_venv import python_of
from forced_clients import CITIES, TOOLS
from front_server import TOOLS as PARSER
from front_server import Front
from real_engines import BLOCK

HERE = Path(__file__).parent
SERVER = (
    "--served-model-name", "coder", "--dtype", "float32", "--max-model-len", "1024", "--enable-prompt-tokens-details",
    "--tool-strict-level", "parameter", *PARSER,
)  # fmt: skip


def loop(client: str, served: Front) -> dict[str, Any]:
    """Run a client's loop to its end; return what it prints."""
    python = python_of(
        "front-clients", "clients of OpenAI's and Anthropic's APIs", HERE / "clients.txt", takes="a minute, 300 MB"
    )
    line = [str(python), "-P", str(HERE / "forced_clients.py"), client, f"http://127.0.0.1:{served.port}"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:] + served.log.read_text()[-4000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def check(found: dict[str, Any]) -> None:
    """Three calls by the schema, then a turn without one, in which so small a model may say nothing; and of each prompt
    is cached what it has in common with the one before: that whole prompt, in blocks."""
    assert [name for name, _ in found["calls"]][1:] == ["train", "weather"]
    assert found["calls"][0][0] in TOOLS
    for _, arguments in found["calls"]:
        assert arguments.keys() == {"city", "days"}
        assert arguments["city"] in CITIES
        assert type(arguments["days"]) is int
        assert 1 <= arguments["days"] <= 9
    assert len(found["tokens"]) == 4
    assert all(came for *_, came in found["tokens"])
    for (before, *_), (_, cached, *_) in zip(found["tokens"], found["tokens"][1:], strict=False):
        assert cached == before // BLOCK * BLOCK

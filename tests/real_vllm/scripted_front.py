"""vLLM's own server, started as docs/agents.md says, in front of a prefill and a decode rank whose answers are written
down: for each client a loop of tool calls, each of which follows from the last one's result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from docs_commands import ROOT, blocks, commands
from front_server import Front
from part_process import PartProcess
from scripted import Answer, Script
from scripted_model import END, ids_of, model_folder

from bus.runtime.ports import free_ports

HERE = Path(__file__).parent
PAGE = ROOT / "docs" / "agents.md"
CONTEXT = 131072  # a coding agent's first prompt has thousands of tokens
QUESTION, CITIES = "Plan my trip", ("Paris", "Rome", "Oslo")
FACTS = ("It is 17 degrees in Paris", "It is 21 degrees in Rome", "It is 3 degrees in Oslo")
ANSWER = "Go to Rome."
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CLOSED = "http://127.0.0.1:9"  # nothing listens there
OFFLINE = {"HTTPS_PROXY": CLOSED, "HTTP_PROXY": CLOSED, "NO_PROXY": "127.0.0.1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
ENDED_S = 600.0  # of a busy machine: seconds on a quiet one


def one(words: str) -> str:
    """The block of the page in which these words are."""
    (text,) = [block.text for block in blocks(PAGE) if block.info != "inline" and words in block.text]
    return text


def call(tool: str, **arguments: str) -> str:
    """A tool call as the parser `hermes` reads it."""
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def script_of(model: Path) -> Script:
    """The loop of three calls, and what answers the page's questions; what has no mark gets the numbers from 1 on."""
    ids, (end, size) = ids_of(model)
    said = dict(zip((QUESTION, *FACTS), (*(call("weather", city=city) for city in CITIES), ANSWER), strict=True))
    said["Where is it warm?"] = call("Bash", command="cat weather.txt", description="Read the file")
    said["Where shall I go?"] = call("exec_command", cmd="cat weather.txt")
    said["Say in trip.txt where to go"] = "trip.txt\n```\nRome\n```"
    answers = tuple(Answer(ids(mark), ids(text + END)) for mark, text in said.items())
    numbers = ids(" ".join(map(str, range(1, 100))))
    return Script(answers, vocab_size=size, eos_ids=(end,), max_context=CONTEXT, otherwise=numbers)


@contextmanager
def started(folder: Path) -> Iterator[Front]:
    """The server, and `folder/sessions` with the session of each request that came."""
    model = folder / "model"
    model.mkdir()
    script = script_of(model_folder(model, CONTEXT)).saved(folder / "script")
    bus, controller = f"ipc://{folder}/bus", f"ipc://{folder}/c"
    python = [sys.executable, "-P", "-m"]
    method = f"{HERE.parent / 'support' / 'session_log.py'}:SessionLog"
    lines = [[*python, "controller", "--with-broker", "--bus", bus, "--controller", controller]]
    lines[0] += ["--prefill-method", method]
    lines += [
        [*python, "scripted", role, bus, controller, str(folder), role, str(script)] for role in ("prefill", "decode")
    ]
    paths = os.pathsep.join([str(HERE.parents[1]), str(HERE.parent / "support")])
    port = free_ports("127.0.0.1", 1)
    (line,) = (words for words in commands(at(port, one("pdbus serve --front vllm"))) if words[1] == "serve")
    line = [str(model) if word.startswith("/models/") else word for word in line]
    with ExitStack() as stack:
        for number, each in enumerate(lines):
            part = PartProcess(each, folder / f"log{number}", {"PYTHONPATH": paths, "SESSIONS": f"{folder}/sessions"})
            stack.callback(part.close)
            part.until_ready()
        yield stack.enter_context(Front(line, port, folder / "log", PDBUS_CONTROLLER=controller))


def at(port: int, text: str) -> str:
    """A block of the page with this port."""
    return text.replace("127.0.0.1:8000", f"127.0.0.1:{port}").replace("--http 8000", f"--http {port}")


def typed(front: Front, home: Path, script: str, programs: Path) -> tuple[str, list[str]]:
    """What a block of the page prints, run by a shell, and the sessions of its requests, as a method sees them. Nothing
    in it reaches another machine."""
    log = front.log.parent / "sessions"
    before = len(log.read_text().splitlines()) if log.exists() else 0
    path = os.pathsep.join([str(programs), "/usr/local/bin", "/usr/bin", "/bin"])
    done = subprocess.run(
        ["bash", "-ec", at(front.port, script)], cwd=home, env={**OFFLINE, "HOME": str(home), "PATH": path},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ENDED_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout, log.read_text().splitlines()[before:]

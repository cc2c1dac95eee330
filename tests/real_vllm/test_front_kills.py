"""Parts of a cluster are killed at random while streamed tool calls run through two of vLLM's own servers in front of
it, one of which speaks TLS: each call is whole."""

from __future__ import annotations

import http.client
import json
import os
import random
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from front_server import TOOLS, Front, certificate, events, unmodified
from part_process import PartProcess
from scripted import Answer, Script
from scripted_model import END, ids_of, model_folder

from bus.runtime.ports import free_ports

pytestmark = pytest.mark.timeout(600)

HERE = Path(__file__).parent
CALLS, AT_ONCE, STEP_S, PAUSE_S = 200, 8, 0.02, 0.3
CITIES = ("Paris", "Rome", "Oslo", "Lima", "Bern")
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


class Part:
    """A process that can be killed and started again by the same line."""

    def __init__(self, line: list[str], log: Path, path: str) -> None:
        self._made = line, log, {"PYTHONPATH": path}
        self.process = self._start()

    def _start(self) -> PartProcess:
        started = PartProcess(*self._made)
        started.until_ready()
        return started

    def kill(self) -> None:
        """Kill it, and return once it is back."""
        self.process.close()
        self.process = self._start()

    def close(self) -> None:
        self.process.close()


Parts = tuple[dict[str, Part], tuple[Front, Front]]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    """Two prefill and two decode ranks whose answers are written down, and in front of them vLLM's server over TLS and
    an unmodified `vllm serve`."""
    folder, model = tmp_path_factory.mktemp("kills"), model_folder(tmp_path_factory.mktemp("model"))
    ids, (end, size) = ids_of(model)
    answers = tuple(Answer(ids(f"Weather in {city}"), ids(call_of(city) + END)) for city in CITIES)
    script = Script(answers, vocab_size=size, eos_ids=(end,)).saved(folder / "script")
    bus, controller = f"ipc://{folder}/bus", f"ipc://{folder}/c"
    python = [sys.executable, "-P", "-m"]
    lines = {
        "broker": [*python, "bus", "--bus", bus],
        "controller": [*python, "controller", "--bus", bus, "--controller", controller],
    }
    for role in ("prefill", "decode"):
        for number in range(2):
            name = f"{role}-{number}"
            rank = [role, bus, controller, str(folder), name, str(script), str(STEP_S)]
            lines[name] = [*python, "scripted", *rank]
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE.parent / "support")])
    with ExitStack() as stack:
        made: dict[str, Part] = {}
        for name, line in lines.items():
            made[name] = Part(line, folder / f"{name}.log", path)
            stack.callback(made[name].close)
        port, (cert, key) = free_ports("127.0.0.1", 1), certificate(folder)
        arguments = ("--served-model-name", "scripted", *TOOLS)
        line = ["pdbus", "serve", "--front", "vllm", "--model", str(model), "--http", str(port)]
        line += ["--controller", controller, "--", *arguments, "--ssl-certfile", str(cert), "--ssl-keyfile", str(key)]
        over_tls = stack.enter_context(Front(line, port, folder / "front.log", cert))
        plain = unmodified(model, folder, *arguments, PDBUS_VLLM_CONTROLLER=controller)
        yield made, (over_tls, stack.enter_context(plain))


def call_of(city: str) -> str:
    return f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}", "unit": "celsius"}}}}\n</tool_call>'


def called(served: Front, city: str, refused: Counter[int]) -> tuple[str, Any, str]:
    """Return the name, the arguments and the finish reason of one streamed call. A request that is refused before its
    stream begins is repeated, as clients do; one whose stream has begun is not."""
    body = {
        "model": "scripted", "stream": True, "tools": [TOOL], "max_tokens": 200,
        "messages": [{"role": "user", "content": f"Weather in {city}"}],
    }  # fmt: skip
    while True:
        connection, answer = served.begin("/v1/chat/completions", body)
        try:
            if answer.status != 200:
                refused[answer.status] += 1
                assert answer.status == 503, answer.read()
                assert answer.getheader("retry-after")
                threading.Event().wait(0.2)
                continue
            name = arguments = finish = ""
            for event in events(answer):
                assert "error" not in event, event
                (choice,) = event["choices"]
                for delta in choice["delta"].get("tool_calls") or ():
                    name += delta["function"].get("name") or ""
                    arguments += delta["function"].get("arguments") or ""
                finish = choice["finish_reason"] or finish
            return name, json.loads(arguments), finish
        finally:
            connection.close()


def test_tls_is_that_of_vllms_arguments(parts: Parts) -> None:
    _, (served, _) = parts
    assert called(served, "Rome", Counter()) == ("weather", {"city": "Rome", "unit": "celsius"}, "tool_calls")
    assert f"READY endpoint=https://127.0.0.1:{served.port}\n" in served.log.read_text()
    plain = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    plain.request("GET", "/health")
    with pytest.raises((http.client.HTTPException, OSError)):
        plain.getresponse()
    plain.close()


def test_calls_are_whole_whichever_part_is_killed(parts: Parts) -> None:
    """The calls go to both servers by turns."""
    processes, servers = parts
    rng, killed, refused = random.Random(1), Counter[str](), Counter[int]()
    over = threading.Event()

    def kill() -> None:
        """Kill each part in turn, each round in another order."""
        while True:
            for name in rng.sample(sorted(processes), len(processes)):
                if over.wait(PAUSE_S):
                    return
                processes[name].kill()
                killed[name.partition("-")[0]] += 1

    with ThreadPoolExecutor(AT_ONCE) as callers, ThreadPoolExecutor(1) as killers:
        killing = killers.submit(kill)
        try:
            cities = [CITIES[number % len(CITIES)] for number in range(CALLS)]
            found = list(callers.map(lambda served, city: called(served, city, refused), cycle(servers), cities))
        finally:
            over.set()
        killing.result()
    print(f"killed {dict(killed)}, refused before their first token {dict(refused)}")
    assert found == [("weather", {"city": city, "unit": "celsius"}, "tool_calls") for city in cities]
    assert set(killed) == {"broker", "controller", "prefill", "decode"}

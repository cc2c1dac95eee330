"""How requests end through vLLM's own server in front of the bus: its client leaves, the cluster is overloaded, a rank
gives an answer up or dies in the midst of a grammar, the server's key is revoked.

An unmodified `vllm serve` with keys, in front of a controller with a short queue and of ranks whose answers are written
down (`scripted`). The ranks run in this process, so that a test sees what they hold.
"""

from __future__ import annotations

import http.client
import json
import os
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from front_server import Front, events, unmodified
from part_process import PartProcess
from real_engines import until
from scripted import Answer, Gate, Script, Scripted, rank
from scripted_model import END, ids_of, model_folder

from bus.runtime.keys import add_key, give_key, new_keys, revoke_key
from nodes.link.leg import Leg

pytestmark = pytest.mark.timeout(600)

HERE = Path(__file__).parent
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
TEXT = "One ship sails over the wide sea at night, and nobody on the shore knows where it goes or when it comes back."
OBJECT = '{"city": "Paris", "country": "France", "river": "Seine", "people": 2000000}'
WAIT_S = 60.0
QUEUE, RUNNING = 4, 2
HELD = QUEUE + 2 * RUNNING  # requests that the cluster takes: a rank has twice its run slots
ASKED = 40
LEAVES = 20
SCHEMA = {"type": "json_schema", "json_schema": {"name": "place", "schema": {"type": "object"}}}


class World:
    """The cluster and the server. `gate` permits the tokens of the decode rank."""

    def __init__(self, folder: Path, model: Path, stack: ExitStack) -> None:
        self.folder, self.keys, self.gate = folder, folder / "keys", Gate()
        ids, (end, size) = ids_of(model)
        texts = {"Say it": TEXT, "Fill it": OBJECT, "Go on": 20 * TEXT}
        answers = tuple(Answer(ids(mark), ids(text + END)) for mark, text in texts.items())
        self.script = Script(answers, vocab_size=size, eos_ids=(end,))
        self.tokens = len(ids(TEXT))
        new_keys(self.keys, ("prefill", "decode", "mortal"))
        add_key(self.keys, "clients", "front")
        give_key(self.keys, "clients", "front", folder / "front")
        self.bus, self.controller = f"ipc://{folder}/bus", f"ipc://{folder}/c"
        line = ["controller", "--with-broker", "--bus", self.bus, "--controller", self.controller]
        part = self.part("controller", *line, "--keys", str(self.keys), "--queue-requests", str(QUEUE))
        stack.callback(part.close)
        part.until_ready()
        self.of_decode = stack.enter_context(ExitStack())  # what the decode rank here stands in
        self.prefill = stack.enter_context(self._rank("prefill", None))
        self.decode = self.of_decode.enter_context(self._rank("decode", self.gate))

    def _rank(self, role: str, gate: Gate | None) -> Any:
        at = self.bus, self.controller, self.folder
        return rank(role, *at, self.script, gate, keys=str(self.keys), max_running=RUNNING)

    def part(self, name: str, *line: str) -> PartProcess:
        path = os.pathsep.join([str(HERE.parents[1]), str(HERE.parent / "support")])
        return PartProcess([sys.executable, "-P", "-m", *line], self.folder / f"{name}.log", {"PYTHONPATH": path})

    def mortal(self) -> PartProcess:
        """A decode rank in a process of its own, which says a token in 50 ms."""
        script = str(self.script.saved(self.folder / "script"))
        at = "decode", self.bus, self.controller, str(self.folder), "mortal"
        part = self.part("mortal", "scripted", *at, script, "0.05", str(self.keys))
        part.until_ready()
        return part


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(tmp_path_factory.mktemp("ends"), model, stack)


@pytest.fixture(scope="module")
def served(world: World, model: Path) -> Iterator[Front]:
    environ = {
        "PDBUS_VLLM_CONTROLLER": world.controller, "PDBUS_VLLM_KEYS": str(world.folder / "front"),
        "PDBUS_VLLM_KEY_NAME": "front",
    }  # fmt: skip
    with unmodified(model, world.folder, "--served-model-name", "scripted", **environ) as made:
        yield made


@pytest.fixture(autouse=True)
def logged(world: World, served: Front) -> Callable[[], str]:
    """With the gate closed: what the server's log has had since."""
    world.gate.close()
    start = len(served.log.read_text())
    return lambda: served.log.read_text()[start:]


def body_of(path: str, ask: str = "Say it", **more: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "scripted", "stream": True, **more}
    if path == COMPLETIONS:
        return body | {"prompt": ask, "max_tokens": 200}
    if path == RESPONSES:
        return body | {"input": ask}
    return body | {"messages": [{"role": "user", "content": ask}], "max_tokens": 200}


def begun(
    world: World, served: Front, path: str = CHAT, ask: str = "Say it", **more: Any
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse, Iterator[Any]]:
    """A stream of which three tokens have come."""
    world.gate.release(3)
    connection, answer = served.begin(path, body_of(path, ask, **more))
    assert answer.status == 200, answer.read()
    found = events(answer)
    next(found)
    return connection, answer, found


def counted(served: Front) -> Counter[str]:
    """The failed requests by code."""
    found = Counter[str]()
    for line in served.get("/metrics")[1].decode().splitlines():
        if line.startswith("pdbus_front_failed_requests_total{"):
            name, _, count = line.rpartition(" ")
            found[name.split('"')[1]] += int(float(count))
    return found


def said(found: list[Any]) -> str:
    return "".join(each["choices"][0]["delta"].get("content") or "" for each in found if each["choices"])


class Gone:
    """When a rank was rid of what it held; `both` waits until each of the two was, once."""

    def __init__(self, *ranks: Scripted) -> None:
        self._ranks = ranks
        self._at: dict[Scripted, float] = {}
        self._all = threading.Event()

    def __enter__(self) -> Gone:
        for each in self._ranks:
            each.on_gone = partial(self._note, each)
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._ranks:
            each.on_gone = lambda leg: None

    def _note(self, runner: Scripted, _: Leg) -> None:
        self._at.setdefault(runner, time.monotonic())
        if len(self._at) == len(self._ranks):
            self._all.set()

    def last(self) -> float:
        assert self._all.wait(WAIT_S), f"{len(self._at)} of {len(self._ranks)} ranks are rid of it"
        return max(self._at.values())


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_before_the_first_token_frees_both_ranks(
    world: World, served: Front, stream: bool
) -> None:
    """Prefill holds the KV cache that decode is fetching."""
    world.decode.fetches = False
    took: list[float] = []
    try:
        for _ in range(LEAVES // 2):
            with Gone(world.prefill, world.decode) as gone:
                connection = http.client.HTTPConnection("127.0.0.1", served.port)
                headers = {"content-type": "application/json"}
                connection.request("POST", CHAT, json.dumps(body_of(CHAT) | {"stream": stream}), headers)
                until(lambda: world.prefill._live and world.decode._live, "both ranks have it", WAIT_S)
                left = time.monotonic()
                connection.close()
                took.append(gone.last() - left)
    finally:
        world.decode.fetches = True
    report("before its first token", took)


def test_a_client_that_leaves_a_stream_frees_its_rank(world: World, served: Front) -> None:
    took: list[float] = []
    for _ in range(LEAVES):
        connection, answer, _ = begun(world, served)
        with Gone(world.decode) as gone:
            left = time.monotonic()
            connection.close()
            answer.close()
            took.append(gone.last() - left)
    report("in its stream", took)


def report(when: str, took: list[float]) -> None:
    times = sorted(1000 * each for each in took)
    print(f"left {when}: freed after {statistics.median(times):.1f} ms (median), {times[-1]:.1f} ms at most")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
def test_an_answer_that_a_rank_gives_up_ends_with_an_event_and_one_line_in_the_log(
    world: World, served: Front, logged: Callable[[], str], path: str
) -> None:
    """vLLM's own tracebacks of it are no news."""
    before = counted(served)
    connection, _, found = begun(world, served, path)
    world.decode.fails = "cannot go on"
    try:
        world.gate.release()
        *_, last = found
    finally:
        world.decode.fails = ""
        connection.close()
    error = last if path == RESPONSES else last["error"]
    assert error["message"] == "the answer was interrupted, and cannot be resumed: cannot go on"
    assert str(error.get("code") or error["type"]) in ("503", "overloaded_error")
    assert counted(served) - before == {"interrupted": 1}
    assert logged().count("pdbus.front.failed") == 1
    assert "Traceback" not in logged()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_no_rank_can_run_is_refused_without_a_traceback(
    world: World, served: Front, logged: Callable[[], str], path: str
) -> None:
    """It names a rank that is not there."""
    connection, answer = served.begin(path, body_of(path), x_data_parallel_rank="9")
    assert answer.status == 400, answer.read()
    connection.close()
    assert "Traceback" not in logged()


def test_an_overloaded_cluster_refuses_before_a_stream_begins_and_is_well_again(
    world: World, served: Front, logged: Callable[[], str]
) -> None:
    """No request hangs, and none that was taken is lost. One that comes while a refusal stands is refused at once."""
    before, refused = counted(served), threading.Semaphore(0)

    def ask(_: int) -> str:
        connection, answer = served.begin(CHAT, body_of(CHAT))
        try:
            if answer.status == 200:
                return said(list(events(answer)))
            assert answer.status == 503, answer.read()
            assert int(answer.getheader("retry-after") or 0) >= 1
            assert "error" in json.loads(answer.read())
            refused.release()
            return ""
        finally:
            connection.close()

    with ThreadPoolExecutor(ASKED + 1) as callers:
        asked = [callers.submit(ask, number) for number in range(ASKED)]
        for _ in range(ASKED - HELD):
            assert refused.acquire(timeout=WAIT_S)
        further = 0
        while not (counted(served) - before)["overloaded_before"]:  # a refusal stands for a second or more
            assert callers.submit(ask, 0).result(WAIT_S) == ""
            further += 1
        assert served.get("/health")[0] == 200
        world.gate.open()
        answers = Counter(each.result(WAIT_S) for each in asked)
    assert answers == {TEXT: HELD, "": ASKED - HELD}
    failed = counted(served) - before
    assert failed.total() == ASKED - HELD + further
    assert set(failed) == {"overloaded", "overloaded_before"}
    until(lambda: served.post(CHAT, body_of(CHAT) | {"stream": False})[0] == 200, "it takes requests again", WAIT_S)
    assert "Traceback" not in logged()


def test_a_grammar_that_is_cut_in_its_midst_ends_with_a_clean_event(
    world: World, served: Front, logged: Callable[[], str]
) -> None:
    """Its decode rank is killed, and comes back: it cannot go on with a grammar. An answer without one goes on."""
    world.of_decode.close()
    mortal = world.mortal()
    world.of_decode.callback(lambda: mortal.close())
    for ask, grammar in (("Fill it", {"response_format": SCHEMA}), ("Say it", {})):
        connection, answer = served.begin(CHAT, body_of(CHAT, ask, **grammar))
        assert answer.status == 200, answer.read()
        found, came = events(answer), []
        for each in found:
            came.append(each)
            if len(came) == 4:
                mortal.close()
                mortal = world.mortal()
        connection.close()
        if grammar:
            error = came.pop()["error"]
            assert error["code"] == 503
            assert error["message"].startswith("the answer was interrupted, and cannot be resumed: ")
            assert OBJECT.startswith(said(came))
        else:
            assert said(came) == TEXT
    assert "Traceback" not in logged()
    mortal.close()


def test_a_revoked_key_ends_the_streams_of_its_server(world: World, served: Front, logged: Callable[[], str]) -> None:
    """The last test of this server: it stands in front of nothing then."""
    mortal = world.mortal()
    try:
        connection, answer = served.begin(CHAT, body_of(CHAT, "Go on") | {"max_tokens": 600})
        found = events(answer)
        next(found)
        revoke_key(world.keys, "clients", "front")
        *_, last = found
        connection.close()
    finally:
        mortal.close()
    assert last["error"]["code"] == 503
    until(lambda: served.get("/health")[0] == 503, "it is unhealthy", WAIT_S)
    assert served.post(CHAT, body_of(CHAT) | {"stream": False})[0] == 503
    assert "Traceback" not in logged()

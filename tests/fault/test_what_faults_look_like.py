"""Each fault of docs/guide.md, caused; `pdbus top` shows what the page says it does."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from cut_links import far_node
from fault_rig import TIMING, WAIT_S, Rig, rig
from terminal import pattern

from bus.endpoints import BusAddress
from nodes import RankFacts, RankLink
from pdbus.client import Client
from pdbus.fleet.figures import Sample
from pdbus.fleet.history import History
from pdbus.fleet.source import BrokerStatusClient, Watcher
from pdbus.launcher import Cluster, ClusterSpec
from pdbus.launcher.child import Child
from pdbus.launcher.spec import PartSpec
from pdbus.top.screen import lines_of
from pdbus.top.view import View

pytestmark = pytest.mark.fault
DOCS = Path(__file__).parents[2] / "docs"
FAIL, HANG, CRASH = 0, 1, 2  # token ids that the sim engine never produces
NODE = (*TIMING, "--fault-fail-token", str(FAIL), "--fault-hang-token", str(HANG), "--fault-crash-token", str(CRASH))
CONTROLLER = ("--lease-s", "2.0", "--hang-s", "1.0", "--stale-s", "0.6", "--attempts", "2")


def rows(page: str, title: str) -> dict[str, list[str]]:
    """The first table under `title`, by its first column."""
    section = (DOCS / page).read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    cells = [re.split(r"(?<!\\)\|", line.strip("|")) for line in section.splitlines() if line.startswith("|")]
    return {first.strip(): [cell.strip() for cell in rest] for first, *rest in cells[2:]}


LOOKS = rows("guide.md", "Every fault, and what shows it")


class Watch:
    """`pdbus top` of a controller, but for the terminal."""

    def __init__(self, bus: str, controller: str, wake: int) -> None:
        self._history, self._silent, self._where = History(), "", controller
        self._client = Client(controller)
        self._desk = BrokerStatusClient(BusAddress(bus), "")
        self._watcher = Watcher(self._client, self._desk, 0.1, wake)
        self._watcher.start()

    def close(self) -> None:
        self._watcher.stop()
        self._desk.__exit__(None, None, None)
        self._client.close()

    def until(self, *shown: str) -> None:
        """Each of `shown` was on the screen at some time from now on."""
        end = time.monotonic() + WAIT_S
        missing, screen = list(shown), ""
        while missing:
            assert time.monotonic() < end, f"not shown: {missing}; the last was\n{screen}"
            with suppress(queue.Empty):
                said = self._watcher.updates.get(timeout=1.0)
                assert not isinstance(said, Exception), said
                self._silent = said if isinstance(said, str) else ""
                if isinstance(said, Sample):
                    self._history.add(said)
            lines = lines_of(self._history, View(), 200, 60, where=self._where, silent=self._silent)
            screen = "\n".join(line.plain for line in lines)
            missing = [words for words in missing if not any(looks_like(words).search(line.plain) for line in lines)]


def looks_like(words: str) -> re.Pattern[str]:
    return re.compile(pattern(words).pattern.replace("RANK", r"[\w-]+/\d+").replace("ROLE", r"\w+"))


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """With the prefill method that the test asks for."""
    spec = ClusterSpec(
        prefill=2, decode=2, engine="sim", model="sim", prefill_method=request.param, node_args=NODE,
        controller_args=CONTROLLER,
    )  # fmt: skip
    with Cluster(spec) as running:
        yield running


class Scene:
    """A cluster, its watch, and what the fault leaves behind to be tidied up."""

    def __init__(self, live: Rig, exits: ExitStack) -> None:
        self.live, self.cluster, self.exits = live, live.cluster, exits
        self.wake = os.open(os.devnull, os.O_WRONLY)
        exits.callback(os.close, self.wake)
        self.watch = self.watching(live.cluster.bus, live.cluster.controller)
        self.watch.until("decode-0/1 …ready")

    def watching(self, bus: str, controller: str) -> Watch:
        watch = Watch(bus, controller, self.wake)
        self.exits.callback(watch.close)
        return watch

    def kill(self, part: str, number: int = signal.SIGKILL) -> None:
        self.live.signal(part, number)
        if number == signal.SIGSTOP:
            self.exits.callback(self.live.signal, part, signal.SIGCONT)

    def process(self, name: str, module: str, *args: str) -> Child:
        child = Child(
            PartSpec(name, "node", module, (*args, "--watch-parent")), self.cluster.directory / "more.log", {}
        )
        self.exits.callback(child.close)
        self.live.until(lambda: (child.read(), child.ready)[1], f"{name} is ready")
        return child

    def refused(self, prompt: list[int], retries: int = 2, **options: Any) -> None:
        """Ask for something that will not be done."""
        with rig(self.cluster, retries=retries) as asker:
            asker.ended(asker.begin(prompt, 4, **options))


@pytest.fixture
def scene(cluster: Cluster) -> Iterator[Scene]:
    with rig(cluster) as live:
        live.idle()
        with ExitStack() as exits:
            yield Scene(live, exits)
        for part in cluster.poll():
            cluster.restart(part)

        def restart_hung() -> None:
            """The controller may have given what hangs an engine to a second one, which is found to hang later."""
            for rank in live.status().ranks:
                if rank.state == "hung":
                    cluster.restart(f"{rank.instance}/{rank.dp_rank}")

        live.idle(restart_hung)


def killed_while(role: str) -> Callable[[Scene], None]:
    def cause(scene: Scene) -> None:
        live = scene.live
        rid = live.begin(300, 400)
        scene.kill(live.holder(role, rid))  # type: ignore[arg-type]
        live.ended(rid)

    return cause


def second_start(scene: Scene) -> None:
    cluster = scene.cluster
    scene.process(
        "again", "nodes.decode", "--bus", cluster.bus, "--controller", cluster.controller, "--instance", "decode-0",
        "--dp-size", "2", "--dp-rank", "1", "--data", f"ipc://{cluster.directory}", "--engine", "sim", "--model", "sim",
    )  # fmt: skip


def role_gone(scene: Scene) -> None:
    for part in ("decode-0/0", "decode-0/1"):
        scene.kill(part)
    scene.watch.until("! no decode rank is ready")
    scene.refused([5, 6, 7])


def its_room_gone(scene: Scene) -> None:
    scene.kill("prefill-0/1")
    scene.watch.until("! prefill-0/1 has been lost")
    scene.refused([5, 6, 7], bootstrap_room=7)


def cut_off(which: str) -> Callable[[Scene], None]:
    def cause(scene: Scene) -> None:
        link, links = scene.exits.enter_context(far_node(scene.live))
        for each in (link,) if which == "controller" else links:
            each.cut()

    return cause


def one_of_several(scene: Scene) -> None:
    cluster = scene.cluster
    second = f"ipc://{cluster.directory}/second"
    child = scene.process(
        "controller-1", "controller", "--name", "controller-1", "--bus", cluster.bus, "--controller", second
    )
    scene.watch = scene.watching(cluster.bus, second)
    scene.watch.until("controller-1")
    child.send(signal.SIGKILL)


def with_broker(scene: Scene) -> None:
    bus, controller = (f"ipc://{scene.cluster.directory}/w{name}" for name in "bc")
    child = scene.process("both", "controller", "--with-broker", "--bus", bus, "--controller", controller)
    scene.watch = scene.watching(bus, controller)
    scene.watch.until("controller-0")
    child.send(signal.SIGKILL)


def client_lost(scene: Scene) -> None:
    command = [sys.executable, "-P", "-m", "pdbus", "generate", "--tokens", "5 6 7", "--max-tokens", "8000"]
    with subprocess.Popen([*command, "--controller", scene.cluster.controller], stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.read(1)
        client.kill()


def embedded_fails(scene: Scene) -> None:
    def bug() -> None:
        raise RuntimeError("a bug of ours")

    cluster = scene.cluster
    facts = RankFacts(model="toy", max_context=8192, max_running=1, vocab_size=259)
    link = RankLink(
        cluster.bus, controllers=[cluster.controller], role="unified", instance="toy", facts=facts,
        data=f"ipc://{cluster.directory}",
    )  # fmt: skip
    scene.exits.enter_context(link)
    assert link.wait_ready(WAIT_S)
    scene.watch.until("toy/0 …ready")
    link.loop.call_threadsafe(bug)


def signalled(part: str, number: int = signal.SIGKILL) -> Callable[[Scene], None]:
    return lambda scene: scene.kill(part, number)


CAUSES: dict[str, Callable[[Scene], None]] = {
    "node killed or crashed": signalled("decode-0/1"),
    "node restarted within its lease": lambda scene: scene.cluster.restart("decode-0/1"),
    "a rank started a second time": second_start,
    "node stopped": signalled("prefill-0/0", signal.SIGSTOP),
    "engine hung": lambda scene: scene.refused([HANG] * 4, retries=0),
    "a forward step fails": lambda scene: scene.refused([5, FAIL]),
    "a request that kills ranks": lambda scene: scene.refused([CRASH] * 4, retries=10),
    "prefill rank lost while decode": killed_while("prefill"),
    "decode rank lost while prefill": killed_while("decode"),
    "all ranks of a role are gone": role_gone,
    "`follow_bootstrap_room` and": its_room_gone,
    "node cut off from a controller": cut_off("controller"),
    "node cut off from the bus": cut_off("bus"),
    "broker killed or stopped": signalled("broker"),
    "controller killed": signalled("controller-0"),
    "controller paused": signalled("controller-0", signal.SIGSTOP),
    "controller asked to leave": signalled("controller-0", signal.SIGTERM),
    "one of several controllers": one_of_several,
    "the client loses its process": client_lost,
    "an embedded part's thread": embedded_fails,
    "the broker inside a controller": with_broker,
}
NOT_IN_TOP = (
    "the client inside an edge",  # it has a port of its own
    "client cut off from a decode rank", "prefill rank cut off from a decode rank",  # the cluster sees nothing
)  # fmt: skip


def test_every_fault_has_its_row_and_its_cause() -> None:
    assert len(LOOKS) == len(CAUSES) + len(NOT_IN_TOP)
    for fault in LOOKS:
        assert sum(fault.startswith(each) for each in (*CAUSES, *NOT_IN_TOP)) == 1, fault


@pytest.mark.parametrize(
    ("cluster", "fault"),
    [("follow_bootstrap_room" if "room" in fault else "total_tokens", fault) for fault in CAUSES],
    indirect=["cluster"],
)
def test_top_shows_what_the_guide_says(scene: Scene, fault: str) -> None:
    (row,) = (cells for name, cells in LOOKS.items() if name.startswith(fault))
    shown = re.findall(r"`([^`]+)`", row[0])
    assert shown
    CAUSES[fault](scene)
    scene.watch.until(*shown)

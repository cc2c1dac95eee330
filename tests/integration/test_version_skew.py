"""Today's parts beside those of release 0.1.0, whose wire is version 1 too: a cluster of the release is upgraded part
by part under load in the order of docs/deploy.md, and back again, while clients of both send requests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import release_010
from part_process import WAIT_S, PartProcess
from release_010_starts import Starts

from bus.endpoints import BusAddress
from nodes.own.engines.sim import SIM_VOCAB_SIZE
from pdbus.client import Client
from pdbus.fleet.figures import Sample
from pdbus.fleet.history import History
from pdbus.fleet.source import BrokerStatusClient
from pdbus.top.screen import lines_of
from pdbus.top.view import View

pytestmark = pytest.mark.timeout(600)
ORDER = ("broker", "controller", "decode/0", "decode/1", "prefill/0", "prefill/1")
CLIENT = f"""
import random, sys
from nodes.own.engines.sim import sim_generate
from pdbus.client import Client

rng = random.Random(1)
with Client(sys.argv[1], connect_timeout_s={WAIT_S}, retries=30) as client:
    for line in sys.stdin:
        asked = [[rng.randrange({SIM_VOCAB_SIZE}) for _ in range(rng.randrange(20, 200))] for _ in range(int(line))]
        streams = [client.generate_tokens(prompt, max_tokens=20) for prompt in asked]
        answers = [stream.tokens() == sim_generate(prompt, 20) for prompt, stream in zip(asked, streams)]
        print("right" if all(answers) else "wrong", flush=True)
"""


class Versions:
    """A cluster whose parts are each of one version: `old`, or `new`."""

    def __init__(self, old: Path, place: Path) -> None:
        self._paths = {"old": str(old), "new": ""}
        self.place = place
        self.parts: dict[str, PartProcess] = {}
        self.clients = {version: self._client(path) for version, path in self._paths.items()}

    def start(self, part: str, version: str) -> None:
        """READY on return."""
        role, _, rank = part.partition("/")
        bus, controller = ("--bus", f"ipc://{self.place}/bus"), ("--controller", f"ipc://{self.place}/c")
        line = {
            "broker": ("bus", *bus),
            "controller": ("controller", *bus, *controller, "--prefill-method", "total_tokens"),
        }.get(role) or (
            f"nodes.{role}", *bus, *controller, "--data", f"ipc://{self.place}", "--engine", "sim", "--model", "sim",
            "--dp-size", "2", "--dp-rank", rank, "--sim-base-s", "0.002",
        )  # fmt: skip
        self.parts[part] = PartProcess(
            [sys.executable, "-P", "-m", *line], self.place / "log", {"PYTHONPATH": self._paths[version]}
        )
        self.parts[part].until_ready()

    def replace(self, part: str, version: str) -> None:
        self.parts.pop(part).stop()
        self.start(part, version)

    def ask(self, count: int) -> None:
        for client in self.clients.values():
            assert client.stdin is not None
            client.stdin.write(f"{count}\n")
            client.stdin.flush()

    def answers(self) -> Counter[str]:
        """One of each client, when all that it was last asked has ended."""
        said: Counter[str] = Counter()
        for version, client in self.clients.items():
            assert client.stdout is not None
            said[f"{version}: {client.stdout.readline().strip()}"] += 1
        return said

    def log(self) -> str:
        return (self.place / "log").read_text(encoding="utf-8")[-4000:]

    def close(self) -> None:
        for client in self.clients.values():
            client.kill()
            client.communicate(timeout=60)
        for part in self.parts.values():
            part.close()

    def _client(self, path: str) -> subprocess.Popen[str]:
        with open(self.place / "log", "a", encoding="utf-8") as log:
            return subprocess.Popen(
                [sys.executable, "-P", "-c", CLIENT, f"ipc://{self.place}/c"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env=os.environ | {"PYTHONPATH": path}, cwd=self.place,
            )  # fmt: skip


@pytest.fixture(scope="module")
def old() -> Iterator[Path]:
    commit = release_010.commit()
    if not commit:
        pytest.skip("no history down to release 0.1.0 here: a shallow clone, or no clone")
    folder = release_010.packages(commit)
    starts = Starts(folder)
    starts.install()
    starts.on = True
    yield folder
    starts.close()


@pytest.fixture
def cluster(old: Path) -> Iterator[Versions]:
    with tempfile.TemporaryDirectory(prefix="pd") as place:
        made = Versions(old, Path(place))
        try:
            for part in ORDER:
                made.start(part, "old")
            yield made
        finally:
            made.close()


def test_they_are_two_versions(old: Path, tmp_path: Path) -> None:
    """Or the rest would prove nothing: the release's messages have fewer fields. Its forks are as old as what starts
    anew."""
    look = "from bus.wire.messages import StatusQuery, Status; print(Status.__module__, len(Status.__struct_fields__))"
    (tmp_path / "look.py").write_text(look)
    said = [
        {
            subprocess.run(
                [sys.executable, "-P", *words], env=os.environ | {"PYTHONPATH": path}, cwd=old, check=True,
                capture_output=True,
            ).stdout
            for words in (["-c", look], [str(tmp_path / "look.py")])
        }
        for path in (str(old), "")
    ]  # fmt: skip
    assert [len(each) for each in said] == [1, 1]
    assert said[0] != said[1]


def test_todays_status_and_top_of_the_release_say_what_it_does_not_know(cluster: Versions) -> None:
    """One sentence or a dash each, and no traceback."""
    at = ("--controller", f"ipc://{cluster.place}/c", "--bus", f"ipc://{cluster.place}/bus")
    cluster.ask(4)
    cluster.answers()
    for more in ((), ("--json",)):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "pdbus", "status", "--events", "0", *at, *more],
            capture_output=True, text=True, timeout=WAIT_S, check=True,
        )  # fmt: skip
        assert not done.stderr
        if more:
            said = json.loads(done.stdout)
            assert (said["controller"]["events"], said["controller"]["queue"], said["conditions"]) == (None, None, [])
        else:
            assert "events: - (this controller is older than this pdbus, and keeps none)" in done.stdout
    with Client(at[1]) as client, BrokerStatusClient(BusAddress(at[3])) as broker:
        history = History()
        for _ in range(2):
            seen = client.status(timeout_s=WAIT_S, events_from=0)
            history.add(Sample(time.monotonic(), time.time(), seen, broker.ask()))
    chosen = seen.ranks[0].instance, seen.ranks[0].dp_rank
    for page, words in (("ranks", "older than this pdbus, and keeps no events"), ("rank", "- kept for other ranks")):
        shown = lines_of(history, View(page=page, chosen=chosen), 120, 40, where=at[1])
        assert any(words in line.plain for line in shown), [line.plain for line in shown]


@pytest.mark.slow
def test_an_upgrade_part_by_part_and_back_loses_nothing(cluster: Versions) -> None:
    """The parts of a role that is there twice go one after the other; requests run all the while."""
    right = Counter({"old: right": 1, "new: right": 1})
    cluster.ask(8)
    assert cluster.answers() == right, cluster.log()
    for version, parts in (("new", ORDER), ("old", ORDER[::-1])):
        for part in parts:
            cluster.ask(8)
            cluster.replace(part, version)
            assert cluster.answers() == right, cluster.log()
            cluster.ask(4)
            assert cluster.answers() == right, cluster.log()

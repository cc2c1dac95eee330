"""Keys are replaced as docs/deploy.md says, line by line, in a cluster that serves: every request comes back right."""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from deploy_page import blocks, run
from part_process import WAIT_S, PartProcess

from bus.runtime.keys import add_key, give_key, new_keys
from nodes.own.engines.sim import sim_generate
from pdbus.client import Client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
BREATH_S = 0.03  # without it a core would be busy with nothing but these
NODES = ("prefill/0", "prefill/1", "decode/0", "decode/1")


class Asking(threading.Thread):
    """A client with one key: requests one after the other, each after a breath, until it is stopped."""

    def __init__(self, controller: str, keys: Path) -> None:
        super().__init__(daemon=True)
        self.answers: list[bool] = []
        self.failure: BaseException | None = None
        self.of = controller.partition("#")[2]
        self._controller, self._keys = controller, keys
        self._more, self._stopping = threading.Semaphore(0), threading.Event()
        self.start()

    def run(self) -> None:
        try:
            with Client(self._controller, keys=str(self._keys), connect_timeout_s=WAIT_S, retries=100) as client:
                while not self._stopping.wait(BREATH_S):
                    prompt = [5 + len(self.answers) % 400] * 40
                    self.answers.append(
                        client.generate_tokens(prompt, max_tokens=8).tokens() == sim_generate(prompt, 8)
                    )
                    self._more.release()
        except BaseException as error:
            self.failure = error
            self._more.release(1_000_000)

    def serves(self, count: int = 5) -> None:
        """Until so many more have come back."""
        for _ in range(count):
            assert self._more.acquire(timeout=WAIT_S)
        assert self.failure is None

    def stop(self) -> None:
        self._stopping.set()
        self.join(WAIT_S)
        assert not self.is_alive()
        assert self.failure is None
        assert all(self.answers)


class Cluster:
    """Parts over ipc, where a revoked key is that of a process; `allow` is read where the keys were made."""

    def __init__(self, place: Path) -> None:
        self.place, self.keys = place, place / "keys"
        self._running: dict[str, PartProcess] = {}
        self._asking: dict[str, Asking] = {}
        new_keys(self.keys, ("prefill", "decode"))
        add_key(self.keys, "controllers", "controller-1")

    def begin(self) -> None:
        self.start("broker", "controller-0", "controller-1", *NODES)
        self.ask("edge", "controller-0")
        self.ask("other", "controller-1")

    def start(self, *parts: str) -> None:
        base = f"ipc://{self.place}"
        bus = ("--bus", f"{base}/bus", "--keys", str(self.keys), "--log-level", "warning")
        controllers = [f"{base}/controller-{number}#controller-{number}" for number in range(2)]
        for part in parts:
            instance, _, rank = part.partition("/")
            if part == "broker":
                line = ["bus", *bus]
            elif part.startswith("controller"):
                line = ["controller", *bus, "--name", part, "--controller", f"{base}/{part}", "--lease-s", "1"]
            else:
                line = [f"nodes.{instance.partition('-')[0]}", *bus, "--instance", instance, "--dp-size", "2"]
                line += ["--dp-rank", rank, "--engine", "sim", "--model", "sim", "--data", base]
                line += [word for each in controllers for word in ("--controller", each)]
            self._running[part] = PartProcess([sys.executable, "-P", "-m", *line], self.place / "log")
        for part in parts:
            self._running[part].until_ready()

    def stop(self, *parts: str) -> None:
        for part in parts:
            self._running.pop(part).stop()

    def address(self, controller: str) -> str:
        return f"ipc://{self.place}/{controller}#{controller}"

    def ask(self, name: str, controller: str) -> None:
        if not (self.keys / "allow" / "clients" / f"{name}.key").exists():
            add_key(self.keys, "clients", name)
        give_key(self.keys, "clients", name, self.place / name)  # once more: it renews what it knows of others
        self._asking[name] = Asking(self.address(controller), self.place / name)
        self._asking[name].serves()

    def no_longer(self, *names: str) -> None:
        for name in names:
            self._asking.pop(name).stop()

    def serves(self) -> None:
        """Who asks is answered, where its controller runs."""
        for asking in self._asking.values():
            if asking.of in self._running:
                asking.serves()

    def close(self) -> None:
        try:
            self.no_longer(*self._asking)
        finally:
            for process in self._running.values():
                process.close()

    def told(self) -> dict[str, Callable[[], None]]:
        """What the lines that begin with # say is to be done."""
        return {
            "start the ranks of prefill-b": lambda: self.start("prefill-b/0", "prefill-b/1"),
            "stop the ranks of prefill": lambda: self.stop("prefill/0", "prefill/1"),
            "start a client with the key of edge-b": lambda: self.ask("edge-b", "controller-0"),
            "stop the client with the key of edge": lambda: self.no_longer("edge"),
            "copy allow to where there are copies of it": self.give_once_more,
            "stop controller-1": lambda: self.stop("controller-1"),
            "start controller-1": lambda: self.start("controller-1"),
            "stop the broker": lambda: self.stop("broker"),
            "start the broker": lambda: self.start("broker"),
        }

    def give_once_more(self) -> None:
        for name in self._asking:
            give_key(self.keys, "clients", name, self.place / name)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="pd") as place:
        made = Cluster(Path(place))
        try:
            made.begin()
            yield made
        finally:
            made.close()


def test_the_page_is_followed_line_by_line(cluster: Cluster) -> None:
    commands = blocks("Key rotation")
    assert len(commands) == 4
    for line in (line for block in commands for line in block):
        if line.startswith("# "):
            cluster.told()[line.removeprefix("# ")]()
        else:
            run(line, cluster.place)
        cluster.serves()
    cluster.ask("after", "controller-1")


def test_a_list_that_is_away_for_three_seconds_disturbs_nobody(cluster: Cluster) -> None:
    """All handshakes and looks meanwhile count as before."""
    allow, aside = cluster.keys / "allow", cluster.place / "aside"
    allow.rename(aside)
    until = time.monotonic() + 3.0
    while time.monotonic() < until:
        cluster.serves()
    newcomer = Asking(cluster.address("controller-0"), cluster.place / "edge")  # it proves its key meanwhile
    newcomer.serves()
    newcomer.stop()
    aside.rename(allow)
    until = time.monotonic() + 2.0
    while time.monotonic() < until:
        cluster.serves()
    log = (cluster.place / "log").read_text()
    assert "allowlist.unreadable" in log
    assert "revoked" not in log

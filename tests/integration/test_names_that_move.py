"""Addresses by name: a part that comes back under its name at another address is found there by those that were
connected to it, as when Kubernetes gives a new pod another one. Names are of a hosts file that the parts alone see."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from edge_process import wait
from part_process import PartProcess

from nodes.own.engines.sim import sim_generate
from pdbus.client import Client

OWN_HOSTS = ("unshare", "--map-root-user", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"')
PARTS = {
    "broker": ("bus", "--metrics-port", "9100"),
    "controller": ("controller", "--bus", "tcp://the-broker:5550", "--lease-s", "1"),
    "node": ("nodes.unified", "--engine", "sim", "--model", "sim", "--sim-timing", "zero", "--bus",
             "tcp://the-broker:5550", "--controller", "tcp://the-controller:5560"),
}  # fmt: skip


def own_hosts_work(hosts: Path) -> bool:
    try:
        return subprocess.run([*OWN_HOSTS, hosts, "true"], capture_output=True, timeout=60).returncode == 0
    except OSError:
        return False


class Parts:
    def __init__(self, place: Path) -> None:
        self.hosts = place / "hosts"
        self._place = place
        self._net = f"127.{random.SystemRandom().randrange(1, 255)}.{random.SystemRandom().randrange(1, 255)}"
        self._at: dict[str, str] = {}
        self._running: dict[str, PartProcess] = {}

    def address(self, part: str) -> str:
        return self._at[part]

    def start(self, part: str) -> None:
        """At an address that nobody had."""
        used = len(list(self._place.glob("*.log"))) + 1
        self._at[part] = at = f"{self._net}.{used}"
        self.hosts.write_text("".join(f"{ip} the-{name}\n" for name, ip in self._at.items()))  # in place: it is mounted
        serves = {
            "broker": ("--bus", f"tcp://{at}:5550", "--metrics-host", at),
            "controller": ("--controller", f"tcp://{at}:5560"),
            "node": ("--data", f"tcp://{at}:5580"),
        }
        line = [*OWN_HOSTS, str(self.hosts), sys.executable, "-P", "-m", *PARTS[part], *serves[part]]
        self._running[part] = PartProcess(line, self._place / f"{used}.log")

    def until_ready(self, *parts: str) -> None:
        for part in parts:
            self._running[part].until_ready()

    def kill(self, part: str) -> None:
        self._running.pop(part).close()

    def close(self) -> None:
        for part in list(self._running):
            self.kill(part)


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    made = Parts(tmp_path)
    made.hosts.touch()
    if not own_hosts_work(made.hosts):
        pytest.skip("no mount namespaces here")
    try:
        for part in reversed(PARTS):  # when the first ones start there is no name yet
            made.start(part)
        made.until_ready(*PARTS)
        yield made
    finally:
        made.close()


def answers(parts: Parts) -> bool:
    with Client(f"tcp://{parts.address('controller')}:5560", connect_timeout_s=60.0) as client:
        return client.generate_tokens([5, 6, 7], max_tokens=4).tokens() == sim_generate([5, 6, 7], 4)


def reported(parts: Parts, recently: Callable[[float], bool]) -> bool:
    """Whether the controller has heard the rank over the broker, that long ago."""
    with Client(f"tcp://{parts.address('controller')}:5560") as client:
        ages = [rank.report_age_s for rank in client.status().ranks]
    return bool(ages) and all(age_s >= 0 and recently(age_s) for age_s in ages)


def known_to_the_broker(parts: Parts) -> bool:
    with urllib.request.urlopen(f"http://{parts.address('broker')}:9100/metrics", timeout=60) as page:
        return re.search(r"^pdbus_broker_ranks 1.0$", page.read().decode(), re.M) is not None


def test_a_broker_and_a_controller_are_found_at_their_new_addresses(parts: Parts) -> None:
    assert answers(parts)
    wait(lambda: reported(parts, lambda age_s: age_s < 2.0))
    parts.kill("broker")
    wait(lambda: reported(parts, lambda age_s: age_s > 3.0))
    parts.start("broker")
    parts.until_ready("broker")
    wait(lambda: reported(parts, lambda age_s: age_s < 2.0))  # rank and controller both came back to it
    wait(lambda: known_to_the_broker(parts))
    assert answers(parts)
    parts.kill("controller")
    parts.start("controller")
    parts.until_ready("controller")
    assert answers(parts)

"""The commands, settings, keys and probes of the manifests, as processes here: they serve, are replaced one after the
other under load with nothing lost, and connect exactly as the network policies let them."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from deploy_page import blocks, run
from pods import POLL_S, WAIT_S, Namespace, Pod
from rendered import PLACE, Way, ports, tool, ways

from nodes.own.engines.sim import sim_generate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ORDER = ("broker", "controller", "decode", "prefill", "edge")  # docs/deploy.md


@pytest.fixture(scope="module")
def namespace() -> Iterator[Namespace]:
    place = Path(tempfile.mkdtemp(prefix="pd"))
    place.chmod(0o755)
    try:
        (commands,) = blocks("Keys")
        for line in commands:
            run(line, place)
        made = list(yaml.safe_load_all(tool("sh", PLACE / "keys.sh", place / "keys")))
        with Namespace("sim", made, place) as running:
            yield running
    finally:
        shutil.rmtree(place)


class Load:
    """Requests through the edges that the Service has, a few at a time, each answer compared with the right one."""

    def __init__(self, namespace: Namespace, threads: int = 6) -> None:
        self.edges = namespace.of("edge")  # that the Service sends to; whoever takes one out replaces the list
        self.ends: list[str] = []
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(threads)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def more(self, count: int) -> None:
        """Until so many more have ended."""
        wanted, until = len(self.ends) + count, time.monotonic() + WAIT_S
        while len(self.ends) < wanted:
            assert time.monotonic() < until, set(self.ends)
            time.sleep(POLL_S)

    def _run(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self._stopping.is_set():
            prompt = [rng.randrange(3, 500) for _ in range(rng.randrange(20, 200))]
            edge = rng.choice(self.edges)
            try:
                said = generated(edge, prompt, 24)
            except urllib.error.HTTPError as error:
                with error:
                    self.ends.append(f"{edge.name}: {error} {error.read()!r}")
            except OSError as error:
                self.ends.append(f"{edge.name}: {error}")
            else:
                self.ends.append("right" if said == sim_generate(prompt, 24) else f"wrong from {edge.name}")


def generated(edge: Pod, prompt: list[int], tokens: int) -> list[int]:
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": tokens, "temperature": 0}}
    request = urllib.request.Request(
        f"http://{edge.address}:8000/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        return list(json.load(answer)["output_ids"])


def test_they_serve_and_connect_as_the_policies_say(namespace: Namespace) -> None:
    allowed, seen = set(ways("sim", "ingress")), set[Way]()
    with Load(namespace) as load:
        until = time.monotonic() + WAIT_S
        while seen != allowed and time.monotonic() < until:
            seen |= namespace.connections()
            time.sleep(POLL_S)
        load.more(50)
        seen |= namespace.connections()
    assert seen == allowed
    assert set(load.ends) == {"right"}
    for pod in namespace.pods.values():
        assert pod.listening() == set(ports(namespace.workloads[pod.component]).values()), pod.name
        assert pod.probed("livenessProbe")


def test_pods_do_not_run_as_root(namespace: Namespace) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can start processes of others")
    for pod in namespace.pods.values():
        assert pod.process is not None
        status = Path(f"/proc/{pod.process.pid}/status").read_text(encoding="utf-8")
        assert re.search(r"^Uid:\t65532\t65532\t65532\t65532$", status, re.M)


def rolled(namespace: Namespace, load: Load, component: str) -> None:
    """As a StatefulSet does it: the highest first, the next once that is ready. An edge is out of the Service before it
    is told anything; the other parts get their SIGTERM in the midst of requests."""
    for pod in sorted(namespace.of(component), key=lambda pod: -pod.index):
        if component == "edge":
            load.edges = [edge for edge in namespace.of("edge") if edge is not pod]
        load.more(10)
        assert pod.terminate() == 0, pod.log()
        pod.replace()
        if component == "edge":
            load.edges = namespace.of("edge")


def test_rolling_restarts_lose_nothing(namespace: Namespace) -> None:
    """In the order that the page names."""
    with Load(namespace) as load:
        for component in ORDER:
            rolled(namespace, load, component)
        load.more(50)
    assert set(load.ends) == {"right"}


def test_all_at_once_lose_nothing(namespace: Namespace) -> None:
    """A change of what they have in common restarts all, each StatefulSet for itself."""
    with Load(namespace) as load, ThreadPoolExecutor(len(ORDER)) as controllers:
        list(controllers.map(lambda component: rolled(namespace, load, component), ORDER))
        load.more(50)
    assert set(load.ends) == {"right"}


def test_an_edge_whose_controller_is_away_is_not_ready(namespace: Namespace) -> None:
    """Then the Service has the other one; and it is not started again for that."""
    controller, edge = namespace.pods["pdbus-controller-1"], namespace.pods["pdbus-edge-1"]
    controller.kill()
    until = time.monotonic() + WAIT_S
    while edge.probed("readinessProbe"):
        assert time.monotonic() < until
        time.sleep(POLL_S)
    assert edge.probed("livenessProbe")
    assert generated(namespace.pods["pdbus-edge-0"], [5, 6, 7], 8) == sim_generate([5, 6, 7], 8)
    controller.replace()
    edge.until_ready()
    assert generated(edge, [5, 6, 7], 8) == sim_generate([5, 6, 7], 8)


def test_what_autoscalers_go_by_is_served(namespace: Namespace) -> None:
    rules = (PLACE / "components" / "autoscaling" / "adapter-rules.yaml").read_text(encoding="utf-8")
    named = set(re.findall(r"pdbus_node_\w+", rules)) - {"pdbus_node_kv_used"}
    rank = namespace.pods["pdbus-decode-0"]
    with urllib.request.urlopen(f"http://{rank.address}:9100/metrics", timeout=WAIT_S) as answer:
        page = answer.read().decode()
    assert named
    assert all(re.search(rf"^{name}\{{", page, re.M) for name in named)

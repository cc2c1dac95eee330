"""A pytest plugin: the fixture `pdbus_cluster` starts clusters of processes for a test, and removes them after it.

    def test_mine(pdbus_cluster):
        cluster = pdbus_cluster(prefill=2, decode=2, engine="sim")
        with cluster.client() as client:
            assert client.generate_tokens([5, 6, 7], max_tokens=4).tokens()

The arguments are those of `pdbus.ClusterSpec` (default engine: `sim`). Nothing of pdbus is imported before a test uses
the fixture.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pdbus.launcher import Cluster

_CLUSTERS = pytest.StashKey[list[Any]]()
_NOTES = pytest.StashKey[Path]()  # a folder with a file for each xdist worker: the directories of its clusters
_SHOWN = 4000  # characters of each log


@pytest.fixture
def pdbus_cluster(request: pytest.FixtureRequest) -> Generator[Callable[..., Cluster], None, None]:
    """A factory of running clusters: `pdbus_cluster(**fields of ClusterSpec)` waits until the cluster is READY and
    returns it. At the end of the test each cluster is stopped, and the test fails if a process or socket file is left.
    If the test failed, its report has the logs of the parts."""
    from pdbus.launcher import Cluster, ClusterSpec

    clusters: list[Cluster] = []
    directories: list[Path] = []
    request.node.stash[_CLUSTERS] = clusters
    worker: dict[str, str] = getattr(request.config, "workerinput", {})

    def start(**spec: Any) -> Cluster:
        cluster = Cluster(ClusterSpec(**{"engine": "sim", "model": "sim"} | spec))
        clusters.append(cluster)
        stopping.push(cluster)
        cluster.start()
        directories.append(cluster.directory)
        if "pdbus_notes" in worker:
            with Path(worker["pdbus_notes"], worker["workerid"]).open("a", encoding="utf-8") as file:
                file.write(f"{cluster.directory}\n")
        return cluster

    with ExitStack() as stopping:  # stops all of them, even if one raises
        yield start
    alive = [child.pid for cluster in clusters for child in cluster.started if child.returncode is None]
    assert not alive, f"processes {alive} outlived their cluster"
    left = [socket for cluster in clusters for socket in cluster.leftovers]
    assert not left, f"sockets were left in {', '.join(map(str, directories))}: {', '.join(left)}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the end of each part's log to the report of a failed test."""
    report = yield
    if report.failed:
        for cluster in item.stash.get(_CLUSTERS, []):
            logs = cluster.logs or {name: child.tail() for name, child in cluster.children.items()}
            for name, log in logs.items():
                report.sections.append((f"log of {name}", log[-_SHOWN:]))
    return report


# --- under pytest-xdist: logs and directories of a worker that has crashed -------------------------------------


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Have an xdist worker record the directories of its clusters in a file."""
    notes = node.config.stash.setdefault(_NOTES, None) or Path(tempfile.mkdtemp(prefix="pdbus-xdist-"))
    node.config.stash[_NOTES] = notes
    node.workerinput["pdbus_notes"] = str(notes)


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: pytest.TestReport, sched: Any) -> None:
    """Add the logs that a crashed worker's clusters left to the test's report, and remove their directories."""
    worker: Any = report.node
    notes = worker.config.stash.get(_NOTES, None)
    if notes is None or not (noted := notes / worker.gateway.id).exists():
        return
    for directory in map(Path, noted.read_text(encoding="utf-8").split()):
        for log in sorted(directory.glob("*.log")):
            report.sections.append((f"log of {log.stem}", log.read_text("utf-8", "replace")[-_SHOWN:]))
        shutil.rmtree(directory, ignore_errors=True)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the folder of the workers' records at the end of the session."""
    notes = config.stash.get(_NOTES, None)
    if notes is not None:
        shutil.rmtree(notes, ignore_errors=True)

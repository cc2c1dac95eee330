"""pytest plugin: `pdbus_cluster`, a live cluster of processes for a test, gone without a trace after it.

    def test_mine(pdbus_cluster):
        cluster = pdbus_cluster(prefill=2, decode=2, engine="sim")
        with cluster.client() as client:
            assert client.generate_tokens([5, 6, 7], max_tokens=4).tokens()

Takes what `pdbus.ClusterSpec` takes (the engine is `sim` unless said otherwise). Nothing of pdbus is imported before a
test asks for the fixture.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pdbus.launcher import Cluster

_CLUSTERS = pytest.StashKey[list[Any]]()


@pytest.fixture
def pdbus_cluster(request: pytest.FixtureRequest) -> Generator[Callable[..., Cluster], None, None]:
    """A factory of running clusters. At the end of the test each is taken down, and the test fails if a process or a
    socket file survives; if the test failed, the parts' logs are in its report."""
    from pdbus.launcher import Cluster, ClusterSpec

    running: list[tuple[Cluster, str]] = []
    request.node.stash[_CLUSTERS] = running

    def start(**spec: Any) -> Cluster:
        cluster = Cluster(ClusterSpec(**{"engine": "sim", "model": "sim"} | spec)).start()
        running.append((cluster, str(cluster.directory)))
        return cluster

    yield start
    for cluster, directory in reversed(running):
        processes = [child.process for child in cluster.started]
        cluster.stop()
        alive = [process.pid for process in processes if process.returncode is None]
        assert not alive, f"processes {alive} outlived their cluster"
        assert not cluster.leftovers, f"sockets were left in {directory}: {', '.join(cluster.leftovers)}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the end of each part's log to the report of a test that failed."""
    report = yield
    if report.failed:
        for cluster, _ in item.stash.get(_CLUSTERS, []):
            logs = cluster.logs or {name: child.tail() for name, child in cluster.children.items()}
            for name, log in logs.items():
                report.sections.append((f"log of {name}", log[-4000:]))
    return report

"""A cluster's life: started twice, in a second `with`, in a forked child. Its only part is a line of Python."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_service import in_a_forked_child

from bus.errors import PartFailed, StartError
from pdbus.launcher.addresses import choose
from pdbus.launcher.cluster import Cluster
from pdbus.launcher.spec import ClusterSpec, PartSpec

PART = "print('READY a=b', flush=True)\nimport sys\nsys.stdin.read()\n"
CALLS: dict[str, Callable[[Cluster], Any]] = {
    "bus": lambda cluster: cluster.bus,
    "controller": lambda cluster: cluster.controller,
    "controllers": lambda cluster: cluster.controllers,
    "directory": lambda cluster: cluster.directory,
    "log_dir": lambda cluster: cluster.log_dir,
    "client": lambda cluster: cluster.client(),
    "status": lambda cluster: cluster.status(),
}
OF_PARTS: dict[str, Callable[[Cluster], Any]] = {
    "log": lambda cluster: cluster.log("part"),
    "kill": lambda cluster: cluster.kill("part"),
    "restart": lambda cluster: cluster.restart("part"),
    "begin": lambda cluster: cluster.begin("part"),
    "poll": lambda cluster: cluster.poll(),
}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    def start_parts(self: Cluster) -> None:
        self._addresses = choose(self.spec, self.directory)
        self._wait_ready([self._spawn(PartSpec("part", "node", "part", ()))])

    (tmp_path / "part.py").write_text(PART)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Cluster, "_start_parts", start_parts)
    return Cluster(ClusterSpec(unified=1, env={"PYTHONPATH": str(tmp_path)}))


def test_a_cluster_that_runs_is_not_started_again(cluster: Cluster) -> None:
    with cluster:
        directory, part = cluster.directory, cluster.children["part"]
        with pytest.raises(StartError, match="runs already"):
            cluster.start()
        assert (cluster.directory, cluster.children["part"]) == (directory, part)
        assert cluster.poll() == []
    assert part.returncode is not None


def test_in_another_with_a_cluster_starts_as_new(cluster: Cluster) -> None:
    with cluster:
        first = cluster.directory
        cluster.interrupt()
    assert not first.exists()
    with cluster:
        assert cluster.directory != first
        assert not cluster._hurried, "nobody has interrupted this one"
        assert cluster.poll() == []
    assert all(child.returncode is not None for child in cluster.started)


@pytest.mark.parametrize("call", CALLS)
def test_who_asks_a_cluster_that_does_not_run_is_told(cluster: Cluster, call: str) -> None:
    for _ in range(2):
        with pytest.raises(PartFailed, match="does not run"):
            CALLS[call](cluster)
        with cluster:
            pass


def test_a_forked_child_leaves_its_parents_cluster_alone(cluster: Cluster) -> None:
    with cluster:

        def child() -> None:
            for call in (CALLS | OF_PARTS).values():
                with pytest.raises(PartFailed, match="in a forked child, make another"):
                    call(cluster)
            cluster.stop()
            cluster.__exit__(None, None, None)

        assert in_a_forked_child(child) == "None"
        assert cluster.directory.exists()
        os.kill(cluster.children["part"].pid, 0)
        assert cluster.poll() == []


def test_in_a_forked_child_a_cluster_starts_anew(cluster: Cluster) -> None:
    with cluster:
        mine = cluster.directory

        def child() -> bool:
            with cluster:
                return cluster.directory != mine and cluster.poll() == []

        assert in_a_forked_child(child) == "True"
        assert mine.exists()
        assert cluster.poll() == []

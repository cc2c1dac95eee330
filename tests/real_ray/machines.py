"""A Ray cluster whose nodes are all on this machine, each with a loopback address of its own: 127.0.0.2 is the head."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from ray.cluster_utils import Cluster

HEAD = "127.0.0.2"
STORE_BYTES = 80 << 20  # Ray's object store, for which there is no use here
# A node is found dead within 2 s; by default it takes Ray half a minute.
DETECTION = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 5_000,
    "health_check_failure_threshold": 3,
}


class Machines:
    """`with Machines() as ray:`; the head has 4 logical CPUs. All that Ray started is gone afterwards."""

    def __enter__(self) -> Machines:
        self._directory = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # short, for Ray's sockets
        (self._directory / "ray").mkdir()  # Ray writes its address there, and expects RAY_TMPDIR/ray to exist
        self._before = os.environ.get("RAY_TMPDIR")
        os.environ["RAY_TMPDIR"] = str(self._directory)
        head = {
            "num_cpus": 4,
            "_system_config": DETECTION,
            "temp_dir": str(self._directory),
            "include_dashboard": False,
        }
        self._cluster = Cluster(
            initialize_head=True, head_node_args={**head, "node_ip_address": HEAD, "object_store_memory": STORE_BYTES}
        )
        self.address: str = self._cluster.address
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.shutdown()
        os.environ.pop("RAY_TMPDIR")
        if self._before is not None:
            os.environ["RAY_TMPDIR"] = self._before
        shutil.rmtree(self._directory, ignore_errors=True)

    def add(self, ip: str, **resources: int) -> Any:
        """One more node, with `num_cpus` and `num_gpus` as said."""
        return self._cluster.add_node(node_ip_address=ip, object_store_memory=STORE_BYTES, **resources)

    def kill(self, node: Any) -> None:
        """As a machine that loses its power: by SIGKILL, and nothing on it survives."""
        self._cluster.remove_node(node, allow_graceful=False)


def gone(pid: int, deadline_s: float = 30.0) -> bool:
    """Whether a process has ended, by then at the latest."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        try:
            process = psutil.Process(pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return True
            process.wait(0.1)
        except psutil.NoSuchProcess:
            return True
        except psutil.TimeoutExpired:
            continue
    return False

"""Runs whole clusters as child processes: a `ClusterSpec` describes one, a `Cluster` runs it, a `Supervisor` restarts
parts that die, by a `RestartPolicy`. A part is one process: broker, controller, node or HTTP edge."""

from pdbus.names import check_names

check_names()  # before `bus` is imported

from pdbus.launcher.cluster import Cluster
from pdbus.launcher.restarts import RestartPolicy
from pdbus.launcher.spec import ClusterSpec
from pdbus.launcher.supervisor import Supervisor

__all__ = ["Cluster", "ClusterSpec", "RestartPolicy", "Supervisor"]

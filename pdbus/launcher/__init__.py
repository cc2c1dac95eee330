"""Whole clusters as child processes of this one: described by a `ClusterSpec`, run by a `Cluster`."""

from pdbus.launcher.cluster import Cluster
from pdbus.launcher.spec import ClusterSpec

__all__ = ["Cluster", "ClusterSpec"]

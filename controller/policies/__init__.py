"""The load balancing methods (policies: they pick a rank for a request), the table of their names, and the base for
writing one."""

from __future__ import annotations

from controller.costs import Costs
from controller.load.groups import Metric, View
from controller.load.rank import RankLoad
from controller.policies.base import Policy, PolicySettings, PrefixPolicy
from controller.policies.registry import POLICIES, make_policy, resolve
from controller.trips import TRIPS, Trip

__all__ = [
    "POLICIES", "TRIPS", "Costs", "Metric", "Policy", "PolicySettings", "PrefixPolicy", "RankLoad", "Trip", "View",
    "make_policy", "resolve",
]  # fmt: skip

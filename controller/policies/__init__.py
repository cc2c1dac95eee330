"""The load balancing methods, the table of their names, and what it takes to write one."""

from __future__ import annotations

from controller.policies.base import Policy, PolicySettings, PrefixPolicy
from controller.policies.registry import POLICIES, make_policy, resolve

__all__ = ["POLICIES", "Policy", "PolicySettings", "PrefixPolicy", "make_policy", "resolve"]

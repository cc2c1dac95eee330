"""The load balancing methods, and the table of their names."""

from __future__ import annotations

from controller.policies.base import Policy
from controller.policies.registry import AUTO, POLICIES, resolve

__all__ = ["AUTO", "POLICIES", "Policy", "resolve"]

"""These tests need Ray: `make test-ray` runs them in an environment that has it, and no other run sees them."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("ray") else ["test_*.py"]

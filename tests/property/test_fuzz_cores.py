"""Whatever comes off the wire, in any order: no core raises, breaks its invariants, or says what its peer would refuse.

A million: PDBUS_FUZZ_EXAMPLES=3000, or `make fuzz` (python -m fuzz_cores).
"""

from __future__ import annotations

import os

import fuzz_cores
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("PDBUS_FUZZ_EXAMPLES", "300")) // 3


@pytest.mark.parametrize("core", list(fuzz_cores.CORES))
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), count=st.integers(1, 400))
def test_any_messages_in_any_order(core: str, seed: int, count: int) -> None:
    """M10."""
    fuzz_cores.fuzz(core, seed, count)

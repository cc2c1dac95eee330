"""Why messages are dropped, as metric labels: all reasons are listed, and counted from 0 on. A series that is born with
a count has no increase of it, so that a short burst would be seen nowhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bus.errors import REASONS
from bus.wire.messages import Role
from controller.observe import Regret, collect

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not (ROOT / "bus").is_dir(), reason="beside compiled cores there are no sources to read")
def test_all_reasons_in_the_code_are_listed() -> None:
    said = set()
    for path in (path for part in ("bus", "controller", "nodes") for path in (ROOT / part).rglob("*.py")):
        said |= set(re.findall(r"(?:Remote|Local)?ProtocolError\(\s*\"([a-z_]+)\"", path.read_text(encoding="utf-8")))
    assert said == set(REASONS)


def test_a_controller_counts_them_from_0_on() -> None:
    methods: dict[Role, str] = {"prefill": "total_tokens"}
    metrics = collect({"rejected_version": 2}, {}, [], {}, methods, Regret(), 0.0)
    (rejected,) = [each for each in metrics if each.name == "pdbus_controller_rejected_total"]
    counts = {each.labels["reason"]: each.value for each in rejected.samples}
    assert counts.pop("version") == 2
    assert counts == dict.fromkeys({*REASONS, "bad_identity"} - {"version"}, 0)

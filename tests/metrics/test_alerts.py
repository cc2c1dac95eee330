"""Each alert rings for what its cluster did, not for a little less, and falls silent again."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from metrics_alerts import CASES, alone, unit_tests
from metrics_world import EXAMPLES, WAIT_S, World

pytestmark = pytest.mark.timeout(240)
RULES = (EXAMPLES / "alerts.yml").read_text(encoding="utf-8")


def rules() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for group in yaml.safe_load(RULES)["groups"] for rule in group["rules"]}


def test_each_rule_has_its_cases() -> None:
    assert list(CASES) == list(rules())


def test_promtool_understands_rules_and_configuration(programs: Path) -> None:
    for what, name in (("rules", "alerts.yml"), ("config", "prometheus.yml")):
        done = subprocess.run(
            [str(programs / "promtool"), "check", what, str(EXAMPLES / name)],
            capture_output=True, text=True, check=False, timeout=WAIT_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", CASES)
def test_it_rings_and_falls_silent(name: str, world: World, tmp_path: Path) -> None:
    rule = CASES[name](world)
    assert all((rule.rings, rule.below, rule.silent))
    assert any(case.labels for case in rule.rings)
    (tmp_path / "alerts.yml").write_text(alone(name, RULES), encoding="utf-8")
    told = unit_tests(name, rules()[name]["labels"]["severity"], rule)
    (tmp_path / "cases.yml").write_text(yaml.safe_dump(told), encoding="utf-8")
    done = subprocess.run(
        [str(world.programs / "promtool"), "test", "rules", "cases.yml"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=WAIT_S,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]

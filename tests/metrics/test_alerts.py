"""Each alert rings for what its cluster did, not for a little less, and falls silent again."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from metrics_alerts import CASES, alone, unit_tests
from metrics_world import EXAMPLES, PARTS, WAIT_S, World, fetched

pytestmark = pytest.mark.timeout(600)
RULES = (EXAMPLES / "alerts.yml").read_text(encoding="utf-8")


def rules_by_name() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for group in yaml.safe_load(RULES)["groups"] for rule in group["rules"]}


def test_each_rule_has_its_cases() -> None:
    assert list(CASES) == list(rules_by_name())


def test_promtool_understands_rules_and_configuration(programs: Path) -> None:
    for what, name in (("rules", "alerts.yml"), ("config", "prometheus.yml")):
        done = subprocess.run(
            [str(programs / "promtool"), "check", what, str(EXAMPLES / name)],
            capture_output=True, text=True, check=False, timeout=WAIT_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_takes_the_page_of_each_part(world: World) -> None:
    pages = world.pages()
    assert len(pages) == PARTS
    for url in pages:
        done = subprocess.run(
            [str(world.programs / "promtool"), "check", "metrics"],
            input=fetched(url), capture_output=True, text=True, check=False, timeout=WAIT_S,
        )  # fmt: skip
        assert (done.returncode, done.stdout + done.stderr) == (0, ""), url


def tried(name: str, rules: str, world: World, place: Path) -> subprocess.CompletedProcess[str]:
    rule = CASES[name](world)
    assert all((rule.rings, rule.below, rule.silent))
    assert any(case.labels for case in rule.rings)
    (place / "alerts.yml").write_text(alone(name, rules), encoding="utf-8")
    told = unit_tests(name, rules_by_name()[name]["labels"]["severity"], rule)
    (place / "cases.yml").write_text(yaml.safe_dump(told), encoding="utf-8")
    return subprocess.run(
        [str(world.programs / "promtool"), "test", "rules", "cases.yml"],
        cwd=place, capture_output=True, text=True, check=False, timeout=WAIT_S,
    )  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_rings_and_falls_silent(name: str, world: World, tmp_path: Path) -> None:
    done = tried(name, RULES, world, tmp_path)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@pytest.mark.parametrize(
    ("name", "right", "planted"),
    [  # what a slip of the pen makes of a rule
        ("PdbusPartDown", "for: 30s", "for: 25s"),
        ("PdbusRankNotServing", "lost|hung|silent", "hung|silent"),
        ("PdbusRoleWithoutRank", "max by (role, model)", "max by (role)"),
        ("PdbusRankKeepsRestarting", "> 2.5", "> 3"),
        ("PdbusRankKeepsRestarting", "max by (instance, dp_rank) (inc", "sum by (instance, dp_rank) (inc"),
        ("PdbusRequestsFail", "|poison", "|poison|deadline"),
        ("PdbusOverloaded", "|no_rank", ""),
        ("PdbusReportsLate", "and on (controller, instance, dp_rank) pdbus_controller_ready == 1", ""),
        ("PdbusAcknowledgementsLag", "by (le, instance, dp_rank)", "by (le)"),
        ("PdbusMessagesRefused", "or sum by (reason) (rate(pdbus_broker_rejected_total[5m])) > 1", ""),
        ("PdbusKeysRefused", "> 5.5", "> 4.5"),
    ],
)
def test_a_planted_fault_is_noticed(name: str, right: str, planted: str, world: World, tmp_path: Path) -> None:
    begin = RULES.index(f"alert: {name}")
    assert right in RULES[begin : begin + 500]
    done = tried(name, RULES[:begin] + RULES[begin:].replace(right, planted, 1), world, tmp_path)
    assert "FAILED:" in done.stdout + done.stderr

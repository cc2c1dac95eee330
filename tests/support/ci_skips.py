"""In CI a test that is skipped for want of a tool or a package has failed: what it shows would be shown nowhere.

`.ci/run` names its target in the environment (PDBUS_CI_TARGET). Other reasons to skip stand here: what another target
runs, what this machine cannot be made to have, and what a target is without on purpose.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import TypeVar

import pytest

ANYWHERE = (
    r"make test-\S+ ",  # has it
    "it is installed here",  # so nothing is to be seen of its absence
    "beside compiled cores there are no sources",
    "of pure cores ",
    "elsewhere the usual build",
    "no history down to release",
    "only root ",
    "no mount namespaces here",
    "this machine has no IPv6",
    "the kernel counts no instructions",
)
WITHOUT_TORCH = ("test-newest", "test-compiled")  # they run the cores
Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def judged(report: Report, target: str) -> Report:
    """`report`, as a failure where it is a skip that CI does not take."""
    if not report.skipped or hasattr(report, "wasxfail"):
        return report
    reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    if any(re.match(known, reason) for known in ANYWHERE):
        return report
    if "torch" in reason and any(f"-{each}-" in target for each in WITHOUT_TORCH):
        return report
    report.outcome = "failed"
    report.longrepr = f"skipped in CI, where that is a failure: {reason}"
    return report


class Strict:
    """The plugin."""

    def __init__(self, target: str) -> None:
        self._target = target

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        return judged((yield), self._target)  # type: ignore[misc]

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self) -> Iterator[None]:
        return judged((yield), self._target)  # type: ignore[misc]


def install(config: pytest.Config) -> None:
    if target := os.environ.get("PDBUS_CI_TARGET"):
        config.pluginmanager.register(Strict(target), "ci-skips")

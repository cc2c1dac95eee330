"""What a worker of pytest-xdist reports of a test: its call, and what went wrong or took long before and after.

A worker reports each set-up and each end of a test too, and that a test begins. Of those that pass the terminal shows
nothing, and to pack and unpack them costs a process more than most tests do.
"""

from __future__ import annotations

from typing import Any

import pytest

SHOWN_S = 0.005  # `--durations` shows what takes longer


def is_news(report: pytest.TestReport | pytest.CollectReport) -> bool:
    """Return true if the terminal shows something of this report."""
    return (
        not isinstance(report, pytest.TestReport)
        or report.when == "call"
        or not report.passed
        or bool(report.sections)
        or report.duration >= SHOWN_S
    )


class News:
    """A plugin of a worker. It neither packs nor sends a report that is no news."""

    def __init__(self, worker: Any) -> None:
        self._send = worker.sendevent
        worker.sendevent = self._sendevent

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_to_serializable(self, report: pytest.TestReport | pytest.CollectReport) -> dict[str, Any] | None:
        return None if is_news(report) else {"no news": True}

    def _sendevent(self, name: str, **told: Any) -> None:
        if name != "logstart" and not (name == "testreport" and "no news" in told["data"]):
            self._send(name, **told)


def install(config: pytest.Config) -> None:
    """Add the plugin in a worker; other processes send nothing."""
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "WorkerInteractor":
            config.pluginmanager.register(News(plugin))

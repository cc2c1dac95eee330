"""What a worker of pytest-xdist reports of a test: its call, and what went wrong or took long before and after.

A worker reports each set-up and each end of a test too, and that a test begins. Of those that pass the terminal shows
nothing, and to pack and unpack them costs a process more than most tests do. What is said of one test goes in one
message (`together`), and of a test that passed without its keywords, which nothing shows.
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
    """A plugin of a worker. It neither packs nor sends a report that is no news, and sends what a test says when it is
    over."""

    def __init__(self, worker: Any) -> None:
        self._send = worker.sendevent
        self._held: list[tuple[str, dict[str, Any]]] = []
        worker.sendevent = self._sendevent

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_to_serializable(self, report: pytest.TestReport | pytest.CollectReport) -> dict[str, Any] | None:
        if not is_news(report):
            return {"no news": True}
        if isinstance(report, pytest.TestReport) and report.passed:
            report.keywords = {}
        return None

    def _sendevent(self, name: str, **told: Any) -> None:
        if name == "logstart" or (name == "testreport" and "no news" in told["data"]):
            return
        if name == "logfinish" or (name == "testreport" and told["data"]["outcome"] == "passed"):
            self._held.append((name, told))
        elif self._held:
            self._send("together", events=[*self._held, (name, told)])
            self._held.clear()
        else:
            self._send(name, **told)


def take_apart(controller: type[Any]) -> None:
    """Let `controller`, xdist's side of a worker, handle each of the events that came `together`."""
    handle = controller.process_from_remote

    def process_from_remote(self: Any, event: Any) -> None:
        for each in event[1]["events"] if isinstance(event, tuple) and event[0] == "together" else [event]:
            handle(self, each)

    controller.process_from_remote = process_from_remote  # type: ignore[attr-defined]


def install(config: pytest.Config) -> None:
    """Add the plugin in a worker; other processes send nothing."""
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "WorkerInteractor":
            config.pluginmanager.register(News(plugin))

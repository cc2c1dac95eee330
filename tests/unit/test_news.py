"""Workers of the suite tell of each test what is shown, and nothing else (tests/support/news.py)."""

from __future__ import annotations

from typing import Any

import news
import pytest


class Worker:
    def __init__(self) -> None:
        self.sent: list[str] = []
        self.events: list[Any] = []

    def sendevent(self, name: str, **told: Any) -> None:
        self.events.append((name, told))
        self.sent += [name for name, _ in told["events"]] if name == "together" else [name]


def report(when: Any = "setup", outcome: Any = "passed", sections: Any = (), duration: float = 0.0) -> Any:
    return pytest.TestReport("a.py::test", ("a.py", 1, "test"), {}, outcome, None, when, sections, duration)


def sent(name: str, told: Any = None) -> bool:
    worker = Worker()
    plugin = news.News(worker)
    data = {} if told is None else plugin.pytest_report_to_serializable(told) or {"outcome": told.outcome}
    worker.sendevent(name, data=data)
    worker.sendevent("runtest_protocol_complete")
    return worker.sent == [name, "runtest_protocol_complete"]


@pytest.mark.parametrize("when", ["setup", "teardown"])
def test_of_what_surrounds_a_test_only_what_is_shown_is_sent(when: str) -> None:
    assert not sent("testreport", report(when))
    for shown in ({"outcome": "failed"}, {"outcome": "skipped"}, {"sections": [("log", "a line")]}, {"duration": 0.01}):
        assert sent("testreport", report(when, **shown))


def test_each_call_is_sent_and_that_a_test_has_ended_but_not_that_it_begins() -> None:
    assert sent("testreport", report("call"))
    assert sent("logfinish")
    assert not sent("logstart")


def test_what_a_test_says_comes_in_one_message_and_is_handled_in_its_order() -> None:
    """A failure at once: a test that hangs afterwards has been heard."""
    worker = Worker()
    news.News(worker)
    for name, outcome in (("testreport", "passed"), ("logfinish", ""), ("runtest_protocol_complete", "")):
        worker.sendevent(name, data={"outcome": outcome})
    worker.sendevent("testreport", data={"outcome": "failed"})
    assert [name for name, _ in worker.events] == ["together", "testreport"]

    handled: list[str] = []

    class Controller:
        def process_from_remote(self, event: Any) -> None:
            handled.append(event[0] if isinstance(event, tuple) else event)

    news.take_apart(Controller)
    for event in (*worker.events, "the end"):
        Controller().process_from_remote(event)
    assert handled == ["testreport", "logfinish", "runtest_protocol_complete", "testreport", "the end"]


def test_of_what_was_collected_all_is_sent() -> None:
    assert sent("collectreport", pytest.CollectReport("a.py", "failed", None, []))

"""Runs each cut's test in a forked child, into which the cut is put first, and judges how it failed."""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from cuts import ROOT, Cut, cut_hook

LIMIT_S = 100.0  # for one cut; its test has less
TAKE_DOWN_S = 10.0  # for what a test leaves that has failed
OPTIONS = [
    *("-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "timeout=60"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # what is imported before pytest begins
    *("-W", "ignore::pytest.PytestUnraisableExceptionWarning"),  # what a test that fails leaves open
]
TESTS = str(ROOT / "tests") + os.sep
GOOD = "assertion"


def preload() -> None:
    """What every child would import. Nothing of ours: a cut goes in while its module is imported."""
    for name in ("zmq", "zmq.asyncio", "msgspec", "msgpack", "structlog", "prometheus_client", "click", "psutil",
                 "hypothesis.stateful", "uvicorn", "httptools", "asyncio", "http.server", "jinja2"):  # fmt: skip
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    settings.register_profile(  # as tests/conftest.py's, without the search for a smaller example
        "cuts", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow],
        phases=[Phase.explicit, Phase.generate],
    )  # fmt: skip


def judge(error: BaseException, trace: TracebackType | None) -> str:
    """GOOD for an assertion of the tests; else what it was."""
    if isinstance(error, BaseExceptionGroup):
        return next((said for each in error.exceptions if (said := judge(each, each.__traceback__)) != GOOD), GOOD)
    if isinstance(error, pytest.fail.Exception):
        return "timeout" if str(error).startswith("Timeout") else GOOD
    while trace and trace.tb_next:
        trace = trace.tb_next
    code = trace.tb_frame.f_code if trace else None  # `validate` is there for tests to call
    file = code.co_filename if code else ""  # of pytest: `raises` with a `match`
    inside = file.startswith(TESTS) or "/_pytest/" in file or (code is not None and code.co_name == "validate")
    if inside and isinstance(error, ValueError) and "values to unpack" in str(error):
        return GOOD  # `(one,) = found` asserts that there is one
    if not isinstance(error, AssertionError):
        return f"{type(error).__name__}: {error}"
    return GOOD if inside else f"an assertion of the code: {error}"


class Verdict:
    """A pytest plugin: puts the cut in, and says how the test's calls failed."""

    def __init__(self, cut: Cut, failed: Callable[[], None] = lambda: None) -> None:
        """`failed` is called when the test has, before what it leaves is taken down: that may hang."""
        self._cut = cut
        self._failed = failed
        self.failures: list[str] = []
        self.ran = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_load_initial_conftests(self) -> None:
        """Before our modules are imported, and in front of pytest's own importer, which would import them uncut."""
        cut_hook.install(self._cut.symbol, self._cut.old, self._cut.new)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Iterator[None]:
        outcome: Any = yield
        self.ran += call.when == "call"
        if outcome.get_result().failed and (call.when != "teardown" or not self.failures):
            said = judge(call.excinfo.value, call.excinfo.tb)
            self.failures.append(said if call.when == "call" else f"{call.when}: {said}")
            self._failed()

    @property
    def text(self) -> str:
        wrong = [each for each in self.failures if each != GOOD]
        if not self.ran and not wrong:
            return "the test did not run"
        return wrong[0] if wrong else GOOD if self.failures else "the test passes: nothing holds this promise"


def child(cut: Cut, output: int, pipe: int) -> None:
    """Never returns."""
    said = "the child broke"

    def tell() -> None:
        with contextlib.suppress(OSError):
            os.write(pipe, verdict.text.encode()[:2000])

    verdict = Verdict(cut, tell)
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ["HYPOTHESIS_PROFILE"] = "cuts"
        pytest.main([*OPTIONS, f"tests/{cut.test}"], plugins=[verdict])
        said = "" if verdict.failures else verdict.text
    except BaseException as error:  # whatever it is, the parent says it
        said = f"{type(error).__name__}: {error}"
    finally:
        with contextlib.suppress(OSError):
            os.write(pipe, said.encode()[:2000])
        os._exit(0)


@dataclass
class Run:
    """One that is under way."""

    cut: Cut
    pid: int
    pipe: int
    output: Any
    began: float

    def end(self) -> tuple[str, str]:
        """The verdict and what was printed; whatever it started is killed."""
        ready, _, _ = select.select([self.pipe], [], [], 0)
        said = os.read(self.pipe, 2000).decode() if ready else ""
        end = time.monotonic() + TAKE_DOWN_S if ready else 0.0
        while time.monotonic() < end and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.pipe)
        self.output.seek(0)
        text = self.output.read().decode(errors="replace")
        self.output.close()
        return said or f"no end within {LIMIT_S:.0f} s", text


def begin(cut: Cut) -> Run:
    output = tempfile.TemporaryFile()  # noqa: SIM115
    reads, writes = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        os.close(reads)
        child(cut, output.fileno(), writes)
    os.close(writes)
    return Run(cut, pid, reads, output, time.monotonic())


def run(cuts: Iterable[Cut], at_once: int) -> Iterator[tuple[Cut, str, str, float]]:
    """Each with its verdict, what pytest printed, and how long it took, as they end."""
    os.chdir(ROOT)
    sys.path[:] = [str(ROOT), *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
    preload()
    waiting, live = list(cuts)[::-1], []
    while waiting or live:
        while waiting and len(live) < at_once:
            live.append(begin(waiting.pop()))
        oldest = min(each.began for each in live)
        ready, _, _ = select.select([each.pipe for each in live], [], [], max(0.0, oldest + LIMIT_S - time.monotonic()))
        for each in [each for each in live if each.pipe in ready or time.monotonic() >= each.began + LIMIT_S]:
            live.remove(each)
            yield each.cut, *each.end(), time.monotonic() - each.began

"""What all tests share: Hypothesis' profile, and failing on what a test leaves open."""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator

import ci_skips
import news
import pytest
import structlog
import zmq
from hypothesis import HealthCheck, settings
from warm_starts import STARTS

# Started in the background or under nohup these are ignored, and so they would be in every process that a test starts.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# Each of the many processes that tests start would compile our modules, and each numpy would spin on every core.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

STARTS.install()
WARM = (
    "tests/integration/", "tests/fault/",
    *(f"tests/simulation/test_{name}.py" for name in ("guests", "network_keys", "scenarios", "simulation")),
    *(f"tests/unit/test_{name}.py" for name in ("ci_run", "cli_pdbus", "cli_settings", "settings", "vllm_node")),
)  # fmt: skip

settings.register_profile(
    "ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Before the first worker starts."""
    from forked_workers import Workers
    from xdist.workermanage import WorkerController

    news.take_apart(WorkerController)
    workers = Workers(config.invocation_params.args)
    workers.install()
    workers.on = True


def pytest_configure(config: pytest.Config) -> None:
    ci_skips.install(config)
    news.install(config)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What there is now stays to the end: no collection of garbage, of which tests make much, is to walk through it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests begin first, one after another at three of the workers, so that none of them is what all others have
    waited for at the end. (`worksteal` gives each worker its share of the list in a row.)"""
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    slow = [item for item in items if item.get_closest_marker("slow")]
    rest = [item for item in items if not item.get_closest_marker("slow")]
    ends = [len(items) * (worker + 1) // workers for worker in range(workers)]
    lanes = min(workers, 3)
    items.clear()
    for worker, end in enumerate(ends):
        items += slow[worker::lanes] if worker < lanes else []
        missing = max(0, end - len(items))
        items += rest[:missing]
        del rest[:missing]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before the first fixture."""
    STARTS.on = item.nodeid.startswith(WARM) and item.get_closest_marker("cold") is None
    if STARTS.on:
        STARTS.wait()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """All plugins are there: which of them see a test is the same for each of its hooks, some twenty."""
    session.gethookproxy = functools.cache(session.gethookproxy)  # type: ignore[method-assign]


_made: list[zmq.Context[zmq.Socket[bytes]]] = []  # contexts, by the test that runs
_make = zmq.Context.__init__


def _note(self: zmq.Context[zmq.Socket[bytes]], *args: object, **kwargs: object) -> None:
    _make(self, *args, **kwargs)
    if not getattr(self, "_shadow", False):
        _made.append(self)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fail a test whose worlds break the laws of their counters (`support/laws.py`), or that leaves a ZeroMQ context
    open: it would hang or leak in a user's process. What a test has configured of logs is no other test's:
    `bus.runtime.logs` goes by whether anybody has. (One fixture, since each costs a test as much as many tests take.)
    """
    _made.clear()
    zmq.Context.__init__ = _note  # type: ignore[method-assign]
    yield
    zmq.Context.__init__ = _make  # type: ignore[method-assign]
    structlog.reset_defaults()
    left = [context for context in _made if not context.closed]
    for context in left:
        context.destroy(linger=0)
    _made.clear()
    if "laws" in sys.modules:
        sys.modules["laws"].settle()
    assert not left, f"{len(left)} ZeroMQ contexts were left open"

"""What all tests share: Hypothesis' profile, and failing on what a test leaves open."""

from __future__ import annotations

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


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before the first fixture."""
    STARTS.on = item.nodeid.startswith(WARM) and item.get_closest_marker("cold") is None
    if STARTS.on:
        STARTS.wait()


@pytest.fixture(autouse=True)
def logs_as_a_host_has_them() -> Iterator[None]:
    """What one test has configured is no other test's: `bus.runtime.logs` goes by whether anybody has."""
    yield
    structlog.reset_defaults()


@pytest.fixture(autouse=True)
def counts_are_conserved() -> Iterator[None]:
    """The worlds that this test made obey the laws of their counters (`support/laws.py`)."""
    yield
    if "laws" in sys.modules:
        sys.modules["laws"].settle()


@pytest.fixture(autouse=True)
def no_open_contexts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A ZeroMQ context that a test made and did not close fails it: it would hang or leak in a user's process."""
    made: list[zmq.Context[zmq.Socket[bytes]]] = []
    original = zmq.Context.__init__

    def note(self: zmq.Context[zmq.Socket[bytes]], *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        if not getattr(self, "_shadow", False):
            made.append(self)

    monkeypatch.setattr(zmq.Context, "__init__", note)
    yield
    left = [context for context in made if not context.closed]
    for context in left:
        context.destroy(linger=0)
    made.clear()
    assert not left, f"{len(left)} ZeroMQ contexts were left open"

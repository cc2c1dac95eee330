"""`python -m benchmarks controllers`: several controllers over the same ranks, and ranks that are always at work."""

from __future__ import annotations

import time

import pytest

from benchmarks import controllers, parts
from benchmarks.busy import NUMBER
from benchmarks.harness import Scope, Workspace
from pdbus.client import Client

WAIT_S = 20.0


@pytest.mark.slow
def test_controllers_stand_beside_one_and_ranks_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controllers, "SHARED_RANKS", 8)
    monkeypatch.setattr(controllers, "SHARED_PROCESSES", 2)
    rows = {(row.case, row.metric): row for row in controllers.run(Scope(runs=1, quick=True))}
    for case in ("8 ranks", *controllers.METHODS):
        metrics = controllers.SHARED if case == "8 ranks" else [metric for _, metric, _ in controllers.MEASURES]
        for metric in metrics:
            one = rows["1 controller, " + case, metric]
            assert one.floor is None
            assert all(rows[f"{count} controllers, {case}", metric].floor == one.value for count in (2, 4))
    at_work = {metric: row.value for (case, metric), row in rows.items() if case == "64 ranks at work"}
    assert 0 < at_work["publications/s"] <= 1.2 * 64 * controllers.REPORT_HZ
    assert at_work["CPU of the broker"] > 0
    assert at_work["read by the controller"] > 0
    assert at_work["submit to arrival at 500/s, p50"] > 0


def test_ranks_at_work_are_ranks_to_a_controller() -> None:
    """Ready, with loads that go on, and what is dispatched there is acknowledged."""
    with Workspace() as space:
        parts.broker(space)
        controller = space.part("busy:controller", bus=space.endpoint("bus"), address=space.endpoint("ctl"))
        controller.wait_ready()
        nodes = parts.our_nodes(space, 4, processes=1, report_hz=controllers.REPORT_HZ, kind="busy:ours")
        path = parts.Path(parts.our_client(space, 128), controller, nodes)
        assert len(path.journeys(40, 500.0)) == 40
        with Client(space.endpoint("ctl")) as client:
            deadline, before = time.monotonic() + WAIT_S, -1
            while time.monotonic() < deadline:
                ranks = client.status(timeout_s=WAIT_S).ranks
                numbers = [rank.load.seq - NUMBER for rank in ranks if rank.load is not None]
                in_flight = sum(rank.in_flight_requests for rank in ranks)
                if not in_flight and 0 < before < min(numbers):
                    break
                before = min(numbers, default=-1)
        assert [rank.state for rank in ranks] == ["ready"] * 4
        assert sum(rank.dispatched_total for rank in ranks) == 40
        assert in_flight == 0
        assert min(numbers) > before
        assert nodes[0].ask(do="count") >= sum(numbers)
        assert controller.ask() >= sum(numbers)

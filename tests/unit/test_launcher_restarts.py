"""When a part is started again, after how long, and when the launcher gives up. Virtual time."""

from __future__ import annotations

import signal

import pytest

from bus.errors import ConfigError
from pdbus.launcher.restarts import Again, GiveUp, Left, Overdue, PartState, RestartPolicy, Restarts, Start

KINDS = {"broker": "broker", "controller-0": "controller", "prefill-0/0": "prefill", "decode-0/0": "decode"}
POLICY = RestartPolicy(limit=4, window_s=60.0, first_delay_s=1.0, max_delay_s=5.0, start_timeout_s=30.0)
KILLED = -signal.SIGKILL


def made(policy: RestartPolicy = POLICY) -> Restarts:
    return Restarts(KINDS, policy, 0.0)


def fail(core: Restarts, now: float, part: str = "decode-0/0") -> Again | Left | GiveUp:
    return core.exited(part, KILLED, "ended by SIGKILL", now)


def back(core: Restarts, now: float, part: str = "decode-0/0") -> None:
    """It is started, and is READY at once."""
    assert [action.part for action in core.due(now)] == [part]
    core.ready(part, now)


def test_the_waits_double_up_to_the_longest_and_then_it_is_over() -> None:
    core, now, waits = made(), 0.0, []
    for number in range(1, 5):
        verdict = fail(core, now)
        assert isinstance(verdict, Again)
        assert (verdict.part, verdict.cause, verdict.number) == ("decode-0/0", "ended by SIGKILL", number)
        waits.append(verdict.delay_s)
        assert core.due(now + verdict.delay_s - 0.01) == []
        assert core.wait_s(now) == verdict.delay_s
        now += verdict.delay_s
        back(core, now)
        now += 1.0
    assert waits == [1.0, 2.0, 4.0, 5.0]
    end = fail(core, now)
    assert end == GiveUp("decode-0/0", "ended by SIGKILL", "it was started again 4 times within 60 s of service")
    assert core.state("decode-0/0") is PartState.LEFT


def test_failures_that_lie_further_back_than_the_window_are_forgotten() -> None:
    core, now = made(), 0.0
    for _ in range(20):
        verdict = fail(core, now)
        assert isinstance(verdict, Again)
        assert verdict.number <= 3
        back(core, now + verdict.delay_s)
        now += verdict.delay_s + 25.0


def test_time_that_a_part_takes_to_start_is_no_service() -> None:
    """A model that loads for 25 s and crashes at once would never fail five times in a minute by the clock."""
    core, now = made(), 0.0
    for _ in range(4):
        verdict = fail(core, now)
        assert isinstance(verdict, Again)
        now += verdict.delay_s
        assert core.due(now) == [Start("decode-0/0", "ended by SIGKILL")]
        core.ready("decode-0/0", now + 25.0)
        now += 26.0
    assert isinstance(fail(core, now), GiveUp)


def test_a_part_that_never_starts_again_ends_it() -> None:
    core, now = made(), 0.0
    verdict = fail(core, now)
    for _ in range(4):
        assert isinstance(verdict, Again)
        now += verdict.delay_s
        core.due(now)
        verdict = core.exited("decode-0/0", 1, "exit code 1", now)
    assert isinstance(verdict, GiveUp)


def test_a_part_that_hangs_at_its_start_is_overdue_until_it_has_ended() -> None:
    core = made()
    fail(core, 0.0)
    assert core.due(1.0) == [Start("decode-0/0", "ended by SIGKILL")]
    assert (core.due(30.9), core.wait_s(1.0)) == ([], 30.0)
    overdue = Overdue("decode-0/0", "not ready after 30 s")
    assert core.due(31.0) == core.due(31.5) == [overdue]
    again = core.exited("decode-0/0", KILLED, overdue.cause, 31.6)
    assert again == Again("decode-0/0", "not ready after 30 s", 2.0, 2)


MORE = KINDS | {"decode-0/1": "decode", "unified-0/0": "unified"}


@pytest.mark.parametrize("code", [0, 2, 4])
def test_who_was_asked_to_leave_or_was_replaced_stays_away(code: int) -> None:
    core = Restarts(MORE, POLICY, 0.0)
    for part in ("decode-0/0", "decode-0/1", "prefill-0/0"):  # unified ranks can serve alone
        assert core.exited(part, code, "its words", 1.0) == Left(part, "its words")
    assert (core.due(1000.0), core.wait_s(1000.0)) == ([], float("inf"))
    assert core.exited("unified-0/0", code, "its words", 2.0) == GiveUp("unified-0/0", "its words", "no node is left")


def test_without_a_node_of_each_role_a_cluster_is_over_but_for_one_that_drained() -> None:
    assert made().exited("decode-0/0", 0, "left", 1.0) == Left("decode-0/0", "left")
    for code in (2, 4):
        assert made().exited("decode-0/0", code, "x", 1.0) == GiveUp("decode-0/0", "x", "no decode node is left")
    core = Restarts({"prefill-0/0": "prefill", "unified-0/0": "unified"}, POLICY, 0.0)
    assert core.exited("unified-0/0", 4, "x", 1.0) == GiveUp("unified-0/0", "x", "no unified node is left")


def test_a_rank_whose_restart_fails_once_is_started_again() -> None:
    """Its memory was not free yet, or a hub did not answer."""
    core = made()
    fail(core, 0.0)
    assert core.due(1.0) == [Start("decode-0/0", "ended by SIGKILL")]
    assert core.exited("decode-0/0", 3, "no memory", 60.0) == Again("decode-0/0", "no memory", 2.0, 2)


@pytest.mark.parametrize("part", ["broker", "controller-0"])
def test_without_its_only_broker_or_controller_a_cluster_is_over(part: str) -> None:
    assert made().exited(part, 2, "wrong", 1.0) == GiveUp(part, "wrong", f"no {KINDS[part]} is left")


def test_a_part_that_waits_for_its_restart_is_not_gone() -> None:
    core = made()
    fail(core, 0.0, "prefill-0/0")
    assert core.exited("decode-0/0", 0, "left", 0.1) == Left("decode-0/0", "left")


@pytest.mark.parametrize("code", [1, 3, 130, -signal.SIGSEGV, None])
def test_every_other_end_is_a_failure(code: int | None) -> None:
    assert made().exited("broker", code, "x", 1.0) == Again("broker", "x", 1.0, 1)


def test_no_restarts() -> None:
    assert fail(made(RestartPolicy(limit=0)), 1.0) == GiveUp(
        "decode-0/0", "ended by SIGKILL", "it may not be started again"
    )


def test_parts_are_counted_each_for_itself() -> None:
    core = made()
    for part in KINDS:
        verdict = fail(core, 0.0, part)
        assert isinstance(verdict, Again)
        assert verdict.number == 1
    assert {action.part for action in core.due(1.0)} == set(KINDS)


def test_what_cannot_happen_is_our_bug() -> None:
    core = made()
    with pytest.raises(AssertionError, match="broker was serving and cannot be serving"):
        core.ready("broker", 1.0)


@pytest.mark.parametrize(
    "wrong",
    [{"limit": -1}, {"window_s": 0.0}, {"first_delay_s": 9.0, "max_delay_s": 1.0}, {"start_timeout_s": float("nan")}],
)
def test_a_policy_that_means_nothing(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        RestartPolicy(**wrong)  # type: ignore[arg-type]

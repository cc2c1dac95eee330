"""The attacks in short, against one live cluster of each transport: nobody dies, memory stays within the bounds that
docs/failures.md states, the honest client beside them is served, and soon after each as before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hostile_range import Range, firing_range
from hostile_run import BACK_MAX_S, RATIO_MAX, judge
from soak.attackers import make_keys
from soak.attacks import ATTACKS

pytestmark = pytest.mark.fault
MIB = 1 << 20
# How much one part may grow by. The attacks that libzmq leaves open are bounded by what the attacker sends.
GROWN_MAX = dict.fromkeys(ATTACKS, 64 * MIB) | {
    "subscriptions": 128 * MIB,
    "endless_message": 256 * MIB,
    "empty_frames": 256 * MIB,
    "full_queue_and_gone": 256 * MIB,
    "unread_publications": 128 * MIB,
    "valid_megabytes": 128 * MIB,  # of four connections
}


@pytest.fixture(scope="module", params=["ipc", "tcp", "ipc with keys"])
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Range]:
    transport, _, keyed = request.param.partition(" ")
    keys = make_keys(tmp_path_factory.mktemp("k")) if keyed else ()
    with firing_range(transport, *keys) as made:
        yield made


@pytest.mark.parametrize("attack", list(ATTACKS))
def test_an_attack_kills_no_part_and_costs_the_honest_client_little(live: Range, attack: str) -> None:
    outcome = live.under(attack)
    assert not outcome.died
    assert max(outcome.grown_bytes.values()) <= GROWN_MAX[attack], outcome.grown_bytes
    live.rig.check()


@pytest.mark.parametrize(
    ("tries", "said"),
    [
        ([(2.9, 0.1)], (2.9, 0.1)),
        ([(3.1, 0.1), (2.0, 0.3), (2.5, 0.2)], (2.5, 0.2)),
        ([(1.0, 9.0), (1.0, 0.4), (5.0, 0.2)], (1.0, 0.4)),
        ([(3.1, 0.1), (9.0, 0.1), (2.0, 0.1)], (3.1, 0.1)),
    ],
)
def test_what_exceeds_a_limit_once_is_judged_by_the_medians_of_three_tries(
    tries: list[tuple[float, float]], said: tuple[float, float]
) -> None:
    assert (RATIO_MAX, BACK_MAX_S) == (3.0, 1.0)
    left = iter(tries)
    assert judge(lambda: next(left), RATIO_MAX) == said
    assert not list(left)

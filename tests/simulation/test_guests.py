"""Worlds in which others take part (`--guests`): what must hold holds, and is seen where it does not."""

from __future__ import annotations

import pytest

from simulation.apart import run

RUN = "import cuts, sys; cuts.cut_hook.install({0!r}, {1!r}, {2!r}); from simulation.run import main; main()"
# what is put in another's place, and a seed in which that is seen, as which law
PUT_BACK = (
    ("bus.rights:owns", 'not owner or key_of(peer) in ("", owner)', "True", 5, "no client reads another key's tokens"),
    (
        "controller.requests.life:RequestLifecycle.cancel",
        'client not in ("", request.client)',
        "False",
        2,
        "no end without a cause",
    ),
)


def test_what_must_hold_holds_for_those_who_take_part() -> None:
    """Of keys, an intruder, resolvers, a dispatcher, rank links, an edge and a foreign client each is there."""
    code, said = run("-m", "simulation.run", "2:6", "--guests", "--first")
    assert code == 0, said
    for each in ("intruder told", "resolved", "unread ok", "fault revoke"):
        assert each in said, said


@pytest.mark.parametrize(("symbol", "old", "new", "seed", "law"), PUT_BACK, ids=lambda each: str(each)[:30])
def test_a_right_that_is_not_looked_at_is_seen(symbol: str, old: str, new: str, seed: int, law: str) -> None:
    code, said = run("-c", RUN.format(symbol, old, new), str(seed), "--guests", "--first")
    assert code == 1, said
    assert f"seed {seed}: {law}" in said

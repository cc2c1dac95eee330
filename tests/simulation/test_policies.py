"""Worlds whose policies raise or answer nonsense at each of their points (`--policies`): no request suffers."""

from __future__ import annotations

from simulation.apart import run

TRIAL = """
import sys
from collections import Counter
from simulation.run import trial
from simulation.spec import draw
hooks, alone = Counter(), 0
from controller.policies import guard
for hook in ("begin", "admit", "order", "prefill_here", "pick"):
    def told(self, *arguments, hook=hook, was=getattr(guard.Guard, hook)):
        on_fault = self._on_fault
        self._on_fault = lambda name, why: (hooks.update([name]), on_fault(name, why))
        try:
            return was(self, *arguments)
        finally:
            self._on_fault = on_fault
    setattr(guard.Guard, hook, told)
for seed in map(int, sys.argv[1:]):
    world, error = trial(draw(seed, policies=True))
    assert error is None, f"seed {seed}: {error}"
    alone += sum(r is not None and r.code == "ok" and r.prefill is None for r in (a.result for a in world.asked
                 if world.spec.paired))
print(*sorted(hooks), alone)
"""
SEEDS = ("1", "3", "4")


def test_no_request_suffers_from_a_policy_that_raises_at_each_point() -> None:
    """And pairs run at unified ranks, where it says so."""
    code, said = run("-c", TRIAL, *SEEDS)
    assert code == 0, said
    *hooks, alone = said.split()
    assert hooks == ["admit", "begin", "order", "pick", "prefill_here"]
    assert int(alone) > 10

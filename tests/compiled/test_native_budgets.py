"""The compiled cores do no more than their budget, in the processor's own instructions, which hold for pure code too.

Pure cores are held to theirs in `test_opcount_budgets`, by bytecode, of which compiled code has none. A budget is in
steps of a yardstick in plain Python (`opcount.native`), so neither the machine's speed nor its load counts.
Over budget: the path got slower; what got faster passes, and who made it so lowers the budget.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from opcount import native

from benchmarks import scripts
from bus import build

BUDGETS: dict[str, tuple[Callable[[], scripts.Script], float]] = {  # a single pick, report, message or request
    "pick by total_tokens": (lambda: scripts.pick("total_tokens"), 5.7),
    "pick by total_tokens of 4096": (lambda: scripts.pick("total_tokens", 4096), 8.2),
    "pick by cache_aware, 64 blocks held by 8 of 512": (lambda: scripts.pick_hits(512, 64, 8), 29.3),
    "KV events of 16 blocks, come and gone": (scripts.kv_events, 170.4),
    "report": (scripts.report, 16.0),
    "encode": (scripts.encode, 2.05),
    "decode": (scripts.decode, 7.3),
    "dispatch": (scripts.dispatch, 47.6),
    "dispatch by cache_aware, 16 blocks": (lambda: scripts.dispatch("cache_aware", 16), 64.3),
    "client request": (scripts.client_request, 122.5),
    "client token": (scripts.client_token, 4.0),
    "edge token": (scripts.edge_token, 9.7),
}
OVER = 1.15  # what another processor, compiler or build of Python makes of the same sources

pytestmark = pytest.mark.skipif(build.CORES == "pure", reason="of pure cores test_opcount_budgets counts the bytecode")


def steps(script: Callable[[], object]) -> float:
    """Return the processor's steps for one of the `TIMES` repetitions of a script."""
    try:
        return 1000 * native(script) / scripts.TIMES
    except OSError as error:
        pytest.skip(f"the kernel counts no instructions for us here: {error.strerror}")


@pytest.mark.parametrize("name", BUDGETS)
def test_within_budget(name: str) -> None:
    script, budget = BUDGETS[name]
    used = steps(script())
    assert used <= budget * OVER, f"{name}: {used:.1f} steps each, budget {budget}"


def test_a_slower_path_shows() -> None:
    script = scripts.pick("total_tokens")

    def slower() -> None:
        script()
        for _ in range(scripts.TIMES):
            sum(range(50))

    assert steps(slower) > 1.1 * steps(script)

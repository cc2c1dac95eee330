"""Mutations side by side: a place asks which text holds, and forks where the other one would make a difference."""

from __future__ import annotations

import ast
import builtins
from typing import Any

import cuts
import pytest

from simulation.drawn import DRAWN
from simulation.mutation import Mutation
from simulation.mutations import MUTATIONS
from simulation.schemata import with_places

SOURCE = """
class Shop:
    def __init__(self):
        self.sold = 0

    def sell(self, count):
        if count > 3:
            return "no"
        self.sold += count
        return "yes" if self.sold < 5 else "last"
"""
CHANGES = [
    Mutation("more", "", "shop:Shop.sell", "count > 3", "count > 4"),
    Mutation("free", "", "shop:Shop.sell", "self.sold += count", "pass"),
    Mutation("later", "", "shop:Shop.sell", "self.sold < 5", "self.sold < 6"),
]


def shop(monkeypatch: pytest.MonkeyPatch, active: int | None) -> tuple[Any, list[int]]:
    """One in which a mutation holds, and which ones would have made a difference."""
    differed: list[int] = []

    def differs(number: int, value: Any, other: Any) -> Any:
        if active == number:
            return other()
        if other() != value:
            differed.append(number)
        return value

    def reach(number: int) -> bool:
        differed.append(number)
        return active == number

    monkeypatch.setattr(builtins, "mutation_differs", differs, raising=False)
    monkeypatch.setattr(builtins, "mutation_reach", reach, raising=False)
    names: dict[str, Any] = {}
    exec(compile(with_places(SOURCE, list(enumerate(CHANGES))), "shop", "exec"), names)  # noqa: S102
    return names["Shop"](), differed


def test_a_place_holds_the_text_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {}
    for active in (None, 0, 1, 2):
        sells = shop(monkeypatch, active)[0].sell
        said[active] = [sells(count) for count in (4, 2, 3)]
    assert said == {
        None: ["no", "yes", "last"],
        0: ["yes", "last", "last"],
        1: ["no", "yes", "yes"],
        2: ["no", "yes", "yes"],
    }


def test_a_condition_asks_only_where_it_would_turn_out_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    one, differed = shop(monkeypatch, None)
    assert (one.sell(3), differed) == ("yes", [1])
    assert (one.sell(4), differed) == ("no", [1, 0])
    assert (one.sell(2), differed) == ("last", [1, 0, 1, 2])


@pytest.mark.parametrize("module", sorted({each.module for each in (*MUTATIONS, *DRAWN)}))
def test_all_mutations_of_a_module_go_side_by_side(module: str) -> None:
    source = (cuts.ROOT / f"{module.replace('.', '/')}.py").read_text()
    mine = [(number, each) for number, each in enumerate((*MUTATIONS, *DRAWN)) if each.module == module]
    tree = with_places(source, mine)
    compile(tree, module, "exec")
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    asked = {call.args[0].value for call in calls if call.func.id in ("mutation_reach", "mutation_differs")}
    assert asked == {number for number, _ in mine}

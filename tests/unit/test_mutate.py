"""`make mutate` changes what it says, and knows of the rooms and tests that there are."""

from __future__ import annotations

import ast

import mutate
import pytest


@pytest.mark.parametrize("room", mutate.TESTS)
def test_each_room_and_its_tests_are_there(room: str) -> None:
    assert (mutate.ROOT / room).exists()
    assert all((mutate.ROOT / "tests" / each).is_file() for each in mutate.TESTS[room])


def test_shells_are_there() -> None:
    assert all((mutate.ROOT / each).is_file() for each in mutate.SHELLS)


def test_every_mutant_is_a_program_with_one_line_changed() -> None:
    path = "bus/broker/watches.py"
    whole = ast.unparse(ast.parse((mutate.ROOT / path).read_text(encoding="utf-8"))).splitlines()
    found = list(mutate.mutants("bus/broker", path))
    assert len(found) > 20
    for mutant in found[::4]:
        compile(mutant.source, path, "exec")
        other = mutant.source.splitlines()
        assert len(other) == len(whole)
        assert sum(a != b for a, b in zip(whole, other, strict=True)) == 1, mutant


def test_a_seed_draws_the_same_and_from_each_room() -> None:
    drawn = mutate.draw(30, 7, "")
    assert drawn == mutate.draw(30, 7, "")
    assert {mutant.room for mutant in drawn} == mutate.TESTS.keys()
    assert not {mutant.path for mutant in drawn} & mutate.SHELLS
    assert mutate.draw(30, 8, "") != drawn

"""Many mutations in one process: each place that one of them changes has both texts, and is asked which holds.

A trial runs unmutated. Where it comes to a place at which a mutation would make a difference, the process forks: the
child goes on with that mutation and says at the end whether a law broke, the parent waits for it and goes on as it was.
So a trial costs a mutation nothing where it makes no difference, and what comes before the difference is run once for
all.
"""

from __future__ import annotations

import ast
import builtins
import os
import resource
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import cuts

from simulation.mutation import Mutation

HARMLESS = {"len", "any", "all", "max", "min", "isinstance", "sum", "frozenset", "zip", "agrees", "get", "is_apart",
            "mutation_reach", "mutation_differs"}  # fmt: skip
CHILD_CPU_S = 8  # a child that takes longer never ends
Path = tuple[tuple[str, int | None], ...]


@dataclass
class Outcome:
    """What became of a trial with a mutation: what broke (empty: nothing), and the CPU time since the fork."""

    broke: str
    cpu_s: float


class Switch:
    """Which mutation holds in this process, and which are looked for."""

    def __init__(self) -> None:
        self.active: int | None = None
        self.wanted: set[int] = set()
        self.outcomes: dict[int, Outcome] = {}  # of the trial that runs
        self._out = -1

    def begin(self, wanted: Iterable[int]) -> None:
        """A trial begins."""
        self.wanted, self.outcomes = set(wanted), {}

    def reach(self, number: int) -> bool:
        """Whether the mutation holds, at a place where it always makes a difference."""
        return self.active == number or (number in self.wanted and self._fork(number))

    def differs(self, number: int, value: Any, other: Callable[[], Any]) -> Any:
        """`value`, or what the mutation makes of it."""
        if self.active == number:
            return other()
        if number in self.wanted:
            try:
                made = other()
                same = bool(made == value) or (made == () and not value)
            except Exception:
                same = False
            if not same and self._fork(number):
                return other()
        return value

    def says(self, broke: str) -> None:
        """The trial is over. A child ends here."""
        if self.active is not None:
            os.write(self._out, broke[:2000].encode())
            os._exit(0)

    def _fork(self, number: int) -> bool:
        self.wanted.discard(number)
        sys.stdout.flush()
        into, out = os.pipe()
        sys.modules["bus.runtime.service"]._opened.clear()  # type: ignore[attr-defined]
        child = os.fork()  # whose parts go on: they have no threads here
        if not child:
            os.close(into)
            self.active, self.wanted, self._out = number, set(), out
            resource.setrlimit(resource.RLIMIT_CPU, (CHILD_CPU_S, CHILD_CPU_S))
            return True
        os.close(out)
        _, status, used = os.wait4(child, 0)
        with os.fdopen(into, errors="replace") as said:
            broke = said.read()
        if status:
            broke = f"a turn ends: killed by signal {status & 127} after {used.ru_utime:.0f} CPU s"
        self.outcomes[number] = Outcome(broke, used.ru_utime + used.ru_stime)
        return False


def install(mutations: list[Mutation]) -> Switch:
    """From now on modules are imported with the places of these, numbered as in the list."""
    switch = Switch()
    builtins.mutation_reach = switch.reach  # type: ignore[attr-defined]
    builtins.mutation_differs = switch.differs  # type: ignore[attr-defined]
    by_module: dict[str, list[tuple[int, Mutation]]] = {}
    for number, each in enumerate(mutations):
        assert each.module not in sys.modules, f"{each.module} has been imported already"
        by_module.setdefault(each.module, []).append((number, each))
    changes = {module: partial(with_places, mutations=some) for module, some in by_module.items()}
    sys.meta_path.insert(0, cuts.cut_hook.Finder(changes))
    return switch


def with_places(source: str, mutations: list[tuple[int, Mutation]]) -> ast.Module:
    """The module with the places of all of them."""
    tree = ast.parse(source)
    places: list[tuple[Path, int, Any]] = []
    for number, each in mutations:
        other = ast.parse(cuts.cut_hook.patched(source, each.symbol, each.old, each.new))
        path, new = _difference(tree, other)
        places.append((path, number, new))
    for path, number, new in sorted(places, key=lambda place: -len(place[0])):
        _put(tree, path, number, new)
    return ast.fix_missing_locations(tree)


def _difference(one: ast.AST, other: ast.AST) -> tuple[Path, ast.AST]:
    """The way to a statement or expression that holds all that differs, and what `other` has there: of the smallest
    statement the largest expression that may be evaluated once more, as many differences come to the same there."""
    where: Path = ()
    found: tuple[Path, ast.AST] | None = None
    settled = False  # an expression is found
    while True:
        if isinstance(one, ast.stmt):
            found, settled = (where, other), False
        elif isinstance(one, ast.expr) and isinstance(other, ast.expr) and not settled:
            found, settled = (where, other), _harmless(other)
        if type(one) is not type(other):
            break
        steps: list[tuple[str, int | None, Any, Any]] = []
        for name in one._fields:
            a, b = getattr(one, name), getattr(other, name)
            if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
                pairs = [(name, at, x, y) for at, (x, y) in enumerate(zip(a, b, strict=True)) if _dump(x) != _dump(y)]
                steps += pairs
            elif _dump(a) != _dump(b):
                steps.append((name, None, a, b))
        if len(steps) != 1 or not (isinstance(steps[0][2], ast.AST) and isinstance(steps[0][3], ast.AST)):
            break
        name, at, one, other = steps[0]
        where = (*where, (name, at))
    assert found is not None
    return found


def _dump(value: Any) -> Any:
    if isinstance(value, list):
        return [_dump(each) for each in value]
    return ast.dump(value) if isinstance(value, ast.AST) else value


def _put(tree: ast.AST, path: Path, number: int, new: Any) -> None:
    parent: Any = tree
    for name, at in path[:-1]:
        parent = getattr(parent, name) if at is None else getattr(parent, name)[at]
    name, at = path[-1]
    old = getattr(parent, name) if at is None else getattr(parent, name)[at]
    chosen = _chosen(number, old, new, test=name == "test")
    if at is None:
        setattr(parent, name, chosen)
    else:
        getattr(parent, name)[at] = chosen


def _chosen(number: int, old: Any, new: Any, *, test: bool) -> ast.AST:
    if isinstance(old, ast.expr):
        if not (_harmless(old) and _harmless(new)):
            return ast.IfExp(_asked(number), new, old)
        if test:
            old, new = _truth(old), _truth(new)
        return _differing(number, old, new)
    match old, new:
        case ast.Assign(targets=[ast.Attribute(value=of, attr=attr) as target], value=value), ast.Pass():
            return ast.Assign([target], _differing(number, value, ast.Attribute(of, attr, ast.Load())))
    return ast.If(_asked(number), [new], [old])


def _asked(number: int) -> ast.expr:
    return ast.Call(ast.Name("mutation_reach", ast.Load()), [ast.Constant(number)], [])


def _truth(node: ast.expr) -> ast.expr:
    return ast.UnaryOp(ast.Not(), ast.UnaryOp(ast.Not(), node))


def _differing(number: int, old: ast.expr, new: ast.expr) -> ast.expr:
    nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    return ast.Call(ast.Name("mutation_differs", ast.Load()), [ast.Constant(number), old, ast.Lambda(nothing, new)], [])


def _harmless(node: ast.AST) -> bool:
    """Whether to evaluate it once more changes nothing."""
    for each in ast.walk(node):
        if isinstance(each, ast.Call):
            called = each.func.id if isinstance(each.func, ast.Name) else getattr(each.func, "attr", "")
            if called not in HARMLESS:
                return False
        elif isinstance(each, ast.NamedExpr | ast.Yield | ast.Await):
            return False
    return True

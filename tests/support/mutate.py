"""Changes one line of a core at a time, at random but always the same, and shows whether the tests notice.

    python -m mutate --count 96 --seed 1            # draw mutants, run each, print what became of it
    python -m mutate --only nodes/link --list       # what would be run

Works in a copy of the tree. A mutant that no test catches is either equivalent (say why) or a test that is missing.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIMIT_S = 300.0  # a mutant whose tests take longer hangs: caught
WORLD = [*(f"unit/test_controller_{part}.py" for part in ("submits", "once", "ends", "waits", "ranks")),
         "property/test_controller_life.py", "property/test_load_invariant.py"]  # fmt: skip
CORE = ["unit/test_health_states.py", "unit/test_who_speaks_for_ranks.py", "unit/test_policies_plugged_in.py",
        "unit/test_cache_aware.py", "unit/test_defaults.py", *WORLD]  # fmt: skip
LEGS = ["unit/test_legs_in_memory.py", "property/test_legs_machine.py"]
POLICY = ["unit/test_policies_methods.py", "unit/test_cache_aware.py", "property/test_cache_aware_choice.py"]
TESTS = {  # of which room, with which tests under tests/; others hold these as well, but slower
    "bus/timer_slots.py": ["unit/test_timer_slots.py", "unit/test_watches.py"],
    "bus/broker": ["unit/test_broker_core.py", "unit/test_rooms.py", "unit/test_watches.py", "unit/test_topology.py",
                   "property/test_rooms_model.py"],
    "bus/embed": ["unit/test_publisher_core.py", "unit/test_resolver_core.py", "property/test_rooms_model.py"],
    "controller/load": ["unit/test_load_table.py", "property/test_load_reconnect.py", "unit/test_capabilities.py",
                        "unit/test_policies_plugged_in.py", *POLICY, *WORLD],
    "controller/policies": [*POLICY, "unit/test_prefix_index.py", "property/test_prefix_index_model.py",
                            "unit/test_policies_plugged_in.py"],
    "controller/requests": ["unit/test_queue_central.py", *WORLD],
    "controller/core.py": CORE,
    "controller/balancer.py": ["unit/test_balancer.py", "unit/test_capabilities.py", "unit/test_same_decisions.py",
                               *POLICY, *WORLD],
    "controller/placement.py": ["unit/test_capabilities.py", *POLICY, *WORLD],
    "controller/members.py": CORE,
    "nodes/link": ["unit/test_token_streams.py", "unit/test_kv_fetch.py", "unit/test_rank_link.py", *LEGS,
                   "unit/test_foreign_runner.py", "property/test_rank_link_load.py"],
    "nodes/own": ["unit/test_scheduler_rules.py", "unit/test_kv_fetch.py", "property/test_blocks_pool.py",
                  "property/test_scheduler_machine.py", *LEGS],
    "pdbus/client": ["unit/test_client_request.py", "unit/test_client_questions.py", "property/test_client_core.py"],
}  # fmt: skip
SHELLS = {  # what owns sockets, threads or a process is held by the integration tests
    "bus/broker/shell.py", "bus/embed/publisher.py", "bus/embed/resolver.py", "controller/policies/registry.py",
    "nodes/link/connection.py", "nodes/link/data.py", "nodes/link/host.py", "nodes/link/rank.py",
    "nodes/link/embed.py", "nodes/own/kv_events.py", "pdbus/client/channel.py", "pdbus/client/sync.py",
    "pdbus/client/aio.py", "pdbus/client/base.py", "pdbus/client/options.py", "pdbus/client/output.py",
    "pdbus/client/loop_channel.py", "pdbus/client/traffic.py",
}  # fmt: skip
OTHER: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One file with one place changed: the `number`th of those that `places` finds."""

    room: str
    path: str
    number: int
    line: int
    before: str
    after: str

    @property
    def source(self) -> str:
        tree = ast.parse((ROOT / self.path).read_text(encoding="utf-8"))
        target = places(tree)[self.number]

        class Put(ast.NodeTransformer):
            def visit(self, node: ast.AST) -> Any:
                return changed(node) if node is target else self.generic_visit(node)

        return ast.unparse(ast.fix_missing_locations(Put().visit(tree)))


def places(tree: ast.Module) -> list[ast.AST]:
    """What may be changed: statements and what they are made of, but no annotations, defaults, what is raised or
    asserted, or beginnings (without which nothing runs)."""
    found: list[ast.AST] = [
        each
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and function.name not in ("__init__", "__repr__", "validate")
        for each in function.body
        if not isinstance(each, ast.FunctionDef)  # it comes by itself
    ]
    for node in found:
        if not isinstance(node, ast.Assert | ast.Raise | ast.JoinedStr | ast.FunctionDef):
            found += ast.iter_child_nodes(node)
    return [node for node in found if hasattr(node, "lineno")]


def changed(node: ast.AST) -> ast.AST | None:
    """`node` as a mistake would have it; None where there is nothing to get wrong."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in OTHER:
            return ast.Compare(node.left, [OTHER[type(op)]()], node.comparators)  # type: ignore[list-item]
        case ast.BoolOp():
            return ast.BoolOp(OTHER[type(node.op)](), node.values)  # type: ignore[arg-type]
        case ast.UnaryOp(op=ast.Not()):
            return node.operand
        case ast.BinOp() if type(node.op) in OTHER:
            return ast.BinOp(node.left, OTHER[type(node.op)](), node.right)  # type: ignore[arg-type]
        case ast.Constant(value=bool()):
            return ast.Constant(not node.value)
        case ast.Constant(value=int() | float()):
            return ast.Constant(node.value + 1)  # type: ignore[operator]
        case ast.AugAssign() | ast.Delete() | ast.Expr(value=ast.Call()) | ast.Continue():
            return ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return ast.Pass()
        case ast.If():
            return ast.If(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    return None


@cache
def mutants(room: str, path: str) -> list[Mutant]:
    """Every one of a file."""
    out = []
    text = (ROOT / path).read_text(encoding="utf-8")
    lines = text.splitlines()
    for number, node in enumerate(places(ast.parse(text))):
        if (new := changed(node)) is not None:
            line: int = node.lineno  # type: ignore[attr-defined]
            said = lines[line - 1].strip(), ast.unparse(new).splitlines()[0]
            out.append(Mutant(room, path, number, line, *said))
    return out


def draw(count: int, seed: int, only: str) -> list[Mutant]:
    """`count` of them on different lines, each room with about as many."""
    rng = random.Random(seed)
    out: list[Mutant] = []
    by_room: dict[str, list[Mutant]] = {}
    for room in TESTS:
        files = [ROOT / room] if room.endswith(".py") else sorted((ROOT / room).glob("*.py"))
        paths = [path for each in files if (path := str(each.relative_to(ROOT))) not in SHELLS]
        by_line: dict[tuple[str, int], list[Mutant]] = {}
        for path in paths if room.startswith(only) else ():
            for mutant in mutants(room, path):
                by_line.setdefault((mutant.path, mutant.line), []).append(mutant)
        by_room[room] = [rng.choice(each) for each in by_line.values()]
        rng.shuffle(by_room[room])
    while len(out) < count and any(by_room.values()):
        out += [each.pop() for each in by_room.values() if each]
    return out[:count]


def run(tree: Path, tests: list[str]) -> str:
    """The first test that fails in `tree`, "time" where they hang, "" where all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-o", "timeout=60"]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*command, *(f"tests/{each}" for each in tests)], cwd=tree, env=environment,
            capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "time"
    if done.returncode == 0:
        return ""
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0][:110] if failed else f"exit {done.returncode}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=96)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="rooms whose name begins so")
    parser.add_argument("--list", action="store_true", help="run nothing")
    given = parser.parse_args()
    drawn = draw(given.count, given.seed, given.only)
    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, tree / name)
        for room in dict.fromkeys(mutant.room for mutant in drawn if not given.list):
            if failed := run(tree, TESTS[room]):
                sys.exit(f"the tests of {room} fail as they are: {failed}")
        for mutant in drawn:
            print(f"{mutant.path}:{mutant.line}  {mutant.before}  =>  {mutant.after}", end="", flush=True)
            if given.list:
                print()
                continue
            begun, path = time.monotonic(), tree / mutant.path
            path.write_text(mutant.source, encoding="utf-8")
            caught = run(tree, TESTS[mutant.room])
            shutil.copy2(ROOT / mutant.path, path)
            survived += not caught
            print(f"  [{time.monotonic() - begun:.0f} s] {caught or 'SURVIVED'}", flush=True)
    if not given.list:
        print(f"{len(drawn)} mutants, {survived} survived")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())

"""Puts a cut into one module's source while it is imported. It imports little: each process of a cut's test runs it."""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Callable
from functools import lru_cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType
from typing import Any

VARIABLE = "PDBUS_TESTS_CUT"  # of the processes that a cut's test starts; [symbol, old, new]


class CutMissed(Exception):
    """The symbol is not there, or the text does not stand once in its source."""


def part(source: str, symbol: str) -> str:
    """The text of `module:qualified.name` in its module's `source`, decorators included; the last of that name."""
    body = _parsed(source)
    node: Any = None
    for name in symbol.partition(":")[2].split("."):
        named = [each for each in walk(body) if name in names(each)]
        if not named:
            raise CutMissed(f"{symbol} is not there")
        node = named[-1]
        body = getattr(node, "body", [])
    first = min(each.lineno for each in (node, *getattr(node, "decorator_list", ())))
    return "".join(source.splitlines(keepends=True)[first - 1 : node.end_lineno])


@lru_cache(4)
def _parsed(source: str) -> list[ast.stmt]:
    return ast.parse(source).body


def walk(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements of a body and, where they are under an `if`, `try` or `with`, those below."""
    out: list[ast.stmt] = []
    for each in body:
        out.append(each)
        if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            out += walk([below for below in ast.iter_child_nodes(each) if isinstance(below, ast.stmt)])
    return out


def names(node: ast.stmt) -> list[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def patched(source: str, symbol: str, old: str, new: str) -> str:
    """The module's `source` with the cut. Raises CutMissed."""
    whole = part(source, symbol)
    if whole.count(old) != 1 or source.count(whole) != 1:
        raise CutMissed(f"{whole.count(old)} times in {symbol}, not once: {old!r}")
    return source.replace(whole, whole.replace(old, new))


class _Loader(SourceFileLoader):
    change: Callable[[str], str | ast.Module]

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return compile(self.change(self.get_data(path).decode()), path, "exec", dont_inherit=True)


class Finder(MetaPathFinder):
    """Imports modules with another source: `changes` make it of the source there is, by module."""

    def __init__(self, changes: dict[str, Callable[[str], str | ast.Module]]) -> None:
        self._changes = changes

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name not in self._changes:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)) and spec.origin:
                spec.loader = loader = _Loader(name, spec.origin)
                loader.change = self._changes[name]
                return spec
        return None


def _cut(symbol: str, old: str, new: str) -> Finder:
    return Finder({symbol.partition(":")[0]: lambda source: patched(source, symbol, old, new)})


def install(symbol: str, old: str, new: str) -> None:
    """From now on, here and in the Python processes that are started from here."""
    module = symbol.partition(":")[0]
    if module in sys.modules:
        raise CutMissed(f"{module} has been imported already")
    sys.meta_path.insert(0, _cut(symbol, old, new))
    os.environ[VARIABLE] = json.dumps([symbol, old, new])
    here = os.path.dirname(os.path.abspath(__file__))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))


def from_environment() -> None:
    if said := os.environ.get(VARIABLE):
        symbol, old, new = json.loads(said)
        sys.meta_path.insert(0, _cut(symbol, old, new))

"""How much memory an object holds on to, whatever it calls the places where it does."""

from __future__ import annotations

import gc
from types import FunctionType, ModuleType


def retained(thing: object) -> int:
    """The objects that can be reached from `thing`; of code only what it holds by itself."""
    seen: dict[int, object] = {}
    todo = [thing]
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, type | ModuleType | FunctionType):
            continue
        seen[id(each)] = each
        todo += gc.get_referents(each)
    return len(seen)

"""Checks that the packages `bus`, `nodes` and `controller` are pdbus's own. Imports none of them, because foreign code
would run.

`nodes` and `controller` check `bus` in the same way when they are imported; they must not import this package.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

OURS = ("bus", "nodes", "controller")


@cache
def check_names() -> None:
    """Raise ImportError when one of the names would be imported from another place, for example from a `bus.py` in the
    working directory. Checked once a process."""
    for name in OURS:
        spec = find_spec(name)
        found = spec and (spec.origin or next(iter(spec.submodule_search_locations or ()), None))
        if found and Path(found).resolve().with_suffix("") != Path(__file__).resolve().parents[1] / name / "__init__":
            raise ImportError(
                f"{found} hides pdbus's own package {name!r}: rename it, or keep it off the import path (python -P)",
                name=name,
            )

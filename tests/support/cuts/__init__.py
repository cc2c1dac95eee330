"""Promises are cut: for each promise of the documents, a patch that takes its enforcement away and the test that fails.

    python -m cuts                      # all of them; `make cuts`
    python -m cuts M29 S4               # these
    python -m cuts --since REF          # what changed since REF touches, and a tenth by date; `make cuts SINCE=REF`

`protocol`, `security` and `edge` are the registry, as data: one `Cut` for each `[M7]`, `[S3]` and `E5` of
docs/protocol.md, docs/security.md and docs/edge.md. A cut names a symbol, a text in its source, and what stands there
instead. `site/cut_hook` puts it there while the module is imported, in the test's process and in those that it starts;
no product code knows of it. tests/unit/test_cuts_registry.py checks that the registry is complete and each patch fits.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.append(str(Path(__file__).parent / "site"))
import cut_hook as cut_hook  # noqa: E402


@dataclass(frozen=True)
class Cut:
    """In the source of `symbol` (`module:qualified.name`) `old`, which stands there once, becomes `new`: then `test`
    (below tests/) fails by an assertion. `peer`: the promise binds peers too, and the test plays one that breaks it."""

    promise: str
    test: str
    symbol: str
    old: str
    new: str
    peer: bool = False

    @property
    def file(self) -> str:
        """The symbol's, from the root."""
        path = self.symbol.partition(":")[0].replace(".", "/")
        return f"{path}/__init__.py" if (ROOT / path).is_dir() else f"{path}.py"


@dataclass(frozen=True)
class Uncut:
    """A promise whose test holds it, but whose enforcement no patch of ours takes away: `why` says so. Ten at most."""

    promise: str
    test: str
    why: str


def registry() -> list[Cut | Uncut]:
    """All entries, in the documents' order."""
    from cuts import edge, protocol, security

    return [*protocol.CUTS, *security.CUTS, *edge.CUTS]

"""What a mutation is: a change of one text in a symbol, under which the simulation has to break."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Mutation:
    """In the source of `symbol` `old` becomes `new`; `defect` is what users saw of it. `seed`: a trial that is known to
    break under it, tried first, in worlds of the kind `how`. `unseen`: why none can."""

    name: str
    defect: str
    symbol: str
    old: str
    new: str
    seed: int = -1
    unseen: str = ""
    how: Literal["small", "tight", "crowded", "tries", "killers"] = "small"

    @property
    def module(self) -> str:
        return self.symbol.partition(":")[0]

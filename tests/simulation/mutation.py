"""What a mutation is: a change of one text in a symbol, under which the simulation has to break."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """In the source of `symbol` `old` becomes `new`; `defect` is what users saw of it. `seed`: a trial that is known to
    break under it, tried first, of a small world or a `tight` one. `unseen`: why none can."""

    name: str
    defect: str
    symbol: str
    old: str
    new: str
    seed: int = -1
    unseen: str = ""
    tight: bool = False

    @property
    def module(self) -> str:
        return self.symbol.partition(":")[0]

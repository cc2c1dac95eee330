"""Cases of a property, drawn from one seeded generator each: for what would be a hundred choices of Hypothesis, at a
hundred times the price. What a case that fails has drawn stands in its failure."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

ENCODINGS_END = [sign * 2**bits + by for sign in (-1, 1) for bits in (5, 7, 8, 15, 16, 31, 32, 53) for by in (-1, 0, 1)]
SPECIAL = (0.0, -0.0, 5e-324, 2.2250738585072014e-308, 1.0, 1 / 3, float(2**53), 1.7976931348623157e308)
CHARACTERS = [
    (0x20, 0x7E),
    (0x20, 0x7E),
    (0, 0x1F),
    (0x7F, 0x7FF),
    (0x800, 0xD7FF),
    (0xE000, 0xFFFF),
    (0x10000, 0x10FFFF),
]


class Case(Random):
    """`with case:` what fails inside says what was drawn."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name
        self.drawn: list[object] = []

    def __enter__(self) -> Case:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            error.add_note(f"case {self.name} drew {', '.join(map(repr, self.drawn))}")

    def note(self, value: Any) -> Any:
        self.drawn.append(value)
        return value

    def one(self, values: Sequence[Any]) -> Any:
        return self.note(self.choice(values))

    def number(self, low: int, high: int) -> int:
        """Often at an end, or where its encoding changes."""
        match self.randrange(4):
            case 0:
                return self.choice((low, high))
            case 1:
                within = [each for each in ENCODINGS_END if low <= each <= high]
                return self.choice(within) if within else low
            case 2:
                return self.randint(low, high)
        return self.randint(max(low, min(high, -3)), min(high, max(low, 300)))

    def length(self, least: int, most: int) -> int:
        """Often short."""
        return self.randint(least, self.choice((min(most, least + 1), min(most, least + 8), most)))

    def text(self, least: int, most: int) -> str:
        """Of all that UTF-8 can encode."""
        kinds = [self.choice(CHARACTERS)] if self.randrange(2) else CHARACTERS
        return "".join(chr(self.randint(*self.choice(kinds))) for _ in range(self.length(least, most)))

    def bytes_of(self, most: int) -> bytes:
        if self.randrange(2):
            return self.randbytes(self.length(0, most))
        few = self.randbytes(self.randint(1, 4))
        return bytes(self.choice(few) for _ in range(self.length(0, most)))

    def float_of(self, low: float, high: float) -> float:
        match self.randrange(4):
            case 0:
                return self.choice((low, high))
            case 1:
                return self.choice([each for each in SPECIAL if low <= each <= high] or [low])
            case 2:
                return self.choice((math.nextafter(low, high), math.nextafter(high, low)))
        return self.uniform(low, high)

    def tree(self, leaf: Callable[[Case], Any], key: Callable[[Case], str], depth: int, widest: int) -> Any:
        """A leaf as often as a list or a mapping, which hold trees of less `depth`."""
        match self.randrange(4) if depth else 3:
            case 0:
                return [self.tree(leaf, key, depth - 1, widest) for _ in range(self.randint(0, widest))]
            case 1:
                return {key(self): self.tree(leaf, key, depth - 1, widest) for _ in range(self.randint(0, widest))}
        return leaf(self)


def cases(count: int) -> Iterator[Case]:
    """The same at each run of a test, others in each test."""
    test = os.environ["PYTEST_CURRENT_TEST"].partition(" ")[0].rpartition("::")[2]
    return (Case(f"{test} {number}") for number in range(count))

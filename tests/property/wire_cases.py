"""Cases of every message, read off the field types, so that a new message is covered by itself.

Drawn from one seeded generator a case: a message has dozens of fields, each of which would be a choice of Hypothesis,
at a hundred times the price. What a case that fails has drawn stands in its failure.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from random import Random
from typing import Any

import msgspec.inspect as inspect

from bus.wire import messages
from bus.wire.codec import readable
from bus.wire.messages import Message, Table

TABLES = {name: value for name, value in vars(messages).items() if isinstance(value, Table)}
ALL = readable(Table({tag: kind for table in TABLES.values() for tag, kind in table.items()}))
TAGS = sorted(ALL)

EXAMPLES = int(os.environ.get("PDBUS_FUZZ_EXAMPLES", "600"))

I64 = (-(2**63), 2**63 - 1)
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

Maker = Callable[["Case"], Any]


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

    # --- of messages --------------------------------------------------------------------------------------------

    def message(self, kind: type[Message]) -> Any:
        """Of one kind, within the bounds of its fields."""
        return self.note(_maker(kind)(self))

    def any_message(self) -> Any:
        return self.message(ALL[self.choice(TAGS)])

    # --- of anything else ---------------------------------------------------------------------------------------

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


def cases(count: int = EXAMPLES) -> Iterator[Case]:
    """The same at each run of a test, others in each test."""
    test = os.environ["PYTEST_CURRENT_TEST"].partition(" ")[0].rpartition("::")[2]
    return (Case(f"{test} {number}") for number in range(count))


@cache
def _maker(kind: type[Message]) -> Maker:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    fields = [(field.name, _of(field.type)) for field in info.fields]
    return lambda case: kind(**{name: make(case) for name, make in fields})


def _of(kind: inspect.Type) -> Maker:
    match kind:
        case inspect.StructType():
            return lambda case: _maker(kind.cls)(case)
        case inspect.BoolType():
            return lambda case: case.random() < 0.5
        case inspect.NoneType():
            return lambda case: None
        case inspect.IntType():
            low = kind.gt + 1 if kind.gt is not None else kind.ge if kind.ge is not None else I64[0]
            high = kind.lt - 1 if kind.lt is not None else kind.le if kind.le is not None else I64[1]
            return lambda case: case.number(low, high)
        case inspect.FloatType(le=float() | int()):
            low_f = kind.ge if kind.gt is None else math.nextafter(kind.gt, kind.le)
            assert low_f is not None
            return lambda case: case.float_of(low_f, kind.le)
        case inspect.Metadata(type=inspect.StrType(), extra={"alphabet": alphabet}):
            return _of_alphabet(alphabet)
        case inspect.StrType(pattern=str(pattern)):
            assert re.search(pattern, _traceparent(Random(0))), f"no case for {pattern}"
            return _traceparent
        case inspect.StrType(pattern=None):
            least, most = kind.min_length or 0, min(kind.max_length or 40, 40)
            return lambda case: case.text(least, most)
        case inspect.BytesType():
            return lambda case: case.bytes_of(64)
        case inspect.LiteralType():
            return lambda case: case.choice(kind.values)
        case inspect.UnionType():
            makers = [*map(_of, kind.types)]
            return lambda case: case.choice(makers)(case)
        case inspect.TupleType():
            items = [*map(_of, kind.item_types)]
            return lambda case: tuple(make(case) for make in items)
        case inspect.VarTupleType():
            item, shortest, longest = _of(kind.item_type), kind.min_length or 0, min(kind.max_length or 3, 3)
            return lambda case: tuple(item(case) for _ in range(case.randint(shortest, longest)))
        case inspect.DictType():
            key, value = _of(kind.key_type), _of(kind.value_type)
            return lambda case: {key(case): value(case) for _ in range(case.randint(0, 4))}
    raise AssertionError(f"no case for {kind}")


def _traceparent(case: Random) -> str:
    return f"00-{case.getrandbits(128):032x}-{case.getrandbits(64):016x}-{case.getrandbits(8):02x}"


def _of_alphabet(pattern: re.Pattern[str]) -> Maker:
    """Of a pattern that is one class of ASCII characters and how many of them."""
    characters = [chr(each) for each in range(128) if pattern.fullmatch(chr(each))]
    lengths = [length for length in range(200) if pattern.fullmatch(characters[0] * length)]
    return lambda case: "".join(case.choices(characters, k=case.length(lengths[0], lengths[-1])))

"""Messages of every kind, read off the field types, so that a new one is covered by itself."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

import msgspec.inspect as inspect
from cases import Case

from bus.wire import messages
from bus.wire.codec import readable
from bus.wire.messages import Message, Table

TABLES = {name: value for name, value in vars(messages).items() if isinstance(value, Table)}
ALL = readable(Table({tag: kind for table in TABLES.values() for tag, kind in table.items()}))
TAGS = sorted(ALL)

EXAMPLES = int(os.environ.get("PDBUS_FUZZ_EXAMPLES", "600"))

I64 = (-(2**63), 2**63 - 1)

Maker = Callable[[Case], Any]


def message(case: Case, kind: type[Message]) -> Any:
    """Return a random message of one kind, within the bounds of its fields."""
    return case.note(_maker(kind)(case))


def any_message(case: Case) -> Any:
    return message(case, ALL[case.choice(TAGS)])


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

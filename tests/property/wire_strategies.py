"""Hypothesis strategies for every message, read off the field types, so that a new message is covered by itself."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import msgspec.inspect as inspect
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from bus.wire import messages
from bus.wire.codec import readable
from bus.wire.messages import Message, Table

TABLES = {name: value for name, value in vars(messages).items() if isinstance(value, Table)}
ALL = readable(Table({tag: kind for table in TABLES.values() for tag, kind in table.items()}))

EXAMPLES = int(os.environ.get("PDBUS_FUZZ_EXAMPLES", "300"))
fuzz = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
cheap_fuzz = settings(fuzz, max_examples=5 * EXAMPLES)  # for inputs that cost little to make

_TEXT = st.characters(codec="utf-8")
_I64 = (-(2**63), 2**63 - 1)


def _integers(low: int | None, high: int | None) -> st.SearchStrategy[int]:
    low, high = _I64[0] if low is None else low, _I64[1] if high is None else high
    edges = st.sampled_from([low, high])
    return edges | st.integers(low, high) | st.integers(max(low, -3), min(high, max(low, 300)))


def _of(kind: inspect.Type) -> st.SearchStrategy[Any]:
    match kind:
        case inspect.StructType():
            return of(kind.cls)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.IntType():
            low = kind.gt + 1 if kind.gt is not None else kind.ge
            high = kind.lt - 1 if kind.lt is not None else kind.le
            return _integers(low, high)
        case inspect.FloatType():
            low_f = kind.gt if kind.gt is not None else kind.ge
            return st.floats(low_f, kind.le, exclude_min=kind.gt is not None, allow_nan=False)
        case inspect.Metadata(type=inspect.StrType(), extra={"alphabet": alphabet}):
            return st.from_regex(alphabet, fullmatch=True)
        case inspect.StrType(pattern=str(pattern)):
            return st.from_regex(pattern)
        case inspect.StrType():
            return st.text(_TEXT, min_size=kind.min_length or 0, max_size=min(kind.max_length or 40, 40))
        case inspect.BytesType():
            return st.binary(max_size=64)
        case inspect.LiteralType():
            return st.sampled_from(kind.values)
        case inspect.UnionType():
            return st.one_of(*map(_of, kind.types))
        case inspect.TupleType():
            return st.tuples(*map(_of, kind.item_types))
        case inspect.VarTupleType():
            longest = min(kind.max_length or 3, 3)
            return st.lists(_of(kind.item_type), min_size=kind.min_length or 0, max_size=longest).map(tuple)
        case inspect.DictType():
            return st.dictionaries(_of(kind.key_type), _of(kind.value_type), max_size=4)
    raise AssertionError(f"no strategy for {kind}")


@cache
def of(cls: type[Message]) -> st.SearchStrategy[Any]:
    """Messages of one kind, within the bounds of their fields."""
    info = inspect.type_info(cls)
    assert isinstance(info, inspect.StructType)
    return st.builds(cls, **{field.name: _of(field.type) for field in info.fields})


def any_message() -> st.SearchStrategy[Message]:
    return st.sampled_from(sorted(ALL)).flatmap(lambda tag: of(ALL[tag]))

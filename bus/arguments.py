"""Checks of a caller's arguments, before anything is changed: TypeError for another type, ValueError for an invalid
value.

They are for parts without a thread; `bus.wire.codec` checks what comes over the wire.
"""

from __future__ import annotations

import math
from numbers import Real
from operator import index
from typing import TypeVar

from msgspec import ValidationError, convert, to_builtins

from bus.wire.messages import MAX_ROOM, Message

M = TypeVar("M", bound=Message)

LONGEST_S = 1e12


def seconds(value: object, name: str = "now") -> float:
    """Return `value`, a number of any library, as a finite number of seconds."""
    if not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= LONGEST_S:
        raise ValueError(f"{name} must be a finite number of seconds")
    return number


def count(value: object, name: str) -> int:
    """Return `value`, an integer of any library, as a count that can go over the wire."""
    number = int(index(value))  # type: ignore[arg-type]  # TypeError for what is none
    if not 0 <= number <= MAX_ROOM:
        raise ValueError(f"{name} must be between 0 and {MAX_ROOM}")
    return number


def message(value: object, kind: type[M]) -> M:
    """Return `value` if it is a message of this kind that could come over the wire."""
    if type(value) is not kind:
        raise TypeError(f"{kind.__name__} expected, not {type(value).__name__}")
    try:
        convert(to_builtins(value), kind, builtin_types=(bytes,))
    except (ValidationError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{kind.__name__}: {error}") from None
    return value

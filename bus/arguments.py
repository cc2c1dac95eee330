"""Checks of the arguments that a program gives to our cores, made before anything is changed: TypeError for a value of
another type, ValueError for an invalid value. `name` is the argument's name in the error.

They are for the cores that a program calls on a loop of its own (`bus.embed.checked`); `bus.wire.codec` checks what
comes over the wire.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from numbers import Integral, Real
from operator import index
from os import PathLike
from typing import Any, TypeVar

from msgspec import ValidationError, convert, to_builtins

from bus.errors import ConfigError
from bus.wire.messages import MAX_ROOM, NAME, Message

M = TypeVar("M", bound=Message)

LONGEST_S = 1e12


def number(value: object, name: str) -> float:
    """Return `value`, a number of any library, as a float; infinity and NaN pass. TypeError if it is no number."""
    if not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        return math.inf  # or minus as much: code that wants a finite number takes neither


def seconds(value: object, name: str = "now") -> float:
    """Return `value`, seconds of any sign, as a float; ValueError for NaN, infinity, and beyond LONGEST_S either
    way."""
    found = number(value, name)
    if not abs(found) <= LONGEST_S:
        raise ValueError(f"{name} must be a finite number of seconds")
    return found


def positive(value: object, name: str) -> float:
    """Return `value` as a finite float above 0; ValueError for any other number."""
    found = seconds(value, name)
    if found <= 0:
        raise ValueError(f"{name} must be more than 0")
    return found


def instance_name(value: object, name: str) -> str:
    """Return `value`, the name of an instance or an empty text, as a plain str. ValueError for anything else."""
    if not isinstance(value, str) or (value and NAME.fullmatch(value) is None):
        raise ValueError(f"{name} is not a valid name")
    return str(value)  # a subclass of str cannot be encoded


def count(value: object, name: str) -> int:
    """Return `value`, an integer of any library, as an int from 0 to 2^63 - 1, the largest that goes over the wire.
    TypeError for what is no integer, ValueError outside."""
    found = int(index(value))  # type: ignore[arg-type]  # TypeError for what is none
    if not 0 <= found <= MAX_ROOM:
        raise ValueError(f"{name} must be between 0 and {MAX_ROOM}")
    return found


def message(value: object, kind: type[M]) -> M:
    """Return `value` itself, if its class is exactly `kind` (else TypeError) and its fields are valid on the wire (else
    ValueError)."""
    if type(value) is not kind:
        raise TypeError(f"{kind.__name__} expected, not {type(value).__name__}")
    try:
        convert(to_builtins(value), kind, builtin_types=(bytes,))
    except (ValidationError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{kind.__name__}: {error}") from None
    return value


def typed(config: Any, *, called: Callable[[str], str] = str) -> None:
    """Raise ConfigError if a field of the dataclass instance `config` has a value of another type than it declares.
    Only fields that are declared as str, int, float, bool or tuple are checked. `called` turns a field's name into the
    name that the error shows."""
    for field in fields(config):
        value, declared = getattr(config, field.name), str(field.type)
        kind, words = _KINDS.get(declared.partition("[")[0], (object, ""))
        good = isinstance(value, kind)
        if declared == "tuple[str, ...]":
            good, words = good and all(isinstance(each, str) for each in value), "texts"
        if not good:
            raise ConfigError(f"{called(field.name)} must be {words}, not {value!r:.60}")


_KINDS: dict[str, tuple[Any, str]] = {  # what a declared type takes, and how a sentence names it
    "str": ((str, PathLike), "text"),
    "int": (Integral, "a whole number"),
    "float": (Real, "a number"),
    "bool": ((bool, Integral), "true or false"),
    "tuple": ((tuple, list), "a list"),
}

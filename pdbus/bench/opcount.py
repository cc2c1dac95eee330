"""Counts what a piece of code does, not how long it takes: bytecode instructions and calls into C.

The same on every machine for one Python version (and within a few percent across versions), so CI can hold the hot
paths to a budget. What C code does inside a call is not seen: a budget guards our own lines.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any


@dataclass(frozen=True, slots=True)
class Count:
    """Of one call of the function that was counted."""

    instructions: int
    c_calls: int


def count(function: Callable[[], object]) -> Count:
    """What one call of `function` takes, once it has been called before (caches filled, code specialised)."""
    function()
    instructions = c_calls = 0

    def on_opcode(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal instructions
        if event == "opcode":
            instructions += 1
        return on_opcode

    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return on_opcode

    def on_profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal c_calls
        c_calls += event == "c_call"

    collecting = gc.isenabled()
    tracer, profiler = sys.gettrace(), sys.getprofile()
    gc.disable()  # a collection may run somebody's finaliser
    try:
        sys.settrace(on_call)
        function()
        sys.settrace(None)
        sys.setprofile(on_profile)
        function()
    finally:
        sys.settrace(tracer)
        sys.setprofile(profiler)
        if collecting:
            gc.enable()
    return Count(instructions, c_calls - 1)  # the last is sys.setprofile itself

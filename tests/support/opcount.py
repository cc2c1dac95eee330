"""Counts what a piece of code does, not how long it takes: bytecode instructions and calls into C, or the processor's.

The first are the same on every machine for one Python version (and within a few percent across versions), so CI can
hold the hot paths to a budget. What C code does inside a call is not seen: a budget guards our own lines. Of compiled
code they see next to nothing; what the processor did for it the kernel tells, where it lets us ask.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    c_calls = 0

    def on_profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal c_calls
        c_calls += event == "c_call"

    profiler = sys.getprofile()
    with _quiet():
        instructions = _opcodes(function)
        try:
            sys.setprofile(on_profile)
            function()
        finally:
            sys.setprofile(profiler)
    return Count(instructions, c_calls - 1)  # the last is sys.setprofile itself


if sys.version_info >= (3, 12):  # tracers hear of a part of them there; PEP 669 tells of all

    def _opcodes(function: Callable[[], object]) -> int:
        monitoring, taken = sys.monitoring, 0

        def on_instruction(code: object, offset: int) -> None:
            nonlocal taken
            taken += 1

        tool = next(number for number in range(6) if monitoring.get_tool(number) is None)
        event = monitoring.events.INSTRUCTION
        monitoring.use_tool_id(tool, __name__)
        try:
            monitoring.register_callback(tool, event, on_instruction)
            monitoring.set_events(tool, event)
            function()
        finally:
            monitoring.set_events(tool, 0)
            monitoring.register_callback(tool, event, None)
            monitoring.free_tool_id(tool)
        return taken

else:

    def _opcodes(function: Callable[[], object]) -> int:
        taken = 0

        def on_opcode(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal taken
            if event == "opcode":
                taken += 1
            return on_opcode

        def on_call(frame: FrameType, event: str, argument: Any) -> Any:
            frame.f_trace_opcodes = True
            frame.f_trace_lines = False
            return on_opcode

        tracer = sys.gettrace()
        try:
            sys.settrace(on_call)
            function()
        finally:
            sys.settrace(tracer)
        return taken


PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}  # perf_event_open(2)
_HARDWARE, _INSTRUCTIONS, _USER_ONLY, _SIZE = 0, 1, 1 << 5 | 1 << 6, 112
ROUNDS = 3


def native(function: Callable[[], object]) -> float:
    """The processor's instructions for one call of `function`, in those of `_yard` in this process, so that the figure
    means the same for another build of Python. OSError where the kernel does not count for us."""
    with _quiet():
        return _instructions(function) / _instructions(_yard)


def _instructions(function: Callable[[], object]) -> int:
    """Of this thread, outside the kernel."""
    number = PERF_EVENT_OPEN.get(platform.machine())
    if sys.platform != "linux" or number is None:
        raise OSError("no counter is known here")
    attributes = struct.pack("IIQQQQQ", _HARDWARE, _SIZE, _INSTRUCTIONS, 0, 0, 0, _USER_ONLY).ljust(_SIZE, b"\0")
    counter = ctypes.CDLL(None, use_errno=True).syscall(number, attributes, 0, -1, -1, 0)
    if counter < 0:
        raise OSError(ctypes.get_errno(), "the kernel does not count instructions for us")
    try:
        function()
        taken = []
        for _ in range(ROUNDS):
            before = os.read(counter, 8)
            function()
            taken.append(int.from_bytes(os.read(counter, 8), sys.byteorder) - int.from_bytes(before, sys.byteorder))
        return min(taken)
    finally:
        os.close(counter)


def _yard() -> None:
    table: dict[int, tuple[int, str]] = {}
    for number in range(1000):
        table[number & 63] = (number, str(number))


@contextmanager
def _quiet() -> Iterator[None]:
    """No collection meanwhile: it may run somebody's finaliser."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()

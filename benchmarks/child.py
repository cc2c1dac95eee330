"""The inside of a benchmark's own processes: `python child.py MODULE:FUNCTION SETTINGS`.

A function with a first parameter `parent` lives until stdin closes and talks through it; any other is called once,
and its result is printed. Owns that protocol; measures nothing.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Last: pdbus is the one that the interpreter has installed, where it has one.
sys.path.append(str(Path(__file__).parents[1]))

from bus.runtime import cli, logs

STDIN = 0


class Parent:
    """The process that started this one: its commands come as JSON lines on stdin, answers go back as JSON lines on
    stdout. `gone`: it has closed our stdin."""

    def __init__(self) -> None:
        self._pending = b""
        self.gone = False

    def ready(self) -> None:
        """Print the READY line, for which the parent waits."""
        cli.ready()

    def send(self, result: Any) -> None:
        """Print one result as a JSON line."""
        print(json.dumps(result), flush=True)

    def commands(self) -> list[dict[str, Any]]:
        """Return the commands that have arrived, without more after them; it blocks unless STDIN is readable. Sets
        `gone` at its end."""
        chunk = os.read(STDIN, 1 << 16)
        self.gone = not chunk
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        return [json.loads(line) for line in lines]

    def serve(self, answer: Callable[..., Any]) -> None:
        """Print READY, then answer each command with `answer(**command)` until the parent has gone."""
        self.ready()
        while not self.gone:
            for command in self.commands():
                self.send(answer(**command))


def main() -> None:
    """Run the function that argv names; see the module."""
    logs.configure("warning", part="bench")
    target, settings = sys.argv[1], json.loads(sys.argv[2])
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(f"benchmarks.{module}"), name)
    if "parent" in inspect.signature(function).parameters:
        function(Parent(), **settings)
    else:
        Parent().send(function(**settings))


if __name__ == "__main__":
    main()

"""`python -m nodes.unified`."""

from __future__ import annotations

from bus.cli import run
from nodes.main import command

if __name__ == "__main__":
    run(command("unified"), "python -m nodes.unified")

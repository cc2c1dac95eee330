"""`python -m nodes.decode`."""

from __future__ import annotations

from bus.cli import run
from nodes.main import command

if __name__ == "__main__":
    run(command("decode"), "python -m nodes.decode")

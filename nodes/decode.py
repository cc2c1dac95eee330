"""`python -m nodes.decode`: a node whose ranks run the decode legs of requests. `nodes.main` has the command."""

from __future__ import annotations

from bus.runtime.interrupt import leave_at_once

if __name__ == "__main__":
    leave_at_once()  # before the imports, which take their time
    from bus.runtime.cli import run
    from nodes.main import command

    run(command("decode"), "python -m nodes.decode")

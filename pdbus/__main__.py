"""The start of `pdbus` and `python -m pdbus`: the steps before the imports. The command itself is in `pdbus.cli`."""

from __future__ import annotations

import sys

from pdbus.names import check_names


def main() -> None:
    """Run the `pdbus` command: check that `bus`, `nodes` and `controller` are ours (else exit with 2), have signals end
    the process at once while modules load, then run the subcommand."""
    try:
        check_names()
    except ImportError as error:
        print(f"pdbus: error: {error}", file=sys.stderr)
        sys.exit(2)
    from bus.runtime.interrupt import leave_at_once

    leave_at_once()
    from pdbus.cli import main as run

    run()


if __name__ == "__main__":
    main()

"""The parts that every main shares: one-line errors, exit codes, the READY line, option types, and text that is safe
for a terminal.

Exit codes: 0 clean, 2 bad setting, 3 no start, 4 a start that another start has replaced, 130 interrupted.
"""

from __future__ import annotations

import errno
import gc
import io
import os
import re
import select
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

import click

from bus.defaults import METRICS_HOST, SPIN_US_MAX
from bus.errors import BusError, ConfigError, Replaced, StartError
from bus.runtime.file_limit import raise_file_limit
from bus.runtime.interrupt import EXIT_INTERRUPTED, leave_at_once
from bus.runtime.logs import LEVELS

EXIT_CONFIG = 2
EXIT_START = 3
EXIT_REPLACED = 4
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_MAX_S = 1e9
_NoArguments: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())  # since click 8.2


def run(command: click.Command, program: str) -> None:
    """Run the command of a main, and exit the process; it does not return. Each error that a user can cause is one line
    on stderr and a non-zero exit code."""
    _make_streams_safe()
    raise_file_limit()
    try:
        _run(command, program)
    finally:
        _forget_unwritten_errors()


def _run(command: click.Command, program: str) -> NoReturn:
    try:
        command.main(prog_name=program, standalone_mode=False)
        sys.stdout.flush()  # the interpreter, at its end, would fail with a traceback
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(EXIT_INTERRUPTED)
    except _NoArguments as error:
        print(error.format_message(), file=sys.stderr)  # the help, as it is
        sys.exit(EXIT_CONFIG)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)  # of the subcommand, in errors of usage
        program = context.command_path if context is not None else program
        _fail(program, f"{error.format_message()} (see {program} --help)", EXIT_CONFIG)
    except ConfigError as error:
        _fail(program, str(error), EXIT_CONFIG)
    except Replaced as error:
        _fail(program, str(error), EXIT_REPLACED)
    except StartError as error:
        _fail(program, str(error), EXIT_START)
    except BusError as error:
        _fail(program, str(error), 1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EPIPE):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter would try to write the rest at its end
        if error.errno == errno.EPIPE:
            sys.exit(1)  # as click does where it writes itself
        _fail(program, f"cannot write the output: {error.strerror}", 1)
    finally:
        leave_at_once()  # a second Ctrl-C, while the interpreter ends
        if callable(signal.getsignal(signal.SIGTERM)):  # it leaves because of one; the next would look like a crash
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)


def _make_streams_safe() -> None:
    """Replace what stdout and stderr cannot encode; where one of them is closed, discard its output."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _forget_unwritten_errors() -> None:
    """Drop what stderr could not take (full disk, closed pipe): otherwise the interpreter would exit with code 120."""
    try:
        sys.stderr.flush()
    except (OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _fail(program: str, message: str, code: int) -> NoReturn:
    with suppress(OSError):  # the exit code says it too
        print(f"{program}: error: {printable(' '.join(message.split()))}", file=sys.stderr)
    sys.exit(code)


def printable(text: str) -> str:
    """Return `text` safe for a terminal: characters that control the terminal or change the writing direction are
    written out (`\\x1b`). Line ends and tabs stay."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def ready(**facts: object) -> None:
    """Print the line that a launcher waits for: `READY key=value ...` on stdout. A main calls it once, when its part
    serves. The objects of the start stay, so the garbage collector does not look at them from now on."""
    gc.freeze()
    print(" ".join(["READY", *(f"{key}={value}" for key, value in facts.items())]), flush=True)


def leave_with_parent(leave: Callable[[], None]) -> None:
    """Call `leave`, once, when the parent process has gone: stdin is a pipe whose other end closes. A helper thread
    waits for that and makes the call; this returns at once, and does nothing where stdin is a terminal or closed."""
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        return

    def watch() -> None:
        descriptor = sys.stdin.fileno()
        try:
            while True:
                select.select([descriptor], [], [])
                if not os.read(descriptor, 4096):
                    leave()
                    return
        except OSError:
            leave()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def setting(config: object, flag: str, **settings: Any) -> Callable[[Any], Any]:
    """Return a click option for a field of the dataclass `config`. `flag` is the option, like `--room-ttl-s`; the field
    has its name and gives its default."""
    name = flag.removeprefix("--").replace("-", "_")
    return click.option(flag, **{"default": getattr(config, name), "show_default": True} | settings)


class Seconds(click.FloatRange):
    """A click option type: a duration of at least `min` and at most `max` seconds, as a float; NaN, infinity and more
    than 1e9 are refused."""

    name = "seconds"

    def __init__(self, min: float = 0.0, max: float | None = None) -> None:
        super().__init__(min, max)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = super().convert(value, param, ctx)
        if not abs(seconds) <= _MAX_S:  # NaN neither
            self.fail(f"{seconds:g} is no number of seconds.", param, ctx)
        return seconds


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # of a part: two to leave, one to read its settings again

log_level_option = click.option(
    "--log-level", type=click.Choice(LEVELS), default="info", show_default=True, help="What to log, on stderr."
)
metrics_port_option = click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    default=0,
    show_default=True,
    help="Serve /metrics (Prometheus), /health and /ready on this port (0: don't).",
)
metrics_host_option = click.option(
    "--metrics-host", default=METRICS_HOST, show_default=True, metavar="HOST", help="The address of the metrics port."
)
slo_class_option = click.option(
    "--slo-class",
    "slo_classes",
    multiple=True,
    metavar="NAME=TTFT[,TPOT]",
    help="slo: both for requests of that slo_class, and of the client whose key has that name (repeatable).",
)
spin_us_option = click.option(
    "--spin-us",
    type=click.IntRange(0, SPIN_US_MAX),
    default=0,
    show_default=True,
    help="After a message poll for so long before sleeping, while messages come as densely: faster, for up to a core.",
)
watch_parent_option = click.option(
    "--watch-parent", is_flag=True, help="Leave when stdin closes (set by launchers, so that no orphan stays)."
)

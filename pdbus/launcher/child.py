"""One child process: started, watched for its READY line, signalled, reaped. Owns the process and its log."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from bus.errors import ConfigError, StartError
from bus.runtime.cli import EXIT_CONFIG
from pdbus.launcher.spec import PartSpec

LOG_MAX_BYTES = 16 << 20
_TAIL_BYTES = 16 << 10
_KILLED_S = 30.0  # how long SIGKILL may take


class Child:
    """One process of a cluster, started at construction (OSError if that fails). Its stdin is a pipe held open here, so
    the child leaves when this process ends; stderr goes to the log file; stdout has one READY line once it serves."""

    def __init__(self, spec: PartSpec, log: Path, env: dict[str, str]) -> None:
        self.spec = spec
        self.log = log
        self.facts: dict[str, str] = {}  # of its READY line
        self.silent = False  # it has closed its stdout
        self.unlogged = ""  # the reason why it has no log; empty: it has one
        with log.open("ab") as stderr:
            self._log_from = stderr.tell()  # earlier output is of an earlier start
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", spec.module, *spec.args],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **env},
                start_new_session=True,  # Ctrl-C reaches only this process, which stops the parts in order
            )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self._stdout = b""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def closed(self) -> bool:
        """True once its pipes are closed (`close`)."""
        assert self.process.stdout is not None
        return self.process.stdout.closed

    @property
    def fileno(self) -> int:
        """The descriptor of its stdout, to wait for with a selector."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    @property
    def ready(self) -> bool:
        """True once its READY line was read."""
        return bool(self.facts)

    @property
    def returncode(self) -> int | None:
        """The exit code (negative: a signal); None while it lives."""
        return self.process.poll()

    @property
    def killed(self) -> bool:
        """True if a signal ended it, so that it could not clean up."""
        return (self.returncode or 0) < 0

    def read(self) -> bool:
        """Read stdout without waiting, and set `facts` (the KEY=VALUE words) at the READY line. Return false at the end
        of the output, also setting `silent`; true if more may come."""
        try:
            data = os.read(self.fileno, 65536)
        except BlockingIOError:
            return True
        self.silent = not data
        self._stdout = (self._stdout + data)[-65536:]
        whole_lines = self._stdout[: self._stdout.rfind(b"\n") + 1]  # a read may end within a line
        for line in whole_lines.decode("utf-8", "replace").splitlines():
            if line.startswith("READY ") and not self.facts:
                self.facts = dict(word.split("=", 1) for word in line.split()[1:] if "=" in word)
        return bool(data)

    def send(self, number: int) -> None:
        """Send it the signal `number`; nothing if it has ended."""
        if self.returncode is None:
            self.process.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        """Wait for its exit; return true if it exits within `timeout_s`."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Kill the process if it lives, reap it, close the pipes; a second call does nothing. It waits up to 30 s; a
        process that survives SIGKILL longer is left to the kernel."""
        if self.returncode is None:
            self.send(signal.SIGKILL)
            self.wait(_KILLED_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()

    def failure(self) -> ConfigError | StartError:
        """Return (not raise) an error that says in one line why it ended: by the last `error:` line of its log,
        otherwise by `cause`. It is a ConfigError where the exit code says that a setting is bad."""
        errors = [line.partition(": error: ")[2] for line in self.last_lines() if ": error: " in line]
        kind = ConfigError if self.returncode == EXIT_CONFIG else StartError
        return kind(f"{self.name}: {errors[-1] if errors else self.cause()}")

    def cause(self) -> str:
        """Return its exit code or signal and the last line of its log, in one line."""
        code = self.returncode
        how = f"ended by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        lines = self.last_lines()
        return f"{how}; last words: {lines[-1].strip()[:300] if lines else 'none'}"

    def last_lines(self) -> list[str]:
        """Return the last log lines (16 KiB at most) of this start, without empty lines and terminal escapes; empty if
        the log cannot be read."""
        try:
            logged = self.log.stat().st_size - self._log_from
        except OSError:
            return []
        lines = self.tail(max(0, min(_TAIL_BYTES, logged))).splitlines()
        return ["".join(c if c.isprintable() else " " for c in line) for line in lines if line.strip()]

    def tail(self, size: int = _TAIL_BYTES) -> str:
        """Return the last `size` bytes of its log as text; empty if it cannot be read."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - size))
                return file.read().decode("utf-8", "replace")
        except OSError:
            return ""

    def trim_log(self) -> None:
        """If the log is larger than its limit, move its whole content to `.1` and empty it; the part goes on appending
        to it. A log that cannot be emptied, or does not exist, stays as it is."""
        with suppress(OSError):
            if self.log.stat().st_size <= LOG_MAX_BYTES:
                return
            with self.log.open("r+b") as file:  # opened before it is copied, as this is repeated
                with suppress(OSError):  # on a full disk it is emptied all the same
                    shutil.copyfile(self.log, self.log.with_name(f"{self.log.name}.1"))
                file.truncate(0)
            self._log_from = 0

    def remove_socket(self) -> None:
        """Remove the data socket file that a killed node has left: no later start removes it, because each has a name
        of its own. The process must have ended."""
        assert self.returncode is not None, f"{self.name} lives"
        scheme, _, path = self.facts.get("endpoint", "").partition("://")
        if scheme == "ipc" and is_socket(Path(path)):
            Path(path).unlink()


def start(spec: PartSpec, logs: Path, env: dict[str, str], *, again: bool = False) -> Child:
    """Start the part as a child, with its log in the directory `logs`, which is made if it is missing; return without
    waiting for READY. `env` is added to this process's environment. Raises StartError when the part cannot be run or
    its log cannot be written. With `again` (a restart), a log that cannot be written is no error: the part runs
        without one, and `unlogged` has the reason."""
    log, unlogged = logs / f"{spec.name.replace('/', '.')}.log", ""
    try:
        try:
            logs.mkdir(parents=True, exist_ok=True)
            log.open("ab").close()
        except OSError as error:
            if not again:
                raise
            log, unlogged = Path(os.devnull), f"{error.filename} {error.strerror}"
        child = Child(spec, log, {**env, **spec.env})
    except OSError as error:
        at = f" {error.filename}" if error.filename else ""
        raise StartError(f"{spec.name}: could not be started:{at} {error.strerror}") from None
    child.unlogged = unlogged
    return child


def is_socket(path: Path) -> bool:
    """Return whether `path` is a socket file; false if there is none."""
    try:
        return stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return False

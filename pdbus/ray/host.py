"""Runs one part (a process of a cluster: broker, controller, node or edge) on one machine: its files, its process, its
restarts there. Owns these and a list of events, which the owner of the placement (`cluster`) reads; does not know Ray.

A part that dies is restarted here, by the policy of all launchers. When this process dies, the part dies with it
(`parent_death`), and the owner of the placement starts both again, here or elsewhere.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from secrets import token_hex
from typing import NoReturn, TypeAlias

from bus.errors import ConfigError, StartError
from pdbus.launcher.child import Child, start
from pdbus.launcher.lifecycle import take_down, wait_ready
from pdbus.launcher.restarts import FINAL, RestartPolicy
from pdbus.launcher.spec import Addresses, ClusterSpec, PartSpec
from pdbus.launcher.supervisor import Supervisor

ASK_S = 30.0  # how long a question for events waits
LIST = "keys/allow/"


@dataclass(frozen=True)
class Task:
    """A part of a cluster to run, by name, with the content of the files that it needs on its machine, by path
    (`keys/...`, `config.toml`)."""

    spec: ClusterSpec
    at: Addresses
    part: str
    policy: RestartPolicy
    files: dict[str, bytes] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Notice:
    """An event: a line for the operator."""

    line: str


@dataclass(frozen=True, slots=True)
class Ready:
    """An event: the part serves, as process `pid` on the machine `ip`; `facts` are the words of its READY line. Each
    restart gives another one."""

    ip: str
    pid: int
    facts: dict[str, str]


@dataclass(frozen=True, slots=True)
class Ended:
    """An event: the part will not be restarted here, with its exit code (None: it never ran) and the cause in one
    line."""

    code: int | None
    cause: str


Event: TypeAlias = Notice | Ready | Ended


class _Leave(Exception):
    """Raised when the part was asked to leave."""


class Host:
    """Runs one part, in a thread started at construction. `ip` is this machine's address, where a node binds. `again`
    says that an earlier host ran the part: it is known to be able to start, so a failure at its first start leads to
    restarts by the policy, as any later failure does. Failures become events; no call raises them."""

    def __init__(self, task: Task, ip: str, *, again: bool = False) -> None:
        self.children: dict[str, Child] = {}
        self._task = task
        self._ip = ip
        self._again = again
        self._id = token_hex(8)
        self._events: list[Event] = []
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._files = task.files
        self._files_lock = threading.Lock()
        self._directory = Path(os.environ.get("TMPDIR") or "/tmp", f"pd{self._id}")
        # Only this thread starts the part, because a part dies with the thread that started it.
        self._thread = threading.Thread(target=self._run, name=task.part, daemon=True)
        self._thread.start()

    # --- for the owner of the placement, from any thread -------------------------------------------------------------

    def events(self, host: str, seen: int) -> tuple[str, list[Event]]:
        """Return this host's id and its events after the first `seen` ones; all, if `host` is not this host's id (it is
        another start). Waits up to ASK_S for one; the list may be empty."""
        with self._changed:
            first = seen if host == self._id else 0
            self._changed.wait_for(lambda: len(self._events) > first, ASK_S)
            return self._id, self._events[first:]

    def stop(self) -> None:
        """Ask the part to leave (a node drains), and wait until it has left and its files are removed. Takes the spec's
        `stop_grace_s` and some seconds at most."""
        self._stopping.set()
        self._thread.join()

    def hurry(self) -> None:
        """Send the part, which is leaving, one more SIGTERM: it then leaves at once. Does not wait."""
        for child in list(self.children.values()):
            child.send(signal.SIGTERM)

    def renew(self, files: dict[str, bytes]) -> None:
        """Replace the list of allowed keys on disk by the one in `files` (by path, as in Task); the part reads it again
        by itself. Later starts of the part get all of `files`."""
        with self._files_lock:
            self._files = files
            if self._directory.exists():
                self._write({name: key for name, key in files.items() if name.startswith(LIST)})
                for path in self._directory.glob(f"{LIST}*/*.key"):
                    if str(path.relative_to(self._directory)) not in files:
                        path.unlink()

    # --- for the supervisor ---------------------------------------------------------------------------------------

    def poll(self) -> list[str]:
        """Return the names of the parts that have ended; called by the supervisor in this host's thread."""
        self._trim_logs()
        return [name for name, child in self.children.items() if child.returncode is not None]

    def begin(self, part: str) -> Child:
        """Write the part's files and start it, without waiting for its READY; called by the supervisor in this host's
        thread. Raises StartError."""
        old = self.children.get(part)
        if old is not None:
            old.close()
        logs = Path(self._task.spec.log_dir or self._directory)
        try:
            with self._files_lock:
                self._directory.mkdir(mode=0o700, exist_ok=True)
                self._write(self._files)
        except OSError as error:
            raise StartError(f"{part}: cannot write {error.filename}: {error.strerror}") from None
        again = self._again or old is not None
        child = self.children[part] = start(self._on_this_machine(), logs, self._task.spec.env, again=again)
        return child

    # --- its thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        end = Ended(None, "it was asked to leave")
        try:
            self._serve()
        except _Leave:
            pass
        except (ConfigError, StartError) as error:
            child = self.children.get(self._task.part)
            end = Ended(child.returncode if child else None, str(error).removeprefix(f"{self._task.part}: "))
        except Exception as error:  # a fault of this machine, such as a full disk
            end = Ended(None, f"{type(error).__name__}: {error}")
        take_down(list(self.children.values()), self._task.spec.stop_grace_s, lambda line: self._trim_logs())
        with self._files_lock:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._record(end)

    def _first(self) -> Child:
        """Start the part for the first time here. What a machine that took it over lacks (room in its temporary folder)
        may be there later: it is tried again as often as the policy allows."""
        part, policy = self._task.part, self._task.policy
        for number in range(1, policy.limit + 1 if self._again else 1):
            try:
                return self.begin(part)
            except StartError as error:
                delay_s = min(policy.max_delay_s, policy.first_delay_s * 2.0 ** (number - 1))
                self._record(Notice(f"{error}; starts again in {delay_s:g} s ({number} of at most {policy.limit})"))
                if self._stopping.wait(delay_s):
                    raise _Leave from None
        return self.begin(part)

    def _serve(self) -> NoReturn:
        part, policy = self._task.part, self._task.policy
        child = self._first()
        try:
            wait_ready([child], policy.start_timeout_s, lambda line: self._check())
        except (ConfigError, StartError):
            self._check()
            child.close()
            if not self._again or child.returncode in FINAL:
                raise
        supervisor = Supervisor(self, policy, lambda line: self._record(Notice(line)))
        pid = 0
        while True:
            self._check()
            child = self.children[part]
            if child.ready and child.pid != pid:
                pid = child.pid
                shutil.rmtree(self._directory / "keys" / "secrets", ignore_errors=True)  # it has read its own
                self._record(Ready(self._ip, pid, child.facts))
            try:
                supervisor.turn()
            except StartError:
                child = self.children[part]
                if child.returncode not in FINAL:
                    raise
                raise StartError(child.cause() if child.returncode else "it has left") from None

    def _trim_logs(self) -> None:
        for child in self.children.values():
            child.trim_log()

    def _check(self) -> None:
        self._trim_logs()
        if self._stopping.is_set():
            raise _Leave

    def _record(self, event: Event) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def _on_this_machine(self) -> PartSpec:
        """Return the part with this machine's address and files in its command line."""
        task = self._task
        keys = str(self._directory / "keys") if task.spec.keys else ""
        config = str(self._directory / "config.toml") if task.spec.config else ""
        spec = replace(task.spec, keys=keys, config=config)
        parts = spec.parts(replace(task.at, data=f"tcp://{self._ip}"))
        part = next(part for part in parts if part.name == task.part)
        return replace(part, module="pdbus.ray.parent_death", args=(part.module, *part.args))

    def _write(self, files: dict[str, bytes]) -> None:
        """Write files, readable by this user alone, into the part's directory. Each is replaced atomically, because the
        part reads the list of keys whenever it changes."""
        for name, content in files.items():
            path = self._directory / name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fresh = path.with_name(f".{path.name}.new")
            with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(content)
            fresh.replace(path)

"""A running cluster: starts the parts, waits for READY, and stops them all. Owns the children and their files.

Nodes start last. An edge leaves first, then the nodes (they drain), the controllers and the broker. A part that does
not leave in time is killed. No part outlives this process: children notice when it dies.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from bus.errors import ConfigError, PartFailed, StartError
from bus.runtime.keys import ensure_keys
from bus.wire.messages import Status
from pdbus.client import Client
from pdbus.launcher.addresses import choose
from pdbus.launcher.child import Child, is_socket, start
from pdbus.launcher.lifecycle import take_down, wait_ready
from pdbus.launcher.restarts import RestartPolicy
from pdbus.launcher.spec import Addresses, ClusterSpec, PartSpec
from pdbus.launcher.supervisor import Supervisor

NOT_RUNNING = "this cluster does not run: ask it in a `with` block of it"
_PORT_TRIES = 5


class Cluster:
    """A cluster of processes: `with Cluster(ClusterSpec(prefill=2, decode=2)) as cluster:`. Raises StartError on entry
    when a part does not start, ConfigError when that is for a bad setting.

    While parts start, `progress` is called a few times a second with a line that names the parts waited for. With
    `restarts`, broker, controllers and edge are started again if they end while nodes start (which may take minutes),
    and `notify` gets a line for each restart; afterwards a `Supervisor` restarts parts.

    One thread at a time may use it. A stopped cluster can be started again, as a new one. Calls to a cluster that is
    not running raise PartFailed. A forked child must not use its parent's cluster: calls raise PartFailed, `stop` does
    nothing, and `start` makes a new one.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        progress: Callable[[str], None] | None = None,
        *,
        restarts: RestartPolicy | None = None,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        self.spec = spec
        self._restarts = restarts
        self._notify = notify or (lambda line: None)
        self.children: dict[str, Child] = {}
        self.started: list[Child] = []  # all children since the construction
        self.leftovers: tuple[str, ...] = ()  # socket files left after a clean exit (a bug of ours)
        self.logs: dict[str, str] = {}  # the end of each part's log, after the stop
        self._progress = progress or (lambda line: None)
        self._stack = ExitStack()
        self._clients: list[Client] = []
        self._directory: Path | None = None
        self._addresses: Addresses | None = None
        self._hurried = False
        self._pid = os.getpid()

    # --- life ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Cluster:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> Cluster:
        """Start all parts and wait until they are READY. On failure the started parts are stopped again. Raises
        StartError when a part does not start or the cluster runs already (it then goes on running), and ConfigError for
        settings that cannot be used, such as an unknown model or a `log_dir` that cannot be written."""
        if self._inherited:
            type(self).__init__(self, self.spec, self._progress, restarts=self._restarts, notify=self._notify)
        if self._directory is not None:
            raise StartError("this cluster runs already: stop it first, or make another one")
        if self.spec.log_dir:
            try:
                Path(self.spec.log_dir).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"cannot write logs to {self.spec.log_dir}: {error.strerror}") from None
        self._directory = Path(tempfile.mkdtemp(prefix="pd"))
        try:
            fresh_ports = self.spec.transport == "tcp" and not (self.spec.bus and self.spec.controller)
            for attempt in range(_PORT_TRIES if fresh_ports else 1):
                try:
                    self._start_parts()
                    break
                except StartError as error:
                    if " is taken" not in str(error) or attempt == _PORT_TRIES - 1 or not fresh_ports:
                        raise
                    self._stop_parts()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stop all parts; a second call does nothing. Ctrl-C shortens the wait for draining nodes, and is raised
        afterwards."""
        if self._directory is None or self._inherited:
            return
        try:
            self._stop_parts()
        finally:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = self._addresses = None
            self._hurried = False

    def interrupt(self, *_: object) -> None:
        """Shorten the wait for draining nodes, as Ctrl-C does; for signal handlers. It raises nothing, because an
        exception at the wrong moment could keep `stop` from running to its end."""
        self._hurried = True

    # --- what it is ---------------------------------------------------------------------------------------------

    @property
    def bus(self) -> str:
        """The broker's base address."""
        return self._at.bus

    @property
    def controller(self) -> str:
        """The base address of the controller, or of the first one."""
        return next(iter(self._at.controllers.values()))

    @property
    def controllers(self) -> dict[str, str]:
        """Base addresses by controller name (`controller-0`, or `controller-prefill-0`, ...)."""
        return dict(self._at.controllers)

    @property
    def directory(self) -> Path:
        """A private directory, removed with the cluster."""
        self._raise_if_inherited()
        if self._directory is None:
            raise PartFailed(NOT_RUNNING)
        return self._directory

    @property
    def log_dir(self) -> Path:
        """The directory of the parts' logs: the spec's `log_dir`, which stays, or the private directory."""
        return Path(self.spec.log_dir) if self.spec.log_dir else self.directory

    def client(self, **options: Any) -> Client:
        """Return a client of this cluster, which is closed with it at the latest; `options` are those of `Client`. With
        a controller for each instance, it uses those of the first prefill and decode instances."""
        options.setdefault("keys", self.spec.keys)
        if self.spec.controllers == "per_instance" and not self.spec.unified:
            options.setdefault("prefill_controller", self._at.controllers["controller-prefill-0"])
            options.setdefault("decode_controller", self._at.controllers["controller-decode-0"])
        elif not {"controller", "prefill_controller"} & options.keys():
            options["controller"] = self.controller
        client = Client(**options)
        self._clients.append(client)
        return client

    def status(self, controller: str = "") -> Status:
        """Return the status (ranks, loads, counts) of a controller, given by name or base address; default: the first.
        Raises PeerLost if it does not answer."""
        address = self._at.controllers.get(controller, controller) or self.controller
        with Client(address, keys=self.spec.keys) as client:
            return client.status()

    def log(self, part: str) -> str:
        """Return the last 16 KiB of a part's log. Raises ConfigError for an unknown part, as all calls with a part
        do."""
        return self._child(part).tail()

    # --- faults -------------------------------------------------------------------------------------------------

    def kill(self, part: str, number: int = signal.SIGKILL, *, wait_s: float = 10.0) -> None:
        """Send the signal `number` to a part (`broker`, `controller-0`, `prefill-0/1`, ...). After SIGKILL, SIGTERM or
        SIGINT it waits for the part's exit; StartError when it takes more than `wait_s` seconds. The part is not
        restarted."""
        child = self._child(part)
        child.send(number)
        if number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT) and not child.wait(wait_s):
            raise StartError(f"{part} did not leave within {wait_s:g} s of {signal.Signals(number).name}")

    def restart(self, part: str) -> None:
        """Restart a part, killing it first if it lives, and wait for its READY. Raises as `start` does."""
        if self._child(part).returncode is None:
            self.kill(part)
        self._wait_ready([self.begin(part)])

    def begin(self, part: str) -> Child:
        """Restart a part that has ended, at the same addresses, without waiting for its READY; return its new process.
        Raises StartError if it cannot be run."""
        old = self._child(part)
        old.close()
        old.remove_socket()
        return self._spawn(old.spec, again=True)

    def poll(self) -> list[str]:
        """Return the names of the parts that have ended, by themselves or by `kill`, and trim long logs. It does not
        wait; call it a few times a second."""
        self._raise_if_inherited()
        self._trim_logs()
        return [name for name, child in self.children.items() if child.returncode is not None]

    # --- inside -------------------------------------------------------------------------------------------------

    @property
    def _at(self) -> Addresses:
        self._raise_if_inherited()
        if self._addresses is None:
            raise PartFailed(NOT_RUNNING)
        return self._addresses

    @property
    def _inherited(self) -> bool:
        return self._pid != os.getpid()

    def _raise_if_inherited(self) -> None:
        if self._inherited:
            raise PartFailed("this cluster is the parent process's: in a forked child, make another")

    def _child(self, part: str) -> Child:
        self._raise_if_inherited()
        if part not in self.children:
            raise ConfigError(f"no part {part!r}; there are {', '.join(self.children)}")
        return self.children[part]

    def _start_parts(self) -> None:
        """Start the parts, nodes only once the addresses are ours: if another cluster had them, its controllers would
        take our ranks for later starts of its own ranks, and fence those."""
        self._addresses = choose(self.spec, self.directory)
        if self.spec.keys:
            ensure_keys(
                Path(self.spec.keys),
                self.spec.controller_names(),
                tuple(self.spec.instances()),
                edge=bool(self.spec.http),
            )
        if self.spec.embedded:
            self._embed()
        parts = self.spec.parts(self._addresses)
        self._wait_ready([self._spawn(part) for part in parts if part.early])
        keep: Callable[[], None] = lambda: None  # noqa: E731
        if self._restarts is not None and self.children:
            supervisor = Supervisor(_NamedParts(self, tuple(self.children)), self._restarts, self._notify)
            keep = lambda: supervisor.turn(0.0)  # noqa: E731
        nodes = [self._spawn(part) for part in parts if not part.early]
        wait_ready(nodes, self.spec.start_timeout_s, self._progress, keep)

    def _embed(self) -> None:
        from bus.broker import Broker, BrokerConfig
        from controller.config import ControllerConfig
        from controller.shell import Controller

        spec, at = self.spec, self._at
        self._stack.enter_context(Broker(BrokerConfig(at.bus, keys=spec.keys)))
        config = ControllerConfig(
            bus=at.bus,
            controller=self.controller,
            keys=spec.keys,
            prefill_method=spec.prefill_method,
            decode_method=spec.decode_method,
            unified_method=spec.unified_method,
        )
        self._stack.enter_context(Controller(config))

    def _trim_logs(self) -> None:
        for child in self.children.values():
            child.trim_log()

    def _wait(self, line: str) -> None:
        """Report progress and trim logs, while parts start or leave."""
        self._trim_logs()
        self._progress(line)

    def _spawn(self, part: PartSpec, *, again: bool = False) -> Child:
        child = self.children[part.name] = start(part, self.log_dir, self.spec.env, again=again)
        self.started.append(child)
        return child

    def _wait_ready(self, children: Iterable[Child]) -> None:
        wait_ready(children, self.spec.start_timeout_s, self._wait)

    def _stop_parts(self) -> None:
        for client in self._clients:
            client.close()
        self._clients.clear()
        interrupted = False
        for kind in ("edge", "node", "controller", "broker"):
            children = [child for child in self.children.values() if child.spec.kind == kind]
            interrupted |= take_down(children, self.spec.stop_grace_s, self._wait, hurried=lambda: self._hurried)
            self._hurried |= interrupted
        self._stack.close()
        self.logs = {name: child.tail() for name, child in self.children.items()}
        if not any(child.killed for child in self.started):
            self.leftovers = tuple(str(path) for path in sorted(self.directory.iterdir()) if is_socket(path))
        self.children.clear()
        if interrupted:
            raise KeyboardInterrupt


class _NamedParts:
    """A view of the named parts of a cluster."""

    def __init__(self, cluster: Cluster, names: tuple[str, ...]) -> None:
        self._cluster = cluster
        self._names = names

    @property
    def children(self) -> dict[str, Child]:
        return {name: self._cluster.children[name] for name in self._names}

    def poll(self) -> list[str]:
        return [name for name in self._cluster.poll() if name in self._names]

    def begin(self, part: str) -> Child:
        return self._cluster.begin(part)

"""A stage for scenarios: processes of ours on this machine, behind links that can be held, slowed and reset.

Nodes, controllers and the client reach brokers and controllers over links; what goes between ranks, and from ranks to
the client, goes straight. Who is killed or drained is started again at once.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tcp_links import HOST, Links

from bus.endpoints import ControllerAddress
from bus.errors import BusError
from bus.runtime.ports import free_ports
from bus.wire.messages import Status, StatusQuery
from pdbus.client.channel import Channel
from pdbus.client.core import Patience
from pdbus.client.options import Controllers, Options, make_request
from pdbus.launcher.child import Child
from pdbus.launcher.spec import PartSpec
from simulation.scenario import STEP_S, WAIT_S, Asked, Shape

PORTS = 3  # of a base address
LOOK_S = 0.01
ANSWER_S = 1.0
TIMING = ("--sim-base-s", str(STEP_S), "--sim-prefill-s-per-token", "0.0004", "--sim-decode-s", "0",
          "--sim-context-s-per-token", "0", "--kv-tokens", "4096", "--block-tokens", "4",
          "--max-running", "8", "--chunk-tokens", "256", "--hold-s", "10", "--drain-s", "5")  # fmt: skip


class ProcessStage:
    """`with processes(shape, folder) as stage:`. Scenarios of one shape may be played on it one after the other."""

    def __init__(self, shape: Shape, folder: Path, old: tuple[str, ...] = (), release: Path | None = None) -> None:
        """Those whose names are in `old` run `release`, a folder with another version's packages."""
        self.shape = shape
        self._env = {name: {"PYTHONPATH": str(release)} for name in old}
        self._folder = folder
        self._links = Links()
        self._bases: dict[str, int] = {}  # of who listens: its first port
        self._specs: dict[str, PartSpec] = {}
        self._children: dict[str, Child] = {}
        self._asked: list[Asked] = []
        listeners = 1 + shape.controllers
        links = shape.controllers * 2 + len(shape.nodes()) * listeners
        self._ports = iter(range(free_ports(HOST, PORTS * (listeners + links)), 1 << 16, PORTS))
        self._lay_out()
        clients = [ControllerAddress(self._link("client-0", name)).clients for name in shape.controller_names()]
        self._clients = tuple(clients)
        self._channel = Channel(self._clients, Patience(retries=10), seed=1)

    # --- life ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        for name in self._specs:
            self._children[name] = self._child(name)
        nodes, controllers = self.shape.nodes(), self.shape.controller_names()
        self.until(
            lambda: all(self.ready(controller, node) for controller in controllers for node in nodes),
            "all ranks are ready",
        )

    def stop(self) -> None:
        self._channel.stop()
        for child in self._children.values():
            if child.returncode is None:
                os.kill(child.pid, signal.SIGCONT)
            child.close()
        self._links.close()

    def _lay_out(self) -> None:
        shape, add = self.shape, self._add
        for name in ("broker", *shape.controller_names()):
            self._bases[name] = next(self._ports)
        add("broker", "broker", "bus", "--bus", f"tcp://{HOST}:{self._bases['broker']}")
        settings = [
            word for key, value in shape.settings.items() for word in (f"--{key.replace('_', '-')}", str(value))
        ]
        for name in shape.controller_names():
            base = f"tcp://{HOST}:{self._bases[name]}"
            add(name, "controller", "controller", "--name", name, "--bus", self._link(name, "broker"), "--controller",
                base, *settings)  # fmt: skip
        for name, (role, ranks) in shape.nodes().items():
            controllers = [
                word for each in shape.controller_names() for word in ("--controller", self._link(name, each))
            ]
            add(name, "node", f"nodes.{role}", "--instance", name, "--dp-size", str(ranks), "--dp-rank",
                f"0-{ranks - 1}" if ranks > 1 else "0", "--bus", self._link(name, "broker"), *controllers, "--engine",
                "sim", "--model", "sim", "--data", f"tcp://{HOST}", *TIMING)  # fmt: skip

    def _add(self, name: str, kind: str, module: str, *args: str) -> None:
        self._specs[name] = PartSpec(name, kind, module, (*args, "--watch-parent"))  # type: ignore[arg-type]

    def _link(self, name: str, other: str) -> str:
        """Return the address by which `name` reaches `other`."""
        base = next(self._ports)
        for n in range(PORTS):
            self._links.add(frozenset((name, other)), base + n, self._bases[other] + n)
        return f"tcp://{HOST}:{base}"

    def _child(self, name: str) -> Child:
        return Child(self._specs[name], self._folder / f"{name}.log", self._env.get(name, {}))

    def _supervise(self) -> None:
        for name, child in list(self._children.items()):
            child.read() if not child.closed else None
            if child.returncode is not None:
                child.close()
                self._children[name] = self._child(name)

    # --- as a Stage ---------------------------------------------------------------------------------------------

    def begin(self, name: str, prompt: tuple[int, ...], options: Options, at: int, prefill_at: int | None) -> Asked:
        where = Controllers(self._clients[at], None if prefill_at is None else self._clients[prefill_at])
        request = make_request(prompt, options, where, self._channel.rng, leg=self.shape.leg)  # type: ignore[arg-type]
        asked = Asked(name, prompt, options["max_tokens"], request)
        self._asked.append(asked)
        self._channel.begin(request, asked.update)
        return asked

    def cancel(self, asked: Asked) -> None:
        self._channel.cancel(asked.rid)

    def until(self, true: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + WAIT_S
        while not true():
            assert time.monotonic() < end, f"{what}: not within {WAIT_S:g} s; {self._seen()}"
            self._supervise()
            time.sleep(LOOK_S)

    def ready(self, controller: str, node: str) -> bool:
        status = self._status(controller)
        if status is None:
            return False
        ready = {rank.dp_rank for rank in status.ranks if rank.instance == node and rank.state == "ready"}
        return len(ready) == self.shape.nodes()[node][1]

    def kill(self, name: str) -> None:
        self._children[name].send(signal.SIGKILL)
        assert self._children[name].wait(WAIT_S)
        self._supervise()

    def drain(self, name: str) -> None:
        self._children[name].send(signal.SIGTERM)

    def pause(self, name: str) -> None:
        self._children[name].send(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        self._children[name].send(signal.SIGCONT)

    def reset(self, name: str, other: str) -> None:
        self._links.reset(frozenset((name, other)))

    def hold(self, name: str, other: str) -> None:
        self._links.hold(frozenset((name, other)))

    def free(self, name: str, other: str) -> None:
        self._links.free(frozenset((name, other)))

    def slow(self, name: str, other: str, late_s: float) -> None:
        self._links.slow(frozenset((name, other)), late_s)

    def at_rest(self) -> str:
        """Return what is not as it must be once all is over; empty: nothing."""
        try:
            self.until(lambda: not self._unrest(), "the cluster is whole and idle")
        except AssertionError as error:
            return f"{error}: {self._unrest()}"
        return ""

    # --- inside -------------------------------------------------------------------------------------------------

    def _status(self, controller: str) -> Status | None:
        at = self._clients[self.shape.controller_names().index(controller)]
        try:
            return self._channel.ask(at, StatusQuery, Status, ANSWER_S).result()
        except BusError:
            return None

    def _unrest(self) -> str:
        for controller in self.shape.controller_names():
            status = self._status(controller)
            if status is None:
                return f"{controller} does not answer"
            if status.counts["requests"]:
                return f"{controller} has {status.counts['requests']} requests"
            for name, (_, ranks) in self.shape.nodes().items():
                its = [rank for rank in status.ranks if rank.instance == name and rank.state == "ready"]
                if len(its) != ranks:
                    return f"{controller} knows {len(its)} of {ranks} ranks of {name}"
                for rank in its:
                    load = rank.load
                    held = (rank.outstanding, rank.in_flight_requests, rank.estimate_requests)
                    if any(held) or load is None or load.running or load.waiting or load.kv_tokens:
                        return f"{controller} believes of {name}/{rank.dp_rank}: {held}, {load}"
        return ""

    def _seen(self) -> str:
        requests = [(each.name, len(each.ids), each.result and each.result.code) for each in self._asked]
        return f"{requests}; {self._unrest()}"


@contextmanager
def processes(
    shape: Shape, folder: Path, old: tuple[str, ...] = (), release: Path | None = None
) -> Iterator[ProcessStage]:
    stage = ProcessStage(shape, folder, old, release)
    try:
        stage.start()
        yield stage
    finally:
        stage.stop()

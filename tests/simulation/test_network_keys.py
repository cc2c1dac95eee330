"""What the simulated network makes of keys is what sockets with keys do.

A message bears the name of its sender's key. A key that is taken from the list is let go of; its socket is refused, and
does not try again when the key is listed again: another socket has to."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import pytest
import zmq
from virtual_time import VirtualTime

from bus.runtime import frames
from bus.runtime.keys import add_key, load_keys, new_keys
from bus.runtime.sockets import Sockets
from simulation.network import Network, SimSocket
from simulation.runtime import receive_known

LOOKED_S = 3.0  # more than two looks at a list
NAME = "c"


class Stage(Protocol):
    """A client with a key, which speaks to a router: what arrives there, and the list that has its key or not."""

    def send(self, data: bytes) -> None: ...
    def arrives(self, data: bytes) -> bool:
        """Whether it comes; and from now on nothing that was sent before."""
        ...

    def key(self) -> str:
        """The key of whose message came last."""
        ...

    def list(self, listed: bool) -> None: ...

    def renew(self) -> None:
        """The client connects with another socket, as when it is started again."""
        ...


class Real:
    def __init__(self, folder: Path, exits: ExitStack) -> None:
        new_keys(folder)
        add_key(folder, "clients", NAME)
        router_keys, client_keys = load_keys(folder, "controllers"), load_keys(folder, "clients", name=NAME)
        self._file = folder / "allow" / "clients" / f"{NAME}.key"
        self._public = self._file.read_bytes()
        self._sockets = [exits.enter_context(Sockets(keys=keys)) for keys in (router_keys, client_keys)]
        self._router_at = f"ipc://{folder}/r"
        self._router = self._sockets[0].router(self._router_at, domain="clients")
        self._dealer = self._sockets[1].dealer(self._router_at, role="controllers")
        self._last: Any = b""

    def send(self, data: bytes) -> None:
        with suppress(zmq.Again):
            frames.send(self._dealer, [data])

    def arrives(self, data: bytes) -> bool:
        end = time.monotonic() + LOOKED_S
        while time.monotonic() < end:
            if self._router.poll(50):
                self._last, came = frames.receive(self._router, keyed=True, routed=True)
                if came == data:
                    return True
            for each in self._sockets:
                each.look()
        return False

    def key(self) -> str:
        return str(self._last.key)

    def list(self, listed: bool) -> None:
        self._file.write_bytes(self._public) if listed else self._file.unlink()
        self.arrives(b"")

    def renew(self) -> None:
        self._sockets[1].close_socket(self._dealer)
        self._dealer = self._sockets[1].dealer(self._router_at, role="controllers")


class Simulated:
    def __init__(self, folder: Path, exits: ExitStack) -> None:
        self._time = VirtualTime(0.0)
        self._network = Network(self._time.clock, self._at, random.Random(1))
        processes = [self._process(name, key) for name, key in (("r", "controllers/r"), ("c", f"clients/{NAME}"))]
        router, dealer = [SimSocket(self._network, each, kind, 100, 100)
                          for each, kind in zip(processes, (zmq.ROUTER, zmq.DEALER), strict=True)]  # fmt: skip
        self._router, self._dealer = router, dealer
        self._network.sockets = lambda: [self._router, self._dealer]
        self._network.bind(router, "r")
        self._network.connect(dealer, "r")
        self._last: Any = b""

    def send(self, data: bytes) -> None:
        self._dealer.put([data])

    def arrives(self, data: bytes) -> bool:
        self._pass(LOOKED_S)
        while self._router.ready:
            self._last, came = receive_known(self._router)
            if came == data:
                return True
        return False

    def key(self) -> str:
        return str(self._last.key)

    def list(self, listed: bool) -> None:
        if listed:
            self._network.banned.discard("c")
            return
        self._network.banned.add("c")
        for pipe in self._network.connections():
            self._network.reset(pipe)

    def renew(self) -> None:
        process = self._dealer.process
        self._network.close(self._dealer, 0.0)
        self._dealer = SimSocket(self._network, process, zmq.DEALER, 100, 100)
        self._network.connect(self._dealer, "r")

    def _process(self, name: str, key: str) -> Any:
        return SimpleNamespace(
            name=name, key=key, host=name, paused_until=0.0, woken=lambda: None, readable=lambda socket: None
        )

    def _at(self, when: float, function: Callable[[], None]) -> None:
        self._time.call_later(when - self._time.now, function)

    def _pass(self, seconds: float) -> None:
        end = self._time.now + seconds
        while self._time.next_due <= end:
            self._time.fire()


@pytest.fixture(params=[Real, Simulated], ids=["real", "simulated"])
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    with ExitStack() as exits:
        yield request.param(tmp_path, exits)


@pytest.mark.slow
def test_a_key_that_is_taken_from_the_list_is_let_go_of(stage: Stage) -> None:
    stage.send(b"listed")
    assert stage.arrives(b"listed")
    assert stage.key() == f"clients/{NAME}"
    stage.list(False)
    stage.send(b"taken away")
    assert not stage.arrives(b"taken away")
    stage.list(True)
    stage.send(b"listed again")
    assert not stage.arrives(b"listed again")
    stage.renew()
    stage.send(b"another socket")
    assert stage.arrives(b"another socket")
    assert stage.key() == f"clients/{NAME}"

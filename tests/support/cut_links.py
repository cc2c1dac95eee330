"""A node that joins over links that can be cut, as between machines."""

from __future__ import annotations

import contextlib
import socket as unix
import threading
from collections.abc import Iterator
from pathlib import Path

from fault_rig import TIMING, Rig

from bus.wire.messages import RankStatus
from pdbus.launcher.child import Child
from pdbus.launcher.spec import PartSpec


class Link:
    """A network between a node and others' ipc sockets that can be cut: bytes wait, and no connection ends."""

    def __init__(self, near: Path, far: Path) -> None:
        self._whole = threading.Event()
        self._whole.set()
        self._near, self._far = near, far
        self._sockets: list[unix.socket] = []
        self._listener = unix.socket(unix.AF_UNIX)
        self._listener.bind(str(near))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._whole.clear()

    def mend(self) -> None:
        self._whole.set()

    def close(self) -> None:
        self.mend()
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(unix.SHUT_RDWR)
            each.close()
        self._near.unlink(missing_ok=True)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                there = unix.socket(unix.AF_UNIX)
                self._sockets += [here, there]
                there.connect(str(self._far))
                for source, target in ((here, there), (there, here)):
                    threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _pump(self, source: unix.socket, target: unix.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._whole.wait()
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(unix.SHUT_RDWR)


@contextlib.contextmanager
def far_node(live: Rig) -> Iterator[tuple[Link, tuple[Link, ...]]]:
    """`far/0` joins over links: the one to its controller, and those to the bus."""
    cluster, directory = live.cluster, live.cluster.directory
    controller, bus = (Path(base.removeprefix("ipc://")) for base in (cluster.controller, cluster.bus))
    link = Link(directory / "farc.nodes", controller.with_name(controller.name + ".nodes"))
    names = ("pub", "sub", "bootstrap")
    links = tuple(Link(directory / f"farb.{name}", bus.with_name(f"{bus.name}.{name}")) for name in names)
    args = ("--bus", f"ipc://{directory}/farb", "--controller", f"ipc://{directory}/farc", "--instance", "far",
            "--engine", "sim", "--model", "sim", "--data", f"ipc://{directory}", "--watch-parent", *TIMING)  # fmt: skip
    child = Child(PartSpec("far/0", "node", "nodes.unified", args), directory / "far.log", {})
    try:
        live.until(lambda: (child.read(), state(live) == "ready")[1], "the far node is ready")
        yield link, links
    finally:
        child.close()
        for each in (link, *links):
            each.close()


def far(live: Rig) -> RankStatus | None:
    return live.rank("far/0")


def state(live: Rig) -> str:
    rank = far(live)
    return rank.state if rank is not None else ""

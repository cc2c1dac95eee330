"""The parts that several benchmarks start, and how they are joined. Must not measure."""

from __future__ import annotations

from dataclasses import dataclass

from bus.messages import Leg
from pdbus.bench.harness import Process, Workspace


@dataclass(frozen=True, slots=True)
class Path:
    """A client, the process in the middle (our controller, or the bare broker), and the nodes behind it."""

    client: Process
    middle: Process
    nodes: tuple[Process, ...]


def broker(space: Workspace, *options: str) -> Process:
    started = space.program("bus", "--bus", space.endpoint("bus"), "--watch-parent", "--log-level", "warning", *options)
    started.wait_ready()
    return started


def controller(space: Workspace, *options: str) -> Process:
    started = space.program(
        "controller", "--bus", space.endpoint("bus"), "--controller", space.endpoint("ctl"),
        "--watch-parent", "--log-level", "warning", *options,
    )  # fmt: skip
    started.wait_ready()
    return started


def our_path(
    space: Workspace, ranks: int, prompt_tokens: int, *, processes: int | None = None, method: str = "total_tokens"
) -> Path:
    """Broker, controller, `ranks` unified ranks in as many `processes`, a client."""
    broker(space)
    middle = controller(space, "--unified-method", method)
    count = processes or ranks
    nodes = tuple(
        space.part(
            "node:ours",
            bus=space.endpoint("bus"),
            controller=space.endpoint("ctl"),
            ranks=list(range(ranks))[number::count],
            dp_size=ranks,
        )
        for number in range(count)
    )
    for node in nodes:
        node.wait_ready()
    leg: Leg = "unified"
    client = space.part(
        "client:main", endpoint=f"{space.endpoint('ctl')}.clients", ours=True, prompt_tokens=prompt_tokens, leg=leg
    )
    client.wait_ready()
    return Path(client, middle, nodes)


def bare_path(space: Workspace, nodes: int, prompt_tokens: int) -> Path:
    """The same shape out of bare ROUTERs and DEALERs."""
    front, back = space.endpoint("bare-front"), space.endpoint("bare-back")
    size = prompt_tokens * 4
    middle = space.part("bare:broker", clients=front, nodes=back, node_count=nodes, payload_bytes=size)
    middle.wait_ready()
    others = tuple(space.part("node:bare", endpoint=back, payload_bytes=size) for _ in range(nodes))
    for node in others:
        node.wait_ready()
    client = space.part("client:main", endpoint=front, ours=False, prompt_tokens=prompt_tokens)
    client.wait_ready()
    return Path(client, middle, others)

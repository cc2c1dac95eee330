"""The parts that several benchmarks start, and how they are connected: broker, controller, nodes, client. Each function
starts processes in a workspace and waits until they are READY. Must not measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import Process, Workspace
from bus.wire.messages import Legs, Role

Nodes = tuple[Process, ...]


@dataclass(frozen=True, slots=True)
class Path:
    """A client, the process in the middle (our controller, or the bare broker), and the nodes behind it. `beside` are
    the processes that bring the nodes' loads to the middle: our broker."""

    client: Process
    middle: Process
    nodes: Nodes
    beside: tuple[Process, ...] = ()

    def journeys(self, count: int, rate: float) -> list[float]:
        """Send `count` requests, `rate` a second, and return the microseconds from submit to arrival at a node, one for
        each."""
        self.client.ask(do="paced", count=count, rate=rate)
        return [ns / 1e3 for node in self.nodes for ns in node.ask(do="take")]


def broker(space: Workspace, *options: str, **how: Any) -> Process:
    """Start a broker; `options` are for its command line, and `how` is what else `Workspace.program` takes."""
    argv = ("bus", "--bus", space.endpoint("bus"), "--watch-parent", "--log-level", "warning", *options)
    started = space.program(*argv, **how)
    started.wait_ready()
    return started


def controller(space: Workspace, *options: str, at: str = "ctl", **how: Any) -> Process:
    """Start a controller at the endpoint `at`; `options` and `how` as for `broker`."""
    started = space.program(
        "controller", "--bus", space.endpoint("bus"), "--controller", space.endpoint(at),
        "--watch-parent", "--log-level", "warning", *options, **how,
    )  # fmt: skip
    started.wait_ready()
    return started


def rank_links(space: Workspace, count: int) -> list[Process]:
    """Start `count` unified ranks, each a process with a rank link and an engine that does next to nothing
    (`edge_parts`)."""
    ranks = [
        space.part(
            "edge_parts:rank", bus=space.endpoint("bus"), controller=space.endpoint("ctl"), instance=f"rank-{number}",
            data=f"ipc://{space.folder}",
        )
        for number in range(count)
    ]  # fmt: skip
    for rank in ranks:
        rank.wait_ready()
    return ranks


def sim_nodes(space: Workspace, role: Role, *options: str, processes: int, ranks: int) -> list[Process]:
    """Start the real node program in so many `processes`, with `ranks` ranks of one instance in all, the sim engine,
    and steps of no time."""
    nodes = [
        space.program(
            f"nodes.{role}", "--bus", space.endpoint("bus"), "--controller", space.endpoint("ctl"),
            "--instance", f"{role}-0", "--dp-size", str(ranks), "--data", f"ipc://{space.folder}",
            "--engine", "sim", "--sim-timing", "zero", "--watch-parent", "--log-level", "warning", "--drain-s", "0",
            *options,
            *(argument for rank in range(number, ranks, processes) for argument in ("--dp-rank", str(rank))),
        )
        for number in range(processes)
    ]  # fmt: skip
    for node in nodes:
        node.wait_ready()
    return nodes


def our_path(
    space: Workspace,
    ranks: int,
    prompt_tokens: int,
    *,
    processes: int | None = None,
    method: str = "total_tokens",
    report_hz: float = 20.0,
    **how: Any,
) -> Path:
    """Start broker and controller (with `how`, as `broker`), `ranks` unified ranks in as many processes or in
    `processes`, and a client."""
    brings = broker(space, **how)
    middle = controller(space, "--unified-method", method, **how)
    nodes = our_nodes(space, ranks, processes=processes or ranks, report_hz=report_hz)
    client = our_client(space, prompt_tokens)
    return Path(client, middle, nodes, (brings,))


def our_nodes(
    space: Workspace, ranks: int, *, processes: int, at: Sequence[str] = ("ctl",), kind: str = "node:ours", **more: Any
) -> Nodes:
    """Start `ranks` unified ranks of `benchmarks.node` (or another `kind`) in so many `processes`, for the controllers
    `at`; `more` is what else `benchmarks.node.ours` takes."""
    nodes = tuple(
        space.part(
            kind, bus=space.endpoint("bus"), controllers=[space.endpoint(each) for each in at],
            ranks=list(range(ranks))[number::processes], dp_size=ranks, **more,
        )
        for number in range(processes)
    )  # fmt: skip
    for node in nodes:
        node.wait_ready()
    return nodes


def our_client(space: Workspace, prompt_tokens: int, at: str = "ctl") -> Process:
    """Start a client (`benchmarks.client`) of the controller `at`, with prompts of so many tokens."""
    leg: Legs = "unified"
    endpoint = f"{space.endpoint(at)}.clients"
    client = space.part("client:main", endpoint=endpoint, ours=True, prompt_tokens=prompt_tokens, leg=leg)
    client.wait_ready()
    return client


def bare_path(space: Workspace, nodes: int, prompt_tokens: int, *, lean: bool = False) -> Path:
    """Start the same shape out of bare ROUTERs and DEALERs; `lean`: frames are moved as `bus.runtime.frames` does."""
    name = "lean" if lean else "bare"
    front, back = space.endpoint(f"{name}-front"), space.endpoint(f"{name}-back")
    size = prompt_tokens * 4
    middle = space.part("bare:broker", clients=front, nodes=back, node_count=nodes, payload_bytes=size, lean=lean)
    middle.wait_ready()
    others = tuple(space.part("node:bare", endpoint=back, payload_bytes=size) for _ in range(nodes))
    for node in others:
        node.wait_ready()
    client = space.part("client:main", endpoint=front, ours=False, prompt_tokens=prompt_tokens)
    client.wait_ready()
    return Path(client, middle, others)

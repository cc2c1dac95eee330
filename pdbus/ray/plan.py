"""The placement of a cluster's parts (its processes) in a Ray cluster. A Ray node is a machine; a node of ours is a
process with ranks. Pure: knows Ray's names of resources and strategies, but does not call Ray."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from bus.errors import ConfigError
from bus.wire.messages import Role
from pdbus.launcher.spec import Addresses, ClusterSpec, PartSpec

RAY = "ray==2.60.0"  # as the extra `ray` has it
STRATEGIES = ("SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK")
BUS_PORT, CONTROLLER_PORT = 5550, 5560
HEAD = "node:__internal_head__"  # the resource by which Ray marks its head node
# Directories and files of the machine that `up` runs on, and settings of `up` itself; the parts do not get them.
_OF_THIS_MACHINE = ("PDBUS_DIR", "PDBUS_CACHE", "PDBUS_CONFIG", "PDBUS_KEYS", "PDBUS_UP_")

Resources = dict[str, float]


@dataclass(frozen=True)
class Layout:
    """The placement of ranks in a Ray cluster: Ray's strategy, and the resources of each rank by its role."""

    strategy: str  # for an instance's ranks over the Ray nodes
    resources: Mapping[Role, Resources]  # of each rank


@dataclass(frozen=True, slots=True)
class Machine:
    """A live Ray node."""

    ray_id: str
    ip: str
    hostname: str
    is_head: bool

    @property
    def label(self) -> str:
        """The machine in messages."""
        return f"{self.ip} (head)" if self.is_head else self.ip


@dataclass(frozen=True, slots=True)
class Group:
    """The node processes of one instance, for one placement group of Ray, which reserves a bundle of resources for each
    process."""

    instance: str
    parts: tuple[str, ...]
    bundles: tuple[Resources, ...]

    @property
    def label(self) -> str:
        """The group in messages: its instance, number of bundles and their resources."""
        each = ", ".join(sorted({",".join(f"{k}={v:g}" for k, v in bundle.items()) for bundle in self.bundles}))
        return f"{self.instance} ({len(self.bundles)} x {each})"


def parse_resources(option: str, text: str) -> Resources:
    """Return resources from text such as `CPU=4,GPU=1`. Raises ConfigError for anything else; `option` is named in its
    message."""
    found: Resources = {}
    for word in text.split(","):
        name, _, amount = word.strip().partition("=")
        try:
            found[name] = float(amount)
        except ValueError:
            found[name] = 0.0
        if not name or not 0.0 < found[name] < 1e9:
            raise ConfigError(f"{option} {text!r}: give amounts above 0, as in CPU=4,GPU=1")
    return found


def machines(ray_nodes: Iterable[Mapping[str, Any]]) -> list[Machine]:
    """Return the live machines of `ray.nodes()`, the head first."""
    found = [
        Machine(each["NodeID"], each["NodeManagerAddress"], each["NodeManagerHostname"], HEAD in each["Resources"])
        for each in ray_nodes
        if each["Alive"]
    ]
    return sorted(found, key=lambda machine: not machine.is_head)


def at(base: str, known: Sequence[Machine]) -> Machine:
    """Return the machine whose ip or hostname is in the address `base`; for an empty `base`, the head. `known` is the
    list of `machines`. Raises ConfigError when there is none."""
    if not base:
        return known[0]
    host = urlsplit(base).hostname or ""
    for machine in known:
        if host in (machine.ip, machine.hostname):
            return machine
    there = ", ".join(machine.label for machine in known)
    raise ConfigError(f"{base!r}: no Ray node has that address; there are {there}")


def addresses(spec: ClusterSpec, known: Sequence[Machine]) -> Addresses:
    """Return the addresses of broker and controller: those of `spec`, or fixed ports (5550, 5560) on the head. `data`
    is empty, because each node binds on its own machine."""
    head = known[0].ip
    bus, controller = spec.bus or f"tcp://{head}:{BUS_PORT}", spec.controller or f"tcp://{head}:{CONTROLLER_PORT}"
    return Addresses(bus, {"controller-0": controller}, data="")


def groups(spec: ClusterSpec, parts: Sequence[PartSpec], resources: Mapping[Role, Resources]) -> list[Group]:
    """Return a group for each instance, with the node processes among `parts`; `resources` are those of one rank, so a
    process with several ranks gets as many times that."""
    found = []
    for instance, (role, _) in spec.instances().items():
        names = [part.name for part in parts if part.kind == "node" and part.name.startswith(f"{instance}/")]
        bundles = []
        for name in names:
            first, _, last = name.removeprefix(f"{instance}/").partition("-")
            ranks = int(last or first) - int(first) + 1
            bundles.append({key: ranks * amount for key, amount in resources[role].items()})
        found.append(Group(instance, tuple(names), tuple(bundles)))
    return found


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the PDBUS_ settings in these environment variables that the parts get: all but directories and files of
    this machine and settings of `pdbus up` itself."""
    return {
        name: value
        for name, value in variables.items()
        if name.startswith("PDBUS_") and not name.startswith(_OF_THIS_MACHINE)
    }

"""The parts of a cluster as actors of a Ray cluster: placed, started, watched, taken down.

Owns the actors and placement groups; the process of each part is its `Host`'s. Ray starts an actor again when its
process or machine is gone, where its placement group finds resources. Broker, controller and edge are tied to the
machine that has their address, which other parts know: when that machine goes, the cluster ends.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from bus.errors import ConfigError, StartError
from bus.runtime.cli import EXIT_CONFIG
from bus.runtime.keys import EDGE, ensure_keys, files_of, listed_keys, load_keys
from pdbus.launcher.lifecycle import HURRY_S
from pdbus.launcher.restarts import FINAL, GiveUp, RestartPolicy, Restarts
from pdbus.launcher.spec import ClusterSpec, PartSpec
from pdbus.ray.actors import Actor, Remote, options
from pdbus.ray.host import Ended, Event, Notice, Ready, Task
from pdbus.ray.plan import Group, Layout, addresses, at, environment, groups, machines

POLL_S = 0.25
RENEW_S = 1.0  # between checks of the list of keys
ACTOR_S = 60.0  # how long Ray may take to start an actor, beyond the part's own time
ORDER = ("edge", "node", "controller", "broker")  # the order of leaving


class RayCluster:
    """A `Cluster` and its `Supervisor` in one, after `actors.connect`: `start`, `run`, `stop`, all from one thread.
    `notify` gets a line for each event, `progress` one a few times a second, which names what is waited for. Raises
    ConfigError if an address of `spec` is on no Ray node."""

    def __init__(
        self,
        spec: ClusterSpec,
        layout: Layout,
        policy: RestartPolicy,
        notify: Callable[[str], None],
        progress: Callable[[str], None],
    ) -> None:
        known = machines(ray.nodes())
        self._at = addresses(spec, known)
        logs = str(Path(spec.log_dir).absolute()) if spec.log_dir else ""
        self.spec = replace(spec, transport="tcp", log_dir=logs, env={**environment(os.environ), **spec.env})
        self.children: dict[str, Remote] = {}
        self._layout = layout
        self._policy = policy
        self._notify = notify
        self._progress = progress
        self._pinned = {"broker": at(spec.bus, known), "controller": at(spec.controller, known)}
        self._pinned["edge"] = self._pinned["controller"]
        self._groups: list[Any] = []
        self._asked: dict[Any, str] = {}  # open questions for events, each with the part it is for
        self._parts = self.spec.parts(replace(self._at, data="tcp://0.0.0.0"))
        # Hosts count restarts. This decides whether the others go on when a part stays away.
        self._left = Restarts({part.name: part.duty for part in self._parts}, RestartPolicy(limit=0), time.monotonic())
        self._interrupts = self._heeded = 0
        self._renew_at = 0.0
        self._complaint = ""

    @property
    def bus(self) -> str:
        """The broker's base address."""
        return self._at.bus

    @property
    def controller(self) -> str:
        """The controller's base address."""
        return self._at.controllers["controller-0"]

    @property
    def controllers(self) -> dict[str, str]:
        """The base address by controller name; there is one."""
        return self._at.controllers

    @property
    def log_dir(self) -> Path:
        """The directory of each part's log, on the part's own machine: the spec's `log_dir`, or a private one (as a
        pattern)."""
        return Path(self.spec.log_dir or f"{tempfile.gettempdir()}/pd*")

    # --- life ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all parts, nodes last, and wait until they are READY. Raises StartError when a part ends, or when Ray
        lacks the resources or the time is up; ConfigError when a part ends for a bad setting; KeyboardInterrupt after
        `interrupt`. The started parts go on running: call `stop`."""
        if self.spec.keys:
            ensure_keys(
                Path(self.spec.keys),
                self.spec.controller_names(),
                tuple(self.spec.instances()),
                edge=bool(self.spec.http),
            )
        for part in self._parts:
            if part.kind != "node":
                machine = self._pinned[part.kind]
                where = NodeAffinitySchedulingStrategy(machine.ray_id, soft=False)
                self._place(part, num_cpus=0, scheduling_strategy=where)
        self._until_ready()
        nodes = {part.name: part for part in self._parts if part.kind == "node"}
        for group in groups(self.spec, self._parts, self._layout.resources):
            made = self._room_for(group)
            for index, (name, bundle) in enumerate(zip(group.parts, group.bundles, strict=True)):
                where = PlacementGroupSchedulingStrategy(made, placement_group_bundle_index=index)
                self._place(nodes[name], scheduling_strategy=where, **options(bundle))
        self._until_ready()

    def run(self) -> NoReturn:
        """Keep the parts running; it never returns. Raises StartError when it gives up, KeyboardInterrupt after
        `interrupt`; both leave the parts running."""
        while True:
            self._turn()

    def stop(self) -> None:
        """Stop all parts, the edge first, then nodes (they drain), controller and broker, and leave the Ray cluster; a
        second call does nothing. It waits for each kind up to the spec's `stop_grace_s` and a few seconds; `interrupt`
        shortens the wait, and KeyboardInterrupt is raised at the end."""
        for kind in ORDER:
            leaving = [child for child in self.children.values() if child.spec.kind == kind]
            self._leave(leaving)
            for child in leaving:
                ray.kill(child.actor, no_restart=True)
        self.children.clear()
        for group in self._groups:
            remove_placement_group(group)
        self._groups.clear()
        ray.shutdown()
        self._check()

    def interrupt(self, *_: object) -> None:
        """Note a signal to leave, for signal handlers: `start` and `run` then raise KeyboardInterrupt; during `stop`,
        nodes leave at once. It raises nothing itself, because an exception within Ray's own code may be lost there."""
        self._interrupts += 1

    def _check(self) -> None:
        if self._hurried:
            self._heeded = self._interrupts
            raise KeyboardInterrupt

    @property
    def _hurried(self) -> bool:
        return self._interrupts > self._heeded

    # --- placing ------------------------------------------------------------------------------------------------

    def _room_for(self, group: Group) -> Any:
        """Return the placement group of `group`, once Ray has found resources for all of it."""
        strategy, began = self._layout.strategy, time.monotonic()
        made = placement_group(list(group.bundles), strategy=strategy, name=group.instance)
        self._groups.append(made)
        while not made.wait(POLL_S):
            self._check()
            waited_s = time.monotonic() - began
            if waited_s > self._policy.start_timeout_s:
                free = ", ".join(f"{k}={v:g}" for k, v in ray.available_resources().items() if k in ("CPU", "GPU"))
                raise StartError(
                    f"Ray has no resources for {group.label} by {strategy} within {self._policy.start_timeout_s:g} s; "
                    f"free on {len(machines(ray.nodes()))} nodes: {free or 'no CPU, no GPU'}"
                )
            self._progress(f"waiting for resources in the Ray cluster for {group.label} ({waited_s:.0f} s)")
        return made

    def _place(self, part: PartSpec, **where: Any) -> None:
        task = Task(self.spec, self._at, part.name, self._policy, self._files(part))
        made = ray.remote(Actor).options(name=part.name, max_restarts=-1, max_concurrency=8, **where)
        self.children[part.name] = Remote(part, made.remote(task))

    def _renew_keys(self) -> None:
        """Send the list of keys to hosts that lack the present one: after a change, and after Ray has restarted a host,
        which then has the list of its first start."""
        self._renew_at = time.monotonic() + RENEW_S
        try:
            listed = tuple(listed_keys(Path(self.spec.keys)))
            for child in self.children.values():
                if child.host and child.renewed != (child.host, listed):
                    child.renewed = child.host, listed
                    child.actor.renew.remote(self._files(child.spec))
        except ConfigError as error:  # hosts keep the lists that they have
            if str(error) != self._complaint:
                self._complaint = str(error)
                self._notify(f"the list of keys was not renewed: {error}")

    def _files(self, part: PartSpec) -> dict[str, bytes]:
        """Return the files that the part needs on its machine: settings, its own key, and the keys of other parts."""
        files = {"config.toml": Path(self.spec.config).read_bytes()} if self.spec.config else {}
        if not self.spec.keys:
            return files
        if part.kind == "edge":
            keys = load_keys(self.spec.keys, "clients", default=EDGE)
        elif part.kind == "node":
            keys = load_keys(self.spec.keys, "nodes", name=part.name.partition("/")[0])
        else:
            keys = load_keys(self.spec.keys, "brokers" if part.kind == "broker" else "controllers", name=part.name)
        return files | {f"keys/{path}": content for path, content in files_of(keys).items()}

    def _until_ready(self) -> None:
        began = time.monotonic()
        while waiting := [name for name, child in self.children.items() if not child.pid]:
            waited_s = time.monotonic() - began
            names = ", ".join(waiting[:4]) + (" ..." if len(waiting) > 4 else "")
            if waited_s > self._policy.start_timeout_s + ACTOR_S:
                raise StartError(f"Ray has not started {names} within {waited_s:.0f} s; see: ray list actors")
            self._progress(f"starting {names} ({waited_s:.0f} s)")
            self._turn()

    # --- events -------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Wait a moment for events of any part, and handle them. Raises KeyboardInterrupt after a signal."""
        self._check()
        if self.spec.keys and time.monotonic() >= self._renew_at:
            self._renew_keys()
        asked = set(self._asked.values())
        for name, child in self.children.items():
            if name not in asked:
                self._asked[child.actor.events.remote(child.host, child.seen)] = name
        answered, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=POLL_S)
        for question in answered:
            name = self._asked.pop(question)
            if name in self.children:
                self._read_answer(self.children[name], question)

    def _read_answer(self, child: Remote, answer: Any) -> None:
        name = child.spec.name
        try:
            host, events = ray.get(answer)
        except ActorUnavailableError:
            if not child.away:
                child.away = True
                self._notify(f"{name}: its actor{child.ip and ' on '}{child.ip} is gone; Ray starts it again")
            return
        except RayError as error:
            raise StartError(self._why_dead(child, error)) from None
        if host != child.host:
            child.host, child.seen = host, 0
        elif child.away:
            child.away = False
            self._notify(f"{name}: its actor answers again")
        child.seen += len(events)
        for event in events:
            self._take(child, event)

    def _take(self, child: Remote, event: Event) -> None:
        name = child.spec.name
        if isinstance(event, Notice):
            self._notify(event.line)
        elif isinstance(event, Ready):
            if child.away:
                self._notify(f"{name} is back on {event.ip} (pid {event.pid})")
            child.away, child.ip, child.pid, child.facts = False, event.ip, event.pid, event.facts
        elif isinstance(event, Ended):
            self._ended(child, event)

    def _ended(self, child: Remote, end: Ended) -> None:
        name = child.spec.name
        if not child.pid or end.code not in FINAL:
            kind = ConfigError if end.code == EXIT_CONFIG else StartError
            raise kind(f"{name}: {end.cause}")
        verdict = self._left.exited(name, end.code, end.cause, time.monotonic())
        if isinstance(verdict, GiveUp):
            raise StartError(f"{name}: {end.cause}; gave up: {verdict.why}")
        self._notify(f"{name} has left ({end.cause}); the others go on" if end.code else f"{name} has left")
        ray.kill(child.actor, no_restart=True)  # otherwise Ray would restart it when its machine goes
        del self.children[name]

    def _why_dead(self, child: Remote, error: RayError) -> str:
        machine = self._pinned.get(child.spec.kind)
        if machine is not None and machine.ray_id not in {each.ray_id for each in machines(ray.nodes())}:
            return f"{child.spec.name}: its Ray node {machine.ip} is gone, and with it the address that others know"
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"{child.spec.name}: Ray does not run its actor: {lines[-1] if lines else type(error).__name__}"

    # --- leaving ------------------------------------------------------------------------------------------------

    def _leave(self, leaving: Collection[Remote]) -> None:
        """Ask these parts to leave and wait for them, until their time is up; one more signal shortens it."""
        here = [child for child in leaving if not child.away]
        waiting = {child.actor.stop.remote(): child.spec.name for child in here}
        began = time.monotonic()
        until, hurried = began + self.spec.stop_grace_s + 2 * HURRY_S, False
        while waiting and (now := time.monotonic()) < until:
            if self._hurried and not hurried:
                until, hurried = now + 2 * HURRY_S, True
                for child in here:
                    child.actor.hurry.remote()
            gone, _ = ray.wait(list(waiting), timeout=POLL_S)
            for question in gone:
                del waiting[question]
            if waiting:
                self._progress(f"waiting for {', '.join(list(waiting.values())[:4])} to leave ({now - began:.0f} s)")

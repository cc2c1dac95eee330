"""One trial: processes over the network, requests and faults when they are due, and what must hold.

Owns virtual time. `run` ends when the trial is over, or raises Broken with what did not hold.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from bus.endpoints import ControllerAddress
from bus.errors import Replaced
from nodes.config import NodeConfig
from nodes.link.config import Limits
from nodes.link.leg import Leg
from nodes.own.engines.factory import EngineConfig
from nodes.own.engines.timing import SimTiming
from pdbus.client.core import Patience
from pdbus.client.options import Controllers, Options, make_request
from pdbus.client.output import Result
from simulation import inner_laws, laws
from simulation.broken import Broken
from simulation.embedded import DispatcherProcess, LinkProcess, ResolverProcess
from simulation.network import SILENCE_S, Network, Pipe
from simulation.process import BrokerProcess, ClientProcess, ControllerProcess, NodeProcess, Process, RankProcess
from simulation.runtime import installed
from simulation.spec import HOLD_S, VOCAB, Fault, NodeSpec, RequestSpec, Spec
from simulation.story import ends_of, message_in
from simulation.strangers import EdgeProcess, ForeignProcess, IntruderProcess

CHECK_S = 0.1
HUNG_S = 14.0  # until who supervises a node whose engine hangs kills it
STALL_S = (0.02, 0.6)  # of connections that flap, and between two stalls
LOOKS_S = (0.0, 2.0)  # until a key that was taken from the lists is let go of
KILLS_S = 1.0  # until what is over runs nowhere any more
RESTART_S = (0.05, 1.5)  # until who supervises a process that died starts it again


class Asked:
    """A request as its caller sees it."""

    def __init__(self, world: World, spec: RequestSpec) -> None:
        self.spec = spec
        self.output = laws.Output(spec.prompt)
        self.result: Result | None = None
        self.abandoned = False  # its client has crashed
        self.cancelled = False
        self.rid = ""
        self.began = world.now
        self.ended: float | None = None
        self._world = world
        self.room: int | None = None
        self.over = False  # of who hears of its end alone
        self.process: Process | None = None  # whose it is
        self.killed: list[tuple[float, int]] = []  # when a process died of it, and the offset of that attempt

    @property
    def lives(self) -> bool:
        return self.result is None and not self.abandoned and not self.over

    def end(self, code: str) -> None:
        """Note that it is over, as one whose tokens are read elsewhere."""
        self.over, self.ended = True, self._world.now
        self._world.counts[f"unread {code}"] += 1
        laws.end_unread(self._world, self, code)

    def update(self, update: tuple[int, ...] | Result) -> None:
        if self.result is not None:
            raise Broken("it ends once", f"{self.rid} has ended as {self.result.code}, and then: {update}", self.rid)
        if isinstance(update, tuple):
            had = len(self.output.ids)
            if not self.output.take(update, self._world.salts):
                raise Broken("its own tokens", f"{self.rid}, token {had} on: {update}", self.rid)
            return
        self.result, self.ended = update, self._world.now
        self._world.counts[update.code] += 1
        laws.end(self._world, self)
        inner_laws.end(self._world, self)


class World:
    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.now = 0.0
        self.rng = random.Random(f"{spec.seed} world")
        self.hwm = spec.hwm
        self.running: Any = None
        self.network = Network(lambda: self.now, self.at, random.Random(f"{spec.seed} network"))
        self.network.kernel = spec.kernel
        self.network.passes = self._passes
        self.network.sockets = lambda: [socket for process in self.processes for socket in process.open_sockets]
        self.asked: list[Asked] = []
        self.counts: Counter[str] = Counter()
        self.knows_all_faults = True  # `befell` has each one
        self.befell: list[tuple[float, float, Fault]] = []  # from when, until when it may be felt
        self.odd: dict[tuple[Any, ...], float] = {}  # what controllers and ranks do not agree on, and since when
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._port = 20_000
        self.on_fault: Callable[[Fault], None] = lambda fault: None
        self.clocks: dict[str, float] = {}  # by how much a host's is ahead
        self.unsteady: dict[str, float] = {}  # processes that others may not hear, or late: until when
        self.spoke: dict[tuple[str, str], float] = {}  # (endpoint of a node, client): when something came last
        self.attached: dict[tuple[str, str, int], float] = {}  # (client, rid, attempt): since when it reads
        self.dispatched: dict[str, float] = {}  # by rid, when a rank had it first
        self.came: dict[tuple[Any, ...], tuple[int, float, Any]] = {}  # (node, start, rank, controller's epoch): last
        self.tries: dict[tuple[Any, ...], tuple[int, int]] = {}  # (controller, start, rid, room, attempt, leg)
        self.killed_late: list[Asked] = []  # requests that were over and took a rank down
        self.failures: set[tuple[str, str, str, int]] = set()  # (client, endpoint, rid, attempt): a stream has failed
        self.deadly: dict[tuple[str, int], dict[str, int]] = {}  # (controller, start): rids, and their offsets
        self.given_up: dict[tuple[int, str], list[tuple[int, float]]] = {}  # (start of a rank, rid): attempts, when
        self._dropping: dict[str, float] = {}  # processes whose tokens and KV blocks get lost, and until when
        self._damaging: dict[str, float] = {}  # processes whose KV blocks are, and until when
        self.spared: list[tuple[Any, str, float]] = []  # legs that a cancel which came was not for: its code, when
        self.meant: set[Any] = set()  # legs that one was for
        self.turned_down: set[str] = set()  # rids whose rank, decided by their room, was full before any had them
        self.crowded: dict[tuple[str, int, int], float] = {}  # (node, start, rank): since when legs wait for a place
        self.unstreamed: dict[tuple[Any, ...], float] = {}  # legs whose stream another leg's has replaced: since when
        self.salts = {0, 1, 2} if spec.fickle else {0}
        self.goodbyes: dict[tuple[str, int, int], float] = {}  # of starts of ranks: when they left
        self.bus = self._address("broker", 5550)
        self.keys = "keys" if spec.keyed else ""
        self.revoked: dict[str, float] = {}  # whose key is on no list, since when
        self._build()

    # --- time ---------------------------------------------------------------------------------------------------

    def at(self, when: float, function: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), function))

    def wall(self) -> float:
        """Seconds since 1970, by the clock of the host of who runs."""
        return 1_700_000_000.0 + self.now + self.clocks.get(self.running.host, 0.0)

    def salt(self) -> int:
        """Of an engine that starts now."""
        return self.rng.choice(tuple(self.salts))

    def free_port(self) -> int:
        self._port += 1
        return self._port

    @contextmanager
    def runs(self, process: Process) -> Iterator[None]:
        before, self.running = self.running, process
        try:
            yield
        finally:
            self.running = before

    def run(self) -> None:
        """Broken where a law does not hold; whatever a part raises comes as it is."""
        spec = self.spec
        with installed(self):
            try:
                for process in self.processes:
                    process.start()
                for request in spec.requests:
                    self.at(request.at_s, partial(self._ask, request))
                for fault in spec.faults:
                    self.at(fault.at_s, partial(self._befall, fault))
                self.at(CHECK_S, self._check)
                self._until(
                    max([spec.busy_s, *(each.at_s for each in (*spec.requests, *spec.faults))])
                )  # some come late
                while self.now < spec.bound_s and any(asked.lives for asked in self.asked):
                    self._until(self.now + 1.0)
                ends = [until - laws.TAIL_S for _, until, _ in self.befell]  # nothing is quiet before
                self._until(max([self.now, *ends]) + spec.quiet_s)
                self._watcher = self.network.on_message or (lambda pipe, frames: None)
                self.network.on_message = self._silent_now
                self._until(self.now + laws.SILENT_S)
                laws.at_rest(self)
                inner_laws.at_rest(self)
            finally:
                for process in self.processes:
                    process.crash()

    def _until(self, end: float) -> None:
        while self._events[0][0] <= end:
            self.now, _, function = heapq.heappop(self._events)
            function()
        self.now = end

    # --- what there is ------------------------------------------------------------------------------------------

    def _address(self, name: str, port: int) -> str:
        return f"tcp://{name}:{port}" if self.spec.tcp else f"ipc:///sim/{name}"

    def _build(self) -> None:
        spec, rng = self.spec, random.Random(f"{self.spec.seed} hosts")
        hosts = [f"h{n}" for n in range(spec.hosts)]
        bases = [self._address(f"controller-{n}", 5560) for n in range(spec.controllers)]
        settings = dict(spec.settings)
        self.broker = BrokerProcess(self, "broker", rng.choice(hosts))
        self.controllers = [
            ControllerProcess(self, f"controller-{n}", rng.choice(hosts), base, settings)
            for n, base in enumerate(bases)
        ]
        guests = [each for each in spec.guests if each.kind == "dispatcher"]
        for each in guests:
            base = self._address(each.name, 5560)
            bases.append(base)
            self.controllers.append(DispatcherProcess(self, each.name, each.host, base, settings))
        self.nodes: list[Any] = [
            (LinkProcess if each.linked else NodeProcess)(self, each.name, each.host, self._node(each, bases))
            for each in spec.nodes
        ]
        bases = bases[: spec.controllers]
        self.resolvers = [
            ResolverProcess(self, each.name, each.host) for each in spec.guests if each.kind == "resolver"
        ]
        clients = tuple(ControllerAddress(base).clients for base in bases)
        patience = Patience(retries=spec.retries)
        self.clients = [
            ClientProcess(self, f"client-{n}", rng.choice(hosts), clients, patience) for n in range(spec.clients)
        ]
        self.guests: list[Process] = []
        for each in spec.guests:
            if each.kind == "edge":
                self.guests.append(EdgeProcess(self, each.name, each.host, clients, patience))
            elif each.kind in ("foreign", "intruder"):
                made = ForeignProcess if each.kind == "foreign" else IntruderProcess
                self.guests.append(made(self, each.name, each.host, clients))
        self.processes: list[Process] = [
            self.broker, *self.controllers, *self.nodes, *self.clients, *self.resolvers,
            *self.guests,
        ]  # fmt: skip
        self.by_name = {process.name: process for process in self.processes}
        for process in self.processes if spec.keyed else ():
            process.key = key_of(process)

    def _node(self, each: NodeSpec, controllers: list[str]) -> NodeConfig:
        spec = self.spec
        timing = SimTiming(spec.step_s, spec.step_s / 50, spec.step_s / 100, 0.0)
        engine = EngineConfig("sim", "sim", spec.kv_tokens, 4, 4096, timing, VOCAB)
        return NodeConfig(
            role=each.role, instance=each.instance, dp_size=each.dp_size,  # type: ignore[arg-type]
            dp_ranks=tuple(range(each.first, each.first + each.ranks)), bus=self.bus, controllers=tuple(controllers),
            data=f"tcp://{each.name}" if spec.tcp else "ipc:///sim", engine=engine, max_running=spec.max_running,
            chunk_tokens=spec.chunk_tokens, limits=Limits(hold_s=HOLD_S), drain_s=5.0, wait_s=8.0, keys=self.keys,
            decode_cache=spec.decode_cache,
        )  # fmt: skip

    # --- requests -----------------------------------------------------------------------------------------------

    def _ask(self, spec: RequestSpec) -> None:
        client = self.by_name.get(spec.by) if spec.by else self.clients[spec.client]
        if client is None or not client.alive:
            return
        if not isinstance(client, ClientProcess):
            self._ask_otherwise(spec, client)
            return
        asked = Asked(self, spec)
        asked.process = client
        self.asked.append(asked)
        options: Options = {"max_tokens": spec.max_tokens, "ignore_eos": True}
        if len(self.asked) % 3:  # some belong to a session, and several to one
            options["session"] = f"session {len(self.asked) % 5}"
        if spec.deadline_s:
            options["deadline_s"] = spec.deadline_s
        if self.spec.decode_cache:
            options["block_tokens"] = 4
        if spec.rid:
            options["rid"] = spec.rid
        apart = client.controllers[spec.prefill_controller] if spec.prefill_controller >= 0 else None
        where = Controllers(client.controllers[spec.controller], apart)
        leg = "pair" if self.spec.paired else "unified"
        request = make_request(spec.prompt, options, where, client.rng, leg=leg)  # type: ignore[arg-type]
        asked.rid, asked.room = request.rid, request.main.bootstrap_room
        client.call(lambda: client.traffic.begin(request, asked.update))
        if spec.cancel_s:
            self.at(self.now + spec.cancel_s, lambda: self._cancel(client, asked))
        room = request.main.bootstrap_room
        for resolver in self.resolvers if room is not None and self.spec.paired else ():
            told = self.rng.random() < 0.5
            size = next(node.dp_size for node in self.spec.nodes if node.role == "prefill")
            resolver.want(room, self.rng.randrange(size) if told else None, self.rng.choice((0.5, 2.0, 5.0)))

    def _ask_otherwise(self, spec: RequestSpec, process: Process) -> None:
        """Have a dispatcher or a client of another make ask. The rid is drawn here, for each has a table of its own."""
        if process.paused_until > self.now:
            return
        asked = Asked(self, spec)
        asked.process, asked.rid = process, f"{process.name}-{spec.number}"
        self.asked.append(asked)
        if isinstance(process, DispatcherProcess):
            process.ask(asked, "pair" if self.spec.paired else "unified")
        else:
            assert isinstance(process, ForeignProcess)
            process.ask(asked)
        if spec.cancel_s:
            self.at(self.now + spec.cancel_s, lambda: self._cancel_otherwise(process, asked))

    def _cancel_otherwise(self, process: Any, asked: Asked) -> None:
        if asked.lives and process.alive and process.paused_until <= self.now:
            asked.cancelled = True
            process.cancel(asked)

    def _cancel(self, client: ClientProcess, asked: Asked) -> None:
        if isinstance(client, EdgeProcess):
            client.call(lambda: client.drop(asked) if asked.lives else None)
        elif not asked.abandoned:  # a reader closes its stream, also one that has ended
            asked.cancelled = asked.cancelled or asked.result is None
            client.call(lambda: client.traffic.cancel(asked.rid, asked.update))

    # --- faults -------------------------------------------------------------------------------------------------

    def _befall(self, fault: Fault) -> None:
        process = self.by_name.get(fault.who)
        if process is None or (fault.other and fault.other not in self.by_name):
            return  # of a minimized schedule, it is left out
        lasts_s = fault.for_s
        self.counts[f"fault {fault.kind}"] += 1
        self.on_fault(fault)
        match fault.kind:
            case "crash":
                self._crash(process)
                lasts_s = RESTART_S[1]
            case "pause":
                process.pause(fault.for_s)
                self._silent(lambda: process.paused_until, [(process, None)])
            case "reset_one":
                pipes = self.network.connections(process)
                if pipes:
                    self.network.reset(self.rng.choice(pipes))
                lasts_s = 0.0
            case "reset_all":
                for pipe in self.network.connections(process):
                    self.network.reset(pipe)
                lasts_s = 0.0
            case "cut" | "cut_one_way":
                until = self.now + fault.for_s
                ways = [(fault.who, fault.other), (fault.other, fault.who)][: 2 if fault.kind == "cut" else 1]
                for way in ways:
                    self.network.cut[way] = max(until, self.network.cut.get(way, 0.0))
                self._silent(lambda: self.network.cut[ways[0]], [(process, self.by_name[fault.other])])
            case "slow":
                self.network.slow[fault.who] = fault.much, self.now + fault.for_s
            case "sever":
                pipes = self._between(process, fault.other)
                for pipe in pipes if fault.other else pipes and [self.rng.choice(pipes)]:
                    self.network.sever(pipe, self.now + fault.for_s)
            case "damage":
                self._damaging[fault.who] = self.now + fault.for_s
            case "drop":
                self._dropping[fault.who] = self.now + fault.for_s
            case "flap":
                self._flap(process, self.now + fault.for_s)
            case "drain":
                assert isinstance(process, RankProcess)
                if process.alive and process.ready:
                    process.drain()
                lasts_s = 10.0
            case "leave":
                if process.alive:
                    process.stop()
                    self._restart(process)
                lasts_s = RESTART_S[1]
            case "hang":
                assert isinstance(process, RankProcess)
                if process.alive:
                    for engine in process.engines:
                        engine.hang()
                    start = process.starts
                    self.at(self.now + HUNG_S, lambda: self._crash(process) if process.starts == start else None)
                lasts_s = HUNG_S + RESTART_S[1]
            case "fail_steps":
                assert isinstance(process, RankProcess)
                for engine in process.engines if process.alive else ():
                    engine.fails += self.rng.randint(1, 4)
                lasts_s = 0.0
            case "clock":
                self.clocks[process.host] = self.clocks.get(process.host, 0.0) + fault.for_s
                lasts_s = 0.0
            case "revoke":
                self._revoke(process, fault.for_s)
                lasts_s = LOOKS_S[1] + fault.for_s + RESTART_S[1]
            case "twice":
                assert isinstance(process, RankProcess)
                self._again(process)
        late_s = fault.much if fault.kind == "slow" else 0.0  # what was sent by its end may come so much later
        if fault.kind in ("pause", "cut", "cut_one_way", "slow", "flap", "revoke", "sever"):
            for name in filter(None, (fault.who, fault.other)):
                self.unsteady[name] = max(self.unsteady.get(name, 0.0), self.now + lasts_s + late_s)
        self.befell.append((self.now, self.now + lasts_s + laws.TAIL_S, fault))

    def _flap(self, process: Process, until: float) -> None:
        """Stall its connections for a moment and reset them, over and over; what was sent meanwhile is lost."""
        stall_s = self.rng.uniform(*STALL_S)
        for pipe in self.network.connections(process):
            self.network.stall(pipe, self.now + stall_s)
            self.at(self.now + stall_s, partial(self.network.reset, pipe))
        again = self.now + stall_s + self.rng.uniform(*STALL_S)
        if again < until:
            self.at(again, lambda: self._flap(process, until))

    def _revoke(self, process: Process, for_s: float) -> None:
        """Take its key off the lists: others let go of it soon. It is started again once its key is listed."""

        def let_go() -> None:
            self.network.banned.add(process.name)
            self.revoked[process.name] = self.now
            others: dict[Process, None] = {}  # in order
            for pipe in self.network.connections(process):
                if pipe.peer is not None and pipe.socket.process is not pipe.peer.socket.process:
                    others[pipe.peer.socket.process] = None
                    self.network.reset(pipe)
            for sockets in [sockets for other in others for sockets in other.sockets if sockets.open]:
                sockets.key_revoked(process.name, "")
            self.at(self.now + for_s, back)

        def back() -> None:
            self.network.banned.discard(process.name)
            self.revoked.pop(process.name, None)
            self._crash(process)

        if process.name not in self.revoked:
            low, high = LOOKS_S
            self.at(self.now + low + (high - low) * self.rng.random(), let_go)

    def _between(self, process: Process, other: str) -> list[Pipe]:
        """Return its connections, or those with `other`."""
        ends = [(pipe, pipe.peer) for pipe in self.network.connections(process)]
        return [a for a, b in ends if b is not None and other in ("", a.socket.process.name, b.socket.process.name)]

    def _passes(self, pipe: Pipe, frames: list[bytes]) -> list[bytes] | None:
        """Return what arrives of a message; None: nothing does."""
        name = pipe.socket.process.name
        if self._damaging.get(name, 0.0) > self.now and message_in(frames)[0] == "kv_block" and self.rng.random() < 0.5:
            *first, data = frames
            at = self.rng.randrange(len(data))
            frames = [*first, data[:at] + bytes([data[at] ^ 1 << self.rng.randrange(8)]) + data[at + 1 :]]
        if self._dropping.get(name, 0.0) > self.now and self.rng.random() < 0.3:
            tag, *fields = message_in(frames)
            if tag == "kv_block" or (tag == "tokens" and fields[3]):
                return None
        inner_laws.arrives(self, pipe, frames)
        return frames

    def kills(self, process: Process, leg: Leg, token: int) -> bool:
        """Kill a process that computes this output token of a request, if that is deadly, and return whether it is."""
        rid = leg.rid.removesuffix(".prefill")
        killer = next((each for each in self.asked if each.rid == rid and 0 <= each.spec.kills_at <= token), None)
        if killer is None:
            return False
        killer.killed.append((self.now, leg.offset))
        if killer.ended is not None and self.now > max(killer.ended, process.paused_until) + KILLS_S:
            self.killed_late.append(killer)
        self.counts["killed"] += 1
        self.at(self.now, lambda: self._crash(process))
        fault = Fault(self.now, "crash", process.name)
        self.on_fault(fault)
        self.befell.append((self.now, self.now + RESTART_S[1] + laws.TAIL_S, fault))
        return True

    def _crash(self, process: Process) -> None:
        if not process.alive:
            return
        process.crash()
        for asked in self.asked:
            if asked.lives and asked.process is process:
                asked.abandoned = True
        self._restart(process)

    def _restart(self, process: Process) -> None:
        low, high = RESTART_S
        start = process.starts
        self.at(
            self.now + low + (high - low) * self.rng.random(),
            lambda: process.start() if not process.alive and process.starts == start else None,
        )

    def _again(self, node: Any) -> None:
        twin = type(node)(self, f"{node.name}'{len(self.nodes)}", node.host, node.config)
        self.nodes.append(twin)
        self.processes.append(twin)
        self.by_name[twin.name] = twin
        twin.key = node.key
        twin.start()

    def node_left(self, node: Any) -> None:
        """Start a node again that was drained or has failed; one that was replaced stays away."""
        node.replaced = isinstance(node.failure, Replaced)
        for number, rank in node.part.host.ranks.items():
            self.goodbyes[node.config.instance, number, rank.epoch] = self.now
        if not node.replaced:
            self._restart(node)

    def _silent(self, until: Callable[[], float], between: list[tuple[Process, Process | None]]) -> None:
        """Reset connections over tcp that are silent for SILENCE_S, as their ends do."""

        def look() -> None:
            if until() <= self.now:
                return
            for process, other in between:
                for pipe in self.network.connections(process):
                    ends = pipe.socket.process, pipe.peer.socket.process if pipe.peer is not None else None
                    if (other is None or other in ends) and ends[0] is not ends[1]:
                        self.network.reset(pipe)

        if self.spec.tcp:
            self.at(self.now + SILENCE_S + self.rng.random(), look)

    def felt(self, name: str) -> bool:
        """Return whether a fault may be felt at a process now: one that befell it, or what it speaks with."""
        return any(until > self.now and name in (fault.who, fault.other) for _, until, fault in self.befell)

    def _check(self) -> None:
        laws.at_any_moment(self)
        inner_laws.at_any_moment(self)
        self.at(self.now + CHECK_S, self._check)

    def _silent_now(self, pipe: Pipe, frames: list[bytes]) -> None:
        self._watcher(pipe, frames)
        laws.message_at_rest(self, frames, ends_of(pipe))


def key_of(process: Process) -> str:
    """Return the name of its key."""
    if isinstance(process, BrokerProcess | ControllerProcess):
        return f"{process.kind}s/{process.name}"
    if isinstance(process, RankProcess):
        return f"nodes/{process.config.instance}"
    return "nodes/decode" if isinstance(process, ResolverProcess) else f"clients/{process.name}"

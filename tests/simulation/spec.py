"""What a trial is made of: a world, its requests and its faults, all drawn from one seed, all of them plain data.

A minimized schedule is the same with some of it left out, so nothing here may depend on what the run does.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from simulation.network import KERNEL

Kind = Literal[
    "crash", "pause", "reset_one", "reset_all", "cut", "cut_one_way", "slow", "drain", "leave", "hang", "fail_steps",
    "clock", "twice", "flap", "revoke", "sever", "damage", "drop",
]  # fmt: skip
FAULTS: tuple[Kind, ...] = get_args(Kind)
OVER_TCP = ("cut", "cut_one_way", "sever")
SMALL = ("flap", "sever", "damage", "drop")  # that plain worlds have none of, as they had none before these were there
TROUBLES: tuple[Kind, ...] = ("flap", "flap", "reset_all", "reset_one", "slow", "pause", "crash", "cut", "cut_one_way")
SPEAK = {("client", "controller"), ("client", "node"), ("controller", "node"), ("node", "node"), ("broker", "node"),
         ("broker", "controller")}  # fmt: skip
VOCAB = 512
HOLD_S = 10.0  # for so long a prefill rank holds a KV cache that nobody fetches


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A node process: `ranks` of `instance` from `first` on."""

    name: str
    host: str
    role: str
    instance: str
    dp_size: int
    first: int
    ranks: int
    linked: bool = False  # an engine with a scheduler of its own, behind a RankLink


@dataclass(frozen=True, slots=True)
class Guest:
    """What others embed, in a process of its own."""

    name: str
    host: str
    kind: Literal["dispatcher", "resolver", "edge", "foreign", "intruder"]


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """At `at_s` client `client` wants `max_tokens` tokens. `cancel_s`, `deadline_s`: later; 0: never."""

    number: int
    at_s: float
    client: int
    controller: int
    prompt: tuple[int, ...]
    max_tokens: int
    cancel_s: float = 0.0
    deadline_s: float = 0.0
    rid: str = ""  # empty: the client draws one
    by: str = ""  # the name of a guest that asks for it
    prefill_controller: int = -1  # of a pair at two controllers; -1: there is one for both legs
    kills_at: int = (
        -1
    )  # the process dies that computes this token of its output (0: the first, or its prompt); -1: none


@dataclass(frozen=True, slots=True)
class Fault:
    """At `at_s`, `kind` befalls process `who`, for `for_s` where it lasts; `other` is whom it is cut off from.

    `crash`: killed, and started again by who supervises it. `pause`: it does nothing. `reset_one`, `reset_all`: of its
    connections. `cut`, `cut_one_way`: nothing passes between the two, or from `who` to `other`. `slow`: all that it
    sends or is sent is late, by up to `much`. `drain`, `leave`: told to leave, and started again. `hang`: its engines
    end no step more. `fail_steps`: they fail some. `clock`: that of its host steps by `for_s`, back or forth. `twice`:
    a second start of the same ranks, while the first one lives. `flap`: its connections stall for a moment and are
    reset, over and over. `revoke`: its key is on no list for so long; others let go of it, and it is started again with
    one that is listed. `sever`: its connections with `other`, or one of its connections, are reset and can't be made
    again. `damage`: some KV blocks that it sends arrive with another bit. `drop`: some of its tokens and KV blocks do
    not arrive, though the connection lives.
    """

    at_s: float
    kind: Kind
    who: str
    for_s: float = 0.0
    other: str = ""
    much: float = 0.2


@dataclass(frozen=True, slots=True)
class Spec:
    """One trial. Faults lie in the first `busy_s` seconds, by `bound_s` all requests must have an end, and `quiet_s`
    after the last one nothing is left of them."""

    seed: int
    tcp: bool
    hosts: int
    nodes: tuple[NodeSpec, ...]
    controllers: int
    clients: int
    paired: bool  # prefill and decode; else unified ranks
    settings: tuple[tuple[str, Any], ...]  # of the controllers
    kv_tokens: int
    max_running: int
    chunk_tokens: int
    step_s: float
    hwm: int
    retries: int
    fickle: bool  # another run of a request gives other tokens
    requests: tuple[RequestSpec, ...]
    faults: tuple[Fault, ...]
    busy_s: float
    quiet_s: float = 12.0
    guests: tuple[Guest, ...] = ()
    keyed: bool = False  # each process proves a key, and clients have one each
    kernel: int = KERNEL  # messages that kernels hold of a connection: few where prompts are large
    decode_cache: bool = False  # decode ranks keep KV caches, and compute prompts where they are told

    @property
    def bound_s(self) -> float:
        """Long enough for all of it to be computed one after the other by one rank, and for what clients wait."""
        steps = sum(len(each.prompt) / self.chunk_tokens + each.max_tokens + 1 for each in self.requests)
        return self.busy_s + 60.0 + 3 * self.step_s * steps

    @property
    def kinds(self) -> dict[str, str]:
        """What each process but the guests is, by its name: clients last."""
        kinds = {name: name.partition("-")[0] for name in self.names} | {node.name: "node" for node in self.nodes}
        return kinds | {f"client-{n}": "client" for n in range(self.clients)}

    @property
    def names(self) -> list[str]:
        """The names of all processes but clients and guests."""
        return ["broker", *(f"controller-{n}" for n in range(self.controllers)), *(node.name for node in self.nodes)]


def draw(seed: int, troubles: bool = True, guests: bool = False, policies: bool = False) -> Spec:
    """The trial of `seed`; without `troubles`, `guests` or `policies` as it was before these, for seeds that broke
    then."""
    spec = _plain(seed)
    spec = with_troubles(spec, random.Random(f"{seed} troubles")) if troubles else spec
    spec = with_policies(spec, random.Random(f"{seed} policies")) if policies else spec
    return with_guests(spec, random.Random(f"{seed} guests")) if guests else spec


def _plain(seed: int) -> Spec:
    rng = random.Random(seed)
    tcp = rng.random() < 0.6
    hosts = rng.randint(2, 5) if tcp else 1
    paired = rng.random() < 0.65
    nodes: list[NodeSpec] = []
    for role in ("prefill", "decode") if paired else ("unified",):
        left = ranks = rng.choice((1, 2, 2, 3, 4, 4, 8))
        while left:
            some = min(left, rng.choice((1, 1, 2, 4, 8)))
            name = f"{role}-{ranks - left}"
            nodes.append(NodeSpec(name, f"h{rng.randrange(hosts)}", role, role, ranks, ranks - left, some))
            left -= some
    controllers = rng.choice((1, 1, 1, 2, 2, 3))
    clients = rng.randint(1, 5)
    busy_s = rng.choice((4.0, 8.0, 8.0, 12.0))
    settings: dict[str, Any] = {}
    if rng.random() < 0.25:
        settings["queue_order"] = "slo"
    for role in ("prefill", "decode", "unified"):
        if rng.random() < 0.4:
            methods = ["total_requests", "total_tokens", "round_robin"]
            methods += ["cache_aware"] if role != "decode" else []
            settings[f"{role}_method"] = rng.choice(methods)
    if rng.random() < 0.3:
        settings["lease_s"] = rng.choice((1.0, 2.0, 6.0))
    kv_tokens = rng.choice((128, 256, 1024))
    spec = Spec(
        seed=seed, tcp=tcp, hosts=hosts, nodes=tuple(nodes), controllers=controllers, clients=clients, paired=paired,
        settings=tuple(settings.items()), kv_tokens=kv_tokens, max_running=rng.choice((1, 2, 4, 8)),
        chunk_tokens=rng.choice((8, 16, 64)), step_s=rng.choice((0.002, 0.005, 0.02)),
        hwm=rng.choice((10_000, 10_000, 20)), retries=6, fickle=rng.random() < 0.4, requests=(), faults=(),
        busy_s=busy_s,
    )  # fmt: skip
    return _with_events(spec, rng)


def _with_events(spec: Spec, rng: random.Random) -> Spec:
    rate = rng.choice((2.0, 5.0, 10.0, 20.0)) * len(spec.nodes) / 2
    requests: list[RequestSpec] = []
    names = [f"again-{n}" for n in range(rng.choice((1, 3, 8)))] if rng.random() < 0.2 else []
    at_s, heads = 0.5, [tuple(rng.randrange(3, VOCAB) for _ in range(24)) for _ in range(3)]
    longest = min(60, spec.kv_tokens // 3)
    while (at_s := at_s + rng.expovariate(rate)) < spec.busy_s:
        head = rng.choice(heads)[: rng.choice((0, 8, 24))]
        size = rng.randint(1, longest)
        prompt = (*head, *(rng.randrange(3, VOCAB) for _ in range(size)))[:longest]
        odd = rng.random()
        requests.append(
            RequestSpec(
                len(requests), round(at_s, 6), rng.randrange(spec.clients), rng.randrange(spec.controllers), prompt,
                rng.choice((1, 2, 5, 12, 30)), cancel_s=round(rng.expovariate(4.0), 6) if odd < 0.06 else 0.0,
                deadline_s=rng.choice((0.05, 0.5, 3.0)) if 0.06 <= odd < 0.12 else 0.0,
                rid=rng.choice(names) if names and rng.random() < 0.4 else "",
            )
        )  # fmt: skip
    faults = [_fault(spec, rng) for _ in range(rng.choice((0, 1, 2, 2, 3, 4, 6, 10)))]
    return replace(spec, requests=tuple(requests), faults=tuple(sorted(faults, key=lambda fault: fault.at_s)))


def _fault(spec: Spec, rng: random.Random) -> Fault:
    kinds = [each for each in FAULTS if each not in ("revoke", *SMALL)]  # of keys, and of the troubles
    kind = rng.choice(kinds if spec.tcp else [each for each in kinds if each not in OVER_TCP])
    at_s = round(rng.uniform(0.6, spec.busy_s), 6)
    for_s = round(rng.choice((0.1, 0.5, 1.0, 2.0, 4.0, 8.0)) * rng.uniform(0.5, 1.5), 6)
    clients = [f"client-{n}" for n in range(spec.clients)]
    nodes = [node.name for node in spec.nodes]
    if kind in ("drain", "hang", "fail_steps", "twice"):
        who = rng.choice(nodes)
    elif kind == "leave":
        who = f"controller-{rng.randrange(spec.controllers)}"
    elif kind == "crash":
        who = rng.choice(spec.names)
    else:
        who = rng.choice([*spec.names, *clients])
    if kind == "clock":
        for_s *= rng.choice((-100.0, -1.0, 1.0, 100.0))
    other = rng.choice([name for name in (*spec.names, *clients) if name != who]) if kind in OVER_TCP else ""
    return Fault(at_s, kind, who, for_s, other)


def with_troubles(spec: Spec, rng: random.Random) -> Spec:
    """Some worlds have requests that last, rids of several clients, or pairs at two controllers; most have faults that
    come together, on one process or on the way between two that speak with each other."""
    if rng.random() < 0.3:
        if rng.random() < 0.4:
            spec = replace(spec, settings=(*(each for each in spec.settings if each[0] != "lease_s"), ("lease_s", 1.0)))
        spec = replace(spec, kv_tokens=1024, step_s=0.05, requests=tuple(_longer(each, rng) for each in spec.requests))
    if spec.controllers > 1 and spec.clients > 1 and rng.random() < 0.3:
        names = [f"shared-{n}" for n in range(rng.choice((1, 2, 4)))]
        spec = replace(spec, requests=tuple(_named(each, names, rng) for each in spec.requests))
    if spec.paired and spec.controllers > 1 and rng.random() < 0.4:
        spec = replace(spec, requests=tuple(_apart(each, spec.controllers, rng) for each in spec.requests))
    faults = list(spec.faults)
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        faults += _trouble(spec, rng)
    return replace(spec, faults=tuple(sorted(faults, key=lambda fault: fault.at_s)))


def _longer(request: RequestSpec, rng: random.Random) -> RequestSpec:
    return replace(request, max_tokens=rng.choice((60, 120))) if rng.random() < 0.15 else request


def _named(request: RequestSpec, names: list[str], rng: random.Random) -> RequestSpec:
    """One of several clients that use the same rids, at several controllers, and give up often."""
    if rng.random() < 0.5:
        return request
    cancel_s = round(rng.expovariate(4.0), 6) if rng.random() < 0.3 else request.cancel_s
    return replace(request, rid=rng.choice(names), cancel_s=cancel_s)


def _apart(request: RequestSpec, controllers: int, rng: random.Random) -> RequestSpec:
    other = (request.controller + rng.randrange(1, controllers)) % controllers
    return replace(request, prefill_controller=other) if rng.random() < 0.5 else request


def _trouble(spec: Spec, rng: random.Random) -> list[Fault]:
    """One to three faults within two seconds or so."""
    kinds = spec.kinds
    who = rng.choice([name for name, kind in kinds.items() if kind in ("controller", "node")])
    others = [name for name, kind in kinds.items() if name != who and tuple(sorted((kind, kinds[who]))) in SPEAK]
    at_s, faults = rng.uniform(0.6, spec.busy_s), []
    for _ in range(rng.randint(1, 3)):
        kind = rng.choice(TROUBLES if spec.tcp else [each for each in TROUBLES if each not in OVER_TCP])
        other = rng.choice(others) if kind in OVER_TCP else ""
        first, second = (other, who) if other and rng.random() < 0.5 else (who, other)
        faults.append(Fault(round(at_s, 6), kind, first, round(rng.choice((0.5, 1.0, 2.0, 4.0, 8.0)), 6), second))
        at_s += rng.expovariate(1.0)
    return faults


def with_policies(spec: Spec, rng: random.Random) -> Spec:
    """The same world with policies of other people, which raise or answer nonsense at each point now and then. Pairs
    may have unified ranks beside theirs, to which these policies send some."""
    odd = {f"{role}_method": "odd_policies:Erratic" for role in ("prefill", "decode", "unified") if rng.random() < 0.8}
    nodes = spec.nodes
    if spec.paired and rng.random() < 0.8:
        ranks = rng.choice((1, 2, 4))
        nodes += (NodeSpec("unified-0", f"h{rng.randrange(spec.hosts)}", "unified", "unified", ranks, 0, ranks),)
    return replace(spec, nodes=nodes, settings=tuple((dict(spec.settings) | odd).items()))


def with_guests(spec: Spec, rng: random.Random) -> Spec:
    """The same world with parts that others embed (dispatchers, resolvers, engines behind rank links), edges, clients
    of another make and, where there are keys, one who meddles with what is others'; some faults are theirs."""
    hosts = [f"h{n}" for n in range(spec.hosts)]
    keyed = rng.random() < 0.4
    counts = {"dispatcher": (0, 0, 1, 2), "edge": (0, 1), "foreign": (0, 1)}
    counts |= {"resolver": (0, 1, 2)} if spec.paired else {}
    counts |= {"intruder": (0, 1, 1)} if keyed else {}
    guests = tuple(
        Guest(f"{kind}-{n}", rng.choice(hosts), kind)  # type: ignore[arg-type]
        for kind, some in counts.items()
        for n in range(rng.choice(some))
    )
    share = rng.choice((0.0, 1.0)) if spec.paired else rng.choice((0.0, 0.5, 1.0))
    nodes = tuple(replace(each, linked=rng.random() < share) for each in spec.nodes)
    askers = [each.name for each in guests if each.kind in ("dispatcher", "edge", "foreign")]
    requests = []
    for each in spec.requests:
        theirs = askers and rng.random() < 0.4
        requests.append(replace(each, by=rng.choice(askers), prefill_controller=-1) if theirs else each)
    faults = list(spec.faults)
    names = [*(each.name for each in guests), *(each.name for each in nodes if each.linked)]
    for _ in range(rng.choice((0, 1, 2, 3)) if names else 0):
        kind: Kind = rng.choice(("crash", "pause", "reset_all", "reset_one", "flap", "slow"))
        at_s, for_s = rng.uniform(0.6, spec.busy_s), rng.choice((0.2, 1.0, 4.0))
        faults.append(Fault(round(at_s, 6), kind, rng.choice(names), for_s))
    names = [f"client-{n}" for n in range(spec.clients)] + [each.name for each in nodes]
    for _ in range(rng.choice((0, 1, 1, 2)) if keyed else 0):
        at_s, for_s = rng.uniform(0.6, spec.busy_s), rng.choice((1.0, 4.0, 30.0))
        faults.append(Fault(round(at_s, 6), "revoke", rng.choice(names), for_s))
    faults.sort(key=lambda fault: fault.at_s)
    return replace(
        spec, nodes=nodes, guests=guests, requests=tuple(requests), faults=tuple(faults), keyed=keyed,
        busy_s=max([spec.busy_s, *(fault.at_s + fault.for_s for fault in faults if fault.kind == "revoke")]),
    )  # fmt: skip

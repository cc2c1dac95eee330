"""Small worlds, for what meets seldom: one to six ranks, a handful of requests, and of all kinds of faults a few, which
come often and together (each seed draws which ones, and how hot).

In a large world a second fault that hits the same request at the same moment is rare, and most of the time nothing is
wrong; here nearly each request meets some.
"""

from __future__ import annotations

import random
from dataclasses import replace

from simulation.spec import FAULTS, OVER_TCP, SPEAK, VOCAB, Fault, Kind, NodeSpec, RequestSpec, Spec

PACES = (  # seconds a step, tokens wanted: requests of milliseconds, of seconds, and such as outlast most faults
    (0.005, (1, 5, 12, 30)),
    (0.05, (5, 20, 40, 80)),
    (0.05, (2, 20, 40, 80)),
    (0.1, (20, 60, 120)),
    (0.2, (10, 60, 90)),
)
LATE_S = (0.05, 0.2, 1.0)  # of what is slow
HOT: tuple[Kind, ...] = ("crash", "leave", "pause", "reset_one", "reset_all", "cut", "cut_one_way", "slow", "flap",
                         "sever")  # fmt: skip
PAIRS = (("controller", "client"), ("controller", "node"), ("controller", "node"), ("client", "node"),
         ("node", "node"), ("broker", "node"))  # fmt: skip
BETWEEN: tuple[Kind, ...] = ("cut", "cut_one_way", "sever")


def draw_nodes(paired: bool, hosts: int, rng: random.Random) -> tuple[NodeSpec, ...]:
    """Return one to three ranks of each role, in one process or in one each, on any of `hosts`."""
    nodes: list[NodeSpec] = []
    for role in ("prefill", "decode") if paired else ("unified",):
        ranks = rng.choice((1, 2, 2, 3))
        size = rng.choice((1, 1, ranks))
        for first in range(0, ranks, size):
            nodes.append(NodeSpec(f"{role}-{first}", f"h{rng.randrange(hosts)}", role, role, ranks, first, size))
    return tuple(nodes)


def draw_small(seed: int) -> Spec:
    """The trial of `seed`."""
    rng = random.Random(f"{seed} small")
    tcp = rng.random() < 0.75
    hosts = rng.randint(1, 3) if tcp else 1
    paired = rng.random() < 0.5
    nodes = draw_nodes(paired, hosts, rng)
    step_s, tokens = rng.choice(PACES)
    settings: list[tuple[str, object]] = []
    if rng.random() < 0.75:
        settings.append(("lease_s", rng.choice((1.0, 1.0, 2.0))))
    if rng.random() < 0.15:
        settings.append(("queue_order", "slo"))
    if rng.random() < 0.1:
        settings.append(("client_requests", rng.choice((1, 2, 4))))
    for role in ("prefill", "decode", "unified"):
        if rng.random() < 0.25:
            methods = ["total_requests", "total_tokens", "round_robin"]
            settings.append((f"{role}_method", rng.choice([*methods, *(["cache_aware"] if role != "decode" else [])])))
    spec = Spec(
        seed=seed, tcp=tcp, hosts=hosts, nodes=nodes, controllers=rng.choice((1, 2, 2)),
        clients=rng.choice((1, 2, 2, 3)), paired=paired, settings=tuple(settings), kv_tokens=rng.choice((256, 1024)),
        max_running=rng.choice((1, 2, 4)), chunk_tokens=rng.choice((8, 64)), step_s=step_s,
        hwm=rng.choice((10_000, 20)), retries=6, fickle=rng.random() < 0.6, requests=(), faults=(),
        busy_s=rng.choice((3.0, 5.0, 8.0)),
    )  # fmt: skip
    spec = replace(spec, requests=_requests(spec, tokens, rng))
    return replace(spec, faults=_faults(spec, rng))


def _requests(spec: Spec, tokens: tuple[int, ...], rng: random.Random) -> tuple[RequestSpec, ...]:
    names = [f"shared-{n}" for n in range(rng.choice((1, 1, 2)))] if rng.random() < 0.35 else []
    apart = spec.paired and spec.controllers > 1 and rng.random() < 0.5
    cancelled, due = rng.choice((0.0, 0.1, 0.4)), rng.choice((0.0, 0.0, 0.2))
    head = tuple(rng.randrange(3, VOCAB) for _ in range(16))
    requests: list[RequestSpec] = []
    times = sorted(
        rng.uniform(0.5, spec.busy_s) for _ in range(rng.choice((3, 6, 12, 20) if spec.step_s < 0.1 else (2, 4, 6)))
    )
    if rng.random() < 0.3:  # most of them at once
        times = sorted(time if rng.random() < 0.3 else times[0] + rng.random() * 0.2 for time in times)
    for number, at_s in enumerate(times):
        prompt = (*head[: rng.choice((0, 16))], *(rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 40))))
        controller, odd = rng.randrange(spec.controllers), rng.random()
        requests.append(
            RequestSpec(
                number, round(at_s, 6), rng.randrange(spec.clients), controller, prompt, rng.choice(tokens),
                cancel_s=round(rng.expovariate(3.0), 6) if odd < cancelled else 0.0,
                deadline_s=rng.choice((0.5, 3.0)) if odd > 1 - due else 0.0,
                rid=rng.choice(names) if names and rng.random() < 0.7 else "",
                prefill_controller=(controller + 1) % spec.controllers if apart and rng.random() < 0.6 else -1,
            )
        )  # fmt: skip
    return tuple(requests)


def _faults(spec: Spec, rng: random.Random) -> tuple[Fault, ...]:
    """Of a few kinds, at a few victims, in bursts; in some worlds none."""
    possible = [kind for kind in FAULTS if kind != "revoke" and (spec.tcp or kind not in OVER_TCP)]
    clients = [f"client-{n}" for n in range(spec.clients)]
    roles = {name: name.partition("-")[0] for name in (*spec.names, *clients)}
    roles |= {node.name: "node" for node in spec.nodes}
    if rng.random() < 0.4:
        kinds = rng.sample(possible, rng.choice((1, 2, 2, 3, 5)))
        victims = rng.sample(list(roles), min(len(roles), rng.choice((1, 2, 3))))
    else:  # between two that speak with each other
        hot = [kind for kind in possible if kind in HOT]
        kinds = rng.sample(hot, rng.choice((1, 2, 3)))
        pair = rng.choice(PAIRS)
        victims = [rng.choice([name for name, role in roles.items() if role == each]) for each in pair]
    faults: list[Fault] = []
    for _ in range(rng.choice((0, 1, 1, 2, 2, 3))):
        at_s = rng.uniform(0.6, spec.busy_s)
        for _ in range(rng.choice((1, 1, 2, 3, 5))):
            fault = draw_fault(spec, round(at_s, 6), rng.choice(kinds), victims, roles, rng)
            if fault is not None:
                faults.append(fault)
            at_s += rng.expovariate(rng.choice((0.5, 2.0, 10.0)))
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def draw_fault(
    spec: Spec, at_s: float, kind: Kind, victims: list[str], roles: dict[str, str], rng: random.Random
) -> Fault | None:
    """Return a fault of this kind, at one of `victims` if it may befall one of these. `roles`: of all processes, by
    name. None: the fault cannot happen to any of them."""
    of = dict.fromkeys(("drain", "hang", "fail_steps", "twice", "damage", "drop"), "node")
    of |= {"leave": "controller", "crash": "node controller broker client", "revoke": "node client"}
    may = [name for name, role in roles.items() if role in of.get(kind, role)]
    who = rng.choice([name for name in victims if name in may] or may)
    for_s = round(rng.choice((0.3, 1.0, 2.0, 4.0, 8.0)) * rng.uniform(0.7, 1.3), 6)
    if kind == "clock":
        for_s *= rng.choice((-100.0, -1.0, 1.0, 100.0))
    if kind not in BETWEEN:
        return Fault(at_s, kind, who, for_s, much=rng.choice(LATE_S) if kind == "slow" else 0.2)
    others = [name for name, role in roles.items() if name != who and tuple(sorted((role, roles[who]))) in SPEAK]
    if not others:
        return None
    other = rng.choice(others) if kind in OVER_TCP or rng.random() < 0.6 else ""
    first, second = (other, who) if kind == "cut_one_way" and rng.random() < 0.5 else (who, other)
    return Fault(at_s, kind, first, for_s, second)

"""Crowded worlds: small ones whose ranks are full and whose requests outlast faults.

Requests come together and run for many seconds, and their callers give up also while they wait. A process loses several
that it speaks with at one moment of a request's life, and before they are back it, or one of them, fails too. In some
worlds kernels hold few messages of a connection, so that queues fill while a process is away.
"""

from __future__ import annotations

import random
from dataclasses import replace

from simulation.network import KERNEL
from simulation.small import draw_nodes, draw_small
from simulation.spec import VOCAB, Fault, Kind, RequestSpec, Spec

PACES = ((0.05, (20, 60, 120)), (0.1, (20, 60, 120)), (0.2, (10, 40, 80)), (0.3, (10, 40, 60)))
MOMENTS_S = (-0.02, 0.0, 0.0004, 0.0008, 0.0012, 0.002, 0.01, 0.1, 0.5, 2.0)  # from a submit until something befalls
AWAY: tuple[Kind, ...] = ("sever", "sever", "sever", "cut", "cut_one_way")
AWAY_S = (0.3, 1.0, 2.0, 3.0, 4.5, 7.0, 12.0)
ALONE: tuple[Kind, ...] = ("pause", "slow", "reset_all", "flap", "crash", "drain", "twice", "leave", "hang")
THEN: dict[str, tuple[Kind, ...]] = {
    "client": ("crash", "crash", "pause"),
    "controller": ("crash", "crash", "leave", "pause"),
    "node": ("crash", "drain", "twice", "twice", "hang", "pause"),
    "broker": ("crash", "pause"),
}
THEN_S = (0.001, 0.02, 0.3, 1.0, 1.5, 2.5)


def draw_crowded(seed: int) -> Spec:
    """Return the trial of `seed`."""
    rng = random.Random(f"{seed} crowded")
    spec = draw_small(seed)
    step_s, tokens = rng.choice(PACES)
    settings = [each for each in spec.settings if each[0] not in ("lease_s", "client_requests")]
    settings += [("lease_s", rng.choice((1.0, 1.0, 1.0, 2.0)))]
    settings += [("client_requests", rng.choice((1, 2)))] if rng.random() < 0.2 else []
    spec = replace(
        spec, tcp=True, hosts=3, nodes=draw_nodes(spec.paired, 3, rng), settings=tuple(settings), kv_tokens=1024,
        max_running=rng.choice((1, 1, 2, 4)), chunk_tokens=64, step_s=step_s, hwm=rng.choice((10_000, 10_000, 3)),
        kernel=rng.choice((KERNEL, 0)), fickle=rng.random() < 0.6, busy_s=rng.choice((4.0, 8.0)),
    )  # fmt: skip
    if rng.random() < 0.15:  # queues of connections are full before the credit of ranks is used up
        spec = replace(spec, hwm=3, kernel=0, max_running=4)
    if spec.paired and spec.hwm == 3:  # a KV cache leaves at once, and what there is no room for takes seconds
        spec = replace(spec, kernel=KERNEL)
    spec = replace(spec, requests=_requests(spec, tokens, rng))
    faults = [fault for _ in range(rng.choice((1, 1, 2))) for fault in _befalls(spec, rng)]
    faults += _shut_off(spec, rng) if rng.random() < 0.12 else []
    spec = replace(spec, faults=tuple(sorted(faults, key=lambda fault: fault.at_s)))
    return _otherwise(spec, random.Random(f"{seed} crowded again"))


def _otherwise(spec: Spec, rng: random.Random) -> Spec:
    """Return the trial with other faults, in a few worlds: none, while callers give up what waits; a controller that is
    away from all nodes for a moment, while callers give up; or one that loses a client while nodes are killed."""
    kind, request = rng.random(), rng.choice(spec.requests)
    requests, faults = list(spec.requests), list[Fault]()
    nodes, controller = [node.name for node in spec.nodes], f"controller-{request.controller}"
    at_s = request.at_s + rng.choice((0.05, 0.3, 1.0)) * rng.uniform(0.5, 1.5)
    if kind > 0.24:
        return spec
    if kind < 0.08:
        for each in spec.requests:
            requests[each.number] = replace(each, cancel_s=rng.choice((0.0, rng.uniform(1.0, 5.0))), deadline_s=0.0)
    elif kind < 0.16:
        faults = [Fault(round(at_s, 6), "sever", controller, rng.uniform(0.3, 1.0), node) for node in nodes]
        for each in spec.requests:
            if each.at_s < at_s and rng.random() < 0.5:
                requests[each.number] = replace(each, cancel_s=at_s - each.at_s + rng.uniform(0.001, 0.2))
    else:
        faults = [Fault(round(at_s, 6), "sever", f"client-{request.client}", rng.uniform(3.0, 8.0), controller)]
        some = rng.sample(nodes, rng.randint(1, len(nodes)))
        faults += [Fault(round(at_s + rng.uniform(0.0, 2.0), 6), "crash", node) for node in some]
    return replace(spec, requests=tuple(requests), faults=tuple(sorted(faults, key=lambda fault: fault.at_s)))


def _requests(spec: Spec, tokens: tuple[int, ...], rng: random.Random) -> tuple[RequestSpec, ...]:
    apart = spec.paired and spec.controllers > 1 and rng.random() < 0.3
    begins = [rng.uniform(0.6, 3.0) for _ in range(rng.choice((1, 2, 2)))]
    times = sorted(
        rng.choice(begins) + rng.choice((0.0, 0.3, 1.0)) * rng.random()
        for _ in range(rng.randint(3, 10) * spec.max_running // 2 + 2)
    )
    requests: list[RequestSpec] = []
    for number, at_s in enumerate(times):
        controller, odd = rng.randrange(spec.controllers), rng.random()
        requests.append(
            RequestSpec(
                number, round(at_s, 6), rng.randrange(spec.clients), controller,
                tuple(rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 40))), rng.choice(tokens),
                cancel_s=round(rng.choice((0.3, 1.0, 3.0, 6.0)) * rng.random() + 0.001, 6) if odd < 0.3 else 0.0,
                deadline_s=rng.choice((1.0, 3.0)) if odd > 0.9 else 0.0,
                prefill_controller=(controller + 1) % spec.controllers if apart and rng.random() < 0.6 else -1,
            )
        )  # fmt: skip
    return tuple(requests)


def _befalls(spec: Spec, rng: random.Random) -> list[Fault]:
    """Return what befalls about a moment of one request: a process alone, or one and several that it speaks with; and
    what follows."""
    request = rng.choice(spec.requests)
    at_s = max(0.6, request.at_s + rng.choice(MOMENTS_S) * rng.uniform(0.7, 1.3))
    kinds, nodes = spec.kinds, [node.name for node in spec.nodes]
    client, controller = f"client-{request.client}", f"controller-{request.controller}"
    if rng.random() < 0.3:
        kind = rng.choice(ALONE)
        who = rng.choice((client, controller, "broker", *nodes))
        if kind in ("drain", "twice", "hang") and kinds[who] != "node":
            who = rng.choice(nodes)
        who = controller if kind == "leave" else who
        return [Fault(round(at_s, 6), kind, who, _for_s(rng), much=rng.choice((0.2, 1.0)))]
    speaks = {
        client: [controller, *nodes], controller: [client, *nodes, "broker"], "broker": [controller, *nodes],
        **{node: [controller, controller, client, "broker", *nodes] for node in nodes},
    }  # fmt: skip
    who = rng.choice((controller, controller, controller, "broker", client, *nodes))
    if rng.random() < 0.25:  # all of them
        faults = [Fault(round(at_s, 6), "pause", who, _for_s(rng))]
        return faults + _then(kinds, (who, *nodes), at_s, rng)
    others = list(dict.fromkeys(rng.choice(speaks[who]) for _ in range(rng.choice((1, 2, 2, 3)))))
    faults = [
        Fault(round(at_s + rng.choice((0.0, 0.0005, 0.02)) * rng.random(), 6), rng.choice(AWAY), *pair)
        for pair in ((who, _for_s(rng), other) for other in others if other != who)
    ]
    return faults + _then(kinds, (who, who, *others, *nodes), at_s, rng)


def _then(kinds: dict[str, str], victims: tuple[str, ...], at_s: float, rng: random.Random) -> list[Fault]:
    if rng.random() < 0.4:
        return []
    who = rng.choice(victims)
    at_s += rng.choice(THEN_S) * rng.uniform(0.7, 1.3)
    return [Fault(round(at_s, 6), rng.choice(THEN[kinds[who]]), who, _for_s(rng))]


def _shut_off(spec: Spec, rng: random.Random) -> list[Fault]:
    """Return how a controller loses a client, as it takes a request of it, and all nodes but one, and is killed and
    started again before they are back: first nodes, then the client."""
    request = rng.choice(spec.requests)
    controller, at_s = f"controller-{request.controller}", request.at_s + rng.uniform(0.0004, 0.002)
    faults = [Fault(round(at_s, 6), "cut", f"client-{request.client}", rng.uniform(5.0, 8.0), controller)]
    nodes = [node.name for node in spec.nodes]
    for node in rng.sample(nodes, max(1, len(nodes) - 1)):
        faults.append(Fault(round(at_s + rng.uniform(0.0, 0.02), 6), "sever", controller, rng.uniform(2.0, 4.5), node))
    return [*faults, Fault(round(at_s + rng.uniform(1.0, 2.5), 6), "crash", controller)]


def _for_s(rng: random.Random) -> float:
    return round(rng.choice(AWAY_S) * rng.uniform(0.7, 1.3), 6)

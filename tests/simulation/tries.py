"""Worlds of many tries: small ones in which what is tried again fails again, or is forgotten.

In some, steps fail and KV blocks arrive damaged, often enough to use up the tries of a submit. In others a controller
has tried a request again while its client does not hear of it, is killed, and gets from the client the submit that came
first. In the rest it is killed while ranks that run the request are away, and these come back when it runs elsewhere.
"""

from __future__ import annotations

import random
from dataclasses import replace

from simulation.small import draw_nodes, draw_small
from simulation.spec import Fault, NodeSpec, RequestSpec, Spec

AWAY_S = (0.3, 0.6, 1.0)


def draw_tries(seed: int) -> Spec:
    """Return the trial of `seed`."""
    rng = random.Random(f"{seed} tries")
    spec = draw_small(seed)
    spec = replace(spec, tcp=True, hosts=3, nodes=draw_nodes(spec.paired, 3, rng), step_s=rng.choice((0.005, 0.05)))
    spec = rng.choice((_fails_again, _is_forgotten, _comes_late))(spec, rng)
    return replace(spec, faults=tuple(sorted(spec.faults, key=lambda fault: fault.at_s)))


def _fails_again(spec: Spec, rng: random.Random) -> Spec:
    """Return the trial with steps that fail, and in pairs with KV blocks that are damaged or lost, about the time of a
    few requests."""
    faults: list[Fault] = []
    for request in rng.sample(spec.requests, min(len(spec.requests), rng.choice((1, 2, 3)))):
        for node in spec.nodes:
            for _ in range(rng.choice((0, 1, 2, 3))):
                at_s = max(0.6, request.at_s + rng.choice((-0.1, 0.0, 0.01, 0.1)) * rng.random())
                kinds = ("fail_steps", "fail_steps", "damage", "drop") if node.role == "prefill" else ("fail_steps",)
                faults.append(Fault(round(at_s, 6), rng.choice(kinds), node.name, rng.choice((0.5, 2.0, 8.0))))  # type: ignore[arg-type]
    return replace(spec, faults=tuple(faults))


def _is_forgotten(spec: Spec, rng: random.Random) -> Spec:
    """Return the trial with a short request whose client does not hear its controller for seconds. Its first try fails
    at a step, or on its way, and its controller is killed when a later one may have ended."""
    spec, request = _plain_one(spec, rng.choice(spec.requests).number, rng.choice((1, 2, 5)))
    controller, at_s = f"controller-{request.controller}", max(0.6, request.at_s)
    faults = [_does_not_hear(request, at_s, rng)]
    for node in spec.nodes:
        if rng.random() < 0.7:
            faults.append(Fault(round(at_s + rng.uniform(-0.02, 0.002), 6), "fail_steps", node.name))
        else:
            faults.append(
                Fault(round(at_s + rng.uniform(0.0, 0.002), 6), "sever", controller, rng.choice(AWAY_S), node.name)
            )
    faults.append(Fault(round(at_s + rng.uniform(0.3, 2.5), 6), "crash", controller))
    return replace(spec, faults=tuple(faults))


def _comes_late(spec: Spec, rng: random.Random) -> Spec:
    """Return the trial with a long request whose client does not hear its controller for seconds. That loses half of
    its nodes, once they may have the request, and is killed; they are away for longer than it."""
    roles = ("prefill", "decode") if spec.paired else ("unified",)
    nodes = tuple(
        NodeSpec(f"{role}-{n}", f"h{rng.randrange(3)}", role, role, 2, n, 1) for role in roles for n in range(2)
    )
    spec, request = _plain_one(
        replace(spec, nodes=nodes, step_s=0.05), rng.choice(spec.requests).number, rng.choice((80, 150))
    )
    controller, at_s = f"controller-{request.controller}", max(0.6, request.at_s)
    faults = [_does_not_hear(request, at_s, rng)]
    gone_s = at_s + rng.uniform(0.005, 0.1)
    for node in [node for node in nodes if node.first == 0]:
        faults.append(Fault(round(gone_s, 6), "sever", controller, rng.uniform(2.0, 6.0), node.name))
    faults.append(Fault(round(gone_s + rng.uniform(0.001, 1.0), 6), "crash", controller))
    return replace(spec, faults=tuple(faults))


def _plain_one(spec: Spec, number: int, max_tokens: int) -> tuple[Spec, RequestSpec]:
    """Return the trial with one of its requests changed: its client does not give it up, and no other request has its
    rid."""
    requests = list(spec.requests)
    requests[number] = replace(
        requests[number], rid="", max_tokens=max_tokens, cancel_s=0.0, deadline_s=0.0, prefill_controller=-1
    )
    return replace(spec, requests=tuple(requests)), requests[number]


def _does_not_hear(request: RequestSpec, at_s: float, rng: random.Random) -> Fault:
    """Return how the request's client hears nothing of its controller, or late, from before its submit on."""
    client, controller = f"client-{request.client}", f"controller-{request.controller}"
    if rng.random() < 0.3:
        return Fault(round(at_s - 0.01, 6), "slow", client, rng.uniform(1.0, 4.0), much=2.0)
    return Fault(round(at_s - 0.01, 6), "cut_one_way", controller, rng.uniform(1.0, 6.0), client)

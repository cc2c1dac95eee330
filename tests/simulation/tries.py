"""Worlds of many tries: small ones in which what is tried again fails again, or is forgotten.

In some, steps fail and KV blocks arrive damaged, often enough to use up the tries of a submit. In the others a
controller has tried a request again while its client does not hear of it, is killed, and gets from the client the
submit that came first.
"""

from __future__ import annotations

import random
from dataclasses import replace

from simulation.small import draw_nodes, draw_small
from simulation.spec import Fault, Spec

AWAY_S = (0.3, 0.6, 1.0)


def draw_tries(seed: int) -> Spec:
    """Return the trial of `seed`."""
    rng = random.Random(f"{seed} tries")
    spec = draw_small(seed)
    spec = replace(spec, tcp=True, hosts=3, nodes=draw_nodes(spec.paired, 3, rng), step_s=rng.choice((0.005, 0.05)))
    befalls = _fails_again if rng.random() < 0.4 else _is_forgotten
    spec = befalls(spec, rng)
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
    requests = list(spec.requests)
    request = rng.choice(requests)
    request = requests[request.number] = replace(
        request, rid="", max_tokens=rng.choice((1, 2, 5)), cancel_s=0.0, deadline_s=0.0, prefill_controller=-1
    )
    client, controller = f"client-{request.client}", f"controller-{request.controller}"
    at_s = max(0.6, request.at_s)
    away = rng.choice(("cut_one_way", "cut_one_way", "slow"))
    if away == "slow":
        faults = [Fault(round(at_s - 0.01, 6), "slow", client, rng.uniform(1.0, 4.0), much=2.0)]
    else:
        faults = [Fault(round(at_s - 0.01, 6), "cut_one_way", controller, rng.uniform(2.0, 6.0), client)]
    for node in spec.nodes:
        if rng.random() < 0.7:
            faults.append(Fault(round(at_s + rng.uniform(-0.02, 0.002), 6), "fail_steps", node.name))
        else:
            faults.append(
                Fault(round(at_s + rng.uniform(0.0, 0.002), 6), "sever", controller, rng.choice(AWAY_S), node.name)
            )
    faults.append(Fault(round(at_s + rng.uniform(0.3, 2.5), 6), "crash", controller))
    return replace(spec, requests=tuple(requests), faults=tuple(faults))

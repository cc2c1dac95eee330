"""Tight worlds: small ones in which what befalls meets a request at a moment of its life.

Each fault comes within milliseconds of a submit, a dispatch, a first token, or an end, to a process that the request
passes or to the way between two, and others follow it before all is mended. Callers give up and use rids again at such
moments, too.
"""

from __future__ import annotations

import random
from dataclasses import replace

from simulation.small import BETWEEN, HOT, LATE_S, draw_small
from simulation.spec import OVER_TCP, Fault, Kind, RequestSpec, Spec

SUBMIT_S = (-0.02, -0.002, 0.0, 0.0005, 0.001, 0.002, 0.01, 0.1)  # from a submit until a fault
THEN_S = (0.001, 0.01, 0.1, 0.5, 1.5)  # and from that until the next
LASTS_S = (0.3, 1.0, 2.0, 4.0, 8.0, 12.0)
ALSO: tuple[Kind, ...] = ("drain", "fail_steps", "hang", "twice", "drop", "slow", "slow")
OF_NODES = ("drain", "fail_steps", "hang", "twice", "drop")


def draw_tight(seed: int) -> Spec:
    """The trial of `seed`: that of a small world with other faults, and some of its requests changed."""
    rng = random.Random(f"{seed} tight")
    spec = draw_small(seed)
    spec = replace(spec, hwm=rng.choice((spec.hwm, spec.hwm, 3)), fickle=rng.random() < 0.8)
    requests, faults = list(spec.requests), list[Fault]()
    kinds = [kind for kind in (*HOT, *rng.sample(ALSO, 2)) if spec.tcp or kind not in OVER_TCP]
    kinds = rng.sample(kinds, rng.choice((1, 2, 3)))
    for _ in range(rng.choice((1, 2, 3))):
        request = rng.choice(requests)
        at_s = max(0.6, request.at_s + _moment(spec, request, rng))
        for _ in range(rng.choice((1, 1, 2, 3))):
            fault = _fault(spec, request, round(at_s, 6), rng.choice(kinds), rng)
            faults += [fault] if fault is not None else []
            at_s += rng.choice(THEN_S) * rng.uniform(0.5, 1.5)
        if rng.random() < 0.3:
            requests[request.number] = replace(request, cancel_s=max(0.001, round(at_s - request.at_s, 6)))
        if rng.random() < 0.4:
            requests.append(_namesake(spec, requests, request.number, rng))
    faults.sort(key=lambda fault: fault.at_s)
    return replace(spec, requests=tuple(requests), faults=tuple(faults))


def _moment(spec: Spec, request: RequestSpec, rng: random.Random) -> float:
    """Return a moment of its life: about its submit, in its stream, or about its end if all goes well."""
    lasts_s = spec.step_s * (len(request.prompt) / spec.chunk_tokens + request.max_tokens + 1)
    return rng.choice(SUBMIT_S) * rng.uniform(0.5, 1.5) + rng.choice((0.0, 0.0, lasts_s * rng.random(), lasts_s))


def _namesake(spec: Spec, requests: list[RequestSpec], number: int, rng: random.Random) -> RequestSpec:
    """Give the request a rid, and return another one of it, which comes while it runs or about its end."""
    request = requests[number]
    if not request.rid:
        request = requests[number] = replace(request, rid=f"tight-{number}")
    at_s = request.at_s + max(0.001, _moment(spec, request, rng) + rng.choice((0.0, 0.0, 1.0)))
    client = rng.choice((request.client, rng.randrange(spec.clients)))
    prompt = request.prompt if rng.random() < 0.5 else (*request.prompt[:-1], 7, 8)
    return replace(
        request, number=len(requests), at_s=round(at_s, 6), client=client, controller=rng.randrange(spec.controllers),
        prompt=prompt, prefill_controller=-1, cancel_s=0.0,
    )  # fmt: skip


def _fault(spec: Spec, request: RequestSpec, at_s: float, kind: Kind, rng: random.Random) -> Fault | None:
    """Return a fault of a process that the request passes, or of the way between two; None if both ends were drawn
    alike."""
    nodes = [node.name for node in spec.nodes]
    controllers = [f"controller-{request.controller}", f"controller-{max(0, request.prefill_controller)}"]
    client, controller, node = f"client-{request.client}", rng.choice(controllers), rng.choice(nodes)
    ways = [(client, controller), (controller, node), (controller, node), (client, node), (node, rng.choice(nodes)),
            ("broker", node)]  # fmt: skip
    for_s = round(rng.choice(LASTS_S) * rng.uniform(0.7, 1.3), 6)
    if kind in BETWEEN:
        who, other = rng.choice(ways)
        if who == other:
            return None
        who, other = (other, who) if kind == "cut_one_way" and rng.random() < 0.5 else (who, other)
        return Fault(at_s, kind, who, for_s, other)
    if kind in OF_NODES:
        return Fault(at_s, kind, node, for_s)
    if kind == "leave":
        return Fault(at_s, kind, controller, for_s)
    who = rng.choice((client, controller, controller, node, node))
    return Fault(at_s, kind, who, for_s, much=rng.choice(LATE_S))

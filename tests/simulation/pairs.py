"""Small worlds in which two kinds of faults meet: each seed has the next pair of all kinds there are."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

from simulation.small import draw_fault, draw_nodes, draw_small
from simulation.spec import FAULTS, Spec

PAIRS = tuple(combinations(FAULTS, 2))
THEN_S = (0.001, 0.1, 1.0, 3.0)  # from the first of both until the second


def draw_pairs(seed: int) -> Spec:
    """Return the trial of `seed`: its pair comes once or twice, after one fault of the small world at most."""
    rng = random.Random(f"{seed} pairs")
    kinds = list(PAIRS[seed % len(PAIRS)])
    spec = draw_small(seed)
    spec = replace(spec, tcp=True, hosts=3, nodes=draw_nodes(spec.paired, 3, rng), keyed="revoke" in kinds)
    names = {node.name for node in spec.nodes}
    faults = [each for each in spec.faults[:1] if each.kind == "clock" or {each.who, each.other} <= {*names, ""}]
    roles = spec.kinds
    for _ in range(rng.choice((1, 1, 2))):
        rng.shuffle(kinds)
        victims = rng.sample(list(roles), 2)
        at_s = rng.uniform(0.6, spec.busy_s)
        for kind in kinds:
            fault = draw_fault(spec, round(at_s, 6), kind, victims, roles, rng)
            faults += [fault] if fault is not None else []
            at_s += rng.choice(THEN_S) * rng.uniform(0.5, 1.5)
    ends = [fault.at_s + fault.for_s for fault in faults if fault.kind == "revoke"]
    return replace(spec, faults=tuple(sorted(faults, key=lambda fault: fault.at_s)), busy_s=max([spec.busy_s, *ends]))

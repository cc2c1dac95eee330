"""Worlds with a request that kills its ranks: small ones, in some of which nothing else befalls anybody.

Its process dies in the step that computes a certain token of its output, or its prompt, wherever it runs; and where
later ranks begin with that token, in prefill. What others run there is lost with it.
"""

from __future__ import annotations

import random
from dataclasses import replace

from simulation.small import draw_nodes, draw_small
from simulation.spec import Spec

TOKENS = (0, 0, 1, 2, 5)  # of its output, before the one that kills


def draw_killers(seed: int) -> Spec:
    """Return the trial of `seed`."""
    rng = random.Random(f"{seed} killers")
    spec = draw_small(seed)
    nodes = draw_nodes(spec.paired, spec.hosts, rng)
    spec = replace(spec, nodes=nodes, faults=spec.faults if rng.random() < 0.4 else ())
    deadly = rng.sample(range(len(spec.requests)), min(len(spec.requests), rng.choice((1, 1, 2))))
    requests = list(spec.requests)
    for number in deadly:
        kills_at = rng.choice(TOKENS)
        requests[number] = replace(
            requests[number], kills_at=kills_at, max_tokens=kills_at + rng.choice((1, 5)), rid="", cancel_s=0.0,
            deadline_s=0.0, prefill_controller=-1,
        )  # fmt: skip
    return replace(spec, requests=tuple(requests))

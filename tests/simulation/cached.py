"""Worlds of conversations: decode ranks keep KV caches, and compute prompts where a method or the controller says so;
most prompts begin with what an earlier request had."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count

from bus.wire.messages import Submit
from controller.load.rank import RankLoad
from controller.policies.least_cost import LeastCost
from simulation.small import draw_small
from simulation.spec import VOCAB, RequestSpec, Spec, draw

READS = f"{__name__}:Reads"
LONGEST = 120  # tokens of a prompt


class Reads(LeastCost):
    """What decode has is read back however little it is: prompts are short here."""

    def read_back(self, rank: RankLoad, prefill: RankLoad, request: Submit) -> bool:
        return True


def draw_cached(seed: int) -> Spec:
    """Return the trial of `seed`: a large or a small world of pairs."""
    rng = random.Random(f"{seed} cached")
    worlds = draw_small if rng.random() < 0.7 else draw
    spec = next(each for each in map(worlds, count(seed * 1_000)) if each.paired)
    settings = dict(spec.settings) | {"prefill_method": rng.choice(("cache_aware", "total_tokens"))}
    settings["decode_method"] = rng.choice(("least_cost", READS, READS, "cache_aware", "total_requests"))
    settings["prefill_at"] = rng.choice(("auto", "auto", "auto", "decode", "prefill"))
    return replace(
        spec, seed=seed, decode_cache=True, settings=tuple(settings.items()), kv_tokens=rng.choice((256, 1024)),
        requests=_turns(spec.requests, rng),
    )  # fmt: skip


def _turns(requests: tuple[RequestSpec, ...], rng: random.Random) -> tuple[RequestSpec, ...]:
    """Return the requests, of which most go on where an earlier one ended its prompt."""
    turns: list[RequestSpec] = []
    for request in requests:
        prompt = request.prompt
        if turns and rng.random() < 0.7:
            before = rng.choice(turns[-6:]).prompt
            new = tuple(rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 12)))
            prompt = (*before, *new)[:LONGEST]
        turns.append(replace(request, prompt=prompt))
    return tuple(turns)

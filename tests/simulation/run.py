"""`make simulate SEEDS=0:200`: trials by seed, their rate, and of each break a minimized schedule and its story.

A campaign keeps its state in a file (`--state`) and goes on where it was: seeds, hours, what befell, which transitions
the cores made, and which pairs of faults met in one trial (`--tables`).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, TypeAlias

from simulation.broken import Broken
from simulation.cached import draw_cached
from simulation.crowded import draw_crowded
from simulation.killers import draw_killers
from simulation.pairs import draw_pairs
from simulation.small import draw_small
from simulation.spec import FAULTS, Spec, draw
from simulation.story import told
from simulation.tight import draw_tight
from simulation.transitions import MAY_BE, SEP, Transition, line_of, never, watched
from simulation.tries import draw_tries
from simulation.world import World

How: TypeAlias = Literal[
    "", "plain", "guests", "policies", "small", "tight", "crowded", "tries", "pairs", "killers", "cached", "mixed"
]
MIXED: tuple[How, ...] = ("tight", "crowded", "tries", "pairs", "killers", "small", "guests", "")
DRAWS: dict[str, Callable[[int], Spec]] = {
    "small": draw_small,
    "tight": draw_tight,
    "crowded": draw_crowded,
    "tries": draw_tries,
    "pairs": draw_pairs,
    "killers": draw_killers,
    "cached": draw_cached,
}
MEET_S = 5.0  # two faults have met when one began so soon after the other
TRIES = 150  # of smaller schedules, to minimize one


def spec_for(seed: int, how: How = "") -> Spec:
    """Return the trial of `seed` in a world of this kind."""
    if how == "mixed":
        how = MIXED[seed % len(MIXED)]
    if how in DRAWS:
        return DRAWS[how](seed)
    return draw(seed, how != "plain", how == "guests", how == "policies")


def trial(spec: Spec, hears: Callable[..., None] | None = None) -> tuple[World, BaseException | None]:
    """Run a trial; return the world as it was at the end, and what broke. `hears(world, pipe, frames)` is told of each
    message."""
    world = World(spec)
    if hears is not None:
        world.network.on_message = partial(hears, world)
    try:
        world.run()
    except Exception as error:
        return world, error
    return world, None


def name_of(error: BaseException) -> str:
    """Return what broke, whatever the numbers: the law, or the place of an exception."""
    if isinstance(error, Broken):
        words = re.findall(r"(?<!\S)[a-z]+(?!\S)", str(error)) if error.law == "at rest" else []  # no names, no numbers
        return " ".join(["at rest", *words[2:]]) if words else error.law
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f"{trace.tb_frame.f_code.co_qualname}:{trace.tb_lineno}" if trace is not None else ""
    return f"{type(error).__name__} in {where}"


def minimized(spec: Spec, name: str) -> Spec:
    """Return the trial with as few faults and requests as TRIES trials show to break in the same way."""
    tries = 0

    def breaks(smaller: Spec) -> bool:
        nonlocal tries
        tries += 1
        error = trial(smaller)[1]
        return error is not None and name_of(error) == name

    def fewer(field: str) -> None:
        nonlocal spec
        size = max(1, len(getattr(spec, field)) // 2)
        while size and tries < TRIES:
            at = 0
            while at < len(whole := getattr(spec, field)) and tries < TRIES:
                smaller = replace(spec, **{field: (*whole[:at], *whole[at + size :])})
                if breaks(smaller):
                    spec = smaller
                else:
                    at += size
            size //= 2

    fewer("faults")
    fewer("requests")
    fewer("nodes")
    fewer("faults")
    return spec


def _one(how: How, seed: int) -> dict[str, Any]:
    began = time.process_time()
    spec = spec_for(seed, how)
    with watched() as met:
        world, error = trial(spec)
    pairs = {tuple(sorted((a.kind, b.kind))) for a, b in combinations(spec.faults, 2) if abs(a.at_s - b.at_s) < MEET_S}
    return {
        "seed": seed, "simulated_s": world.now, "cpu_s": time.process_time() - began, "counts": dict(world.counts),
        "pairs": [list(pair) for pair in pairs], "transitions": {SEP.join(each): n for each, n in met.items()},
        "broke": "" if error is None else name_of(error), "what": "" if error is None else str(error)[:500],
    }  # fmt: skip


def _all(seeds: Iterable[int], jobs: int, how: How) -> Iterator[dict[str, Any]]:
    one = partial(_one, how)
    if jobs == 1:
        yield from map(one, seeds)
        return
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap_unordered(one, seeds)


def _seeds(text: str) -> range:
    first, colon, last = text.partition(":")
    return range(int(first), int(last)) if colon else range(int(first), int(first) + 1)


def main() -> None:
    if os.environ.get("PYTHONHASHSEED") != "0":  # the same trial again in another process
        os.execve(sys.executable, sys.orig_argv, os.environ | {"PYTHONHASHSEED": "0"})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", type=_seeds, help="one, or from:to")
    parser.add_argument("--cpu-s", type=float, default=float("inf"), help="stop after so many CPU seconds")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--state", type=Path, help="a campaign's: what it names is not run again")
    parser.add_argument("--first", action="store_true", help="stop at the first that breaks, and tell no more of it")
    kinds = parser.add_mutually_exclusive_group()
    for kind, what in (
        ("plain", "without troubles: what old seeds meant"),
        ("guests", "with what others embed: dispatchers, resolvers, links"),
        ("policies", "with policies that raise and answer nonsense, and unified ranks beside pairs"),
        ("small", "small worlds, where faults meet often"),
        ("tight", "small worlds whose faults meet a request at a moment of its life"),
        ("crowded", "small worlds of full ranks and long requests, whose processes lose several others at once"),
        ("tries", "small worlds in which what is tried again fails again, or is forgotten"),
        ("pairs", "small worlds in which two kinds of faults meet, each seed the next pair of all"),
        ("killers", "small worlds with a request that kills its ranks"),
        ("cached", "conversations, whose decode ranks keep KV caches and compute prompts"),
        ("mixed", "all but the plain ones, those with policies and conversations, in turn"),
    ):
        kinds.add_argument(f"--{kind}", dest="how", action="store_const", const=kind, default="", help=what)
    parser.add_argument("--tables", action="store_true", help="list transitions and pairs of faults, met and never met")
    parser.add_argument("--story", action="store_true", help="tell what happened, break or not")
    options = parser.parse_args()
    state = _State(options.state)
    how: How = options.how
    left = [seed for seed in options.seeds if not state.has(seed)]
    for done in _all(left, options.jobs, how):
        state.add(done)
        if done["broke"]:
            print(f"seed {done['seed']}: {done['broke']}: {done['what']}", flush=True)
            if options.first:
                sys.exit(1)
        if state.tally["cpu_s"] > options.cpu_s:
            break
    print(state.summary())
    if options.tables:
        print("\n".join(state.tables()))
    for broken in state.tally["broken"][:3]:
        if len(left) == 1 or not options.state:
            _tell(spec_for(broken["seed"], how), broken["broke"])
    if options.story and len(left) == 1 and not state.tally["broken"]:
        print("\n".join(told(spec_for(left[0], how), "")))
    sys.exit(1 if state.tally["broken"] else 0)


def _tell(spec: Spec, name: str) -> None:
    spec = minimized(spec, name)
    print(f"\nseed {spec.seed}, minimized: {name}")
    for node in spec.nodes:
        print(f"  {node}")
    for each in (*spec.requests, *spec.faults):
        print(f"  {each}")
    error = trial(spec)[1]
    print("\n".join(told(spec, error.rid if isinstance(error, Broken) else "")[-80:]))
    print(f"  {error}")


class _State:
    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.tally: dict[str, Any] = {"done": 0, "next": 0, "simulated_s": 0.0, "cpu_s": 0.0, "counts": {}, "pairs": {},
                                      "transitions": {}, "broken": []}  # fmt: skip
        self._ahead: set[int] = set()
        if path is not None and path.exists():
            self.tally |= json.loads(path.read_text())

    def has(self, seed: int) -> bool:
        return seed < self.tally["next"]

    def add(self, done: dict[str, Any]) -> None:
        tally = self.tally
        tally["done"] += 1
        for name in ("simulated_s", "cpu_s"):
            tally[name] += done[name]
        for name in ("counts", "transitions"):
            tally[name] = dict(Counter(tally[name]) + Counter(done[name]))
        for pair in done["pairs"]:
            tally["pairs"]["+".join(pair)] = tally["pairs"].get("+".join(pair), 0) + 1
        if done["broke"]:
            tally["broken"].append({name: done[name] for name in ("seed", "broke", "what")})
        self._ahead.add(done["seed"])
        if self._path is not None:
            tally["next"] = max(tally["next"], min(self._ahead))
            while tally["next"] in self._ahead:
                self._ahead.discard(tally["next"])
                tally["next"] += 1
            self._path.write_text(json.dumps(tally, indent=1))

    def summary(self) -> str:
        tally = self.tally
        rate = tally["simulated_s"] / max(tally["cpu_s"], 1e-9)
        counts = ", ".join(f"{name} {count}" for name, count in sorted(tally["counts"].items()))
        missed = self._pairs_missed()
        met = f"{len(tally['pairs'])} pairs of faults met" + (f", never: {', '.join(missed)}" if missed else "")
        holes = len(never(self._transitions()))
        return (
            f"{tally['done']} trials, {tally['simulated_s']:.0f} simulated s in {tally['cpu_s']:.0f} CPU s "
            f"({rate:.0f} a second), {len(tally['broken'])} broken\n{counts}\n{met}\n"
            f"{len(MAY_BE) - holes} of {len(MAY_BE)} transitions met"
        )

    def tables(self) -> Iterator[str]:
        """Return the lines of both tables."""
        transitions = self._transitions()
        for each, count in sorted(transitions.items()):
            yield f"{count:9} {line_of(each)}"
        for each in never(transitions):
            yield f"    never {line_of(each)}"
        for pair, count in sorted(self.tally["pairs"].items()):
            yield f"{count:9} {pair}"
        for pair in self._pairs_missed():
            yield f"    never {pair}"

    def _transitions(self) -> dict[Transition, int]:
        return {tuple(each.split(SEP)): count for each, count in self.tally["transitions"].items()}  # type: ignore[misc]

    def _pairs_missed(self) -> list[str]:
        pairs = self.tally["pairs"]
        return [f"{a}+{b}" for a, b in combinations(FAULTS, 2) if "+".join(sorted((a, b))) not in pairs]


if __name__ == "__main__":
    main()

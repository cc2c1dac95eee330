"""`make simulate-mutations`: looks for trials, in small worlds of each kind, that break under each mutation.

    python -m simulation.hunt                       # all: where they were found last, then seed after seed, until each
                                                    # is found or has cost --cpu-s
    python -m simulation.hunt orphans two-halves    # these
    python -m simulation.hunt --known               # each at the seed where it was found last

A trial that breaks unmutated is a defect, and finds nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from simulation.drawn import DRAWN
from simulation.mutation import Mutation
from simulation.mutations import MUTATIONS
from simulation.schemata import Switch, install


class Hunt:
    """`found` by name: law, seed, CPU seconds of all trials until then, its share of those that ran unmutated
    included; `spent` of those that are not found."""

    def __init__(self, mutations: list[Mutation], state: Path | None) -> None:
        self.mutations = mutations
        self.found: dict[str, dict[str, Any]] = {}
        self.spent: dict[str, float] = {}
        self.reached: dict[str, int] = {}
        self.totals = {"trials": 0, "simulated_s": 0.0, "cpu_s": 0.0}  # unmutated
        self.next = 0
        self._state = state
        if state is not None and state.exists():
            vars(self).update(json.loads(state.read_text()))

    def left(self, cpu_s: float) -> list[int]:
        """Numbers of those that are looked for yet."""
        return [
            number
            for number, each in enumerate(self.mutations)
            if each.name not in self.found and not each.unseen and self.spent.get(each.name, 0.0) < cpu_s
        ]

    def trial(self, seed: int, switch: Switch, wanted: list[int], how: Any) -> str:
        """Run one seed, and return what broke unmutated."""
        from simulation.run import name_of, spec_for, trial

        began = time.process_time()
        switch.begin(wanted)
        world, error = trial(spec_for(seed, how))
        broke = "" if error is None else f"{name_of(error)}: {error}"
        switch.says(broke)
        took_s = time.process_time() - began
        self.totals["trials"] += 1
        self.totals["simulated_s"] += world.now
        self.totals["cpu_s"] += took_s
        for number in wanted:
            name, outcome = self.mutations[number].name, switch.outcomes.get(number)
            self.spent[name] = self.spent.get(name, 0.0) + took_s + (outcome.cpu_s if outcome else 0.0)
            self.reached[name] = self.reached.get(name, 0) + (outcome is not None)
            if outcome is not None and outcome.broke and not broke:
                self.found[name] = {"law": outcome.broke, "seed": seed, "cpu_s": round(self.spent[name], 1)}
                print(f"{name}: seed {seed}, {self.spent[name]:.1f} CPU s: {outcome.broke[:160]}", flush=True)
        if self._state is not None:
            kept = {name: value for name, value in vars(self).items() if name not in ("mutations", "_state")}
            self._state.write_text(json.dumps(kept, indent=1))
        return broke


def main() -> None:
    if os.environ.get("PYTHONHASHSEED") != "0":  # the same trial again in another process
        os.execve(sys.executable, sys.orig_argv, os.environ | {"PYTHONHASHSEED": "0"})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of mutations; none: all")
    parser.add_argument("--cpu-s", type=float, default=600.0, help="for each mutation")
    parser.add_argument("--all-cpu-s", type=float, default=float("inf"), help="for all of them together")
    parser.add_argument("--from", dest="first", type=int, default=1)
    parser.add_argument(
        "--how",
        choices=("small", "tight", "crowded", "tries", "killers"),
        help="in these worlds; else in three kinds in turn",
    )
    parser.add_argument("--known", action="store_true", help="at the seeds where they were found, and nowhere else")
    parser.add_argument("--state", type=Path, help="of a hunt that goes on where it was")
    options = parser.parse_args()
    mutations = [each for each in (*MUTATIONS, *DRAWN) if not options.names or each.name in options.names]
    switch = install(mutations)
    hunt = Hunt(mutations, options.state)
    broken: list[str] = []
    known = sorted({(each.seed, each.how) for each in mutations if each.seed >= 0})
    for seed, how in known if not hunt.next else []:
        at = [number for number, each in enumerate(mutations) if (each.seed, each.how) == (seed, how)]
        if broke := hunt.trial(seed, switch, at, how):
            broken.append(f"seed {seed}: {broke}")
    while not options.known and (wanted := hunt.left(options.cpu_s)) and _cpu_s() < options.all_cpu_s:
        seed = max(options.first, hunt.next)
        hunt.next = seed + 1
        if broke := hunt.trial(seed, switch, wanted, options.how or ("tight", "crowded", "tries")[seed % 3]):
            broken.append(f"seed {seed}: {broke}")
            print(f"UNMUTATED {broken[-1][:400]}", flush=True)
    looked_for = [each for each in mutations if not each.unseen and (each.seed >= 0 or not options.known)]
    missed = [each.name for each in looked_for if each.name not in hunt.found]
    totals = hunt.totals
    print(
        f"{totals['trials']} trials unmutated, {totals['simulated_s']:.0f} simulated s in {totals['cpu_s']:.0f} CPU s; "
        f"{_cpu_s():.0f} CPU s in all"
    )
    for name in missed:
        print(f"not found: {name} ({hunt.reached.get(name, 0)} trials reached it, {hunt.spent.get(name, 0):.0f} CPU s)")
    print(f"{len(hunt.found)} found, {len(missed)} not, {len(broken)} broken unmutated")
    sys.exit(bool(missed or broken))


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


if __name__ == "__main__":
    main()

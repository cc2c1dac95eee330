"""`make scenarios`: each scenario of `scenarios.toml` in the simulation and with real processes, and both verdicts.

Real clusters are started once for each shape; each scenario leaves its own at rest."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from itertools import groupby
from pathlib import Path

import release_010

from simulation.processes import processes
from simulation.scenario import Play, Scenario, Stage, Verdict, scenarios, skews
from simulation.simulated import simulated


def verdict(scenario: Scenario, stage: Stage) -> Verdict:
    try:
        return Play(scenario, stage).run()
    except AssertionError as error:
        return Verdict({}, (str(error)[:500],))


def simulate(scenario: Scenario) -> Verdict:
    with simulated(scenario.shape) as stage:
        return verdict(scenario, stage)


def play_old(chosen: list[Scenario]) -> int:
    """Play scenarios with parts of release 0.1.0 among today's. Ends may differ there; each is one, with tokens of its
    own, and nothing is left. Return how many were not so."""
    of = release_010.commit()
    if not of:
        sys.exit("this checkout has no release 0.1.0")
    release, missed = release_010.packages(of), 0
    for old in skews():
        for shape, some in groupby(chosen, lambda each: each.shape):
            names = {"broker", *shape.controller_names(), *shape.nodes()}
            if shape.settings.keys() - {"lease_s"} or not set(old) <= names:
                continue  # settings that the release does not know
            with tempfile.TemporaryDirectory() as folder, processes(shape, Path(folder), old, release) as cluster:
                for scenario in some:
                    seen = verdict(scenario, cluster)
                    missed += bool(seen.odd)
                    said = "ok" if seen.codes == scenario.expect else f"{seen.codes}"
                    print(f"{seen.odd or said}  0.1.0: {' '.join(old)}; {shape.name}: {scenario.name}", flush=True)
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="of the names of those to play; none: all")
    parser.add_argument("--old", action="store_true", help="with parts of release 0.1.0 among today's")
    parser.add_argument("--each", type=int, default=1, help="with real processes only each of so many")
    options = parser.parse_args()
    chosen = [each for each in scenarios() if all(word in each.name for word in options.words)]
    chosen.sort(key=lambda each: each.shape.name)
    if options.old:
        sys.exit(bool(play_old(chosen)))
    missed = 0
    for shape, some in groupby(chosen, lambda each: each.shape):
        group = list(some)
        thoughts = {each.name: simulate(each) for each in group}
        for scenario in group:
            if thoughts[scenario.name] != Verdict(scenario.expect, ()):
                missed += 1
                print(f"NOT AS STATED  {scenario.name}: simulated: {thoughts[scenario.name]}", flush=True)
        real = group[:: options.each]
        with tempfile.TemporaryDirectory() as folder, processes(shape, Path(folder)) as cluster:
            for scenario in real:
                began = time.monotonic()
                seen = verdict(scenario, cluster)
                right = seen == Verdict(scenario.expect, ())
                missed += not right
                how = "ok" if right else f"NOT AS STATED: {seen}, stated: {scenario.expect}"
                print(f"{how}  {shape.name}: {scenario.name} ({time.monotonic() - began:.1f} s)", flush=True)
    print(f"{len(chosen)} scenarios, {missed} ends not as stated")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()

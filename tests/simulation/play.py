"""`make scenarios`: each scenario of `scenarios.toml` in the simulation and with real processes, and both verdicts.

Real clusters are started once for each shape; each scenario leaves its own at rest."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from itertools import groupby
from pathlib import Path

from simulation.processes import processes
from simulation.scenario import Play, Scenario, Stage, Verdict, scenarios
from simulation.simulated import simulated


def verdict(scenario: Scenario, stage: Stage) -> Verdict:
    try:
        return Play(scenario, stage).run()
    except AssertionError as error:
        return Verdict({}, (str(error)[:500],))


def simulate(scenario: Scenario) -> Verdict:
    with simulated(scenario.shape) as stage:
        return verdict(scenario, stage)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="of the names of those to play; none: all")
    options = parser.parse_args()
    chosen = [each for each in scenarios() if all(word in each.name for word in options.words)]
    chosen.sort(key=lambda each: each.shape.name)
    missed = 0
    for shape, some in groupby(chosen, lambda each: each.shape):
        group = list(some)
        thoughts = [simulate(each) for each in group]
        with tempfile.TemporaryDirectory() as folder, processes(shape, Path(folder)) as cluster:
            for scenario, thought in zip(group, thoughts, strict=True):
                began = time.monotonic()
                seen = verdict(scenario, cluster)
                right = thought == seen == Verdict(scenario.expect, ())
                missed += not right
                took_s = time.monotonic() - began
                print(f"{'ok' if right else 'NOT EQUAL'}  {shape.name}: {scenario.name} ({took_s:.1f} s)", flush=True)
                if not right:
                    print(
                        f"    simulated: {thought}\n    processes: {seen}\n    stated:    {scenario.expect}", flush=True
                    )
    print(f"{len(chosen)} scenarios, {missed} not as stated")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()

"""The command: which cuts run, and what became of them."""

from __future__ import annotations

import argparse
import os
import sys
import time

from cuts import Cut, registry
from cuts.chosen import base, choose
from cuts.run import GOOD, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m cuts", description=__doc__)
    parser.add_argument("ids", nargs="*", help="which promises; else all")
    since = "a git ref: those that changes since it touch, and a tenth by date; `ci`: since this branch left its base"
    parser.add_argument("--since", help=since)
    parser.add_argument("--at-once", type=int, default=2 + len(os.sched_getaffinity(0)))
    parser.add_argument("-v", action="store_true", help="show what pytest printed")
    given = parser.parse_args()
    cuts = [each for each in registry() if isinstance(each, Cut)]
    if unknown := set(given.ids) - {each.promise for each in cuts}:
        parser.error(f"no cut is called {', '.join(sorted(unknown))}")
    if given.ids:
        cuts = [each for each in cuts if each.promise in given.ids]
    elif given.since:
        cuts, why = choose(cuts, base() if given.since == "ci" else given.since)
        print(f"==> {len(cuts)} cuts: {why}")
    began, failed = time.monotonic(), 0
    for cut, said, text, took_s in run(cuts, given.at_once):
        good = said == GOOD
        failed += not good
        print(f"{cut.promise}  {cut.test}  [{took_s:.1f} s]{'' if good else f'  {said}'}", flush=True)
        if given.v or not good:
            print(text, flush=True)
    print(f"==> {len(cuts)} cuts, {failed} of them without the assertion that they should cause, "
          f"{time.monotonic() - began:.0f} s")  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

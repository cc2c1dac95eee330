"""Drops each stream at its sender, and demands that its test fails: by an assertion of its own, once all is over.

cut_streams.py [ENGINE ...] [--stream NAME ...] [--together]      without ENGINE: sim and numpy

One run of the scenario for each stream, or for some together. Where nothing else goes with a stream, every other test
still has to pass.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "plugin")]

from stream_record import Record, run  # noqa: E402
from stream_registry import ENGINES, NO_START, STREAMS, TOGETHER  # noqa: E402

START_S = 400.0
SOON = {
    "sim": 5.0,
    "sim-keys": 5.0,
    "numpy": 8.0,
    "torch": 20.0,
    "smollm2": 30.0,
    "vllm": 120.0,
}  # for a start that cannot succeed
WAIT_S = {"sim": 4.0, "sim-keys": 5.0, "numpy": 5.0, "torch": 10.0, "smollm2": 20.0, "vllm": 15.0}
AT_ONCE = {"sim": 3, "sim-keys": 2, "numpy": 2}


def tests_of(engine: str) -> ModuleType:
    if engine != "sglang":
        return import_module("test_streams")
    sys.path.append(str(HERE.parent / "real_sglang"))
    return import_module("test_sglang_streams")


def outcome(name: str, record: Record) -> str:
    """What the test of a stream says of a record: empty where it passes."""
    test = getattr(tests_of(record.engine), STREAMS[name].test)
    try:
        test(record)
    except AssertionError as error:
        (*_, last) = traceback.extract_tb(error.__traceback__)
        if last.filename == tests_of(record.engine).__file__:
            return str(error).partition("\n")[0] or last.line or "an assertion"
        return f"failed elsewhere: {last}"
    except Exception as error:
        return f"failed by {type(error).__name__}: {error}"
    return ""


def wrong(engine: str, names: Sequence[str], record: Record) -> list[str]:
    """What the cuts of these streams don't show; nothing where each is seen by its test, and no other one is there."""
    found = []
    for name in names:
        said = outcome(name, record)
        if name not in record.dropped:
            found.append(f"{name}: its sender {STREAMS[name].senders} dropped nothing")
        elif not said:
            found.append(f"{name}: {STREAMS[name].test} passes all the same")
        elif said.startswith("failed "):
            found.append(f"{name}: {STREAMS[name].test} {said}")
    if all(STREAMS[name].alone for name in names):
        others = sorted(ENGINES[engine] - {*names})
        found += [f"{other} fails, too: {why}" for other in others if (why := outcome(other, record))]
    return [*found, record.log[-3000:]] if found else []


def dropping(engine: str, model: str, names: tuple[str, ...]) -> Record:
    """A run without them. One that cannot begin is given up soon, and later on a machine that has not come so far."""
    if engine == "sglang":
        found: Record = tests_of(engine).run(names)
        return found
    start_s = SOON[engine] if {*names} & {*NO_START} else START_S
    while True:
        record = run(engine, cut=names, start_s=start_s, wait_s=WAIT_S[engine], model=model)
        if record.dropped or start_s >= START_S:
            return record
        start_s *= 3


def groups(engine: str, chosen: Sequence[str], together: bool) -> list[tuple[str, ...]]:
    """What is dropped in each run."""
    names = [name for name in STREAMS if name in ENGINES[engine] and name in (chosen or STREAMS)]
    found = [tuple(name for name in group if name in names) for group in TOGETHER] if together else []
    grouped = {name for group in found for name in group}
    return [group for group in found if group] + [(name,) for name in names if name not in grouped]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="*", metavar="ENGINE")
    parser.add_argument("--stream", action="append", choices=list(STREAMS), metavar="NAME", default=[])
    parser.add_argument("--together", action="store_true", help="several streams a run, where each keeps its occasion")
    parser.add_argument("--model", default="", help="a folder, for an engine that has no model of its own")
    asked = parser.parse_args()
    failed = 0
    for engine in asked.engines or ("sim", "sim-keys", "numpy"):
        began = time.monotonic()
        runs = groups(engine, asked.stream, asked.together)
        with ThreadPoolExecutor(AT_ONCE.get(engine, 1)) as pool:
            made = pool.map(partial(dropping, engine, asked.model), runs)
            for names, record in zip(runs, made, strict=True):
                for name in names:
                    print(f"{engine} {name}: {outcome(name, record)[:100]}", flush=True)
                if why := wrong(engine, names, record):
                    failed += 1
                    print(f"NOT SEEN, of {', '.join(names)}:", *why, sep="\n  ", flush=True)
        count = sum(map(len, runs))
        print(f"{engine}: {count} streams cut in {len(runs)} runs, {time.monotonic() - began:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

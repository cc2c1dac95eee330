"""What a history of fifteen minutes takes for so many ranks: prints its megabytes (the growth of the process's memory),
and the milliseconds of CPU that a second's sample takes. A process of its own measures it."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace
from status_world import latencies, rank

from bus.wire import codec
from bus.wire.messages import CONTROLLER_TO_CLIENT, RankStatus, Status
from bus.wire.status import RANKS_PER_MESSAGE
from pdbus.fleet.figures import Sample
from pdbus.fleet.history import RANK_ROW_S, SPAN_S, WINDOW_S, History

BIG = 2**40
SPREAD = latencies(*(0.0004 * 1.5**n for n in range(36) for _ in range(300)))


def busy(number: int, step: int) -> RankStatus:
    """A rank with counters of a long life, and latencies in all buckets."""
    names = ("prompt_tokens", "cached_tokens", "busy_us", "output_tokens", "admitted_tokens", "computed_tokens",
             "fetched_tokens", "fetch_us", "kv_sent_bytes", "kv_received_bytes")  # fmt: skip
    load = {f"{name}_total": BIG + 10_000 * step + number for name in names}
    load |= {"step": BIG + 10 * step, "kv_cached": 70_000 + number, "kv_pinned": 70_000, "fetches_total": BIG + step}
    return rank(
        f"decode-{number // 8}", number % 8, load=load, ttft_counts=SPREAD, tpot_counts=SPREAD,
        dispatched_total=BIG + step, ended_total=BIG + step, endpoint=f"tcp://10.0.0.{number % 200}:{40000 + number}",
    )  # fmt: skip


def samples(ranks: int) -> Iterator[Sample]:
    """A quarter of an hour: in steps of ten seconds, and the last window second by second."""
    frames = []
    for step in range(2):
        some = [busy(number, step) for number in range(ranks)]
        parts = [tuple(some[at : at + RANKS_PER_MESSAGE]) for at in range(0, ranks, RANKS_PER_MESSAGE)]
        counts = {"done": step, "requests": 9}
        frames.append([codec.encode(Status(1, "controller-0", 7, 1.0, {}, counts, part)) for part in parts])
    at, turn = 0.0, 0
    while at < SPAN_S + 2 * WINDOW_S:
        parts: list[Any] = [codec.decode(frame, CONTROLLER_TO_CLIENT) for frame in frames[turn % 2]]
        yield Sample(at, 1e9 + at, replace(parts[0], ranks=tuple(rank for part in parts for rank in part.ranks)))
        del parts
        at += RANK_ROW_S if at < SPAN_S else 1.0
        turn += 1


def resident_mb() -> float:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096 / 1e6


def main(ranks: int) -> None:
    made = samples(ranks)
    next(made)
    gc.collect()
    before, history, took, last = resident_mb(), History(), [], None
    for sample in made:
        began = time.process_time()
        history.add(sample)
        took.append(time.process_time() - began)
        last = sample
    del sample, last
    gc.collect()
    print(f"{resident_mb() - before:.1f} {1e3 * sorted(took)[len(took) // 2]:.1f} {len(history.rows)}")


if __name__ == "__main__":
    main(int(sys.argv[1]))

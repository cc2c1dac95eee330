"""`report`: decode, validate and apply one load report of 1,000 ranks, beside MessagePack decoding alone."""

from __future__ import annotations

import random
import time
from typing import Any

import msgpack  # the bare floor that our codec is held against; nothing is sent or believed here

from benchmarks.harness import Aim, Row, Scope, in_child, row
from benchmarks.pick import INSTANCE
from bus.wire import codec, topics
from bus.wire.messages import Ack, Load, LoadReport

RANKS = 1_000
HZ = 20.0
ROUNDS = 7
AIM_US = Aim(5.0, of_ratio=False)


def run(scope: Scope) -> list[Row]:
    """Called by `python -m benchmarks`: measure, which blocks for up to minutes, and return the rows."""
    scope.show(f"{RANKS:,} ranks, {scope.size(20, 4)} reports each")
    taken = in_child("report:measure", reports=scope.size(20, 4), rounds=scope.size(ROUNDS, 1))
    share = [us * RANKS * HZ / 1e4 for us in taken["ours"]]
    case = f"{RANKS:,} ranks"
    return [
        row(case, "decode, validate, apply", "µs", taken["ours"], taken["unpack"], AIM_US),
        row(case, f"share of a core at {HZ:g} Hz", "%", share),
    ]


def frames_of(ranks: int, first_seq: int, reports: int) -> list[tuple[bytes, bytes]]:
    """Return the publications (topic, frame) of `reports` rounds of load reports, as a PUB socket sends them: one of
    each rank in a round, in any order, with another load each time, numbered from `first_seq` on."""
    frames = []
    rng = random.Random(first_seq)
    for seq in range(first_seq, first_seq + reports):
        for dp_rank in rng.sample(range(ranks), ranks):
            running, tokens = rng.randrange(200), rng.randrange(200_000)
            load = Load(
                seq=seq, step=seq, running=running, waiting=seq % 3, waiting_tokens=100, kv_tokens=tokens,
                kv_capacity=1 << 20, max_running=256, acks=(Ack(1, 0, 0),),
            )  # fmt: skip
            message = LoadReport(INSTANCE, dp_rank, 1, seq, load)
            frames.append((topics.of(message), codec.encode(message)))
    return frames


def measure(reports: int, rounds: int) -> dict[str, Any]:
    """Return microseconds of CPU for a report, `ours` all the way and `unpack` alone: `rounds` values each, after one
    for warmth."""
    from benchmarks.controller_parts import publication_handler

    handle = publication_handler(RANKS)
    ours, unpack = [], []
    for number in range(1 + rounds):
        frames = frames_of(RANKS, 2 + number * reports, reports)
        began = time.thread_time()
        for message in frames:
            handle(message)
        ours.append((time.thread_time() - began) / len(frames) * 1e6)
        began = time.thread_time()
        for _, frame in frames:
            msgpack.unpackb(frame[1:])
        unpack.append((time.thread_time() - began) / len(frames) * 1e6)
    return {"ours": ours[1:], "unpack": unpack[1:]}

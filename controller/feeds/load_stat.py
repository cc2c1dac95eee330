"""SGLang's LoadStat publications: frames `[b"load", seq, MessagePack ["LoadStat", running, waiting, ...]]`.

This module owns the format and keeps no state. LoadStats acknowledge no dispatches, so they can only overwrite the
known load.
"""

from __future__ import annotations

from collections.abc import Sequence

from bus.errors import RemoteProtocolError
from bus.wire import codec
from bus.wire.kv_events import split_frames
from bus.wire.messages import MAX_ROOM, Load

FIELDS = 11  # with the tag; more may follow


def parse_load_stat(frames: Sequence[bytes]) -> tuple[int, int, Load]:
    """Return `(seq, dp_rank, load)` of a publication; `load.seq` is 0, and the receiver sets it. Raises
    RemoteProtocolError for anything else."""
    seq, payload = split_frames(frames)
    stat = codec.unpack(payload)
    if type(stat) is not list or len(stat) < FIELDS or stat[0] != "LoadStat":
        raise RemoteProtocolError("schema", "not a LoadStat")
    if any(type(value) is not int or not 0 <= value <= MAX_ROOM for value in stat[1:FIELDS]):
        raise RemoteProtocolError("schema", "a LoadStat counts in integers")
    running, waiting, kv_tokens, kv_capacity, rank, uncached, _, max_running, prefilled, busy_us = stat[1:FIELDS]
    load = Load(
        seq=0,
        step=0,
        running=running,
        waiting=waiting,
        waiting_tokens=uncached,
        kv_tokens=kv_tokens,
        kv_capacity=kv_capacity,
        max_running=max_running,
        prompt_tokens_total=prefilled,
        busy_us_total=busy_us,
    )
    return seq, rank, load

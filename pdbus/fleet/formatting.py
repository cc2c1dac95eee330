"""Figures as text of a few characters, for narrow columns. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bus.histogram import quantile
from bus.wire.messages import MemberKey, QueueStatus, RankStatus


def name_of(rank: RankStatus) -> str:
    """Return the name of a rank, as in `prefill-0/1`."""
    return f"{rank.instance}/{rank.dp_rank}"


def by_number(key: MemberKey) -> tuple[list[str | int], int]:
    """Return what ranks are sorted by: their names, with numbers in them as numbers, so that `decode-2` is before
    `decode-10`."""
    parts = re.split(r"(\d+)", key[0])
    return [int(part) if place % 2 else part for place, part in enumerate(parts)], key[1]


def seconds(value: float | None) -> str:
    """Return a time, given in seconds, in at most five characters; None is `-`."""
    if value is None:
        return "-"
    if value < 0.001:
        return f"{1e6 * value:.0f}us"
    if value < 0.0095:
        return f"{1e3 * value:.1f}ms"
    if value < 0.9995:
        return f"{1e3 * value:.0f}ms"
    if value < 99.5:
        return f"{value:.1f}s" if value < 9.95 else f"{value:.0f}s"
    if value < 100 * 60:
        return f"{value / 60:.0f}m"
    return f"{value / 3600:.0f}h" if value < 100 * 3600 else f"{value / 86400:.0f}d"


def age(value: float) -> str:
    """Return an age, given in seconds, in at most five characters, to a tenth of a second at best; a negative one
    (unknown) is `-`."""
    return "-" if value < 0 else f"{value:.1f}s" if value < 9.95 else seconds(value)


def number(value: float | None) -> str:
    """Return a number in at most five characters, as in `12.3k`; None is `-`."""
    if value is None:
        return "-"
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * factor:
            scaled = value / factor
            return f"{scaled:.1f}{unit}" if abs(scaled) < 99.95 else f"{scaled:.0f}{unit}"
    return f"{value:.0f}" if value == int(value) or abs(value) >= 9.95 else f"{value:.1f}"


def share(value: float | None) -> str:
    """Return a share (1 is all) in percent; None is `-`."""
    return "-" if value is None else f"{value:.0%}"


def quantile_of(counts: Sequence[int], q: float) -> str:
    """Return the quantile `q` (0 to 1) of latency counts (`bus.histogram`) as `seconds` does; `-` without any."""
    return seconds(quantile(counts, q))


def queue_words(queue: QueueStatus) -> list[str]:
    """Return what waits by kind, by priority if there are several, and the keys with most, as words."""
    kinds = [
        f"{kind.requests} for {'+'.join(kind.roles)}" + (f" of {kind.model}" if kind.model else "")
        + (" (a rank of their own choice)" if kind.pinned else "")
        for kind in queue.kinds
    ]  # fmt: skip
    priorities = [f"priority {priority}: {count}" for priority, count in queue.priorities]
    keys = [f"{key} {count}" for key, count in queue.keys if key]
    return [f"the first for {age(queue.oldest_s)}", *kinds, *(priorities if len(priorities) > 1 else []), *keys]

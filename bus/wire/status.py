"""A controller's status: its parts joined again, and reduced for other uses. Pure; it must not send."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from bus.wire.messages import Hello, RankStatus, Scraped, Status

RANKS_PER_MESSAGE = 256  # with the longest names that is a quarter of a frame


def without_loads(status: Status) -> Status:
    """Return `status` without loads, counts and addresses, for a client: which ranks there are, their roles and their
    states."""
    ranks = tuple(
        RankStatus(
            rank.instance, rank.dp_rank, rank.role, rank.model, rank.state, rank.epoch, "", rank.max_context, -1.0,
            None, 0, 0, 0, 0, 0, 0, 0, 0, block_tokens=rank.block_tokens,
        )
        for rank in status.ranks
    )  # fmt: skip
    return replace(status, ranks=ranks, counts={}, scraped=(), events=None, queue=None, requests=None)


def targets(scraped: Iterable[Scraped], ranks: Iterable[Hello | RankStatus]) -> list[dict[str, Any]]:
    """Return the addresses of all parts' metrics, in the format of Prometheus's `file_sd` and `http_sd`: of the
    `scraped` ones, and of the `ranks` that are not gone. Labels are those of the metrics themselves; ranks that share a
    process have one target."""
    found: dict[str, dict[str, str]] = {}
    for each in scraped:
        found[each.metrics] = {"part": each.part, "instance": each.name or each.part}
    for rank in sorted(ranks, key=lambda rank: (rank.instance, rank.dp_rank)):
        if not rank.metrics:
            continue
        labels = {"part": "node", "instance": rank.instance, "role": rank.role, "dp_rank": ""}
        labels = found.setdefault(rank.metrics, labels)
        if labels.get("instance") == rank.instance:
            labels["dp_rank"] = ",".join(filter(None, (labels.get("dp_rank", ""), str(rank.dp_rank))))
    return [{"targets": [address], "labels": labels} for address, labels in found.items()]


def join(before: Status | None, part: Status) -> Status:
    """Return the parts received so far (`before`; None: none) joined with the next `part`; the status is complete when
    `remaining` is 0. A `part` that does not continue `before` starts again with itself; where parts before it are
    lost, all of the status still remains."""
    if before is not None and before.remaining == len(part.ranks) + part.remaining:
        return replace(part, ranks=before.ranks + part.ranks)
    is_first = not part.total or part.total == len(part.ranks) + part.remaining
    return part if is_first else replace(part, ranks=(), remaining=part.total)

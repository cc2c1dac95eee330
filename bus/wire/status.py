"""A controller's status in as many messages as it takes, and one again. Pure; must not send."""

from __future__ import annotations

from msgspec.structs import replace

from bus.wire.messages import RankStatus, Status

RANKS_PER_MESSAGE = 512  # with the longest names that is half a frame


def split(status: Status) -> list[Status]:
    """Messages to send in this order; each says how many ranks are still to come."""
    ranks = status.ranks
    starts = range(0, max(1, len(ranks)), RANKS_PER_MESSAGE)
    parts = [ranks[at : at + RANKS_PER_MESSAGE] for at in starts]
    return [
        replace(status, ranks=part, remaining=len(ranks) - at - len(part))
        for at, part in zip(starts, parts, strict=True)
    ]


def without_loads(status: Status) -> Status:
    """What a client needs to know: which ranks there are, of what, and in what state."""
    ranks = tuple(
        RankStatus(
            rank.instance, rank.dp_rank, rank.role, rank.model, rank.state, rank.epoch, "", rank.max_context, -1.0,
            None, 0, 0, 0, 0, 0, 0, 0, 0, block_tokens=rank.block_tokens,
        )
        for rank in status.ranks
    )  # fmt: skip
    return replace(status, ranks=ranks, counts={})


def join(before: Status | None, part: Status) -> Status:
    """What came so far and `part`; complete when `remaining` is 0. A part that does not continue it starts anew."""
    if before is None or before.remaining != len(part.ranks) + part.remaining:
        return part
    return replace(part, ranks=before.ranks + part.ranks)

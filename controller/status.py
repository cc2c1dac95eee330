"""What `pdbus status` shows of a rank. Reads the load table's records; changes nothing."""

from __future__ import annotations

from msgspec.structs import replace

from bus.wire.messages import MAX_ROOM, RankState, RankStatus
from controller.load.rank import RankLoad


def rank_status(rank: RankLoad, state: RankState, now: float) -> RankStatus:
    """One rank as this controller sees it at `now`. Counts are cut to what a message may hold."""
    info = rank.info
    return RankStatus(
        instance=info.instance,
        dp_rank=info.dp_rank,
        role=info.role,
        model=info.model,
        state=state,
        epoch=rank.epoch,
        endpoint=info.endpoint,
        max_context=info.max_context,
        report_age_s=-1.0 if rank.reported_at is None else max(0.0, now - rank.reported_at),
        load=None if rank.load is None else replace(rank.load, acks=()),
        in_flight_requests=rank.in_flight,
        in_flight_tokens=rank.in_flight_tokens,
        estimate_requests=min(rank.requests, MAX_ROOM),
        estimate_tokens=min(rank.tokens, MAX_ROOM),
        outstanding=rank.outstanding,
        dispatched_total=rank.dispatched_total,
        ended_total=rank.ended_total,
        failed_total=rank.failed_total,
        block_tokens=info.block_tokens,
    )

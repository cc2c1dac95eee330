"""A connection that swallows dispatches: the table never goes negative and is exact again once reports have come."""

from __future__ import annotations

from controller_world import hello
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bus.wire.messages import Ack, Load
from controller.load.table import LoadTable

ME = 7
STEPS = st.lists(st.sampled_from(["dispatch", "ingest", "report", "deliver", "swallow", "end"]), max_size=60)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(STEPS)
def test_exact_after_two_fresh_reports_whatever_was_swallowed(steps: list[str]) -> None:
    table = LoadTable(ME, stale_s=1e9)
    rank = table.open(hello("i", 0, dp_size=1))
    inbox: list[int] = []
    live: list[int] = []
    mail: list[Load] = []
    ingested = ingested_tokens = seq = 0

    def report() -> Load:
        nonlocal seq
        seq += 1
        acks = (Ack(ME, ingested, ingested_tokens),) if ingested else ()
        return Load(
            seq=seq, step=0, running=len(live), waiting=0, waiting_tokens=0, kv_tokens=sum(live), kv_capacity=0,
            max_running=0, acks=acks,
        )  # fmt: skip

    for number, step in enumerate([*steps, "settle"]):
        if step == "dispatch":
            inbox.append(number + 1)
            table.charge(rank, number + 1)
        elif step == "swallow":  # what is under way is lost, and the node comes back over a new connection
            for tokens in inbox:
                table.end(rank, tokens)
            inbox.clear()
            table.reconnected(rank)
        elif step in ("ingest", "settle"):
            ingested += len(inbox)
            ingested_tokens += sum(inbox)
            live += inbox
            inbox.clear()
        elif step == "end" and live:
            table.end(rank, live.pop())
        elif step == "report":
            mail.append(report())
        elif step == "deliver" and mail:
            table.apply(rank.key, 1, mail.pop(), 0.0)
        table.validate()
    for _ in range(2):
        table.apply(rank.key, 1, report(), 0.0)
        table.validate()
    assert (rank.requests, rank.tokens, rank.in_flight) == (len(live), sum(live), 0)
    table.charge(rank, 5)
    assert (rank.requests, rank.tokens) == (len(live) + 1, sum(live) + 5)

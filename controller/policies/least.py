"""`round_robin`, `total_requests`, `total_tokens`: the candidate with the least of one number, and what each assumes.

Equals go to the rank whose last turn is longest ago, so ties rotate and ranks that come and go leave the rotation even.
"""

from __future__ import annotations

from bus.wire.messages import Submit
from controller.load.groups import Metric, View
from controller.load.rank import RankLoad
from controller.policies.base import Policy


class RoundRobin(Policy):
    """The next live rank, whatever it has to do. Assumes equal requests and equal ranks."""

    def pick(self, view: View, request: Submit, tokens: int) -> RankLoad | None:
        return view.least(Metric.TURN)


class TotalRequests(Policy):
    """Least running + waiting + in flight. Assumes that a step costs much the same for every request in it: decode with
    plenty of KV memory."""

    def pick(self, view: View, request: Submit, tokens: int) -> RankLoad | None:
        return view.least(Metric.REQUESTS)


class TotalTokens(Policy):
    """Least tokens held or queued + in flight; ties by requests. Assumes that cost goes by tokens: prefill always,
    decode when KV memory is scarce."""

    def pick(self, view: View, request: Submit, tokens: int) -> RankLoad | None:
        return view.least(Metric.TOKENS)

"""`total_requests`: least running + waiting + in flight."""

from __future__ import annotations

from bus.wire.messages import Submit
from controller.load.groups import Metric, View
from controller.load.rank import RankLoad


class TotalRequests:
    """Right where a step costs much the same for every request in it: decode with plenty of KV memory."""

    fixed = False

    def pick(self, view: View, request: Submit, tokens: int) -> RankLoad | None:
        return view.least(Metric.REQUESTS)

"""`round_robin`: the next live rank."""

from __future__ import annotations

from bus.wire.messages import Submit
from controller.load.groups import Metric, View
from controller.load.rank import RankLoad


class RoundRobin:
    """The candidate whose last turn is longest ago, so ranks that come and go leave the rotation even. Assumes equal
    requests and equal ranks."""

    fixed = False

    def pick(self, view: View, request: Submit, tokens: int) -> RankLoad | None:
        return view.least(Metric.TURN)

"""`total_tokens`: least tokens held or queued + in flight; ties by requests."""

from __future__ import annotations

from bus.wire.messages import Submit
from controller.load.groups import Metric, View
from controller.load.rank import RankLoad


class TotalTokens:
    """Right where cost goes by tokens: prefill always, decode when KV memory is scarce."""

    fixed = False

    def pick(self, view: View, request: Submit, tokens: int) -> RankLoad | None:
        return view.least(Metric.TOKENS)

"""Late binding, for the queue order `slo` (requests wait at the controller in order of their SLOs, the limits of their
latency): when a request goes to ranks, and how soon its first token could come. Pure.

The order of what waits at a rank cannot be changed any more. So a prompt leaves the central queue only when some rank
has less than `late_tokens` queued; so many keep a rank busy until the next prompt arrives. Where the time per further
token has a limit, the prompt also waits until some decode rank can take it with no step longer than that limit.
"""

from __future__ import annotations

from bus.wire.messages import Submit
from controller.load.groups import Metric, View
from controller.load.rank import RankLoad
from controller.speeds import Speeds, queued_tokens


class LateBinding:
    """Late binding for one controller's ranks. `late_tokens`: a rank with fewer queued prompt tokens gets the next
    prompt; `tpot_slo_s`: the limit of the time per token for requests that state none (0: none). `held_by_wish`:
    true if `decoding` returned None last time only because of a limit that the request states itself."""

    def __init__(self, late_tokens: int, tpot_slo_s: float = 0.0) -> None:
        self._late_tokens = late_tokens
        self._tpot_slo_s = tpot_slo_s  # of requests that name none; 0: none
        self.speeds = Speeds()
        self.held_by_wish = False  # what was placed last waits for its own wish, and for nothing else

    def reconfigure(self, late_tokens: int, tpot_slo_s: float) -> None:
        """Use other limits from now on."""
        self._late_tokens, self._tpot_slo_s = late_tokens, tpot_slo_s

    def open(self, rank: RankLoad | None) -> bool:
        """Return true if the rank may get the next prompt; false for None."""
        return rank is not None and queued_tokens(rank) < self._late_tokens

    def first_token_s(self, rank: RankLoad | None, work: int) -> float:
        """Return how long `work` prompt tokens take at `rank` from now on, behind what is queued there, in seconds;
        0 without a rank, and before anything was computed."""
        return 0.0 if rank is None else (queued_tokens(rank) + work) * self.speeds.pace(rank)

    def decoding(self, view: View, rank: RankLoad | None, submit: Submit) -> RankLoad | None:
        """Return the decode rank that can take the request with no step longer than its SLO: `rank`, which was chosen
        from `view`, otherwise the one with the fewest tokens. None: neither can, and it waits. An idle rank always can.
        An SLO that is shorter than a step with this request alone is taken as the length of that step."""
        ours_s, slo_s, tokens = self._tpot_slo_s, submit.tpot_slo_s or self._tpot_slo_s, submit.prompt_tokens
        if rank is None or not slo_s:
            return rank
        if submit.tpot_slo_s:
            slo_s = max(slo_s, self.speeds.step_s(rank, 1, tokens))
        steps_s = []
        for each in (rank, view.least(Metric.TOKENS)):
            if each is not None:
                steps_s.append(self._step_s(each, tokens))
                if steps_s[-1] <= slo_s:
                    return each
        self.held_by_wish = bool(submit.tpot_slo_s) and (not ours_s or min(steps_s) <= ours_s)
        return None

    def _step_s(self, rank: RankLoad, tokens: int) -> float:
        """Return the seconds of a step of `rank` with one more request that holds `tokens`, and with all that are on
        their way there; 0 where nothing is known, and for an idle rank."""
        if not rank.requests:
            return 0.0
        return self.speeds.step_s(rank, rank.requests + 1, rank.tokens + rank.held_tokens + tokens)

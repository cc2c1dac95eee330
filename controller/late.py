"""Late binding, for the queue order `slo` (requests wait at the controller in order of their SLOs, the limits of their
latency): when a request goes to ranks, and how soon its first token could come. Pure.

The order of what waits at a rank cannot be changed any more. So a prompt leaves the central queue only when some rank
has less than `late_tokens` queued; so many keep a rank busy until the next prompt arrives. Where the time per further
token has a limit, the prompt also waits until some decode rank can take it with no step longer than that limit.
"""

from __future__ import annotations

from bus.wire.messages import Load, Model, Role, Submit
from controller.load.groups import Metric, View
from controller.load.rank import RankLoad

SMOOTH_TOKENS = 100_000  # computed since: what was measured before counts for half
SMOOTH_STEPS = 10_000  # of decode


class LateBinding:
    """Late binding for one controller's ranks. `late_tokens`: a rank with fewer queued prompt tokens gets the next
    prompt; `tpot_slo_s`: the limit of the time per token for requests that state none (0: none). `held_by_wish`:
    true if `decoding` returned None last time only because of a limit that the request states itself."""

    def __init__(self, late_tokens: int, tpot_slo_s: float = 0.0) -> None:
        self._late_tokens = late_tokens
        self._tpot_slo_s = tpot_slo_s  # of requests that name none; 0: none
        self._prefill_rates: dict[tuple[Role, Model], PrefillRate] = {}
        self._step_models: dict[Model, DecodeStepModel] = {}  # of decode ranks
        self.held_by_wish = False  # what was placed last waits for its own wish, and for nothing else

    def reconfigure(self, late_tokens: int, tpot_slo_s: float) -> None:
        """Use other limits from now on."""
        self._late_tokens, self._tpot_slo_s = late_tokens, tpot_slo_s

    def observe(self, rank: RankLoad, load: Load, now: float) -> None:
        """Learn the rank's speed from `load`; call it before `load` replaces the rank's last report."""
        if rank.load is not None and rank.reported_at is not None and load.seq > rank.load.seq:
            role, model = rank.info.role, rank.info.model
            known = (
                self._step_models.setdefault(model, DecodeStepModel())
                if role == "decode"
                else self._prefill_rates.setdefault((role, model), PrefillRate())
            )
            known.observe(rank.load, load, now - rank.reported_at)

    def open(self, rank: RankLoad | None) -> bool:
        """Return true if the rank may get the next prompt; false for None."""
        return rank is not None and queued_tokens(rank) < self._late_tokens

    def first_token_s(self, rank: RankLoad | None, work: int) -> float:
        """Return how long `work` prompt tokens take at `rank` from now on, behind what is queued there, in seconds;
        0 without a rank, and before anything was computed."""
        if rank is None:
            return 0.0
        pace = self._prefill_rates.get((rank.info.role, rank.info.model))
        return 0.0 if pace is None else (queued_tokens(rank) + work) * pace.s_per_token

    def decoding(self, view: View, rank: RankLoad | None, submit: Submit) -> RankLoad | None:
        """Return the decode rank that can take the request with no step longer than its SLO: `rank`, which was chosen
        from `view`, otherwise the one with the fewest tokens. None: neither can, and it waits. An idle rank always can.
        An SLO that is shorter than a step with this request alone is taken as the length of that step."""
        ours_s, slo_s, tokens = self._tpot_slo_s, submit.tpot_slo_s or self._tpot_slo_s, submit.prompt_tokens
        if rank is None or not slo_s:
            return rank
        if submit.tpot_slo_s and rank.info.model in self._step_models:
            slo_s = max(slo_s, self._step_models[rank.info.model].of(1, tokens))
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
        steps = self._step_models.get(rank.info.model)
        if steps is None or not rank.requests:
            return 0.0
        return steps.of(rank.requests + 1, rank.tokens + tokens)


class PrefillRate:
    """The seconds of a rank's time for each prompt token that it computes, from several reports; recent ones count
    most."""

    def __init__(self) -> None:
        self.s_per_token = 0.0  # 0 before anything was computed
        self._tokens = 0.0
        self._busy_s = 0.0

    def observe(self, last: Load, load: Load, elapsed_s: float) -> None:
        """Learn from the work of one rank between two reports. Where its reports do not state its busy time, the
        time in which prompts waited is taken instead."""
        tokens = _computed(last, load)
        if load.busy_us_total:
            busy_s = (load.busy_us_total - last.busy_us_total) / 1e6
        else:
            busy_s = elapsed_s if last.waiting_tokens else 0.0
        if busy_s < 0 or (tokens <= 0 and not load.waiting_tokens):
            return  # it started again; or it did nothing but decode
        keep = 1 / (1 + max(tokens, 0) / SMOOTH_TOKENS)
        self._tokens = self._tokens * keep + tokens
        self._busy_s = self._busy_s * keep + busy_s
        if self._tokens > 0:
            self.s_per_token = self._busy_s / self._tokens


class DecodeStepModel:
    """The seconds of a decode step as a linear function of its requests and their tokens, fitted to the reports by
    least squares; recent ones count most."""

    def __init__(self) -> None:
        self._sums = [[0.0] * 4 for _ in range(3)]  # of products of 1, requests, tokens (scaled), and seconds
        self._plane: tuple[float, ...] | None = None  # from the sums, until they change

    def observe(self, last: Load, load: Load, elapsed_s: float) -> None:
        """Learn from the work of one rank between two reports. Where its reports do not state its busy time, the
        time in which requests ran is taken instead."""
        steps = load.step - last.step
        if load.busy_us_total:
            busy_s = (load.busy_us_total - last.busy_us_total) / 1e6
        else:
            busy_s = elapsed_s if last.running and load.running else 0.0
        if steps <= 0 or busy_s <= 0:
            return  # it did nothing, or started again
        point = (*_scaled((last.running + load.running) / 2, (last.kv_tokens + load.kv_tokens) / 2), busy_s / steps)
        weight = min(steps, SMOOTH_STEPS)
        keep = 1 / (1 + weight / SMOOTH_STEPS)
        self._sums = [
            [known * keep + weight * a * b for known, b in zip(row, point, strict=True)]
            for row, a in zip(self._sums, point, strict=False)
        ]
        self._plane = None

    def of(self, requests: float, tokens: float) -> float:
        """Return the seconds of a step with so many requests, which hold so many tokens in all; 0 before the first
        sample."""
        if self._plane is None:
            self._plane = _solved(self._sums)
        return sum(a * b for a, b in zip(self._plane, _scaled(requests, tokens), strict=True))


def _scaled(requests: float, tokens: float) -> tuple[float, float, float]:
    """Return the values scaled to a similar size, for the equations."""
    return 1.0, requests / 64, tokens / 65_536


def _solved(sums: list[list[float]]) -> tuple[float, ...]:
    """Solve three linear equations. A small weight of each unknown is added: where all samples are much the same, no
    part of a step then gets more than its share."""
    rows = [row[:] for row in sums]
    for i, row in enumerate(rows):
        row[i] += 1e-5 * sums[0][0] + 1e-12
    for i, row in enumerate(rows):
        for below in rows[i + 1 :]:
            factor = below[i] / row[i]
            below[:] = [b - factor * a for a, b in zip(row, below, strict=True)]
    found = [0.0] * 3
    for i in (2, 1, 0):
        found[i] = (rows[i][3] - sum(rows[i][j] * found[j] for j in range(i + 1, 3))) / rows[i][i]
    return tuple(found)


def queued_tokens(rank: RankLoad) -> int:
    """Return the prompt tokens that wait at `rank` or are on their way there: the estimate without tokens that
    only occupy KV memory."""
    held = 0 if rank.counts_queue_only or rank.load is None else rank.load.kv_tokens
    return max(0, rank.tokens - held)


def _computed(last: Load, load: Load) -> int:
    """Return the prompt tokens computed between two reports. For a rank that does not count them: the tokens it took
    in that were neither cached nor still wait. That is wrong for a while where waiting prompts are partly cached, or
    are cancelled."""
    if load.admitted_tokens_total:
        return load.computed_tokens_total - last.computed_tokens_total
    came = load.prompt_tokens_total - last.prompt_tokens_total
    cached = load.cached_tokens_total - last.cached_tokens_total
    return came - cached - (load.waiting_tokens - last.waiting_tokens)

"""The speeds of ranks, learnt from their load reports: the seconds of a prompt token that they compute, of a KV token
that they fetch, and of a step. Pure; it decides nothing. Late binding and the costs for policies use it.
"""

from __future__ import annotations

from bus.wire.messages import Load, Model, Role
from controller.load.rank import RankLoad

SMOOTH_TOKENS = 100_000  # computed since: what was measured before counts for half
SMOOTH_STEPS = 10_000  # of decode
SMOOTH_FETCHES = 1_000


class Speeds:
    """The speeds of the ranks of each role and model. `observe` gets their reports."""

    def __init__(self) -> None:
        self._prefill_rates: dict[tuple[Role, Model], PrefillRate] = {}
        self._step_models: dict[tuple[Role, Model], DecodeStepModel] = {}
        self._fetch_rates: dict[tuple[Role, Model], FetchRate] = {}
        self._steps_of: set[Role] = {"decode"}  # roles whose steps are learnt

    def observe(self, rank: RankLoad, load: Load, now: float) -> None:
        """Learn from `load`; call it before `load` replaces the rank's last report."""
        last = rank.load
        if last is None or rank.reported_at is None or load.seq <= last.seq:
            return
        role, elapsed_s = rank.info.role, now - rank.reported_at
        name = role, rank.info.model
        if load.fetches_total > last.fetches_total:
            self._fetch_rates.setdefault(name, FetchRate()).observe(last, load)
        if role != "decode":
            self._prefill_rates.setdefault(name, PrefillRate()).observe(last, load, elapsed_s)
        elif load.computed_tokens_total != last.computed_tokens_total:
            return  # it computed prompts too: these steps are no measure of decode
        if role in self._steps_of:
            self._step_models.setdefault(name, DecodeStepModel()).observe(last, load, elapsed_s)

    def learn_steps(self, role: Role) -> None:
        """Learn the steps of ranks of `role` too from now on."""
        self._steps_of.add(role)

    def pace(self, rank: RankLoad) -> float:
        """Return the seconds of a rank's time for each prompt token that it computes; 0 before anything was computed,
        and for decode ranks."""
        known = self._prefill_rates.get((rank.info.role, rank.info.model))
        return 0.0 if known is None else known.s_per_token

    def fetch_s(self, rank: RankLoad) -> float:
        """Return the seconds that a KV token takes on its way to `rank`; 0 before anything was fetched."""
        known = self._fetch_rates.get((rank.info.role, rank.info.model))
        return 0.0 if known is None else known.s_per_token

    def step_s(self, rank: RankLoad, requests: int, tokens: int) -> float:
        """Return the seconds of a step of `rank` with so many requests, which hold so many tokens in all; 0 where
        nothing is known."""
        known = self._step_models.get((rank.info.role, rank.info.model))
        return 0.0 if known is None else known.of(requests, tokens)


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


class FetchRate:
    """The seconds of a KV token on its way to a rank, without those that each fetch takes whatever its size: a line
    through the fetches of the reports, by least squares; recent ones count most."""

    def __init__(self) -> None:
        self.s_per_token = 0.0
        self._sums = [0.0] * 5  # weight, and with it tokens, seconds, tokens squared, tokens by seconds: all a fetch

    def observe(self, last: Load, load: Load) -> None:
        """Learn from the fetches of one rank between two reports."""
        fetches = load.fetches_total - last.fetches_total
        tokens = (load.fetched_tokens_total - last.fetched_tokens_total) / fetches
        seconds = (load.fetch_us_total - last.fetch_us_total) / fetches / 1e6
        keep = 1 / (1 + fetches / SMOOTH_FETCHES)
        point = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        self._sums = [known * keep + fetches * each for known, each in zip(self._sums, point, strict=True)]
        weight, tokens, seconds, squares, products = self._sums
        spread = weight * squares - tokens * tokens
        if spread > 1e-6 * weight * squares:
            self.s_per_token = max(0.0, (weight * products - tokens * seconds) / spread)
        else:  # all are of one size
            self.s_per_token = max(0.0, seconds / tokens) if tokens else 0.0


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
    only occupy KV memory, or will do so at a decode rank that computes prompts too."""
    if rank.counts_queue_only or rank.load is None:
        return rank.tokens - rank.idle_tokens
    return max(0, rank.tokens - rank.load.kv_tokens)


def _computed(last: Load, load: Load) -> int:
    """Return the prompt tokens computed between two reports. For a rank that does not count them: the tokens it took
    in that were neither cached nor still wait. That is wrong for a while where waiting prompts are partly cached, or
    are cancelled."""
    if load.admitted_tokens_total:
        return load.computed_tokens_total - last.computed_tokens_total
    came = load.prompt_tokens_total - last.prompt_tokens_total
    cached = load.cached_tokens_total - last.cached_tokens_total
    return came - cached - (load.waiting_tokens - last.waiting_tokens)

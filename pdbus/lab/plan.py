"""Search for the split of the ranks (how many prefill, the rest decode, or unified), the methods and the order with
which the greatest share of a trace's requests keeps its SLO (limits of the time to the first token and per token).

All combinations would take hours, so the search has steps. First it tries every split that can compute the prompts,
with one choice of methods and order; then all methods and orders at the best split. Then it tries the neighbouring
splits with the best choice, and decode admission where tokens are too slow, and repeats this until nothing gets better.
Last, if asked for, it tries unified ranks, alone and beside the best split. It runs nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from bus.errors import ConfigError
from pdbus.lab.capacity import offered_load
from pdbus.lab.compare import Result, Run
from pdbus.lab.config import LabConfig
from pdbus.lab.metrics import Estimate, estimate
from pdbus.lab.traces import Trace

PREFILL = ("cache_aware", "total_tokens")
DECODE = ("total_requests", "total_tokens")
ORDERS = ("slo", "arrival")
MOST_LOAD = 2.5  # without cache hits; no cache makes up for a higher load
Runner = Callable[[Sequence[Run]], Sequence[Result]]


@dataclass(frozen=True, order=True)
class Choice:
    """One way to run the ranks: the split, the controller's methods, the order of its queue, and decode admission
    (requests wait while no decode rank can take them within the limit per token)."""

    prefill: int  # ranks
    decode: int  # ranks
    prefill_method: str
    decode_method: str
    queue_order: str
    tpot_admission: bool = False
    unified: int = 0  # ranks, with `prefill_method` too

    def __str__(self) -> str:
        order = self.queue_order + (" with decode admission" if self.tpot_admission else "")
        decode = f", {self.decode_method}" if self.decode else ""
        return f"{self.ranks}, {self.prefill_method}{decode}, order {order}"

    @property
    def ranks(self) -> str:
        """The numbers of ranks in words: `3 + 5`, `2 + 2 + 4 unified` or `8 unified`."""
        pairs = [f"{self.prefill} + {self.decode}"] if self.prefill else []
        return " + ".join(pairs + ([f"{self.unified} unified"] if self.unified else []))

    def settings(self) -> dict[str, str | int | bool]:
        """Return the fields by name, for JSON."""
        return asdict(self)

    def run(self, trace: Trace, config: LabConfig) -> Run:
        """Return the description of a run of `trace` with this choice: `config` with the choice's settings, and
        requests at the trace's own times. The caller starts it."""
        settings = replace(
            config, ranks=self.prefill, decode_ranks=self.decode, unified_ranks=self.unified,
            decode_method=self.decode_method, queue_order=self.queue_order, tpot_admission=self.tpot_admission,
            load=0.0,
        )  # fmt: skip
        return Run(trace, self.prefill_method, settings)


@dataclass(frozen=True)
class Found:
    """A choice and its results, one for each seed."""

    choice: Choice
    results: tuple[Result, ...]

    @property
    def kept(self) -> Estimate:
        """The share of requests (0 to 1) that keep both limits, as the mean over the seeds with its interval."""
        return self.mean("slo_attainment")

    def mean(self, field: str) -> Estimate:
        """Return mean and 95 % interval of a field of `Summary` over the seeds."""
        return estimate([getattr(result.summary, field) for result in self.results])


@dataclass(frozen=True)
class Plan:
    """The result of the search. `splits` has the first step: one choice at each split, with one seed. `tried` has the
    choices run with all seeds, the best first."""

    splits: list[Found]
    tried: list[Found]


def plan(traces: Sequence[Trace], ranks: int, config: LabConfig, run: Runner, *, unified: bool = False) -> Plan:
    """Search for the best way to run `ranks` ranks, and return all that was tried; with `unified`, unified ranks too.
    `traces` has one trace for each seed: `traces[0]` for `config.seed`, the next for the seed after it. `run` makes the
    given runs and returns their results in the same order; it is called a few times. Raises ConfigError when no split
    can serve the prompts."""
    splits = [n for n in range(1, ranks) if offered_load(traces[0], replace(config, ranks=n)) <= MOST_LOAD]
    if not splits:
        load = offered_load(traces[0], replace(config, ranks=max(1, ranks - 1)))
        raise ConfigError(
            f"{ranks} ranks cannot serve this: its prompts alone take {load:.1f} times what {ranks - 1} do"
        )

    def try_all(choices: Iterable[Choice], seeds: int) -> list[Found]:
        wanted = list(dict.fromkeys(choices))
        results = iter(run([*_runs(wanted, traces[:seeds], config)]))
        return [Found(choice, tuple(next(results) for _ in range(seeds))) for choice in wanted]

    first = try_all((Choice(n, ranks - n, PREFILL[0], DECODE[0], ORDERS[0]) for n in splits), 1)
    split = _best(first).choice.prefill
    rest = (Choice(split, ranks - split, p, d, order) for p in PREFILL for d in DECODE for order in ORDERS)
    tried = try_all(rest, len(traces))
    while beside := _beside(_best(tried), splits, config.slo_tpot_s) - {found.choice for found in tried}:
        tried += try_all(sorted(beside), len(traces))
    if unified:
        tried += try_all(_mixtures(_best(tried).choice, ranks), len(traces))
    return Plan(first, sorted(tried, key=_rank))


def _beside(found: Found, splits: Sequence[int], slo_tpot_s: float) -> set[Choice]:
    """Return the neighbours of a choice: one more and one fewer prefill rank, and decode admission where more than 1 %
    of the requests exceed the limit per token."""
    choice = found.choice
    ranks, n = choice.prefill + choice.decode, choice.prefill
    beside = {replace(choice, prefill=m, decode=ranks - m) for m in (n - 1, n + 1) if m in splits}
    if choice.queue_order == "slo" and found.mean("tpot_p99_s").mean > slo_tpot_s:
        beside.add(replace(choice, tpot_admission=True))
    return beside


def _mixtures(choice: Choice, ranks: int) -> Iterator[Choice]:
    """Yield ways to run a quarter, half, three quarters or all of the ranks as unified ones, in both orders. The others
    are split as `choice` does, and have its methods."""
    for unified in dict.fromkeys((ranks, ranks * 3 // 4, ranks // 2, ranks // 4)):
        others = ranks - unified
        if unified and others != 1:
            prefill = min(max(1, round(others * choice.prefill / ranks)), others - 1) if others else 0
            for order in ORDERS:
                admission = bool(others) and choice.tpot_admission and order == "slo"
                yield replace(
                    choice, prefill=prefill, decode=others - prefill, unified=unified, queue_order=order,
                    tpot_admission=admission,
                )  # fmt: skip


def _runs(choices: Iterable[Choice], traces: Sequence[Trace], config: LabConfig) -> Iterator[Run]:
    for choice in choices:
        for number, trace in enumerate(traces):
            yield choice.run(trace, replace(config, seed=config.seed + number))


def _best(found: Iterable[Found]) -> Found:
    return min(found, key=_rank)


def _rank(found: Found) -> tuple[float, float, bool]:
    """Return the sort key, the best first: most requests kept, then quicker first tokens, then the simpler choice."""
    return -round(found.kept.mean, 4), round(found.mean("ttft_mean_s").mean, 3), found.choice.tpot_admission

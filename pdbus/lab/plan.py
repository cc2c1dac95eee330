"""Which split of the ranks, which methods and which order keep most requests of a trace within their SLO.

The whole product of splits, methods and orders would take hours, so the search goes by steps: every split that can
compute the prompts at all, with one choice of the rest; the rest at the best of these; and the best of that at the
splits beside it, and with decode admission where its tokens come too slowly, as long as one is better. Runs nothing
itself.
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
MOST_LOAD = 2.5  # with no cache hit; beyond, no cache makes up for it
Runner = Callable[[Sequence[Run]], Sequence[Result]]


@dataclass(frozen=True, order=True)
class Choice:
    """One way to run the ranks."""

    prefill: int  # ranks
    decode: int  # ranks
    prefill_method: str
    decode_method: str
    queue_order: str
    tpot_admission: bool = False

    def __str__(self) -> str:
        order = self.queue_order + (" with decode admission" if self.tpot_admission else "")
        return f"{self.prefill} + {self.decode}, {self.prefill_method}, {self.decode_method}, order {order}"

    def settings(self) -> dict[str, str | int | bool]:
        """By name."""
        return asdict(self)

    def run(self, trace: Trace, config: LabConfig) -> Run:
        """It on `trace`, at the trace's own times."""
        settings = replace(
            config, ranks=self.prefill, decode_ranks=self.decode, decode_method=self.decode_method,
            queue_order=self.queue_order, tpot_admission=self.tpot_admission, load=0.0,
        )  # fmt: skip
        return Run(trace, self.prefill_method, settings)


@dataclass(frozen=True)
class Found:
    """What a choice is worth: the runs with each seed."""

    choice: Choice
    results: tuple[Result, ...]

    @property
    def kept(self) -> Estimate:
        """The share of requests within both SLOs."""
        return self.mean("slo_attainment")

    def mean(self, field: str) -> Estimate:
        """Of a figure of `Summary`, over seeds."""
        return estimate([getattr(result.summary, field) for result in self.results])


@dataclass(frozen=True)
class Plan:
    """`splits`: the choice of the first step at each split, with one seed; `tried`: with all seeds, the best first."""

    splits: list[Found]
    tried: list[Found]


def plan(traces: Sequence[Trace], ranks: int, config: LabConfig, run: Runner) -> Plan:
    """One trace a seed, from `config.seed` on; `run` runs what it is given. ConfigError where no split will do."""
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
    return Plan(first, sorted(tried, key=_rank))


def _beside(found: Found, splits: Sequence[int], slo_tpot_s: float) -> set[Choice]:
    """The same with a rank more, and with one less, of prefill; and with decode admission, where more than a hundredth
    of its requests take too long a token."""
    choice = found.choice
    ranks, n = choice.prefill + choice.decode, choice.prefill
    beside = {replace(choice, prefill=m, decode=ranks - m) for m in (n - 1, n + 1) if m in splits}
    if choice.queue_order == "slo" and found.mean("tpot_p99_s").mean > slo_tpot_s:
        beside.add(replace(choice, tpot_admission=True))
    return beside


def _runs(choices: Iterable[Choice], traces: Sequence[Trace], config: LabConfig) -> Iterator[Run]:
    for choice in choices:
        for number, trace in enumerate(traces):
            yield choice.run(trace, replace(config, seed=config.seed + number))


def _best(found: Iterable[Found]) -> Found:
    return min(found, key=_rank)


def _rank(found: Found) -> tuple[float, float, bool]:
    """The best first: where several keep as much, the one with the quicker first tokens, then the simpler one."""
    return -round(found.kept.mean, 4), round(found.mean("ttft_mean_s").mean, 3), found.choice.tpot_admission

"""One side of the virtual cluster: the ranks of a role, and at each controller a chooser among them with the reports
and KV events that reach it. Owns these connections; it moves no request.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

from bus.wire.messages import Role
from controller.costs import Costs
from pdbus.lab.choosers import Method, build_chooser
from pdbus.lab.clock import VirtualLoop
from pdbus.lab.config import LabConfig
from pdbus.lab.rank import VirtualRank
from pdbus.lab.reports import Listener, Reports
from pdbus.lab.sharing import Sharing
from pdbus.lab.truth import TrueState


class Side:
    """The `ranks` of `role`, chosen by the method called `name`, which is `kind`. `costs` are those of each controller
    for all roles. `watched`: their loads are reported. `on_step` is called when a report leaves after a step, with the
    time of its arrival in seconds. Without ranks there are no choosers."""

    def __init__(
        self, loop: VirtualLoop, config: LabConfig, role: Role, ranks: list[VirtualRank], name: str, kind: Method,
        block_tokens: int, costs: Sequence[Costs], *, watched: bool, on_step: Callable[[float], None] | None,
    ) -> None:  # fmt: skip
        self._loop, self._config = loop, config
        self._delay_s = config.hop_s + config.report_delay_s
        self.role, self.ranks, self.method, self.truth = role, ranks, name, TrueState(loop, ranks)
        if config.controllers > 1:
            for rank in ranks:
                rank.welcomed(range(1, config.controllers + 1))
        self.sharing: Sharing | None = None  # of counters between the controllers
        reports = [
            self._reports(role, dp_rank, rank, kind, on_step) for dp_rank, rank in enumerate(ranks if watched else ())
        ]
        self.choosers = [
            Listener(build_chooser(name, role, len(ranks), n, config, self.truth, block_tokens, costs[n]), n, reports)
            for n in range(config.controllers if ranks else 0)
        ]
        if kind.kv_events:
            for dp_rank, rank in enumerate(ranks):
                rank.steps_taken.append(partial(self._report_cache, dp_rank, rank))

    def explain(self) -> None:
        """Have the choosers keep what they compare."""
        for listener in self.choosers:
            listener.chooser.explain(self.method, self.role)

    def share(self, rng: random.Random) -> None:
        """Let the controllers share their counters from now on; `rng` draws losses."""
        self.sharing = Sharing(self._loop, rng, self._config, self.choosers)

    def _reports(
        self, role: Role, dp_rank: int, rank: VirtualRank, kind: Method, on_step: Callable[[float], None] | None
    ) -> Reports:
        config = self._config
        rng = random.Random(f"{config.seed}/reports/{role}/{dp_rank}")
        interval_s = kind.report_interval_s or config.report_interval_s
        reports = Reports(self._loop, rank, rng, config.controllers, interval_s=interval_s, delay_s=self._delay_s,
                          loss=config.report_loss, before_ingest=kind.before_ingest)  # fmt: skip
        if kind.report_interval_s is None:
            rank.step_counted = reports.report
        if on_step is not None:
            rank.steps_taken.append(lambda: on_step(self._loop.now + self._delay_s))
        return reports

    def _report_cache(self, dp_rank: int, rank: VirtualRank) -> None:
        """Deliver a rank's KV events. Lost events are repeated (by sequence numbers), so they are late but never
        missing."""
        events = rank.take_kv_events()
        if events:
            for listener in self.choosers:
                self._loop.call_later(self._delay_s, listener.chooser.kv_events, dp_rank, events)

"""The node process: linked ranks and their runners (one engine's ranks) on a loop, with signals, readiness and metrics.
It decides nothing."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from bus.endpoints import why_silent
from bus.errors import BusError, Replaced, StartError
from bus.runtime import metrics, probes, reload
from bus.runtime.logs import get_logger
from bus.runtime.loop import Loop
from bus.runtime.spans import Spans
from nodes.config import NodeConfig
from nodes.link.config import Limits
from nodes.link.host import LINGER_MS, STREAM_GRACE_S, Host
from nodes.link.runner import Runner
from nodes.metrics import NodeFigures, snapshot

RELOADS = ("max-waiting", "hold-s", "trace-bytes", "drain-s", "log-level")  # settings that may change while it runs
CHECK_S = 0.25  # for deadlines; what changes is looked at in the same turn
STOOD_STILL_S = 1.0  # without a look at the clock: the process was stopped, or its machine slept
LOG_WAITING_S = 2.0

log = get_logger("node")


def on_signals(loop: Loop, node: Callable[[], Node]) -> None:
    """Let the loop's signals act on `node()`, which exists by the time the loop runs: SIGHUP reloads settings, the
    others call `Node.on_signal`."""
    reload.on_signals(
        loop,
        lambda changed: node().reconfigure(changed),
        lambda: node().leave(),
        lambda number: node().on_signal(number),
    )


class Node:
    """A node: `with Node(config, loop, runners) as node: node.run(on_ready)`. `runners` are by dp_rank; `figures` gives
    their metrics. ConfigError for bad keys, StartError where an endpoint is taken."""

    def __init__(
        self, config: NodeConfig, loop: Loop, runners: Mapping[int, Runner],
        figures: Callable[[], Iterable[metrics.Metric]] = tuple, spans: Spans | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.loop = loop
        self.failure: BusError | None = None
        self._figures = NodeFigures()
        self.host = Host(config, loop, runners, self._check, spans)
        self._figures_of_runners = figures
        self._on_ready: Callable[[Node], None] | None = None
        self._began = self._logged_at = self._checked_at = loop.clock()
        self._drain_began: float | None = None
        self._left = False
        self._stop_metrics: Callable[[], None] = lambda: None
        loop.call_every(CHECK_S, self._check)
        if config.metrics_port:
            try:
                self._stop_metrics = probes.serve(
                    loop, config.metrics_host, config.metrics_port, self._snapshot, self.host.unready
                )
            except StartError:
                self.host.close(linger_ms=0)
                raise

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- life ---------------------------------------------------------------------------------------------------

    def run(self, on_ready: Callable[[Node], None]) -> None:
        """Run the loop until the node has drained or was stopped; it blocks. `on_ready` is called once, when the bus
        and all controllers have answered, or after `wait_s` when at least one has answered each rank. StartError when
        the bus or all controllers are missing then; Replaced when one of our ranks was started again elsewhere;
        EngineDied when a runner is dead."""
        self._on_ready = on_ready
        self.loop.run()
        failure = self.failure or self.host.failure
        if failure is not None:
            raise failure

    def on_signal(self, number: int) -> None:
        """Drain on the first signal; leave at once on the second, or where the node is not ready and runs nothing. A
        controller that has welcomed it dispatches to it also while it waits for the bus."""
        idle = not any(len(rank.core) for rank in self.host.ranks.values())
        if self._drain_began is not None or (self._on_ready is not None and idle):
            self._left = True
            self.loop.stop()
            return
        self._on_ready = None  # it takes nothing any more
        self.drain(signal.Signals(number).name)

    def reconfigure(self, changed: Mapping[str, Any]) -> None:
        """Apply new settings by name (those of RELOADS), on the loop's thread. ConfigError for an invalid value; then
        nothing changes."""
        of_limits = {name: value for name, value in changed.items() if name in Limits.__dataclass_fields__}
        limits = dataclasses.replace(self.config.limits, **of_limits)
        drain_s = changed.get("drain_s", self.config.drain_s)
        self.config = dataclasses.replace(self.config, limits=limits, drain_s=drain_s)
        for rank in self.host.ranks.values():
            rank.core.reconfigure(limits)

    def drain(self, cause: str) -> None:
        """Let all ranks refuse new legs, finish those that run (for `drain_s` at most), and leave; the loop then stops.
        It returns at once; `cause` is for the log."""
        if self._drain_began is None:
            self._drain_began = self.loop.clock()
        self.host.drain(cause)

    def leave(self) -> None:
        """Leave at once, without goodbye; any thread may call it."""
        self._left = True
        self.loop.stop()

    def close(self) -> None:
        """Close sockets, threads and engines. Call it only when the loop no longer runs."""
        self._stop_metrics()
        self.host.close(linger_ms=0 if self._left else LINGER_MS)
        self.loop.close()

    # --- inside -------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        now = self.loop.clock()
        if now - self._checked_at > STOOD_STILL_S:
            self._began += now - self._checked_at  # nothing could be heard meanwhile
        self._checked_at = now
        if self._on_ready is not None:
            self._check_ready(now)
        if self.host.failure is not None and self._drain_began is None:
            self._drain_began = now
        draining_s = -1.0 if self._drain_began is None else now - self._drain_began
        if draining_s >= self.config.drain_s:
            for rank in self.host.ranks.values():
                rank.abandon()
        hangs = self.host.failure is not None and draining_s >= STREAM_GRACE_S  # a hung engine must not delay the exit
        if hangs or self.host.drained():
            self.loop.stop()

    def _check_ready(self, now: float) -> None:
        missing = self.host.missing()
        late = now - self._began >= self.config.wait_s
        if missing and late and not self.host.fenced() and self.host.can_serve():
            log.warning("node.serves_without", missing=missing, waited_s=round(now - self._began, 1))
            missing = []  # they are joined when they come
        if not missing:
            on_ready, self._on_ready = self._on_ready, None
            assert on_ready is not None
            self.host.serving = True
            on_ready(self)
            return
        if now - self._logged_at >= LOG_WAITING_S:  # also where the time is up, on a machine that stood still meanwhile
            self._logged_at = now
            left_s = max(0.0, round(self.config.wait_s - (now - self._began), 1))
            log.info("node.waiting", waits_for=missing, waited_s=round(now - self._began, 1), gives_up_in_s=left_s)
        if late:
            why = why_silent(missing[0].partition(" at ")[2], self.config.keys)
            silent = f"{' and '.join(missing)} did not answer (waited {self.config.wait_s:g} s): {why}"
            fenced = self.host.fenced()
            self.failure = Replaced(f"{fenced}; this one leaves") if fenced else StartError(silent)
            self._give_up()

    def _give_up(self) -> None:
        """Leave with a goodbye: a controller that is there may have sent requests already. They go elsewhere, and no
        rank has died with them."""
        self._on_ready = None
        self.drain("could not start")
        for rank in self.host.ranks.values():
            rank.abandon()

    def _snapshot(self) -> Iterator[metrics.Metric]:
        yield from snapshot(self.host, self._figures)
        yield from self._figures_of_runners()

"""The policy lab compares balancing methods (the rules by which a controller picks a rank) on a trace of requests:
`pdbus replay`, and its parts for notebooks.

It runs in virtual time: a discrete-event loop over parts that also run live (load table, policies, batching, blocks,
timing model), so that an hour of trace takes seconds. See `docs/replay.md`.
"""

from pdbus.lab.config import LabConfig
from pdbus.lab.formats import read_trace
from pdbus.lab.generator import generate
from pdbus.lab.metrics import Summary, summarise
from pdbus.lab.outcome import Outcome
from pdbus.lab.simulate import simulate
from pdbus.lab.traces import Trace, TraceRequest

__all__ = [
    "LabConfig",
    "Outcome",
    "Summary",
    "Trace",
    "TraceRequest",
    "generate",
    "read_trace",
    "simulate",
    "summarise",
]

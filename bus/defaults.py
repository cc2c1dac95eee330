"""Defaults that more than one part relies on: one part promises what another expects. Durations are in seconds.

The defaults of a single part are in its own config; command lines take their defaults from the configs.
"""

from __future__ import annotations

WAIT_S = 60.0  # for the bus and controllers to appear at a start

METRICS_HOST = "127.0.0.1"
SPIN_US_MAX = 10_000  # beyond, a loop that polls instead of sleeping saves nothing that anybody would notice

# the broker
BEACON_S = 0.25
ROOM_TTL_S = 120.0
MAX_ROOMS = 2_000_000

# what a rank says of itself
REPORT_INTERVAL_S = 0.25  # at least this often when it has work
IDLE_INTERVALS = 4  # once in so many when it has none
INTERVAL_MIN_S, INTERVAL_MAX_S = 0.05, 60.0  # what of a declared interval is taken at its word

# and for how long others take it to be true
LEASE_S = 3.0  # a node not heard by its controller for so long is lost
STALE_S = 1.25  # a report is believed for so long at least,
STALE_INTERVALS = 2.0  # and until so many declared intervals have passed: one report may come late by another interval
SILENT_INTERVALS = 3.0  # a rank that published nothing for so many is silent
TRACE_BYTES = 8 << 20  # of requests that are over, remembered by each controller and each rank for `pdbus trace`


def bounded_interval_s(declared_s: float) -> float:
    """Return the publishing interval that a rank declares, in seconds, moved into INTERVAL_MIN_S to INTERVAL_MAX_S.
    Leases follow from it, so a rank cannot declare itself alive without end."""
    return min(INTERVAL_MAX_S, max(INTERVAL_MIN_S, declared_s))

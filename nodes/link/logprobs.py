"""An engine's log probabilities, turned into their form on the wire. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from bus.wire.messages import TokenLogprobs

LEAST = -9999.0  # of the protocol: engines say minus infinity


def token_logprobs(chosen: float, top: Iterable[tuple[int, float]] = (), rank: int = 0) -> TokenLogprobs:
    """Return one token's log probability and those of the most likely tokens (id, value) at its place, the likeliest
    first, moved into the range of the wire. `rank` is the token's among all, from 1 on; 0: unknown."""
    return TokenLogprobs(_bounded(chosen), tuple([(token, _bounded(value)) for token, value in top]), rank)


def _bounded(value: float) -> float:
    """Return a value that fits the wire: rounding may have made it positive, and a value that is not a number counts
    as the lowest."""
    return min(0.0, float(value)) if value >= LEAST else LEAST

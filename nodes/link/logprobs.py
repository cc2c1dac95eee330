"""What engines say of how likely tokens are, as it goes on the wire. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from bus.wire.messages import TokenLogprobs

LEAST = -9999.0  # of the protocol: engines say minus infinity


def token_logprobs(chosen: float, top: Iterable[tuple[int, float]] = ()) -> TokenLogprobs:
    """Of one output token, and of the likeliest at its place, the first first."""
    return TokenLogprobs(_bounded(chosen), tuple([(token, _bounded(value)) for token, value in top]))


def _bounded(value: float) -> float:
    """Rounding may have made it more than 0; what is no number is as good as impossible."""
    return min(0.0, float(value)) if value >= LEAST else LEAST

"""The duration of a step on the sim engine: a linear model, pure, so that the replay lab runs it in virtual time.

This module owns the formula, its calibrations and their file format; it must not sleep or read a clock. The default,
`h100-8b`, stands for an 8 B parameter model in bf16 on one H100: reading 16 GB of weights plus launch overhead takes
7 ms a step, prefill runs at 10 k tokens/s, and a KV token of 128 KiB costs 40 ns of 3.35 TB/s HBM; so 32 decode rows
of 2 k context take 10.5 ms.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

import msgspec

from bus.errors import ConfigError
from nodes.own.engines.base import Row


@dataclass(frozen=True, slots=True)
class SimTiming:
    """The seconds of a step, as a sum over its content. A row that feeds one token is a decode row, a longer one a
    prefill chunk. ConfigError for a part that is negative or not finite."""

    base_s: float = 7e-3
    per_prefill_token_s: float = 1e-4
    per_decode_row_s: float = 3e-5
    per_context_token_s: float = 4e-8
    batched_s: float = 0.0  # of a step that feeds more than one token: on a CPU matrices take another way than vectors

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < float("inf"):
                raise ConfigError(f"sim timing {field.name} must be a number of seconds of at least 0, not {value}")

    def step_s(self, prefill_tokens: int, decode_rows: int, context_tokens: int) -> float:
        """Return the seconds of a step. `context_tokens`: KV tokens that the rows attend to besides those they feed,
        summed over the rows."""
        return (
            self.base_s
            + self.per_prefill_token_s * prefill_tokens
            + self.per_decode_row_s * decode_rows
            + self.per_context_token_s * context_tokens
            + self.batched_s * (prefill_tokens + decode_rows > 1)
        )

    def rows_s(self, rows: Iterable[Row]) -> float:
        """Return the seconds of a step with these rows; 0 for none."""
        prefill_tokens = decode_rows = context_tokens = 0
        for row in rows:
            count = len(row.tokens)
            if count == 1:
                decode_rows += 1
            else:
                prefill_tokens += count
            context_tokens += row.start
        if not prefill_tokens and not decode_rows:
            return 0.0
        return self.step_s(prefill_tokens, decode_rows, context_tokens)

    def scaled(self, factor: float) -> SimTiming:
        """Return the same timing, `factor` times as slow."""
        return SimTiming(*(getattr(self, field.name) * factor for field in fields(self)))


TIMINGS = {"h100-8b": SimTiming(), "zero": SimTiming(0.0, 0.0, 0.0, 0.0, 0.0)}


class TimingFile(msgspec.Struct, kw_only=True):
    """An engine's calibration as `pdbus calibrate` writes it, in JSON."""

    engine: str
    model: str
    timing: SimTiming
    first_at_decode: bool = False  # its decode ranks make the first token themselves
    kv_fetch_token_s: float | None = None  # of a prompt's KV cache, where that was measured
    typical_error: float = 0.0  # half of the points that were measured are nearer to the model, as a share
    worst_error: float = 0.0
    points: list[dict[str, float]] = []  # that it was fitted to


def timing_named(name: str) -> SimTiming:
    """Return the timing called `name` in TIMINGS, else read the timing from the file at the path `name`; ConfigError
    where there is neither."""
    return TIMINGS[name] if name in TIMINGS else read_timing(name).timing


def read_timing(path: str) -> TimingFile:
    """Return what `pdbus calibrate` wrote to the file at `path`; ConfigError for a file that is missing or has other
    content."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=TimingFile)
    except OSError as error:
        names = ", ".join(TIMINGS)
        why = f"choose one of {names}, or a file that pdbus calibrate wrote ({error.strerror})"
        raise ConfigError(f"unknown sim timing {path!r}; {why}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no timing file of pdbus calibrate: {error}") from None

"""Reads files of request traces. Owns the formats.

Two published formats are read:
- Mooncake (FAST '25): JSON lines of `timestamp` (ms), `input_length`, `output_length` (tokens) and `hash_ids`, one per
  512-token block of the input; equal ids mean equal prefixes. The id of a last partial block is not used.
- Azure LLM inference traces (Splitwise, ISCA '24): CSV of `TIMESTAMP,ContextTokens,GeneratedTokens`.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from bus.errors import ConfigError
from pdbus.lab.traces import BLOCK_TOKENS, Trace, TraceRequest, checked

MAX_TOKENS = 10_000_000
AZURE_HEADER = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]  # among others, in any order
_DECIMALS = re.compile(r"(\.\d{6})\d+")  # datetime takes six


def read_trace(path: Path) -> Trace:
    """Return the trace in `path`; its first line decides the format. Raises ConfigError that names file, line and
    fault."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            first = lines.readline()
            lines.seek(0)
            if first.lstrip().startswith("{"):
                return checked(path.stem, _mooncake(path, lines), BLOCK_TOKENS)
            if set(AZURE_HEADER) <= set(_names(first.split(","))):
                return checked(path.stem, _azure(path, lines), BLOCK_TOKENS)
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file") from None
    raise ConfigError(
        f"{path} is no trace that the lab knows: it reads Mooncake JSON lines (timestamp, input_length, output_length, "
        f"hash_ids) and Azure CSV ({','.join(AZURE_HEADER)})"
    )


def _mooncake(path: Path, lines: Iterable[str]) -> Iterator[TraceRequest]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt_tokens = _count(row["input_length"], "input_length", 1)
            ids = [_count(value, "hash_ids") for value in row.get("hash_ids", [])]
            yield TraceRequest(
                _seconds(row["timestamp"]) / 1000,
                prompt_tokens,
                _count(row["output_length"], "output_length"),
                tuple(value + 1 for value in ids[: prompt_tokens // BLOCK_TOKENS]),  # 0 stands for "no parent"
            )
        except KeyError as error:
            raise ConfigError(f"{path}:{number}: {error.args[0]} is missing") from None
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{path}:{number}: {error}") from None


def _azure(path: Path, lines: Iterable[str]) -> Iterator[TraceRequest]:
    rows = csv.reader(lines)
    header = _names(next(rows))
    at_place, prompt_place, output_place = (header.index(name) for name in AZURE_HEADER)
    start: datetime | None = None
    for row in rows:
        if not row:
            continue
        try:
            if len(row) != len(header):
                raise ValueError(f"{len(row)} columns, not {len(header)}")
            at = datetime.fromisoformat(_DECIMALS.sub(r"\1", row[at_place].strip()))
            start = start or at
            if (at.tzinfo is None) != (start.tzinfo is None):
                raise ValueError("some times have a zone and others have none")
            prompt_tokens = _count(int(row[prompt_place]), "ContextTokens", 1)
            output_tokens = _count(int(row[output_place]), "GeneratedTokens")
            yield TraceRequest((at - start).total_seconds(), prompt_tokens, output_tokens)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path}:{rows.line_num}: {error}") from None


def _names(cells: Iterable[str]) -> list[str]:
    return [cell.strip() for cell in cells]


def _count(value: Any, name: str, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= (MAX_TOKENS if name != "hash_ids" else 2**62):
        raise ValueError(f"{name} is {value!r}, which is no count of at least {least}")
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < 1e15:
        raise ValueError(f"timestamp is {value!r}, which is no time")
    return float(value)

"""Reads files of request traces and of agents' sessions. Owns the formats.

Published formats are read, by their first line:
- Mooncake (FAST '25): JSON lines of `timestamp` (ms), `input_length`, `output_length` (tokens) and `hash_ids`, one per
  512-token block of the input; equal ids mean equal prefixes. The id of a last partial block is not used.
- The same with `session_id`, as AIPerf writes it: the rows of a session are its turns, `input_length` and `hash_ids`
  what each adds to the prompt (the answer before it is added too), `delay` the ms since the end of the turn before.
- WEKA's sessions of coding agents (kv-cache-tester): a JSON object a session with `requests` of `in`, `out` (tokens),
  `hash_ids` of blocks of `block_size`, `t` and `think_time` (s), some of them sub-agents with `requests` of their own.
- Bailian (Qwen): JSON lines of `chat_id`, `parent_chat_id`, `timestamp` (s), lengths and `hash_ids` of 16-token blocks.
  It has no ends of requests: the think time is that between two arrivals.
- Azure LLM inference traces (Splitwise, ISCA '24): CSV of `TIMESTAMP,ContextTokens,GeneratedTokens`.

A request's rid is what Mooncake's rows say as `rid` or `request_id`, the `chat_id` of Bailian's, and of a turn the name
of its session and its number there.
"""

from __future__ import annotations

import csv
import gzip
import json
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from bus.errors import ConfigError
from pdbus.lab.traces import BLOCK_TOKENS, Trace, TraceRequest, checked

MAX_TOKENS = 10_000_000
MAX_RID = 200  # characters
BAILIAN_BLOCK_TOKENS = 16
AZURE_HEADER = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]  # among others, in any order
_DECIMALS = re.compile(r"(\.\d{6})\d+")  # datetime takes six
_OPENERS: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}  # else a plain file
_Row = dict[str, Any]


def read_trace(path: Path) -> Trace:
    """Return the trace in `path`, which may be compressed (.xz, .gz) or a folder of WEKA's JSON files. Raises
    ConfigError that names file, line and fault."""
    try:
        if path.is_dir():
            return _weka(path.name, _files(path))
        with _opened(path) as lines:
            first = lines.readline()
            lines.seek(0)
            if set(AZURE_HEADER) <= set(_names(first.split(","))):
                return checked(path.stem, _azure(path, lines), BLOCK_TOKENS)
            if first.lstrip().startswith("{"):
                return _json(path, first, lines)
    except (OSError, EOFError, lzma.LZMAError, zlib.error, csv.Error) as error:
        raise ConfigError(f"cannot read the trace {path}: {getattr(error, 'strerror', None) or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file") from None
    raise ConfigError(
        f"{path} is no trace that the lab knows: it reads JSON lines of Mooncake (timestamp, input_length, "
        f"output_length, hash_ids; with session_id: of AIPerf), WEKA and Bailian, and Azure CSV "
        f"({','.join(AZURE_HEADER)})"
    )


def _opened(path: Path) -> TextIO:
    text: TextIO = _OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8-sig", newline="")
    return text


def _json(path: Path, first: str, lines: TextIO) -> Trace:
    try:
        row = json.loads(first)
    except (ValueError, RecursionError):
        row = None
    if row is None and '"requests"' in lines.read(1 << 20):  # one session, over many lines
        lines.seek(0)
        return _weka(_name(path), [(f"{path}", lines.read())])
    lines.seek(0)
    if isinstance(row, dict) and "requests" in row:
        return _weka(_name(path), ((f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()))
    if isinstance(row, dict) and "chat_id" in row:
        return checked(_name(path), _rows(path, lines, _Chats().read), BAILIAN_BLOCK_TOKENS)
    if isinstance(row, dict) and "session_id" in row:
        turns = _rows(path, lines, _Turns().read)
        starts = [request.arrival_s for request in turns if not request.after]
        return checked(_name(path), turns, BLOCK_TOKENS, timed=len(starts) == 1 or len(set(starts)) > 1)
    return checked(_name(path), _rows(path, lines, _mooncake), BLOCK_TOKENS)


def _name(path: Path) -> str:
    return path.name.split(".")[0]


def _files(folder: Path) -> Iterator[tuple[str, str]]:
    files = sorted(folder.glob("*.json"))
    if not files:
        raise ConfigError(f"{folder} has no .json file: a folder is read as WEKA's sessions, one file each")
    for file in files:
        yield str(file), file.read_text(encoding="utf-8-sig")


@contextmanager
def _faults_at(place: str) -> Iterator[None]:
    """Turn what is wrong with a row into one line that names its place."""
    try:
        yield
    except KeyError as error:
        raise ConfigError(f"{place}: {error.args[0]} is missing") from None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{place}: {error}") from None


def _rows(path: Path, lines: Iterable[str], read: Callable[[_Row], TraceRequest]) -> list[TraceRequest]:
    """Return what `read` makes of each line's JSON object."""
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            with _faults_at(f"{path}:{number}"):
                found.append(read(json.loads(line)))
    return found


def _mooncake(row: _Row) -> TraceRequest:
    prompt_tokens = _count(row["input_length"], "input_length", 1)
    output_tokens = _count(row["output_length"], "output_length")
    return TraceRequest(
        _seconds(row["timestamp"], "timestamp") / 1000,
        prompt_tokens,
        output_tokens,
        _hashes(row, prompt_tokens // BLOCK_TOKENS),
        rid=_rid(row.get("rid", row.get("request_id", ""))),
    )


class _Turns:
    """Reads Mooncake rows with `session_id`: each adds to the prompt of the row before it in its session."""

    def __init__(self) -> None:
        # A session's last turn, with its place.
        self._last: dict[str, tuple[int, TraceRequest]] = {}
        self._turns: Counter[str] = Counter()
        self._places = 0

    def read(self, row: _Row) -> TraceRequest:
        name = str(row["session_id"])
        new_tokens = _count(row["input_length"], "input_length", 1)
        output_tokens = _count(row["output_length"], "output_length")
        hashes = _hashes(row, MAX_TOKENS)
        place, before = self._last.get(name, (0, None))
        if before is None:
            at_s = _seconds(row["timestamp"], "timestamp") / 1000
            request = TraceRequest(at_s, new_tokens, output_tokens, hashes, len(self._last))
        else:
            think_s = _seconds(row["delay"], "delay") / 1000
            tokens = before.prompt_tokens + before.output_tokens + new_tokens
            at_s = before.arrival_s + think_s
            hashes = before.hashes + hashes
            request = TraceRequest(at_s, tokens, output_tokens, hashes, before.session, (place,), think_s)
        self._last[name] = self._places, request
        self._places += 1
        self._turns[name] += 1
        rid = f"{_rid(name)}/{self._turns[name]}"
        return replace(request, hashes=hashes[: request.prompt_tokens // BLOCK_TOKENS], rid=rid)


class _Chats:
    """Reads Bailian's rows: each follows the one that its `parent_chat_id` names."""

    def __init__(self) -> None:
        self._chats: dict[Any, tuple[int, TraceRequest]] = {}  # by chat_id, with its place

    def read(self, row: _Row) -> TraceRequest:
        at_s = _seconds(row["timestamp"], "timestamp")
        prompt_tokens = _count(row["input_length"], "input_length", 1)
        output_tokens = _count(row["output_length"], "output_length")
        hashes = _hashes(row, prompt_tokens // BAILIAN_BLOCK_TOKENS)
        number = len(self._chats)
        place, before = self._chats.get(row.get("parent_chat_id", -1), (0, None))  # one of before the file is none
        if before is None:
            request = TraceRequest(at_s, prompt_tokens, output_tokens, hashes, number)
        else:
            think_s = max(0.0, at_s - before.arrival_s)
            at_s = before.arrival_s + think_s
            request = TraceRequest(at_s, prompt_tokens, output_tokens, hashes, before.session, (place,), think_s)
        if row["chat_id"] in self._chats:
            raise ValueError(f"chat_id {row['chat_id']!r} stands there twice")
        self._chats[row["chat_id"]] = number, request
        return replace(request, rid=_rid(row["chat_id"]))


@dataclass(slots=True)
class _Weka:
    """One of WEKA's sessions while it is read. Ids are its own, so `base` is added to each."""

    requests: list[TraceRequest]  # of all sessions so far
    session: int
    name: str  # of the session
    base: int
    block_tokens: int
    turns: int = 0  # so far
    highest: int = 0  # of the ids
    last_ids: Seq[int] = ()  # of the request before, as they stand there
    last_hashes: tuple[int, ...] = ()  # made of them

    def add(self, row: _Row, at_s: float, after: tuple[int, ...], think_s: float) -> tuple[int, float]:
        """Add a request, and return its place and the time when it ended in the recording."""
        prompt_tokens = _count(row["in"], "in", 1)
        hashes = self._hashes(row.get("hash_ids", [])[: prompt_tokens // self.block_tokens])
        output_tokens = _count(row["out"], "out")
        self.turns += 1
        rid = f"{self.name}/{self.turns}" if self.name else ""
        request = TraceRequest(at_s, prompt_tokens, output_tokens, hashes, self.session, after, think_s, rid)
        self.requests.append(request)
        return len(self.requests) - 1, at_s + _seconds(row.get("api_time", 0.0), "api_time")

    def _hashes(self, ids: Seq[int]) -> tuple[int, ...]:
        """Return the hashes of these ids. A turn shares those of the turn before as far as their ids are the same. That
        takes a fifth of the memory: 8 bytes a block and turn, and not 40."""
        low, high = 0, min(len(ids), len(self.last_ids))
        while low < high:  # how many of the first ids are the same, by halving
            middle = (low + high + 1) // 2
            low, high = (middle, high) if ids[low:middle] == self.last_ids[low:middle] else (low, middle - 1)
        fresh = _hashes({"hash_ids": ids[low:]}, MAX_TOKENS)
        self.highest = max(self.highest, *fresh, 0)
        self.last_ids = ids
        self.last_hashes = self.last_hashes[:low] + tuple(value + self.base for value in fresh)
        return self.last_hashes

    def chain(self, rows: Iterable[_Row], start_s: float, after: tuple[int, ...], think_s: float) -> tuple[int, ...]:
        """Add the turns of a session or of a sub-agent, which began at `start_s`, and return the places of the last.

        A sub-agent's `t` is when it ended; those between two turns ran side by side from the first one's end on, and
        the second one waited for all of them.
        """
        ended_s, agents_s, waits = start_s, start_s, after
        for number, row in enumerate(rows):
            t_s = start_s + _seconds(row["t"], "t")
            if "requests" in row:
                began_s = t_s - _seconds(row["duration_ms"], "duration_ms") / 1000
                pause_s = max(0.0, began_s - ended_s)
                waits += self.chain(row["requests"], max(began_s, start_s), after, pause_s)
                agents_s = t_s
                continue
            if waits != after:  # sub-agents ran meanwhile
                pause_s = max(0.0, t_s - agents_s)
            else:
                pause_s = _seconds(row.get("think_time") or 0.0, "think_time") if number else think_s
            t_s = max([t_s, *(self.requests[each].arrival_s for each in waits)])  # it came after those, if late
            place, ended_s = self.add(row, t_s, tuple(dict.fromkeys(waits)), pause_s if waits else 0.0)
            after = waits = (place,)
        return waits[len(after) :] or waits


def _weka(name: str, texts: Iterable[tuple[str, str]]) -> Trace:
    """Read WEKA's sessions, each a JSON text with the place it stands at."""
    requests: list[TraceRequest] = []
    base = session = block_tokens = 0
    for place, text in texts:
        with _faults_at(place):
            row = json.loads(text)
            size = _count(row["block_size"], "block_size", 1)
            if block_tokens not in (0, size):
                raise ValueError(f"block_size is {size}, and {block_tokens} in the sessions before")
            block_tokens = size
            local = row.get("hash_id_scope", "local") == "local"
            reader = _Weka(requests, session, _rid(row.get("id", "")), base if local else 0, block_tokens)
            reader.chain(row["requests"], 0.0, (), 0.0)
            base, session = base + reader.highest * local, session + 1
    return checked(name, requests, block_tokens, timed=False)


def _hashes(row: _Row, most: int) -> tuple[int, ...]:
    """Return the hashes of a row's full blocks; 0 stands for "no parent", so each id is raised by one."""
    ids = row.get("hash_ids", [])[:most]
    if set(map(type, ids)) - {int} or (ids and not 0 <= min(ids) <= max(ids) <= 2**62):
        for value in ids:
            _count(value, "hash_ids", most=2**62)
    return tuple(value + 1 for value in ids)


def _azure(path: Path, lines: Iterable[str]) -> Iterator[TraceRequest]:
    rows = csv.reader(lines)
    header = _names(next(rows))
    at_place, prompt_place, output_place = (header.index(name) for name in AZURE_HEADER)
    start: datetime | None = None
    for row in rows:
        if not row:
            continue
        with _faults_at(f"{path}:{rows.line_num}"):
            if len(row) != len(header):
                raise ValueError(f"{len(row)} columns, not {len(header)}")
            at = datetime.fromisoformat(_DECIMALS.sub(r"\1", row[at_place].strip()))
            start = start or at
            if (at.tzinfo is None) != (start.tzinfo is None):
                raise ValueError("some times have a zone and others have none")
            prompt_tokens = _count(int(row[prompt_place]), "ContextTokens", 1)
            output_tokens = _count(int(row[output_place]), "GeneratedTokens")
            request = TraceRequest((at - start).total_seconds(), prompt_tokens, output_tokens)
        yield request


def _names(cells: Iterable[str]) -> list[str]:
    return [cell.strip() for cell in cells]


def _rid(value: Any) -> str:
    return str(value)[:MAX_RID]


def _count(value: Any, name: str, least: int = 0, most: int = MAX_TOKENS) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is {value!r}, which is no count of at least {least}")
    return value


def _seconds(value: Any, name: str) -> float:
    if type(value) not in (int, float) or not 0 <= value < 1e15:
        raise ValueError(f"{name} is {value!r}, which is no time")
    return float(value)

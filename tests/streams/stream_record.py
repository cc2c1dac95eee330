"""What each part of a scenario received, message by message, once all of it is over."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from stream_registry import STREAMS

from bus.errors import RemoteProtocolError
from bus.wire import codec
from bus.wire.kv_events import KvEvent, parse_batch, split_frames
from bus.wire.messages import TABLES, Message, Table

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CLIENT = "client"
EVERY = codec.readable(Table({tag: kind for table in TABLES for tag, kind in table.items()}))
M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class Seen:
    """A message as it came to the part `at`; `first` is the frame before it: a topic, or whose it is."""

    at: str
    seconds: float
    first: bytes
    message: Message


@dataclass(repr=False)
class Record:
    engine: str
    seen: list[Seen] = field(default_factory=list)
    kv: list[tuple[str, bytes, tuple[KvEvent, ...]]] = field(default_factory=list)  # at, topic, events
    spans: list[bytes] = field(default_factory=list)  # bodies as a collector gets them
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: list[tuple[str, str]] = field(default_factory=list)  # steps, and why
    dropped: set[str] = field(default_factory=set)  # streams of which a sender dropped something
    over: bool = False
    log: str = ""

    def of(self, kind: type[M], at: str = "") -> list[M]:
        """Messages of a kind that came to `at` (empty: to anybody), in order."""
        return [each.message for each in self._of(kind, at)]  # type: ignore[misc]

    def topics(self, kind: type[Message], at: str = "") -> set[bytes]:
        return {each.first for each in self._of(kind, at)}

    def _of(self, kind: type[Message], at: str) -> Iterator[Seen]:
        return (each for each in self.seen if type(each.message) is kind and at in ("", each.at))

    @property
    def prompt(self) -> list[int]:
        """Of the first request; empty where none was begun."""
        prompt: list[int] = self.facts.get("request", {}).get("prompt", [])
        return prompt


def run(
    engine: str, *, cut: tuple[str, ...] = (), start_s: float = 120.0, wait_s: float = 30.0, model: str = "",
    python: str = "",
) -> Record:  # fmt: skip
    """The scenario from beginning to end, its senders dropping the streams of `cut`; a step waits `wait_s` at most."""
    with tempfile.TemporaryDirectory(prefix="streams") as folder:
        env = os.environ | {"STREAMS_TAP": folder, "STREAMS_CUT": ",".join(cut), "PYTHONUNBUFFERED": "1"}
        env["PYTHONPATH"] = os.pathsep.join([str(HERE / "plugin"), str(ROOT)])
        command = [
            python or sys.executable,
            str(HERE / "stream_scenario.py"),
            engine,
            str(start_s),
            str(wait_s),
            *filter(None, [model]),
        ]
        with open(Path(folder) / "scenario.log", "w+") as log:
            process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
            try:
                process.wait(30 + start_s + 8 * wait_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # its parts leave with it
                process.wait(30)
            log.seek(0)
            said = log.read()
        return read(Path(folder), Record(engine, log=said))


def read(folder: Path, record: Record) -> Record:
    """Fill `record` with what the processes of a run left in `folder`."""
    parts: dict[str, str] = {}
    taken: list[tuple[float, str, Any]] = []
    for path in folder.glob("*.tap"):
        with path.open("rb") as file:
            while True:
                try:
                    at, what = pickle.load(file)  # noqa: S301  (our own processes wrote it)
                except (EOFError, pickle.UnpicklingError):  # a part that was killed has not written all
                    break
                taken.append((at, path.stem, what))
    taken.sort(key=lambda each: each[0])
    for _, pid, what in taken:
        match what:
            case ("part", number, name):
                parts[str(number)] = name
            case ("over",):
                record.over = True
                parts.setdefault(pid, CLIENT)
            case ("fact", name, facts):
                record.facts[name] = facts
            case ("failed", step, why):
                record.failed.append((step, why))
            case ("spans", body):
                record.spans.append(body)
            case str():
                record.dropped.add(what.removeprefix("dropped "))
    for at, pid, what in taken:
        if isinstance(what, list):
            _take(record, parts.get(pid, CLIENT), at, what)
    return record


def _take(record: Record, part: str, seconds: float, frames: list[bytes]) -> None:
    if frames[0].startswith(b"kv/"):
        record.kv.append((part, frames[0], parse_batch(split_frames(frames)[1]).events))
        return
    for frame in frames[:3]:
        try:
            message = codec.decode(frame, EVERY)
        except RemoteProtocolError:
            continue
        record.seen.append(Seen(part, seconds, frames[0], message))
        return


def check(name: str) -> str:
    """The test of a stream."""
    return STREAMS[name].test

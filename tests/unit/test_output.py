"""Output that cannot be written, for a command that is to outlive that."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import click
import pytest
from rich.console import Console

from bus.runtime.output import Unfailing, outlive_readers
from pdbus.commands.common import ProgressLine


def unwritable(kind: str) -> io.TextIOWrapper:
    if kind == "full":
        return open("/dev/full", "w", encoding="utf-8")
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w", encoding="utf-8")


@pytest.mark.parametrize("kind", ["full", "pipe"])
def test_whoever_writes_is_told_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`print`, click and rich, on both streams, flushed or not."""
    streams = [unwritable(kind), unwritable(kind)]
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    outlive_readers()
    print("a line", flush=True)
    print("a line", file=sys.stderr, flush=True)
    click.echo("a line")
    click.echo("a line", err=True)
    Console().print("[b]a line")
    progress = ProgressLine(at_once=True)
    with progress.showing():
        progress.show("a line")
    print("x" * 100_000)
    sys.stdout.flush()
    monkeypatch.undo()
    for stream in streams:
        with pytest.raises(OSError, match=r"No space|Broken pipe"):
            stream.close()  # what was written is still there, and goes with it


def test_what_can_be_written_again_is(tmp_path: Path) -> None:
    """As once the disk has room; and it is the stream that it stands for in all else."""
    with (tmp_path / "log").open("w", encoding="utf-8") as below:
        stream = Unfailing(below)
        os.dup2(full := os.open("/dev/full", os.O_WRONLY), below.fileno())
        os.close(full)
        stream.write("before\n")
        stream.flush()
        os.dup2(file := os.open(tmp_path / "log", os.O_WRONLY), below.fileno())
        os.close(file)
        assert stream.write("after\n") == 6
        stream.flush()
        assert (stream.isatty(), stream.encoding, stream.fileno()) == (False, "utf-8", below.fileno())
    assert (tmp_path / "log").read_text().splitlines()[-1] == "after"

"""The tutorial, and what README.md says to do on one machine, typed in their order; what they show comes back."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs_commands import ROOT, blocks, commands, shell, transcript
from terminal import Terminal, pattern, unshown

from bus.runtime.ports import free_ports


@pytest.fixture
def place() -> Iterator[Path]:
    """`out`, beside the examples, as in a checkout. Sockets want a short path."""
    with tempfile.TemporaryDirectory(prefix="pd") as path:
        (Path(path) / "out").mkdir()
        (Path(path) / "examples").symlink_to(ROOT / "examples")
        yield Path(path)


def moved(text: str) -> str:
    """With ports that nobody else has."""
    base = free_ports("127.0.0.1", 6)
    return text.replace(":5550", f":{base}").replace(":5560", f":{base + 3}").replace(":8000", f":{base + 5}")


def test_the_tutorial(place: Path) -> None:
    page = "\0".join(block.text for block in blocks(ROOT / "docs" / "tutorial.md") if block.info == "console")
    with Terminal(place / "out", PDBUS_DIR=str(place / "s"), COLUMNS="200") as terminal:
        for block in moved(page).split("\0"):
            for command, shown in transcript(block):
                terminal.type(command, shown)


def test_the_readme_on_one_machine_and_the_edges_page(place: Path) -> None:
    scripts = [shell(block) for block in blocks(ROOT / "README.md") if block.info == "sh"]
    (start,), (asks,) = ([each for each in scripts if words in each] for words in ("pdbus up --prefill 2", "pdbus top"))
    (curl,) = (block.text for block in blocks(ROOT / "docs" / "edge.md") if block.text.startswith("curl "))
    (up,) = (shlex.join(words) for words in commands(start) if words[0] == "pdbus")
    up, curl = moved(f"{up} --model sim --http 127.0.0.1:8000 -- --sim-timing zero\0{curl}").split("\0")
    with Terminal(place / "out", PDBUS_DIR=str(place / "s"), COLUMNS="200") as terminal:
        terminal.type(f"{up} 2> up.log & up=$!", ["READY bus=…", "Try, from another terminal: …"])
        for words in commands(asks):
            if words != ["pdbus", "top"]:  # wants a screen: test_top_live
                terminal.type(f"{shlex.join(words)} && echo it went well", ["it went well"])
        terminal.type(curl, ['…"finish_reason":"length"…'])
        terminal.type("kill $up; wait $up; echo $?", ["130"])


def test_a_line_of_a_page_stands_for_lines_like_it() -> None:
    assert pattern("decode-0/0  ready  0.6s  1+0  …").search(" decode-0/0   ready  1.25s       7+0  30%   0/0 ")
    assert not pattern("decode-0/0  ready").search("decode-0/1  ready")
    assert not pattern("ended by length, attempt").search("ended by stop, attempt 1")
    assert unshown("a\nb\nc", ["a", "…", "", "c"]) == ""
    assert unshown("a\nb\nc", ["c", "a"]) == "a"

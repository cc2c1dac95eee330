"""Coding agents, set up as docs/agents.md says, against vLLM's own server in front of scripted ranks: each reads or
edits a file by a tool of its own, and answers by what it read.

The programs are the published ones, in a home of their own, and they reach nothing but this machine. `make test-coders`
runs this, and no other target does: it needs npm, and its environments take minutes to make.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_venv import programs_of, python_of
from front_server import Front
from scripted_front import ANSWER, at, one, typed

pytestmark = pytest.mark.timeout(1800)

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def programs() -> Path:
    return programs_of("agent-programs", "coding agents", HERE / "programs.json", takes="a minute, 900 MB")


def test_claude_code(coder: Front, home: Path, programs: Path) -> None:
    said, sessions = typed(coder, home, one("claude -p"), programs)
    assert ANSWER in said
    assert len(sessions) >= 2
    assert len(set(sessions)) == 1
    assert len(sessions[0].partition("/")[2]) == 36, "behind the key's hash"


def test_codex(coder: Front, home: Path, programs: Path) -> None:
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(at(coder.port, one("model_provider =")))
    said, sessions = typed(coder, home, one("codex exec"), programs)
    assert ANSWER in said
    assert len(sessions) >= 2
    assert len(set(sessions)) == 1, "its prompt_cache_key"
    assert sessions[0]


def test_aider_edits_a_file(coder: Front, home: Path) -> None:
    python = python_of("aider", "aider", HERE / "aider.txt", takes="some minutes, 700 MB")
    (home / ".aider.model.settings.yml").write_text(one("extra_headers:"))
    _, sessions = typed(coder, home, one("aider --model"), python.parent)
    assert (home / "trip.txt").read_text() == "Rome\n"
    assert {session.partition("/")[2] for session in sessions} == {"trip-1"}

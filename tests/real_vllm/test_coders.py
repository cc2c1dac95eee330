"""aider as docs/agents.md says, against vLLM's own server in front of scripted ranks: it edits a file by the answer.

`make test-aider` runs this, and no other target does: its environment takes minutes to make.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_venv import python_of
from front_server import Front
from scripted_front import one, typed

pytestmark = pytest.mark.timeout(1800)

HERE = Path(__file__).parent


def test_aider_edits_a_file(coder: Front, home: Path) -> None:
    python = python_of("aider", "aider", HERE / "aider.txt", takes="some minutes, 700 MB")
    (home / ".aider.model.settings.yml").write_text(one("extra_headers:"))
    _, sessions = typed(coder, home, one("aider --model"), python.parent)
    assert (home / "trip.txt").read_text() == "Rome\n"
    assert {session.partition("/")[2] for session in sessions} == {"trip-1"}

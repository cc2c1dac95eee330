"""The commands of docs/deploy.md, as tests run them."""

from __future__ import annotations

import os
import re
import subprocess
from contextlib import closing
from pathlib import Path

from typed import Typed

ROOT = Path(__file__).parents[2]


def blocks(section: str) -> list[list[str]]:
    """The lines of each block of commands in a section."""
    text = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    text = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return [block.splitlines() for block in re.findall(r"```\n(.*?)```", text, re.S)]


def run(line: str, directory: Path) -> None:
    """A command as it stands on the page, `pdbus` being this checkout's."""
    with closing(Typed()) as typed:
        env = os.environ | {"PATH": f"{typed.folder}:{os.environ['PATH']}"}
        done = subprocess.run(["sh", "-ec", line], cwd=directory, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"

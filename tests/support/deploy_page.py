"""The commands of docs/deploy.md, as tests run them."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def blocks(section: str) -> list[list[str]]:
    """The lines of each block of commands in a section."""
    text = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    text = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return [block.splitlines() for block in re.findall(r"```\n(.*?)```", text, re.S)]


def run(line: str, directory: Path) -> None:
    """A command as it stands on the page, `pdbus` being this checkout's."""
    line = re.sub(r"^pdbus ", f"{shlex.quote(sys.executable)} -P -m pdbus ", line)
    done = subprocess.run(["sh", "-ec", line], cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"

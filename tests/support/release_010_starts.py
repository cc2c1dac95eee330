"""The parts of release 0.1.0 start as forks of a process that has imported them, as today's do (`warm_starts`)."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import warm_starts

IMPORTED = ("bus.__main__", "controller.__main__", "nodes.main", "structlog")


class Starts(warm_starts.Starts):
    """Of commands whose PYTHONPATH is the release's folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = str(folder)

    def install(self) -> None:
        super().install()
        self._found = [self._folder]

    def launch(self, seed: str = "") -> socket.socket:
        return warm_starts.launch([os.path.abspath(__file__)], warm_starts.WAIT_S, PYTHONPATH=self._folder)


if __name__ == "__main__":
    sys.path.pop(0)  # our folder, which a part has not
    warm_starts.main(lambda: warm_starts.import_all(IMPORTED))

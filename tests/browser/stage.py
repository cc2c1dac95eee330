"""A cluster whose every token a test permits (`scripted`), and an edge in front of it that can go and come back."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from edge_process import Serve, get
from part_process import PartProcess
from scripted import Answer, Gate, Script, Scripted, rank

from pdbus.text.models import BytesText

TEXT = BytesText()
QUESTION = "Why is prefill apart from decode?"
ANSWER = (
    "Prefill computes a whole prompt at once and keeps the GPU busy; decode makes one token at a time and mostly waits "
    "for memory.\n\nApart, neither holds up the other: a long prompt delays no other request's next token."
)


def ids(text: str) -> tuple[int, ...]:
    return tuple(TEXT.encode(text))


def script(answers: dict[str, str], model: str = "a-model") -> Script:
    """Answers by a part of the question."""
    return Script(tuple(Answer(ids(mark), ids(text)) for mark, text in answers.items()), model, vocab_size=259)


TALK = script({QUESTION: ANSWER, "And?": "That is all that I know.", "more": "line\n" * 150})


class Stage:
    """A controller, ranks that come and go, and an edge. No token is made without a permit of `gate`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.gate = Gate(is_open=True)
        self.ranks: list[Scripted] = []
        self.bus, self.controller = f"ipc://{folder}/bus", f"ipc://{folder}/c"
        self._stack = ExitStack()
        self._edge: Serve | None = None
        self._arguments: tuple[str, ...] = ()
        self.url = ""
        self.log = ""  # what edges have said

    def __enter__(self) -> Stage:
        line = [sys.executable, "-P", "-m", "controller", "--with-broker", "--bus", self.bus]
        part = PartProcess([*line, "--controller", self.controller], self.folder / "log")
        self._stack.callback(part.close)
        part.until_ready()
        return self

    def __exit__(self, *_: object) -> None:
        if self._edge is not None:
            self.take_edge_away()
        self._stack.close()
        assert "Traceback" not in self.log, self.log

    def rank(self, role: str, instance: str = "", says: Script = TALK) -> Scripted:
        """A rank on a thread, which has joined."""
        joined = rank(role, self.bus, self.controller, self.folder, says, self.gate, instance)
        self.ranks.append(self._stack.enter_context(joined))
        return self.ranks[-1]

    def process(self, role: str, instance: str, says: Script = TALK, step_s: float = 0.1) -> PartProcess:
        """A rank that is a process and makes a token each `step_s`; it has joined."""
        path = says.saved(self.folder / f"{instance}.script")
        line = [sys.executable, "-P", "-m", "scripted", role, self.bus, self.controller, str(self.folder), instance]
        path_of = {"PYTHONPATH": str(Path(__file__).parents[1] / "support")}
        part = PartProcess([*line, str(path), str(step_s)], self.folder / f"{instance}.log", path_of)
        self._stack.callback(part.close)
        part.until_ready()
        return part

    def serve(self, *arguments: str) -> str:
        """Start the edge, and again after it was taken away, on the same port; its URL."""
        self._arguments = arguments or self._arguments
        port = self.url.rpartition(":")[2] or "0"
        self._edge = Serve(self.controller, "--tokenizer", "bytes", *self._arguments, port=port).__enter__()
        self.url = self._edge.url
        return self.url

    def take_edge_away(self) -> None:
        assert self._edge is not None
        self._edge.process.kill()
        self.log += self._edge.end()[1]
        self._edge = None

    def running(self) -> int:
        """Requests that ranks compute now, all together."""
        return sum(rank["running"] or 0 for rank in json.loads(get(self.url, "/load")[1])["ranks"])


@contextmanager
def stage() -> Iterator[Stage]:
    folder = Path(tempfile.mkdtemp(prefix="pd"))
    try:
        with Stage(folder) as made:
            yield made
    finally:
        shutil.rmtree(folder)

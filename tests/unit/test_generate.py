"""`pdbus generate --json` when it is cancelled: one object on stdout all the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from pdbus.client import Piece, Result
from pdbus.commands import generate


class Interrupted:
    """A stream in the midst of which Ctrl-C comes."""

    prompt_ids = (1, 2)
    result = Result("r", "cancelled", (5,), 1, None, None, None, "", 0.1, 0.2, "cancelled", "cancelled by the caller")

    def __iter__(self) -> Iterator[Piece]:
        yield Piece((5,), "a")
        raise KeyboardInterrupt


def test_what_came_before_it_was_cancelled_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    stream: Any = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        generate._show(stream, as_json=True, tokens=False)
    said = json.loads(capsys.readouterr().out)
    assert (said["rid"], said["finish"], said["code"], said["text"], said["ids"]) == (
        "r",
        "cancelled",
        "cancelled",
        "a",
        [5],
    )

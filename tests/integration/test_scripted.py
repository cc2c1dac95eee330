"""The tests' engine of given answers: what it answers to which prompt, gated and free, alone and in a pair."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from part_process import PartProcess
from scripted import Answer, Gate, Script, loaded, rank

from bus.errors import RequestFailed
from pdbus.client import Client

SCRIPT = Script(
    (Answer((7, 8), (20, 21, 22, 2)), Answer((9,), (30, 31, 32, 33))), vocab_size=512, eos_ids=(2,),
)  # fmt: skip


@contextmanager
def ranks(roles: tuple[str, ...], gate: Gate) -> Iterator[str]:
    """Run a controller with ranks of these roles, and yield the controller's address."""
    with tempfile.TemporaryDirectory(prefix="pd") as short:  # sockets' paths are: pytest's folders may be too long
        yield from _ranks(roles, Path(short), gate)


def _ranks(roles: tuple[str, ...], folder: Path, gate: Gate) -> Iterator[str]:
    bus, controller = f"ipc://{folder}/bus", f"ipc://{folder}/c"
    line = [sys.executable, "-P", "-m", "controller", "--with-broker", "--bus", bus, "--controller", controller]
    part = PartProcess(line, folder / "log")
    try:
        part.until_ready()
        with ExitStack() as stack:
            for role in roles:
                stack.enter_context(rank(role, bus, controller, folder, SCRIPT, gate))
            yield controller
    finally:
        part.close()


def test_the_last_mark_of_a_prompt_decides() -> None:
    assert SCRIPT.answer([1, 7, 8, 5]) == (20, 21, 22, 2)
    assert SCRIPT.answer([7, 8, 3, 9, 3]) == (30, 31, 32, 33)
    assert SCRIPT.answer([9, 7, 8]) == (20, 21, 22, 2)
    assert SCRIPT.answer([7, 5, 8]) is None


def test_a_script_is_read_as_it_was_saved(tmp_path: Path) -> None:
    assert loaded(SCRIPT.saved(tmp_path / "script")) == SCRIPT


@pytest.mark.parametrize("roles", [("unified",), ("prefill", "decode")])
def test_answers_come_through_the_bus_and_each_token_waits_for_its_permit(roles: tuple[str, ...]) -> None:
    gate = Gate()
    with ranks(roles, gate) as controller, Client(controller) as client:
        stream = client.generate_tokens([1, 7, 8], max_tokens=9, stop_token_ids=[2])
        pieces = iter(stream)
        for token in (20, 21):
            assert not gate.permits
            gate.release()
            assert next(pieces).ids == (token,)
        gate.open()
        assert [token for piece in pieces for token in piece.ids] == [22, 2]
        assert stream.result.finish == "stop"
        assert client.generate_tokens([9], max_tokens=2, logprobs=1).tokens() == [30, 31]
        whole = client.generate_tokens([9], max_tokens=99)
        assert (whole.tokens(), whole.result.finish) == ([30, 31, 32, 33], "length"), "the end of what is written"
        with pytest.raises(RequestFailed, match="the script has no answer"):
            client.generate_tokens([5]).tokens()

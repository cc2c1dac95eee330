"""Frames that were recorded once are read for ever, and every message has some (docs/protocol.md, section 16)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import golden_frames
import pytest
from golden_frames import GOLDEN, KINDS, TAGS, Golden

from bus.wire import codec, messages

GOLDENS = [golden for path in sorted(GOLDEN.glob("*.txt")) for golden in golden_frames.read(path)]
TABLES: dict[str, Any] = {
    name: table for name, table in vars(messages).items() if name.isupper() and isinstance(table, dict)
}
each_golden = pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: f"{golden.tag}, {golden.title}")


def test_every_message_has_a_golden_frame_with_all_its_fields() -> None:
    """M3: a message or field that is new is recorded before it is released: `make golden`."""
    current = [golden for golden in GOLDENS if golden.is_current()]
    assert {golden.tag for golden in current} == set(TAGS)
    assert set().union(*(golden.kinds() for golden in current)) == set(KINDS)


@each_golden
def test_encodes_byte_for_byte(golden: Golden) -> None:
    """M2 M3: with the fields that messages have today; one recorded before a field came need only be read."""
    assert golden.frame, "its bytes are still to be added: make golden"
    if golden.is_current():
        assert codec.encode(golden_frames.build(golden.text)).hex() == golden.frame.hex()


def wordier(frame: bytes) -> bytes:
    """The same message as others may write it: with more bytes for the length of the array than it needs."""
    kind = frame[1]
    return frame[:1] + (b"\xdd\0\0" if kind == 0xDC else b"\xdc\0" + bytes([kind & 15])) + frame[2:]


@each_golden
def test_decodes_to_the_same_values_on_each_socket_that_takes_it(golden: Golden) -> None:
    """M7 M9."""
    expected = golden_frames.build(golden.text)
    tables = [table for table in TABLES.values() if golden.tag in table]
    assert tables
    for table in tables:
        assert codec.decode(golden.frame, table) == expected
        assert codec.decode(wordier(golden.frame), table) == expected


def test_a_frame_from_before_a_field_was_appended_need_only_be_read() -> None:
    """M9."""
    frame = bytes.fromhex("0193a6617474616368a3722d3101")
    old = Golden("attach", "before `have`", "Attach(rid='r-1', attempt=1)", frame)
    assert not old.is_current()
    assert codec.decode(frame, messages.TO_NODE_DATA) == golden_frames.build(old.text) == messages.Attach("r-1", 1)


def test_recording_adds_the_bytes_that_are_missing_and_changes_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "ping.txt"
    stale = "# stale\nPing(n=1)\n0192a470696e6702\n"  # not its bytes: the tests above say so, the tool mends nothing
    path.write_text(stale + "\n# new\nPing(300)\n", encoding="utf-8")
    assert golden_frames.fill(path) == 1
    assert path.read_text(encoding="utf-8") == stale + "\n# new\nPing(n=300, restate=False)\n0193a470696e67cd012cc2\n"
    assert golden_frames.fill(path) == 0


def test_a_file_of_another_form_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ping.txt"
    path.write_text("Ping(n=1)\n0192a470696e6701\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"ping\.txt: not a title"):
        list(golden_frames.read(path))

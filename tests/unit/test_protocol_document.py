"""docs/protocol.md says what bus/wire/messages.py says, its examples are real bytes, and each MUST has a test."""

from __future__ import annotations

import re
import struct
from hashlib import blake2b
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from golden_frames import KINDS, build

from bus.wire import codec, messages
from bus.wire.codes import Code, is_retryable
from bus.wire.hashing import block_hashes, pack_hashes, root_of
from bus.wire.messages import Table

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
TABLES = {name: table for name, table in vars(messages).items() if name.isupper() and isinstance(table, dict)}
SECTIONS = {
    found["name"]: found
    for found in re.finditer(
        r"^#### (?:`(?P<tag>\w+)` — )?(?P<name>\w+)(?: \(inside other messages\))?\n(?P<body>.*?)(?=^#|\Z)",
        DOCUMENT,
        re.M | re.S,
    )
}
NUMBERS = {"MAX_ROOMS_PER_MESSAGE": "4096", "MAX_TOKENS_PER_MESSAGE": "16384", "MAX_DP_SIZE": "4096"}
NUMBERS |= {"MAX_LOGPROBS_PER_MESSAGE": "2048", "MAX_OTHERS_PER_MESSAGE": "63"}
NUMBERS |= {
    "MAX_WANTED": str(messages.MAX_WANTED),
    "MAX_QUEUED_KINDS": str(messages.MAX_QUEUED_KINDS),
    "MAX_LISTED": str(messages.MAX_LISTED),
    "MAX_TRACE_EVENTS": str(messages.MAX_TRACE_EVENTS),
    "MAX_TRACE_PARTS": str(messages.MAX_TRACE_PARTS),
    "MAX_STEPS_PER_MESSAGE": str(messages.MAX_STEPS_PER_MESSAGE),
    "MAX_WORK_PER_MESSAGE": str(messages.MAX_WORK_PER_MESSAGE),
}
NUMBERS |= {"1 << 19": str(1 << 19), "2**31": str(2**31), "2**32": str(2**32)}
BOUNDS = {"max_length": "at most", "min_length": "at least", "ge": "≥", "le": "≤", "gt": ">", "lt": "<"}


def described(annotation: str) -> str:
    """A field's annotation in the words of the document."""
    for name, number in NUMBERS.items():
        annotation = annotation.replace(name, number)
    bounds: list[str] = []
    if whole := re.fullmatch(r"Annotated\[(.*), Meta\((.*)\)\]", annotation):
        annotation = whole[1]
        bounds = [f"{BOUNDS[key]} {value}" for key, value in (item.split("=") for item in whole[2].split(", "))]
    core = annotation.removesuffix(" | None")
    core = re.sub(r"tuple\[(.*), \.\.\.\]", r"[\1]", core)
    core = re.sub(r"tuple\[([^\[\]]*)\]", r"(\1)", core)
    core = re.sub(r"dict\[(.*)\]", r"{\1}", core)
    return ", ".join([core, *bounds]) + (" or nil" if annotation.endswith(" | None") else "")


def written(default: Any) -> str:
    """A field's default as the document writes it."""
    if default is msgspec.NODEFAULT:
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, str):
        return default or '""'
    return {None: "nil", b"": "empty", (): "[]"}.get(default, repr(default))


def test_every_message_is_documented_and_nothing_else() -> None:
    assert SECTIONS.keys() == KINDS.keys()


@pytest.mark.parametrize("name", KINDS)
def test_fields_types_and_defaults_are_those_of_the_code(name: str) -> None:
    """M3: the order of the fields is the document's."""
    kind, section = KINDS[name], SECTIONS[name]
    assert section["tag"] == kind.__struct_config__.tag
    rows = [tuple(map(str.strip, row.split("|")[1:5])) for row in re.findall(r"^\|.*\|$", section["body"], re.M)][2:]
    fields, defaults = kind.__struct_fields__, kind.__struct_defaults__
    padded = (msgspec.NODEFAULT,) * (len(fields) - len(defaults)) + tuple(defaults)
    expected = [(f, described(kind.__annotations__[f]), written(d)) for f, d in zip(fields, padded, strict=True)]
    assert [row[:3] for row in rows] == expected
    assert all(row[3] for row in rows), "a field without a meaning"


@pytest.mark.parametrize("name", TABLES)
def test_each_socket_takes_the_tags_that_the_document_lists(name: str) -> None:
    row = re.search(rf"^\| {name} \|[^|]*\|(.*)\|$", DOCUMENT, re.M)
    assert row, f"{name} is not in the document"
    assert re.findall(r"`(\w+)`", row[1]) == list(TABLES[name])


def test_codes_are_those_of_the_code() -> None:
    section = DOCUMENT.split("## 14 Codes")[1].split("## 15")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (yes|no) \|$", section, re.M)
    assert [row[0] for row in rows] == list(get_args(Code))
    assert {row[0] for row in rows if row[2] == "yes"} == {code for code in get_args(Code) if is_retryable(code)}


@pytest.mark.parametrize("alias", ["Role", "Legs", "NodeState", "FoundBy", "FinishReason"])
def test_words_are_those_of_the_code(alias: str) -> None:
    row = re.search(rf"^\| {alias} \| str \| (.*) \|$", DOCUMENT, re.M)
    assert row
    assert re.findall(r"`(\w+)`", row[1]) == [word for word in get_args(getattr(messages, alias)) if word]


@pytest.mark.parametrize(
    ("alias", "low", "high"),
    [("Room", 0, 2**63 - 1), ("Epoch", 1, 2**63 - 1), ("Count", 0, 2**63 - 1), ("DpRank", 0, 4095), ("DpSize", 1, 4096),
     ("Attempt", 1, 1_000_000), ("TokenId", 0, 2**31 - 1), ("Priority", -1000, 1000)],
)  # fmt: skip
def test_bounds_of_integers(alias: str, low: int, high: int) -> None:
    """M6."""
    kind = getattr(messages, alias)
    for good in (low, high):
        assert msgspec.convert(good, kind) == good
    for bad in (low - 1, high + 1, float(high), True, str(low)):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(bad, kind)
    row = re.search(rf"^\| {alias} \| int \| ([^|;]*?) to ([^|;]*?)[;|]", DOCUMENT, re.M)
    assert row
    said = [eval_power(text) for text in row.groups()]
    assert said == [low, high]


def eval_power(text: str) -> int:
    """`2^63 - 1` and `1,000` as numbers."""
    power, _, minus = text.strip().replace(",", "").partition(" - ")
    base, _, exponent = power.partition("^")
    return int(base) ** int(exponent or 1) - int(minus or 0)


def test_an_answer_about_the_most_rooms_fits_in_a_frame() -> None:
    """M4: the bounds of Name and Endpoint are chosen so (section 15)."""
    where = messages.Location("n" * 64, 4095, 2**63 - 1, "e" * 150)
    found = (messages.Found(where, 1_000_000, (2**63 - 1,)),) * messages.MAX_ROOMS_PER_MESSAGE
    assert len(codec.encode(messages.Answer(2**63 - 1, found=found))) <= codec.MAX_HEADER_BYTES


EXAMPLES = re.findall(r"```\n([A-Z]\w+\([^`]*?\))\n((?:[0-9a-f]+\n)+)```", DOCUMENT)


def test_there_is_an_example_for_each_step() -> None:
    said = [re.match(r"\w+", text)[0] for text, _ in EXAMPLES]  # type: ignore[index]
    assert said == [
        "Submit", "Params", "Dispatch", "Dispatch", "Rooms", "Query", "Answer", "Accepted", "Attach", "KvPull",
        "KvMeta", "KvBlock", "Tokens", "Done",
    ]  # fmt: skip


@pytest.mark.parametrize(("text", "digits"), EXAMPLES)
def test_examples_are_the_bytes_that_the_codec_makes(text: str, digits: str) -> None:
    """M2 M3."""
    message = build(text)
    frame = bytes.fromhex(digits)
    assert codec.encode(message) == frame
    tag = str(type(message).__struct_config__.tag)
    assert codec.decode(frame, codec.readable(Table({tag: type(message)}))) == message


def test_hashes_of_blocks_are_made_as_the_document_says() -> None:
    """M75: the test computes them with hashlib and struct alone, as a foreign client would."""
    first = blake2b(bytes(8) + struct.pack("<4i", 1, 2, 3, 4), digest_size=8).digest()
    second = blake2b(first + struct.pack("<4i", 5, 6, 7, 8), digest_size=8).digest()
    assert pack_hashes(block_hashes(range(1, 10), 4)) == first + second
    assert f"`{first.hex()} {second.hex()}`" in DOCUMENT


def test_a_salt_stands_before_the_first_block_as_the_document_says() -> None:
    """M95: the test computes them with hashlib and struct alone, as a foreign client would."""
    root = blake2b(b"tenant-\xc3\xa9", digest_size=8, key=b"cache_salt").digest()
    first = blake2b(root + struct.pack("<4i", 1, 2, 3, 4), digest_size=8).digest()
    assert pack_hashes(block_hashes(range(1, 5), 4, root_of("tenant-\xe9"))) == first
    block = struct.pack("<4i", 1, 2, 3, 4)
    assert root_of((bytes(8) + block).decode()) != block_hashes(range(1, 5), 4)[0], "no salt is a prefix's name"


def test_every_must_has_a_number_and_a_test() -> None:
    rules = re.findall(r"^- \[M(\d+)\] .*MUST", DOCUMENT, re.M)
    assert len(rules) == len(set(rules)), "each number is of one rule"
    cited: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        if path != Path(__file__):
            cited |= set(re.findall(r"\bM(\d+)\b", path.read_text(encoding="utf-8")))
    here = re.findall(r'"""M[^"]*"""', Path(__file__).read_text(encoding="utf-8"))
    cited |= {number for text in here for number in re.findall(r"\bM(\d+)\b", text)}
    assert not set(rules) - cited, f"no test holds {sorted(map(int, set(rules) - cited))}"
    assert not cited - set(rules), "a test cites a rule that is not there"

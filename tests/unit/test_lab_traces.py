"""Trace readers: the two published formats, and one clear line for each way a file can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bus.errors import ConfigError
from pdbus.lab.formats import read_trace
from pdbus.lab.traces import Trace, TraceRequest

MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 20, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 512, "output_length": 1, "hash_ids": [0]},
    {"timestamp": 3000, "input_length": 100, "output_length": 7, "hash_ids": [9]},
]


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_mooncake(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, MOONCAKE)) + "\n\n"))
    assert trace.name == "a"
    assert trace.requests == (
        TraceRequest(0.0, 1100, 20, (1, 2)),  # the id of the partial block is dropped, 0 is kept apart from "no parent"
        TraceRequest(3.0, 512, 1, (1,)),
        TraceRequest(3.0, 100, 7, ()),
    )


def test_azure_with_windows_line_ends(tmp_path: Path) -> None:
    lines = [
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:50.9951690,396,109",
    ]
    trace = read_trace(write(tmp_path / "b.csv", "\r\n".join(lines)))
    assert [(r.prompt_tokens, r.output_tokens) for r in trace.requests] == [(374, 44), (396, 109)]
    assert trace.requests[1].arrival_s == pytest.approx(4.314579)
    assert not any(r.hashes for r in trace.requests)


def test_azure_with_a_time_zone_and_columns_of_somebodys_own(tmp_path: Path) -> None:
    lines = [
        "Model, GeneratedTokens, TIMESTAMP, ContextTokens",
        "a,44,2024-05-10 00:00:00+00:00,374",
        "b,109,2024-05-10 00:00:01.250000+00:00,396",
        "b,1,2024-05-10 00:00:02Z,7",
    ]
    trace = read_trace(write(tmp_path / "c.csv", "\n".join(lines)))
    assert trace.requests == (TraceRequest(0.0, 374, 44), TraceRequest(1.25, 396, 109), TraceRequest(2.0, 7, 1))


def test_time_zones_are_read(tmp_path: Path) -> None:
    """Three requests, one second apart, of machines with other clocks."""
    times = ("2024-05-10 12:00:00.0000001+00:00", "2024-05-10 14:00:01+02:00", "2024-05-10 12:00:02Z")
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens", *(f"{time},7,1" for time in times)]
    trace = read_trace(write(tmp_path / "z.csv", "\n".join(lines)))
    assert [request.arrival_s for request in trace.requests] == [0.0, 1.0, 2.0]
    mixed = "\n".join([*lines, "2024-05-10 12:00:03,7,1"])
    with pytest.raises(ConfigError, match=r"z\.csv:5: some times have a zone and others have none"):
        read_trace(write(tmp_path / "z.csv", mixed))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is no trace that the lab knows"),
        ("hello\n", "is no trace that the lab knows"),
        ('{"timestamp": 0, "output_length": 1}\n', "bad:1: input_length is missing"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1}\n', "bad:1: input_length is 0"),
        ('{"timestamp": 0, "input_length": true, "output_length": 1}\n', "bad:1: input_length is True"),
        ('{"timestamp": -1, "input_length": 5, "output_length": 1}\n', "bad:1: timestamp is -1"),
        ('{"timestamp": NaN, "input_length": 5, "output_length": 1}\n', "bad:1: timestamp is nan"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1}\nnonsense\n', "bad:2: "),
        ('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": ["x"]}\n', "hash_ids is 'x'"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1}\n', "too little to replay"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1\n", "bad:2: 2 columns, not 3"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", "bad:2: "),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,many,1\n", "bad:2: "),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_trace(write(tmp_path / "bad", text))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"{\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a text file"):
        read_trace(tmp_path / "binary")


def test_coarse_timestamps_are_spread_over_their_buckets() -> None:
    coarse = Trace("c", tuple(TraceRequest(3.0 * (n // 50), 1 + n, 1) for n in range(200)))
    spread = coarse.spread(seed=5)
    assert spread == coarse.spread(seed=5) != coarse.spread(seed=6)
    before = {request.prompt_tokens: request.arrival_s for request in coarse.requests}
    moved = [request.arrival_s - before[request.prompt_tokens] for request in spread.requests]
    assert all(0 <= by < 3.0 for by in moved)
    assert 1.2 < sum(moved) / len(moved) < 1.8
    assert len({request.arrival_s for request in spread.requests}) == 200


def test_fine_timestamps_stay() -> None:
    fine = Trace("f", tuple(TraceRequest(0.1 * n, 10, 1) for n in range(50)))
    assert fine.spread(seed=1) is fine


def test_first_and_scaled() -> None:
    trace = Trace("t", tuple(TraceRequest(10.0 + n, 10, 1) for n in range(10)))
    assert len(trace.first(4.0)) == 5
    assert [request.arrival_s for request in trace.scaled(2.0).requests][:3] == [0.0, 2.0, 4.0]
    with pytest.raises(ConfigError, match="too little"):
        trace.first(0.5)

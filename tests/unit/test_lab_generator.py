"""The built-in trace: the same every time, and of the shape that it claims."""

from __future__ import annotations

from collections import Counter

import pytest

from bus.errors import ConfigError
from pdbus.lab.generator import Shape, generate
from pdbus.lab.traces import BLOCK_TOKENS


def test_the_seed_decides() -> None:
    assert generate(100, seed=3) == generate(100, seed=3)
    assert generate(100, seed=3) != generate(100, seed=4)


def test_a_length_without_requests_is_refused() -> None:
    """Some seeds have none in a second."""
    with pytest.raises(ConfigError, match=r"^the trace generated--1 has 0 requests: too little to replay$"):
        generate(1.0, seed=-1)


def test_equal_hashes_mean_equal_prefixes() -> None:
    parent_of: dict[int, int] = {}
    shared = 0
    for request in generate(300, seed=1).requests:
        assert len(request.hashes) == request.prompt_tokens // BLOCK_TOKENS
        for parent, block in zip((0, *request.hashes), request.hashes, strict=False):
            shared += block in parent_of
            assert parent_of.setdefault(block, parent) == parent
    assert shared / (shared + len(parent_of)) > 0.3  # conversations and system prompts come again


def test_rate_bursts_and_tails() -> None:
    trace = generate(4_000, seed=2)
    assert 0.8 < len(trace) / 4_000 / Shape().turns_per_s < 1.2
    windows = Counter(int(request.arrival_s // 10) for request in trace.requests)
    counts = [windows[n] for n in range(400)]
    mean = sum(counts) / len(counts)
    assert sum((count - mean) ** 2 for count in counts) / len(counts) > 1.5 * mean  # a Poisson process would have 1.0
    lengths = sorted(request.prompt_tokens for request in trace.requests)
    assert lengths[len(lengths) * 99 // 100] > 5 * lengths[len(lengths) // 2]

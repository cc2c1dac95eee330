"""Every stream of a real vLLM rank, one cluster for all of them: of a random model with a sliding window, whose KV
events are of two groups of layers. The tests are those of every engine; `make cut-streams ENGINE=vllm` drops each.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

STREAMS_TESTS = Path(__file__).parents[1] / "streams"
sys.path += [str(STREAMS_TESTS), str(STREAMS_TESTS / "plugin")]

import test_streams as streams  # noqa: E402
from stream_record import Record, run  # noqa: E402
from stream_registry import ENGINES, STREAMS  # noqa: E402
from tiny_window import WINDOW, make  # noqa: E402

from bus.wire.hashing import block_hashes  # noqa: E402
from bus.wire.kv_events import BlockRemoved, BlockStored  # noqa: E402
from bus.wire.messages import KvMeta  # noqa: E402

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    model = tmp_path_factory.mktemp("model")
    make(model)
    return run("vllm", start_s=300.0, wait_s=60.0, model=str(model))


def test_every_step_came_to_its_end(record: Record) -> None:
    streams.test_every_step_came_to_its_end(record)


@pytest.mark.parametrize("name", sorted(ENGINES["vllm"]))
def test_stream(record: Record, name: str) -> None:
    getattr(streams, STREAMS[name].test)(record)


def test_what_a_window_leaves_behind_is_still_told_of_as_cached(record: Record) -> None:
    """The prompt's blocks are told of once, by the layers that look at all of it; those that its window gave up are in
    no message, as vLLM serves the prompt from its cache all the same."""
    events = [event for _, _, told in record.kv for event in told]
    (size,) = {event.block_tokens for event in events if isinstance(event, BlockStored)}
    names = block_hashes(record.prompt, size)
    assert len(record.prompt) > 2 * WINDOW
    assert {name for event in events if isinstance(event, BlockStored) for name in event.hashes} >= set(names)
    assert not {name for event in events if isinstance(event, BlockRemoved) for name in event.hashes} & set(names)
    served = max(meta.cached_tokens for meta in record.of(KvMeta, streams.DECODE))
    assert served == len(names) * size

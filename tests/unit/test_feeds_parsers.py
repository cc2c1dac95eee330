"""Other engines' bytes: both layouts of KV events, LoadStat, the --engine option, hashes translated to ours."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from cases import Case, cases

from bus.errors import ConfigError, RemoteProtocolError
from bus.wire.codec import pack
from bus.wire.hashing import block_hashes, root_of
from bus.wire.kv_events import (
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    parse_batch,
    split_frames,
)
from bus.wire.kv_names import Cleared, Removed, Stored, Translator
from controller.feeds.load_stat import parse_load_stat
from controller.feeds.settings import EngineSettings, parse_engine
from nodes.own.blocks import BlockPool
from nodes.own.blocks import BlockRemoved as PoolRemoved
from nodes.own.blocks import BlockStored as PoolStored
from nodes.own.kv_events import KvEventLog

SEQ = (7).to_bytes(8, "big")


def test_the_newer_layout_with_keys_we_do_not_know() -> None:
    events = [
        {"type": "BlockStored", "block_hashes": [-5, 9], "parent_block_hash": None, "token_ids": [1, 2, 3, 4],
         "block_size": 2, "lora_id": None, "medium": "GPU", "lora_name": None, "group_idx": 3},
        {"type": "BlockRemoved", "block_hashes": [b"\x01" * 32], "medium": "GPU"},
        {"type": "SomethingNew", "x": 1},
        {"type": "AllBlocksCleared"},
    ]  # fmt: skip
    assert parse_batch(pack([1.5, events, 3])) == Batch(
        (BlockStored((-5, 9), None, (1, 2, 3, 4), 2, group=3), BlockRemoved((b"\x01" * 32,)), AllBlocksCleared()), 3
    )


def test_the_older_layout() -> None:
    events = [["BlockStored", [2**64 - 1], 17, [8, 9], 2, None], ["BlockRemoved", [5]], ["AllBlocksCleared"]]
    assert parse_batch(pack([1.5, events])) == Batch(
        (BlockStored((2**64 - 1,), 17, (8, 9), 2), BlockRemoved((5,)), AllBlocksCleared()), None
    )


@pytest.mark.parametrize(
    "extra",
    [{"lora_id": 3}, {"lora_name": "a"}, {"cache_salt": "s"}, {"extra_keys": [["x"]]}, {"token_ids": [[1, 2], [2, 3]]}],
)
def test_blocks_made_of_more_than_tokens_are_not_plain(extra: dict[str, object]) -> None:
    event = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [1, 2],
             "block_size": 2} | extra  # fmt: skip
    (found,) = parse_batch(pack([0.0, [event], 0])).events
    assert isinstance(found, BlockStored)
    assert not found.plain
    counts: Counter[str] = Counter()
    translator = Translator(counts)
    assert translator.changes([found]) == ()
    assert counts == {"kv_blocks_unnamed": 1}


def stored(**changes: object) -> dict[str, object]:
    return {"type": "BlockStored", "block_hashes": [1, 2, 3], "parent_block_hash": None,
            "token_ids": [1, 2, 3, 4, 5, 6], "block_size": 2} | changes  # fmt: skip


def names(*events: object) -> tuple[tuple[object, ...], dict[str, int]]:
    counts: Counter[str] = Counter()
    return Translator(counts).changes(parse_batch(pack([0.0, list(events), 0])).events), counts


OURS = tuple(block_hashes([1, 2, 3, 4, 5, 6], 2))


@pytest.mark.parametrize("none", [[None, None, None], [[], None, []], [], None])
def test_extra_keys_of_which_none_is_there_are_none(none: object) -> None:
    """vLLM gives an entry a block, for a plain prompt None each."""
    event = stored() if none == "left out" else stored(extra_keys=none)
    assert names(event) == ((Stored(OURS),), {})
    array = [
        "BlockStored",
        [1, 2, 3],
        None,
        [1, 2, 3, 4, 5, 6],
        2,
        None,
        "GPU",
        None,
        none if none != "left out" else None,
    ]
    assert names(array) == ((Stored(OURS),), {}), "as older builds say it"


def test_a_salted_prompt_has_names_of_its_own() -> None:
    """M95: vLLM's event has the salt as an extra key of the first block."""
    salted = stored(extra_keys=[[["cache_salt", "tenant"]], None, None])
    ours = tuple(block_hashes([1, 2, 3, 4, 5, 6], 2, root_of("tenant")))
    later = stored(block_hashes=[4], parent_block_hash=3, token_ids=[7, 8])
    assert names(salted, later) == ((Stored((*ours, *block_hashes(range(1, 9), 2, root_of("tenant"))[3:])),), {})
    for keys in (
        [["cache_salt", "a"], ["image", 0]],
        [["cache_salt", 3]],
        [["cache_salt"]],
        [["lora", "a"]],
        ["tenant"],
    ):
        assert names(stored(extra_keys=[keys, None, None])) == ((), {"kv_blocks_unnamed": 3}), keys
    inside = stored(extra_keys=[[["cache_salt", "a"]], None, None], parent_block_hash=9)
    assert names(stored(block_hashes=[9], token_ids=[1, 2]), inside)[1] == {"kv_blocks_unnamed": 3}


def test_names_end_at_the_first_block_with_an_extra_key() -> None:
    """Also for those that come later and follow it."""
    event = stored(extra_keys=[None, [["image", 0]], None])
    later = stored(block_hashes=[4], parent_block_hash=3, token_ids=[7, 8])
    assert names(event, later) == ((Stored(OURS[:1]),), {"kv_blocks_unnamed": 3})
    assert names(stored(extra_keys=[["salt"], None, None])) == ((), {"kv_blocks_unnamed": 3})
    assert names(stored(extra_keys=[None, None])) == ((), {"kv_blocks_unnamed": 3}), (
        "an entry a block, or none is believed"
    )


def test_a_removal_takes_its_own_group_and_medium_alone() -> None:
    """Layers with a window give blocks up first, and a copy in the host's memory is none on the device."""
    full = {"group_idx": 0, "kv_cache_spec_kind": "full_attention", "medium": "GPU"}
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "medium": "GPU"}
    gone = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU", "group_idx": 1}
    host = {"group_idx": 0, "kv_cache_spec_kind": "full_attention", "medium": "CPU"}
    others = [stored(**window), stored(**host), gone, gone | {"medium": "CPU", "group_idx": 0}]
    assert names(stored(**full), *others) == ((Stored(OURS),), {"kv_blocks_elsewhere": 6})
    assert names(*others, stored(**full), gone | {"group_idx": 0})[0] == (Stored(OURS), Removed(OURS[:1]))
    assert names(*others)[0] == ()


def test_a_block_of_which_there_are_copies_stays_until_the_last_goes() -> None:
    twice, gone = stored(group_idx=0), {"type": "BlockRemoved", "block_hashes": [2], "group_idx": 0}
    assert names(twice, twice, gone)[0] == (Stored(OURS), Stored(OURS))
    assert names(twice, twice, gone, gone)[0][-1] == Removed(OURS[1:2])
    plain, gone = stored(), {"type": "BlockRemoved", "block_hashes": [2]}
    assert names(plain, plain, gone)[0][-1] == Removed(OURS[1:2]), "others say again what they have"


def test_what_a_node_left_out_is_read_by_the_names_we_know() -> None:
    said = {"kv_blocks_unnamed": 5, "kv_gaps": 0, "of_our_own": 3, "kv_blocks_elsewhere": "x"}
    assert parse_batch(pack([1.0, [], 3, said])).left_out == (("kv_blocks_unnamed", 5),)
    assert parse_batch(pack([1.0, [], 3, 7])).left_out == ()


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"\xc1",
        pack(5),
        pack([1.0]),
        pack([1.0, {}]),
        pack([1.0, [7]]),
        pack([1.0, [[]]]),
        pack([1.0, [{"x": 1}]]),
        pack([1.0, [{"type": "BlockStored"}]]),
        pack([1.0, [{"type": "BlockRemoved", "block_hashes": 5}]]),
        pack([1.0, [{"type": "BlockRemoved", "block_hashes": [2**63, "x"]}]]),
        pack([1.0, [["BlockRemoved", [b"x" * 65]]]]),
        pack([1.0, [["BlockRemoved", [True]]]]),
        pack([1.0, [["BlockStored", [1], None, [1], 0]]]),
        pack([1.0, [], -1]),
        pack([1.0, [], "0"]),
    ],
)
def test_bad_payloads_are_refused(bad: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_batch(bad)


def leaf(case: Case) -> Any:
    of = (lambda: None, lambda: case.number(-(2**63), 2**64 - 1), lambda: case.text(0, 6), lambda: case.bytes_of(6),
          lambda: case.float_of(-1e300, 1e300), lambda: case.choice((math.inf, -math.inf, math.nan)))  # fmt: skip
    return case.choice(of)()


def test_no_bytes_raise_anything_else() -> None:
    for case in cases(600):
        with case:
            tree = case.tree(leaf, lambda case: case.text(0, 12), 3, 4)
            data = case.note(case.bytes_of(80) if case.randrange(2) else pack(tree))
            for parse in (parse_batch, lambda payload: parse_load_stat([b"load", SEQ, payload])):
                try:
                    parse(data)
                except RemoteProtocolError:
                    pass


def test_frames_are_read_from_the_right() -> None:
    assert split_frames([b"topic", SEQ, b"p"]) == (7, b"p")
    assert split_frames([SEQ, b"p"]) == (7, b"p")
    assert split_frames([b"", b"topic", SEQ, b"p"]) == (7, b"p")
    assert split_frames([b"", b"\xff" * 8, b""]) == (-1, b"")
    for bad in ([], [SEQ], [b"topic", b"short", b"p"], [(-2).to_bytes(8, "big", signed=True), b""]):
        with pytest.raises(RemoteProtocolError, match="frames"):
            split_frames(bad)


def test_load_stat_and_what_may_follow_it() -> None:
    stat = ["LoadStat", 3, 2, 4096, 65536, 5, 1500, 6000, 64, 123456, 789, "new", None]
    seq, rank, load = parse_load_stat([b"load", SEQ, pack(stat)])
    assert (seq, rank) == (7, 5)
    assert (load.running, load.waiting, load.waiting_tokens) == (3, 2, 1500)
    assert (load.kv_tokens, load.kv_capacity, load.max_running) == (4096, 65536, 64)
    for bad in (stat[:10], ["Load", *stat[1:]], ["LoadStat", -1, *stat[2:]], ["LoadStat", 1.0, *stat[2:]], {}):
        with pytest.raises(RemoteProtocolError):
            parse_load_stat([b"load", SEQ, pack(bad)])


def test_translation_gives_the_names_that_requests_use() -> None:
    tokens = list(range(100, 112))
    ours = tuple(block_hashes(tokens, 4))
    counts: Counter[str] = Counter()
    translator = Translator(counts)
    first = BlockStored((-1, -2), None, tuple(tokens[:8]), 4)
    second = BlockStored((b"third",), -2, tuple(tokens[8:]), 4)
    orphan = BlockStored((50,), 49, tuple(tokens[:4]), 4)
    assert translator.changes([first, orphan, second]) == (Stored(ours),)
    assert translator.changes([BlockRemoved((-2, 50))]) == (Removed(ours[1:2]),)
    assert translator.changes([AllBlocksCleared(), second]) == (Cleared(),)  # its parent is forgotten
    assert counts == {"kv_blocks_unnamed": 2}


def test_what_an_engine_names_block_by_block_is_told_together_as_far_as_it_belongs_together() -> None:
    tokens = list(range(100, 124))
    one, other = block_hashes(tokens[:12], 4), block_hashes(tokens[12:], 4)
    stored = [
        BlockStored((number,), number - 1 if number % 3 else None, tuple(tokens[4 * number : 4 * number + 4]), 4)
        for number in range(6)
    ]
    removed = [BlockRemoved((number,)) for number in (2, 1, 5)]
    translator = Translator(Counter())
    assert translator.changes(stored) == (Stored(tuple(one)), Stored(tuple(other)))
    assert translator.changes([*removed, stored[5]]) == (Removed((one[2], one[1], other[2])), Stored((other[2],)))
    assert translator.changes([removed[2], AllBlocksCleared(), *removed, stored[0]]) == (
        Removed((other[2],)), Cleared(), Stored((one[0],)),
    )  # fmt: skip


def test_translation_is_bounded() -> None:
    translator = Translator(Counter(), max_blocks=10)
    for number in range(100):
        translator.changes([BlockStored((number,), None, (number, 1), 2)])
    (removed,) = translator.changes([BlockRemoved(tuple(range(100)))])
    assert isinstance(removed, Removed)
    assert len(removed.hashes) == 10


def test_a_block_that_others_follow_keeps_its_name() -> None:
    counts = Counter[str]()
    translator = Translator(counts, max_blocks=100)
    translator.changes([BlockStored(tuple(range(1, 65)), None, tuple(range(64)), 1)])  # what all prompts begin with
    for first in range(1000, 3000, 50):
        own = tuple(range(first, first + 50))
        (stored,) = translator.changes([BlockStored(own, 64, tuple(range(50)), 1)])
        assert isinstance(stored, Stored)
        assert len(stored.hashes) == 50
    assert not counts


def test_what_our_nodes_publish_is_in_that_format_and_names_what_requests_name() -> None:
    tokens = list(range(3, 51))
    hashes = block_hashes(tokens, 16)
    pool = BlockPool(3, 16, record_events=True)
    table, _ = pool.take(3) or ([], 0)
    for number, block in enumerate(table):
        parent = hashes[number - 1] if number else 0
        pool.commit(block, hashes[number], parent, tokens[16 * number : 16 * (number + 1)])
    log = KvEventLog("p", 2, 16)
    (message,) = log.messages(pool.take_events(), 1.5)
    topic, _, payload = message
    assert (topic, split_frames(message)[0]) == (b"kv/p/2/", 0)
    batch = parse_batch(payload)
    assert batch == Batch((BlockStored(tuple(hashes), None, tuple(tokens), 16),), 2)  # one chain, one event
    assert Translator(Counter()).changes(batch.events) == (Stored(tuple(hashes)),)
    pool.release(table)
    pool.take(2)
    assert log.messages([], 1.6) == []
    (message,) = log.messages(pool.take_events(), 1.7)
    assert split_frames(message)[0] == 1
    assert parse_batch(message[2]).events == (BlockRemoved((hashes[2], hashes[1])),)


def test_many_events_leave_in_several_messages() -> None:
    """M70"""
    log = KvEventLog("p", 0, 1)
    messages = log.messages(
        [PoolStored(n + 1, 0, (n,)) for n in range(1_000)] + [PoolRemoved(n) for n in range(9)], 0.0
    )
    events = [event for message in messages for event in parse_batch(message[2]).events]
    assert [int.from_bytes(message[1], "big") for message in messages] == list(range(len(messages)))
    assert len(messages) > 1
    assert sum(len(event.hashes) for event in events if isinstance(event, BlockStored)) == 1_000
    assert events[-1] == BlockRemoved(tuple(range(9)))


def test_engine_option() -> None:
    assert parse_engine("sglang=tcp://host:5557,dp_size=8") == EngineSettings("sglang", "host", 5557, "sglang", 8)
    full = parse_engine("sglang=tcp://h:5557,dp_size=2,instance=p0,replay=5600,load=5700")
    assert (full.instance, full.replay, full.load) == ("p0", 5600, 5700)
    assert full.endpoint(full.replay, 1) == "tcp://h:5601"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("trt=tcp://h:1", "the kind is sglang or vllm"),
        ("sglang", "an engine is at tcp"),
        ("sglang=ipc:///x", "an engine is at tcp"),
        ("sglang=tcp://h", "needs a host and a port"),
        ("sglang=tcp://h:5557,dp=8", "'dp=8' is not understood"),
        ("sglang=tcp://h:5557,dp_size=x", "is not understood"),
        ("sglang=tcp://h:5557,dp_size=0", "dp_size must lie"),
        ("sglang=tcp://h:65530,dp_size=8", "goes past 65535"),
        ("vllm=tcp://h:5557,load=9", "vLLM publishes no load"),
    ],
)
def test_bad_engine_options(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_engine(text)

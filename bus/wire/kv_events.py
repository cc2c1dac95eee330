"""KV-cache events (a rank's engine cached or dropped blocks of tokens) as vLLM and SGLang publish them, parsed
strictly. This module owns the format and keeps no state.

Frames are `[topic, seq, payload]`, `seq` 8 bytes big-endian; the payload is MessagePack `[ts, [event ...], dp_rank]`
(the last may be missing). An event is a map with a `type`, or in older builds an array that begins with it. Block
hashes are opaque: signed or unsigned 64-bit integers, or bytes. Unknown parts are skipped where the format allows it
(further elements and keys, unknown event types) and refused otherwise: RemoteProtocolError. Our own nodes append to the
payload a map with what they left out: counts by the names of LEFT_OUT.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from bus.errors import RemoteProtocolError
from bus.wire import codec

Hash: TypeAlias = int | bytes
END_OF_REPLAY = -1
MAX_HASH_BYTES = 64
LEFT_OUT = ("kv_blocks_unnamed", "kv_blocks_elsewhere", "kv_gaps", "kv_unreadable")
_STORED = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
    "group_idx", "kv_cache_spec_kind",
)  # fmt: skip
_REMOVED = ("block_hashes", "medium", "group_idx")
_DEVICE = (None, "GPU")  # the medium from which a prompt is served at once; vLLM calls it so on a CPU, too
# Layers that need no more than the end of a prompt: their blocks go while the prefix can still be served.
_PARTIAL = (
    "sliding_window", "sliding_window_mla", "chunked_local_attention", "mamba", "encoder_only_attention",
    "cross_attention",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Consecutive blocks came into the cache. They are named by `hashes` and have `block_tokens` tokens each, all in
    `tokens`; the first of them follows the block `parent` (None: it begins the prompt).

    `plain` is False where more than the tokens made the hashes (an adapter, an image): no request of ours can name
    such blocks. `group` is the engine's number for the layers of these blocks. `serves` is False where they are in
    another medium than the device's memory, or belong to layers that do not attend to the whole prompt. `salt` is the
    prompt's `cache_salt`, which comes with a first block.
    """

    hashes: tuple[Hash, ...]
    parent: Hash | None
    tokens: tuple[int, ...]
    block_tokens: int
    plain: bool = True
    group: int | None = None
    serves: bool = True
    salt: str = ""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks left the cache. `serves` is False where they left another medium, and the device's memory may still have
    them."""

    hashes: tuple[Hash, ...]
    group: int | None = None
    serves: bool = True


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The whole cache was emptied."""


KvEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class Batch:
    """The events of one message, in order. `dp_rank` None: not stated. `left_out` has (name, count) of what our own
    node could not pass on."""

    events: tuple[KvEvent, ...]
    dp_rank: int | None
    left_out: tuple[tuple[str, int], ...] = ()


def split_frames(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """Return `(seq, payload)` of a live or replayed message: its last two frames, whatever comes before them.
    RemoteProtocolError where they have another form.

    The end of a replay has `seq` -1 and may have an empty payload.
    """
    if len(frames) < 2 or len(frames[-2]) != 8:
        raise RemoteProtocolError("frames", f"{len(frames)} frames without a sequence number")
    seq = int.from_bytes(frames[-2], "big", signed=True)
    if seq < END_OF_REPLAY:
        raise RemoteProtocolError("frames", f"sequence number {seq}")
    return seq, frames[-1]


def parse_batch(payload: bytes) -> Batch:
    """Return the batch in the payload of one message. RemoteProtocolError where it breaks the format."""
    batch = codec.unpack(payload)
    if type(batch) is not list or len(batch) < 2 or type(batch[1]) is not list:
        raise RemoteProtocolError("schema", "not [ts, events, dp_rank]")
    dp_rank = batch[2] if len(batch) > 2 else None
    if dp_rank is not None and (type(dp_rank) is not int or not 0 <= dp_rank < 65_536):
        raise RemoteProtocolError("schema", f"dp_rank {dp_rank!r}"[:100])
    extra = batch[3] if len(batch) > 3 and type(batch[3]) is dict else {}
    left_out = tuple((name, extra[name]) for name in LEFT_OUT if type(extra.get(name)) is int and extra[name] > 0)
    return Batch(tuple(one for event in batch[1] for one in _events(event)), dp_rank, left_out)


def _events(event: Any) -> tuple[KvEvent, ...]:
    if type(event) is dict:
        kind, fields = event.get("type"), event
    elif type(event) is list and event:
        kind = event[0]
        names = _STORED if kind == "BlockStored" else _REMOVED
        fields = dict(zip(names, event[1:], strict=False))
    else:
        raise RemoteProtocolError("schema", "an event is neither a map nor an array")
    if kind == "AllBlocksCleared":
        return (AllBlocksCleared(),)
    serves, group = fields.get("medium") in _DEVICE, fields.get("group_idx")
    group = group if type(group) is int else None
    if kind == "BlockRemoved":
        return (BlockRemoved(_hashes(fields.get("block_hashes")), group, serves),)
    if kind != "BlockStored":
        if type(kind) is not str:
            raise RemoteProtocolError("schema", "an event without a type")
        return ()
    size, tokens = fields.get("block_size"), fields.get("token_ids")
    hashes = _hashes(fields.get("block_hashes"))
    if type(size) is not int or not 1 <= size <= 65_536 or type(tokens) is not list:
        raise RemoteProtocolError("schema", "BlockStored without block_size and token_ids")
    parent = fields.get("parent_block_hash")
    parent = None if parent is None else _hash(parent)
    serves = serves and fields.get("kv_cache_spec_kind") not in _PARTIAL
    plain, salt = len(hashes), ""  # so many of them, the first ones
    if any(fields.get(name) is not None for name in ("lora_id", "lora_name", "cache_salt")) or (
        len(tokens) != size * plain or not all(type(t) is int and 0 <= t < 2**31 for t in tokens)
    ):
        plain = 0
    elif keys := fields.get("extra_keys"):
        if parent is None and (salt := _salt(keys)):
            keys = [None, *keys[1:]]
        plain = _without_keys(keys, plain)
    if plain == len(hashes):
        return (BlockStored(hashes, parent, tuple(tokens), size, True, group, serves, salt),)
    rest = BlockStored(hashes[plain:], hashes[plain - 1] if plain else parent, (), size, False, group, serves)
    if not plain:
        return (rest,)
    return BlockStored(hashes[:plain], parent, tuple(tokens[: plain * size]), size, True, group, serves, salt), rest


def _salt(keys: Any) -> str:
    """Return the salt that is the only extra key of the first block; empty where there is none. vLLM gives a pair for
    each key, of its kind and its value."""
    first = keys[0] if type(keys) is list else None
    if type(first) is not list or len(first) != 1 or type(first[0]) is not list:
        return ""
    match first[0]:
        case ["cache_salt", str(salt)]:
            return salt
    return ""


def _without_keys(keys: Any, count: int) -> int:
    """Return how many of `count` blocks come before the first with an extra key. vLLM gives one entry for each
    block, mostly None."""
    if type(keys) is not list or len(keys) != count:
        return 0
    return next((number for number, each in enumerate(keys) if each), count)


def _hashes(values: Any) -> tuple[Hash, ...]:
    if type(values) is not list:
        raise RemoteProtocolError("schema", "block_hashes is no array")
    return tuple(map(_hash, values))


def _hash(value: Any) -> Hash:
    if (type(value) is int and -(2**63) <= value < 2**64) or (type(value) is bytes and len(value) <= MAX_HASH_BYTES):
        return value
    raise RemoteProtocolError("schema", "a block hash is neither a 64-bit integer nor bytes")

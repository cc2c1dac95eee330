"""What a prefix index says of a prompt, rank by rank, and the same by definition."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from controller.policies.prefix_index import PrefixIndex


def hits(index: PrefixIndex, hashes: Sequence[int]) -> dict[int, int]:
    """For each slot that holds some of the beginning of `hashes`, how many leading blocks of it, by `index.runs`."""
    found: dict[int, int] = {}
    depths, last = [], -1
    for depth, ranks in index.runs(hashes):
        assert ranks & last == ranks != 0, "the ranks of a longer run are among those of a shorter one"
        depths.append(depth)
        last = ranks
        found |= {slot: depth for slot in range(ranks.bit_length()) if ranks >> slot & 1}
    assert depths == sorted(depths)
    return found


def run_length(held: Iterable[int] | Mapping[int, object], hashes: Sequence[int]) -> int:
    """How many leading blocks of `hashes` are in `held`."""
    blocks = set(held)
    return next((n for n, block_hash in enumerate(hashes) if block_hash not in blocks), len(hashes))

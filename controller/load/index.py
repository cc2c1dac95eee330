"""The least of many integer keys: of all (a tournament tree), or of some. This module owns the keys; it knows no
ranks or loads.

Of all: a pick reads the root, and a change replays one path: O(log n), with an early end where the winner stays the
same.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress, count
from operator import itemgetter

NEVER = 1 << 200  # greater than any key: the leaf takes no part
FEW = 8  # slots that are as quickly looked at one by one
SETS_REMEMBERED = 128
_BITS = bytes.maketrans(b"01", b"\0\1")


class LeastIndex:
    """A tournament tree of keys by leaf, a number from 0 on; the low 16 bits of a key are its leaf, so the root names
    the winner."""

    __slots__ = ("_keys", "_size")

    def __init__(self) -> None:
        self._size = 8
        self._keys = [NEVER] * 16

    def update(self, leaf: int, key: int) -> None:
        """Set the key of `leaf` (`NEVER` takes it out of the comparison)."""
        if leaf >= self._size:
            self._grow(leaf)
        keys = self._keys
        at = leaf + self._size
        while keys[at] != key:  # ends above the root at the latest: keys[0] belongs to no leaf
            keys[at] = key
            rival = keys[at ^ 1]
            if rival < key:
                key = rival
            at >>= 1

    def least(self) -> int:
        """Return the leaf with the least key, or -1 when there is none."""
        key = self._keys[1]
        return -1 if key == NEVER else key & 0xFFFF

    def key(self, leaf: int) -> int:
        """Return the key of `leaf`; NEVER without one."""
        return self._keys[leaf + self._size] if leaf < self._size else NEVER

    def validate(self) -> None:
        """Check that every inner node holds the lesser of its children."""
        for at in range(1, self._size):
            assert self._keys[at] == min(self._keys[2 * at], self._keys[2 * at + 1]), at

    def _grow(self, leaf: int) -> None:
        leaves = self._keys[self._size :]
        while self._size <= leaf:
            leaves += [NEVER] * self._size
            self._size *= 2
        self._keys = [NEVER] * self._size + leaves
        for at in range(self._size - 1, 0, -1):
            self._keys[at] = min(self._keys[2 * at], self._keys[2 * at + 1])


class SlotKeys:
    """Keys by slot, whose low 16 bits are the slot: the least of any set of slots, O(its size), mostly in C.

    A set is an integer with a bit for each slot. The same large sets (the ranks that hold a common prefix) are asked
    for again and again, so the last ones are kept unpacked.
    """

    __slots__ = ("_keys", "_unpacked")

    def __init__(self) -> None:
        self._keys: list[int] = []
        self._unpacked: dict[int, Callable[[list[int]], tuple[int, ...]]] = {}

    def update(self, slot: int, key: int) -> None:
        """Set the key of `slot` (`NEVER` takes it out of the comparison)."""
        if slot >= len(self._keys):
            self._keys += [NEVER] * (slot + 1 - len(self._keys))
        self._keys[slot] = key

    def least(self, slots: int) -> int:
        """Return the slot in `slots`, each of which has a key, with the least one; -1 when there is none."""
        keys, least = self._keys, NEVER
        if slots.bit_count() > FEW:
            least = min((self._unpacked.get(slots) or self._unpack(slots))(keys))
        else:
            while slots:
                rest = slots & (slots - 1)
                key = keys[(slots ^ rest).bit_length() - 1]
                if key < least:
                    least = key
                slots = rest
        return -1 if least == NEVER else least & 0xFFFF

    def key(self, slot: int) -> int:
        """Return the key of `slot`; NEVER without one."""
        return self._keys[slot] if slot < len(self._keys) else NEVER

    def _unpack(self, slots: int) -> Callable[[list[int]], tuple[int, ...]]:
        if len(self._unpacked) >= SETS_REMEMBERED:
            self._unpacked.clear()
        bits = f"{slots:b}"[::-1].encode().translate(_BITS)
        getter = self._unpacked[slots] = itemgetter(*compress(count(), bits))
        return getter

"""The least of many integer keys: a tournament tree. Owns the tree; knows nothing of ranks or loads.

A pick reads the root, a change replays one path: O(log n) with an early end where the winner stays the same.
"""

from __future__ import annotations

NEVER = 1 << 200  # greater than any key: the leaf takes no part


class LeastIndex:
    """Keys by leaf; the low 16 bits of a key are its leaf, so the root names the winner."""

    __slots__ = ("_keys", "_size")

    def __init__(self) -> None:
        self._size = 8
        self._keys = [NEVER] * 16

    def update(self, leaf: int, key: int) -> None:
        """Give `leaf` the key `key` (`NEVER` takes it out of the running)."""
        if leaf >= self._size:
            self._grow(leaf)
        keys = self._keys
        at = leaf + self._size
        keys[at] = key
        while at > 1:
            rival = keys[at ^ 1]
            if rival < key:
                key = rival
            at >>= 1
            if keys[at] == key:
                return
            keys[at] = key

    def least(self) -> int:
        """The leaf with the least key, or -1 when none takes part."""
        key = self._keys[1]
        return -1 if key == NEVER else key & 0xFFFF

    def key(self, leaf: int) -> int:
        return self._keys[leaf + self._size] if leaf < self._size else NEVER

    def validate(self) -> None:
        """Every inner node holds the lesser of its children."""
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

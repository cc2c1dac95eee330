"""An index of the blocks that a decode engine of vLLM keeps of ended legs, for prefill engines to read back.

vLLM pins the blocks of a finished request for a while, and gives a handle for them, which is good for one read: that
frees them. Blocks that are merely cached can't be read, so a rank lends nothing but these. The index belongs to the
link's thread; times are of `time.perf_counter`, which this machine's engine shares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from bus.wire import codec
from bus.wire.hashing import block_hashes, root_of

EXPIRY = "remote_blocks_expiry_time"  # in vLLM's handle: when the engine may free the blocks
LEAST_S = 1.0  # what is kept for less time is not lent: a read that ends late is of no use


class Lending(NamedTuple):
    """The first `blocks` blocks of a prompt, which `handle` reads until `until`."""

    blocks: int
    handle: bytes
    until: float


@dataclass(slots=True, eq=False)
class _Pin:
    client: str
    hashes: Sequence[int]  # of its blocks, as prompts name them
    handle: dict[str, Any]
    until: float
    borrower: object = None  # to whom the handle was given


class Pins:
    """The pinned requests of one rank, whose blocks have `block_tokens` tokens."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._pins: dict[_Pin, None] = {}  # the first to expire first: all are kept for as long
        self._at: dict[tuple[str, int], _Pin] = {}  # by the client and hash of each block that can be lent
        self._blocks: Counter[int] = Counter()  # how many of the requests have each block, by its hash

    def add(self, client: str, tokens: Sequence[int], salt: str, handle: Mapping[str, Any], now: float) -> None:
        """Add a finished request of `client`, `tokens` its prompt and output, by the `handle` that the engine gave; do
        nothing for one that is not of one list of such blocks, as of layers with windows."""
        self.expire(now)
        blocks, until = handle.get("remote_block_ids"), handle.get(EXPIRY)
        computed = min(len(tokens) - 1, handle.get("remote_num_tokens") or 0)  # the last token was never fed
        count = computed // self._block_tokens
        if not count or not until or not blocks or len(blocks) != 1:
            return
        if len(blocks[0]) != -(-handle["remote_num_tokens"] // self._block_tokens):
            return
        hashes = block_hashes(tokens[: count * self._block_tokens], self._block_tokens, root_of(salt))
        pin = _Pin(client, hashes, dict(handle), until)
        self._pins[pin] = None
        self._blocks.update(hashes)
        self._at.update(dict.fromkeys([(client, each) for each in hashes], pin))

    def lend(self, borrower: object, client: str, prompt: Sequence[int], salt: str, now: float) -> Lending | None:
        """Give the handle of the most that is pinned of `client`'s prompt, cut to that, to `borrower`, and to no other;
        None: nothing is. What another client has left is not lent."""
        self.expire(now)
        size = self._block_tokens
        hashes = block_hashes(prompt[: (len(prompt) - 1) // size * size], size, root_of(salt))
        for blocks in range(len(hashes), 0, -1):
            pin = self._at.get((client, hashes[blocks - 1]))
            if pin is not None and pin.until - now >= LEAST_S:
                pin.borrower = borrower
                self._unlist(pin)
                handle = {name: value for name, value in pin.handle.items() if name != EXPIRY}
                handle["remote_block_ids"] = [list(pin.handle["remote_block_ids"][0][:blocks])]
                handle["remote_num_tokens"] = blocks * size
                return Lending(blocks, codec.pack(handle), pin.until)
        return None

    def returned(self, borrower: object) -> None:
        """Forget what was lent to `borrower`: it has read it, and so the engine has freed it."""
        for pin in [each for each in self._pins if each.borrower is borrower]:
            self._remove(pin)

    @property
    def tokens(self) -> int:
        """The number of tokens of KV memory that are pinned, in whole blocks."""
        return len(self._blocks) * self._block_tokens

    def expire(self, now: float) -> None:
        """Forget what is kept no longer."""
        while self._pins and (pin := next(iter(self._pins))).until <= now:
            self._remove(pin)

    def _remove(self, pin: _Pin) -> None:
        del self._pins[pin]
        self._unlist(pin)
        for each in pin.hashes:
            self._blocks[each] -= 1
            if not self._blocks[each]:
                del self._blocks[each]

    def _unlist(self, pin: _Pin) -> None:
        for each in pin.hashes:
            if self._at.get((pin.client, each)) is pin:
                del self._at[pin.client, each]

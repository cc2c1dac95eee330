"""KV caches on their way between the ranks of pairs: the decode rank fetches what it lacks of a prompt; before, the
prefill rank may read back what the decode rank has of it. Owns when a cache moves and how much of it; `links` shares
the wires, and the ranks hold the memory.

Every message between the ranks takes a hop. A fetch begins when the decode rank has memory for the request, and ends
when its last token has come and the prompt is computed.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq

from nodes.own.sequence import Sequence
from pdbus.lab.clock import VirtualLoop
from pdbus.lab.config import LabConfig
from pdbus.lab.links import Links
from pdbus.lab.outcome import RequestOutcome
from pdbus.lab.rank import VirtualRank
from pdbus.lab.tape import Tape


class Transfers:
    """The transfers of one run between its `prefill` and `decode` ranks (lists that may be filled later); `courses` are
    its requests by number. `reusable` gives the hashes of a request's blocks that need not be computed where they are
    cached. Times are virtual, in seconds."""

    def __init__(
        self, loop: VirtualLoop, config: LabConfig, courses: Seq[RequestOutcome],
        prefill: list[VirtualRank], decode: list[VirtualRank], reusable: Callable[[int], array[int]],
    ) -> None:  # fmt: skip
        self._loop, self._hop_s = loop, config.hop_s
        self._token_s = config.kv_fetch_token_s  # without links
        self._whole = config.trip == "whole"
        self._by_layer = config.fetch_by_layer
        self._links = Links(loop, config.link_s_per_token) if config.link_s_per_token else None
        self._courses, self._prefill, self._decode = courses, prefill, decode
        self._reusable = reusable
        self.tape: Tape | None = None  # records them

    # --- a decode rank fetches ------------------------------------------------------------------------------------

    def fetch(self, sequence: Sequence) -> None:
        """Let the decode rank fetch what it lacks of a prompt, which it has got the memory for."""
        if self.tape is not None:
            self.tape.begins(sequence.id, "fetch", self._loop.now)
        tokens = len(sequence.prompt)
        if not self._whole:
            tokens -= sequence.cached_tokens
        if self._links is None:
            self._loop.call_later(2 * self._hop_s + self._token_s * tokens, self._moved, sequence.id, tokens)
        else:
            self._loop.call_later(self._hop_s, self._send, sequence.id, tokens)

    def prefilled(self, number: int) -> None:
        """Note that a prompt is computed at its prefill rank. A fetch by layer that has come so far lacks its last
        layer alone."""
        if self._by_layer and self._courses[number].moved_tokens:
            self._loop.call_later(self._hop_s, self._fetched, number)

    def _send(self, number: int, tokens: int) -> None:
        assert self._links is not None
        course = self._courses[number]
        source, target = self._prefill[course.prefill_rank].key, self._decode[course.decode_rank].key
        self._links.send(source, target, tokens, self._loop.call_later, self._hop_s, self._moved, number, tokens)

    def _moved(self, number: int, tokens: int) -> None:
        course = self._courses[number]
        course.moved_tokens = tokens
        if not math.isnan(course.prefilled_s):
            whole_s = course.prefilled_s + self._hop_s  # its last layer comes at this time
            if self._loop.now < whole_s:
                self._loop.call_at(whole_s, self._fetched, number)
            else:
                self._fetched(number)

    def _fetched(self, number: int) -> None:
        course = self._courses[number]
        course.fetched_s = self._loop.now
        if self.tape is not None:
            source, target = self._prefill[course.prefill_rank].key, self._decode[course.decode_rank].key
            self.tape.ends(number, "fetch", source, target, self._loop.now, course.moved_tokens)
        self._decode[course.decode_rank].fetched(number)
        self._loop.call_later(self._hop_s, self.release, number)

    def release(self, number: int) -> None:
        """Let the prefill rank free the KV cache of a request, which is not needed any more."""
        self._prefill[self._courses[number].prefill_rank].release(number)

    # --- a prefill rank reads back --------------------------------------------------------------------------------

    def read_back(self, sequence: Sequence) -> None:
        """Have the prefill rank ask the decode rank for what it lacks of a prompt; then it computes the rest."""
        self._loop.call_later(self._hop_s, self._send_back, sequence.id)

    def _send_back(self, number: int) -> None:
        course = self._courses[number]
        source, target = self._decode[course.decode_rank], self._prefill[course.prefill_rank]
        kept, table = source.pin(self._reusable(number))
        tokens = max(0, kept - target.scheduler.sequence(number).cached_tokens)
        if self.tape is not None:
            self.tape.lends(number, source.key, self._loop.now, tokens)
            self.tape.begins(number, "read", self._loop.now + self._hop_s)
        if self._links is None or not tokens:
            self._loop.call_later(self._token_s * tokens, self._sent_back, number, tokens, table)
        else:
            self._links.send(source.key, target.key, tokens, self._sent_back, number, tokens, table)

    def _sent_back(self, number: int, tokens: int, table: list[int]) -> None:
        course = self._courses[number]
        self._decode[course.decode_rank].unpin(table)
        course.read_tokens = tokens
        if self.tape is not None:
            source, target = self._decode[course.decode_rank].key, self._prefill[course.prefill_rank].key
            self.tape.ends(number, "read", source, target, self._loop.now + self._hop_s, tokens)
        self._loop.call_later(self._hop_s, self._prefill[course.prefill_rank].compute, number, tokens)

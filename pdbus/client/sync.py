"""The client for programs with threads: `Client` and the stream of one request. Owns no sockets (see `channel`)."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Unpack

from bus.wire.messages import DrainRank, Leg, Status, StatusQuery
from pdbus.client.channel import Channel, Update
from pdbus.client.options import (
    Options,
    block_tokens_for,
    check_options,
    check_text,
    leg_for,
    make_plan,
    model_of,
    patience,
    where,
)
from pdbus.client.output import Piece, Result, Texts, Writer


class Client:
    """Submits requests to a controller and streams their output from the ranks. Any thread may use it.

    Args:
        controller: its base address (default: the one `pdbus up` serves on).
        prefill_controller, decode_controller: instead, one controller for each leg. Both get the same room, and the
            failure of one leg cancels the other.
        retries: how often a request is tried anew without a new token in between. Zero: every failure is final, so
            that nothing is resumed either.
        connect_timeout_s: how long a controller may leave a submit unanswered.
        keys: directory of CURVE keys, for tcp.
        model: for text; default: what the controller's ranks serve.
        seed: of the random rids and rooms, for tests.

    Raises ConfigError for a wrong address. `generate` and `generate_tokens` raise TypeError for an option that does not
    exist, ConfigError for a wrong value and, where they must ask the controller first, PeerLost when none answers; a
    request that fails raises RequestFailed from its stream.
    """

    def __init__(
        self,
        controller: str | None = None,
        *,
        prefill_controller: str | None = None,
        decode_controller: str | None = None,
        retries: int = 6,
        connect_timeout_s: float = 10.0,
        keys: str | Path = "",
        model: str = "",
        seed: int | None = None,
    ) -> None:
        self._where = where(controller, prefill_controller, decode_controller)
        self._channel = Channel(self._where.endpoints, patience(retries, connect_timeout_s), keys=keys, seed=seed)
        self._texts = Texts(model)
        self._leg: Leg | None = None if self._where.prefill is None else "pair"
        self._block_tokens = 0

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is live and leave; idempotent."""
        self._channel.stop()

    def generate(
        self, text: str, *, chat: bool = True, system: str | None = None, **options: Unpack[Options]
    ) -> Stream:
        """Submit `text`: as a user's turn in the model's chat template, or as it is with `chat` false.

        Options: see `Options`. The stream's pieces carry text.
        """
        check_text(text)
        check_options(options)
        model = options.get("model") or self._texts.model or self._learn_model()
        tokenizer = self._texts.tokenizer(model)
        ids = tokenizer.chat(text, system) if chat else tokenizer.encode(text)
        return self._begin(ids, options, Writer(tokenizer), tokenizer.eos_ids)

    def generate_tokens(self, ids: Sequence[int], **options: Unpack[Options]) -> Stream:
        """Submit token ids; the stream's pieces carry ids alone."""
        check_options(options)
        return self._begin(ids, options, None, ())

    def status(self, *, timeout_s: float | None = None) -> Status:
        """What the controller (of the decode legs) knows of its ranks. PeerLost when none answers in time."""
        answer = self._channel.ask(self._where.decode, StatusQuery, timeout_s).result()
        assert isinstance(answer, Status)
        return answer

    def drain(self, instance: str, dp_rank: int, *, timeout_s: float | None = None) -> None:
        """Let a rank finish what it has and leave. RequestFailed when the controller knows no such rank."""
        self._channel.ask(self._where.decode, lambda id: DrainRank(id, instance, dp_rank), timeout_s).result()

    def _begin(self, ids: Sequence[int], options: Options, writer: Writer | None, eos_ids: Sequence[int]) -> Stream:
        if self._leg is None and "leg" not in options:
            status = self.status()
            self._leg, self._block_tokens = leg_for(status), block_tokens_for(status)
        rid, plan = make_plan(
            ids, options, self._where, self._leg or "pair", eos_ids, self._channel, self._block_tokens
        )
        stream = Stream(self._channel, rid, tuple(ids), writer)
        self._channel.begin(rid, plan, stream._updates.put)
        return stream

    def _learn_model(self) -> str:
        return self._texts.learn(model_of(self.status()))


class Stream:
    """The output of one request: iterate to get `Piece`s; one thread may iterate, any may cancel.

    Leaving the loop early cancels the request. `result` is there once the iteration ended (also by RequestFailed).
    """

    def __init__(self, channel: Channel, rid: str, prompt_ids: tuple[int, ...], writer: Writer | None) -> None:
        self.rid = rid
        self.prompt_ids = prompt_ids
        self._channel = channel
        self._writer = writer
        self._updates: queue.SimpleQueue[Update] = queue.SimpleQueue()
        self._result: Result | None = None

    @property
    def result(self) -> Result:
        """How the request went; waits for its end and drops what was not read. Does not raise if it failed."""
        for _ in self._pieces():
            pass
        assert self._result is not None
        return self._result

    def __iter__(self) -> Iterator[Piece]:
        try:
            yield from self._pieces()
        finally:
            if self._result is None:
                self.cancel()
        assert self._result is not None
        self._result.raise_if_failed()

    def cancel(self) -> None:
        """End the request now; the iteration stops, and `result.finish` is `cancelled`."""
        self._channel.cancel(self.rid)

    def text(self) -> str:
        """All the text (of what was not read yet). RequestFailed when the request fails."""
        return "".join(piece.text for piece in self)

    def tokens(self) -> list[int]:
        """All the token ids (of what was not read yet). RequestFailed when the request fails."""
        return [token for piece in self for token in piece.ids]

    def _pieces(self) -> Iterator[Piece]:
        while self._result is None:
            update = self._updates.get()
            if isinstance(update, Result):
                self._result = update
                if self._writer is not None and (rest := self._writer.finish()):
                    yield Piece((), rest)
            else:
                yield Piece(update, self._writer.push(update) if self._writer is not None else "")

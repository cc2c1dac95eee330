"""The client for programs with threads: `Client` and the stream of one request. Owns no sockets (see `channel`)."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Unpack

from bus.wire.messages import Role, Status, TraceReply
from pdbus.client.base import BaseClient, BaseStream
from pdbus.client.channel import Channel
from pdbus.client.options import Options, check_options, check_text
from pdbus.client.output import Piece, Result
from pdbus.client.request import Request
from pdbus.client.traffic import Update

if TYPE_CHECKING:
    from pdbus.text.models import ModelText


class Client(BaseClient):
    """Submits requests to a controller and streams their output from the ranks. Any thread may use it.

    Args:
        controller: its base address (default: the one `pdbus up` serves on).
        prefill_controller, decode_controller: instead, one controller for each leg. Both get the same room, and the
            failure of one leg cancels the other.
        retries: how often a request is tried anew without a new token in between. Zero: every failure is final, so
            that nothing is resumed either.
        connect_timeout_s: how long a controller may leave a submit unanswered, or have no rank yet to tell this client
            the model and whether prefill and decode are split.
        overloaded_s, no_rank_s: without a token yet, how long after the submit an overloaded cluster is tried again,
            and how long one that has no rank for the request, from when that was heard first. Default: `retries` alone
            counts.
        keys: directory of CURVE keys.
        model: for text; default: what the controller's ranks serve.
        tokenizer: for text: a folder with the model's `tokenizer.json`, or the word `bytes` (default: the model's own
            files on this machine).
        seed: of the random rids and rooms, for tests.

    Raises ConfigError for a wrong address. `generate` and `generate_tokens` raise TypeError for an option that does not
    exist, ConfigError for a wrong value and, where they must ask the controller first, PeerLost when none answers; a
    request that fails raises RequestFailed from its stream.
    """

    def _start(self, keys: str | Path, seed: int | None) -> None:
        self._channel = Channel(self._controllers.endpoints, self._patience, keys=keys, seed=seed)

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
        """Submit `text`: as a user's turn in the model's chat template (after the system message `system`), or as it is
        with `chat` false, where special tokens in it are read as such. The stream's pieces carry text. ConfigError also
        when the model is unknown, because no rank joins the controller within `connect_timeout_s` or because ranks
        serve several, and when it has no tokenizer or no chat template here."""
        check_text(text)
        check_options(options)
        model = (
            options.get("model") or self._texts.model or self._learn_model(self._ask_cluster(self._channel).result())
        )
        its, ids = self._texts.prompt(model, text, chat, system)
        return self._begin(ids, options, its)

    def generate_tokens(self, ids: Sequence[int], **options: Unpack[Options]) -> Stream:
        """Submit token ids (each from 0 to 2147483647); the stream's pieces carry ids alone."""
        check_options(options)
        return self._begin(ids, options, None)

    def status(self, *, timeout_s: float | None = None) -> Status:
        """What the controller (of the decode legs) knows of its ranks. PeerLost when none answers within `timeout_s`
        (default: `connect_timeout_s`)."""
        return self._ask_status(self._channel, timeout_s).result()

    def trace(self, rid: str, *, timeout_s: float | None = None) -> TraceReply:
        """What controller and ranks remember of the request `rid`, as `pdbus trace` shows it. RequestFailed when the
        controller does not tell this client, PeerLost as with `status`."""
        return self._ask_trace(self._channel, rid, timeout_s).result()

    def drain(self, instance: str, dp_rank: int, *, timeout_s: float | None = None) -> None:
        """Let a rank finish what it has and leave. RequestFailed when the controller knows no such rank, ConfigError
        when there can be none of that name, PeerLost as with `status`."""
        self._ask_drain(self._channel, instance, dp_rank, timeout_s).result()

    def drain_role(self, role: Role, model: str = "", *, timeout_s: float | None = None) -> None:
        """Let all ranks of a role, of one model or of all, finish what they have and leave; the controller does not
        miss the role then, unless it was told to expect it. PeerLost as with `status`."""
        self._ask_drain_role(self._channel, role, model, timeout_s).result()

    def _begin(self, ids: Sequence[int], options: Options, text: ModelText | None) -> Stream:
        if not self._knows(options):
            self._learn_leg(self._model(options), self._ask_cluster(self._channel).result())
        request = self._request(self._channel, ids, options, text)
        stream = Stream(self._channel, request, text, self._learnt.clear)
        self._channel.begin(request, stream._sink)
        return stream


class Stream(BaseStream):
    """The output of one request: iterate to get `Piece`s; one thread may iterate, any may cancel. RequestFailed at the
    end when the request failed.

    Leaving the loop early cancels the request, and so does dropping the stream before its end. `result` is there once
    the iteration ended (also by RequestFailed). `rid` is the request's id.
    """

    def __init__(
        self, channel: Channel, request: Request, text: ModelText | None, forget: Callable[[], object]
    ) -> None:
        self._updates: queue.SimpleQueue[Update] = queue.SimpleQueue()
        super().__init__(channel, request, text, forget, self._updates.put)

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

    def text(self) -> str:
        """All the text (of what was not read yet). RequestFailed when the request fails."""
        return "".join(piece.text for piece in self)

    def tokens(self) -> list[int]:
        """All the token ids (of what was not read yet). RequestFailed when the request fails."""
        return [token for piece in self for token in piece.ids]

    def _pieces(self) -> Iterator[Piece]:
        while self._result is None:
            self._channel.raise_if_inherited()
            if (piece := self._piece(self._updates.get())) is not None:
                yield piece

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
        retries: how many times in a row a request is retried; each new token starts the count again. With 0 every
            failure is final, and nothing is resumed.
        connect_timeout_s: how long a controller may leave a submit unanswered, or may have no rank yet (its ranks tell
            this client the model, and whether prefill and decode are split).
        overloaded_s, no_rank_s: for how long a request without a first token is retried. `overloaded_s`: while the
            cluster is overloaded, from the submit on. `no_rank_s`: while no rank can take it, from the first such
            answer on. Default: no time limit, only `retries`.
        keys: directory of CURVE keys.
        model: for text; default: the model that the controller's ranks serve.
        tokenizer: for text: a folder with the model's `tokenizer.json`, or the word `bytes` (default: the model's own
            files on this machine).
        seed: makes the random rids and rooms the same in each run, for tests.

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
        """Cancel live requests and close the connections. Calling it again does nothing."""
        self._channel.stop()

    def generate(
        self, text: str, *, chat: bool = True, system: str | None = None, **options: Unpack[Options]
    ) -> Stream:
        """Submit `text` as a user's turn in the model's chat template, after the system message `system`; the stream's
        pieces carry text. With `chat` false, submit it as it is; special tokens in it are then read as such.

        Raises ConfigError also when the model is unknown (no rank joins the controller within `connect_timeout_s`, or
        ranks serve several), and when it has no tokenizer or no chat template on this machine."""
        check_text(text)
        check_options(options)
        model = (
            options.get("model") or self._texts.model or self._learn_model(self._ask_cluster(self._channel).result())
        )
        its, ids = self._texts.prompt(model, text, chat, system)
        return self._begin(ids, options, its)

    def generate_tokens(self, ids: Sequence[int], **options: Unpack[Options]) -> Stream:
        """Submit token ids (each from 0 to 2147483647, else ConfigError); the stream's pieces carry ids alone. The
        first call may wait up to `connect_timeout_s` to ask the controller for its roles."""
        check_options(options)
        return self._begin(ids, options, None)

    def status(
        self, *, timeout_s: float | None = None, events_from: int | None = None, requests: bool = False
    ) -> Status:
        """Return the status of the controller (with two controllers, that of the decode legs): its ranks and counts.
        With `events_from`, its `events` are those from this number on that are kept (0: all); with `requests`, its
        `requests` are those that have run and waited longest, and were slowest to their first token in the last 15
        minutes. Both are None where the controller is older, or this client's key is neither a viewer's nor an
        admin's. Raises PeerLost when it does not answer
        within `timeout_s` (default: `connect_timeout_s`), ConfigError for an invalid number."""
        return self._ask_status(self._channel, timeout_s, events_from, requests).result()

    def trace(self, rid: str, *, timeout_s: float | None = None) -> TraceReply:
        """Return what controller and ranks recorded of the request `rid`, as `pdbus trace` shows it. If there is no
        record of `rid`, the newest request whose id is `rid`, a `-` and more is taken; the reply's `rid` says which.
        `parts` is empty if there is none either. Raises RequestFailed when this client may not see it, and PeerLost as
        `status` does."""
        return self._ask_trace(self._channel, rid, timeout_s).result()

    def drain(self, instance: str, dp_rank: int, *, timeout_s: float | None = None) -> None:
        """Order a rank to finish its requests and leave; return when the controller has taken the order. Raises
        RequestFailed for an unknown rank or without an admin's key, ConfigError for an invalid name, and PeerLost as
        `status` does."""
        self._ask_drain(self._channel, instance, dp_rank, timeout_s).result()

    def drain_role(self, role: Role, model: str = "", *, timeout_s: float | None = None) -> None:
        """Drain all ranks of a role, of one model or of all models. The controller then does not report the role as
        missing, unless it has the setting to expect it. Raises RequestFailed without an admin's key, and PeerLost as
        `status` does."""
        self._ask_drain_role(self._channel, role, model, timeout_s).result()

    def _begin(self, ids: Sequence[int], options: Options, text: ModelText | None) -> Stream:
        if not self._knows(options):
            self._learn_leg(self._model(options), self._ask_cluster(self._channel).result())
        request = self._request(self._channel, ids, options, text)
        stream = Stream(self._channel, request, text, self._learnt.clear)
        self._channel.begin(request, stream._sink)
        return stream


class Stream(BaseStream):
    """The output of one request. Iterate over it to get `Piece`s; a request that failed raises RequestFailed at the
    end.

    One thread may iterate, any thread may cancel. Leaving the loop early cancels the request. Dropping the stream
    before its end cancels it too, unless `continue_on_disconnect` is set and no loop has begun. `result` waits for the
    end. `rid` is the request's id.
    """

    def __init__(
        self, channel: Channel, request: Request, text: ModelText | None, forget: Callable[[], object]
    ) -> None:
        self._updates: queue.SimpleQueue[Update] = queue.SimpleQueue()
        super().__init__(channel, request, text, forget, self._updates.put)

    @property
    def result(self) -> Result:
        """The result of the request. It waits for the end and drops output not yet read, so only the thread that
        iterates may ask for it. A failed request raises nothing here."""
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
        """Return all text that was not read yet. Raises RequestFailed when the request fails."""
        return "".join(piece.text for piece in self)

    def tokens(self) -> list[int]:
        """Return all token ids that were not read yet. Raises RequestFailed when the request fails."""
        return [token for piece in self for token in piece.ids]

    def _pieces(self) -> Iterator[Piece]:
        while self._result is None:
            self._channel.raise_if_inherited()
            if (piece := self._piece(self._updates.get())) is not None:
                yield piece

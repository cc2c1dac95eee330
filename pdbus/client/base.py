"""The part that `Client` and `AsyncClient` share: their knowledge of the cluster, and updates that become pieces.

Starts no thread and waits for nothing; the two clients differ in that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from msgspec.structs import replace

from bus.wire.hashing import tokens_of
from bus.wire.messages import (
    DrainRank,
    DrainRole,
    Legs,
    Role,
    Status,
    StatusQuery,
    TokenLogprobs,
    TraceQuery,
    TraceReply,
)
from pdbus.client.channel import Channel
from pdbus.client.loop_channel import LoopChannel
from pdbus.client.options import (
    Options,
    any_rank,
    block_tokens_for,
    controllers_of,
    leg_for,
    make_request,
    model_of,
    patience,
)
from pdbus.client.output import ModelTexts, Piece, Result
from pdbus.client.request import Request
from pdbus.client.traffic import Sink, Update
from pdbus.text.decoder import BEFORE
from pdbus.text.find import places_of

if TYPE_CHECKING:
    from pdbus.text.models import ModelText

AnyChannel: TypeAlias = Channel | LoopChannel
TRACE_REPEAT_S = 2.0  # longer than a controller waits for its ranks


class BaseClient:
    """The common part of the clients. Before a submit it asks the controller what it does not know yet: the model, and
    the legs (a leg is one rank's share of a request: prefill, decode, or both). See `Client` for the arguments."""

    def __init__(
        self,
        controller: str | None = None,
        *,
        prefill_controller: str | None = None,
        decode_controller: str | None = None,
        retries: int = 6,
        connect_timeout_s: float = 10.0,
        overloaded_s: float = math.inf,
        no_rank_s: float = math.inf,
        keys: str | Path = "",
        model: str = "",
        tokenizer: str | Path = "",
        seed: int | None = None,
    ) -> None:
        self._controllers = controllers_of(controller, prefill_controller, decode_controller)
        self._patience = patience(retries, connect_timeout_s, overloaded_s, no_rank_s)
        self._texts = ModelTexts(model, places_of([str(tokenizer)]) if tokenizer else None)
        self._learnt: dict[str, tuple[Legs, int]] = {}  # by model: its requests' legs, and the block size of hashes
        self._start(keys, seed)

    def _start(self, keys: str | Path, seed: int | None) -> None:
        raise NotImplementedError

    def _ask_status(
        self, channel: AnyChannel, timeout_s: float | None, events_from: int | None, requests: bool
    ) -> Future[Status]:
        make = partial(StatusQuery, events_from=events_from, requests=requests)
        return channel.ask(self._controllers.decode, make, Status, timeout_s)

    def _ask_cluster(self, channel: AnyChannel) -> Future[Status]:
        """Ask for the status once a rank has joined; after `connect_timeout_s`, for the status as it is."""
        return channel.ask(self._controllers.decode, StatusQuery, Status, until=any_rank)

    def _ask_drain(self, channel: AnyChannel, instance: str, dp_rank: int, timeout_s: float | None) -> Future[Status]:
        return channel.ask(self._controllers.decode, lambda id: DrainRank(id, instance, dp_rank), Status, timeout_s)

    def _ask_drain_role(self, channel: AnyChannel, role: Role, model: str, timeout_s: float | None) -> Future[Status]:
        return channel.ask(self._controllers.decode, lambda id: DrainRole(id, role, model), Status, timeout_s)

    def _ask_trace(self, channel: AnyChannel, rid: str, timeout_s: float | None) -> Future[TraceReply]:
        make = partial(TraceQuery, rid=rid)
        return channel.ask(self._controllers.decode, make, TraceReply, timeout_s, repeat_s=TRACE_REPEAT_S)

    def _learn_model(self, status: Status) -> str:
        self._texts.model = model_of(status)
        self._learn_leg(self._texts.model, status)
        return self._texts.model

    def _knows(self, options: Options) -> bool:
        """Return true if a request with `options` can be submitted without asking the controller."""
        return "leg" in options or self._controllers.prefill is not None or self._model(options) in self._learnt

    def _learn_leg(self, model: str, status: Status) -> None:
        if model:
            status = replace(status, ranks=tuple(rank for rank in status.ranks if rank.model == model))
        if leg := leg_for(status):
            self._learnt[model] = leg, block_tokens_for(status)

    def _model(self, options: Options) -> str:
        return options.get("model") or self._texts.model

    def _request(self, channel: AnyChannel, ids: Sequence[int], options: Options, text: ModelText | None) -> Request:
        leg, block_tokens = self._learnt.get(self._model(options), ("pair", 0))
        return make_request(
            ids,
            options,
            self._controllers,
            channel.rng,
            leg=leg,
            block_tokens=block_tokens,
            eos_ids=text.eos_ids if text is not None else (),
            asked_us=time.time_ns() // 1000,
        )


class BaseStream:
    """The common part of the streams. `rid` is the request's id, `text` decodes its tokens (None: pieces have ids
    alone).

    `forget` is called when there was no rank for the request, because the roles of the cluster may have changed. The
    channel passes updates to `sink`, which must not hold a reference to the stream.
    """

    def __init__(
        self,
        channel: AnyChannel,
        request: Request,
        text: ModelText | None,
        forget: Callable[[], object],
        sink: Sink,
    ) -> None:
        self._forget = forget
        self.rid = request.rid
        self._prompt = request.prompt
        self._channel = channel
        self._decoder = text.decoder(tokens_of(request.prompt[-4 * BEFORE :])) if text is not None else None
        self._stop_ids = request.stop_ids
        self._continue_on_disconnect = request.main.continue_on_disconnect
        self._request = request
        self._logprobs = request.logprobs  # the channel's thread appends to it, and then delivers the tokens
        self._have = 0  # tokens that became pieces
        self._sink = sink
        self._result: Result | None = None

    def __del__(self) -> None:
        """End a request whose output can no longer be read. May run on any thread at any moment, so it takes no
        lock."""
        if getattr(self, "_result", self) is None and not self._continue_on_disconnect:
            self._channel.drop(self.rid, self._sink)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt's token ids, with those of a chat template."""
        return tuple(tokens_of(self._prompt))

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """The log probabilities of the prompt's tokens from the second on, where the option `prompt_logprobs` asks for
        them. They are there once the first piece has come; before that, and without the option, this is empty."""
        return self._request.prompt_logprobs or ()

    @property
    def cached_tokens(self) -> int:
        """The number of prompt tokens that came from a prefix cache; 0 until a rank has reported it. A rank reports it
        with its first tokens at the latest; one of an older version does so with the end."""
        return self._request.cached_tokens

    @property
    def written_tokens(self) -> int:
        """The number of prompt tokens that were computed and written to a prefix cache; reported as `cached_tokens`
        is."""
        return self._request.written_tokens

    def cancel(self) -> None:
        """Cancel the request, from any thread, without waiting; the iteration then stops, and `result.finish` is
        `cancelled`. Nothing happens if it has ended."""
        self._channel.cancel(self.rid, self._sink)

    def _piece(self, update: Update) -> Piece | None:
        """Return the piece that `update` gives. The last update is the result; its piece has text that was held
        back."""
        if isinstance(update, tuple):
            first, self._have = self._have, self._have + len(update)
            text = ""
            if self._decoder is not None:  # the token that ends an output is not part of its text
                text = self._decoder.push(update[:-1] if update[-1] in self._stop_ids else update)
            return Piece(update, text, tuple(self._logprobs[first : self._have]) if self._logprobs else ())
        self._result = update
        if update.code == "no_rank":
            self._forget()
        rest = self._decoder.finish() if self._decoder is not None else ""
        return Piece((), rest) if rest else None

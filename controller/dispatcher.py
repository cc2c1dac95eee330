"""`Dispatcher`: a controller embedded in an engine, in place of the engine's own data-parallel controller.

It owns the hand-over between the engine's thread and the controller's: bounded, never blocking unless asked to,
raising only where a call itself is invalid or the controller has failed. It decides nothing.
"""

from __future__ import annotations

import random
import struct
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import TypeAlias, TypedDict, Unpack

from bus.errors import ConfigError, PartFailed, ProtocolError
from bus.wire import codec
from bus.wire.hashing import packed_hashes
from bus.wire.messages import (
    CLIENT_TO_CONTROLLER,
    Accepted,
    Cancel,
    Done,
    Failed,
    Legs,
    MemberKey,
    Message,
    Status,
    StatusQuery,
    Submit,
    TraceContext,
)
from bus.wire.status import join
from controller.config import ControllerConfig
from controller.requests.request import ROLES
from controller.shell import Controller, bytes_of
from controller.traffic import LOCAL

MAX_HANDED_OVER = 4096

Answer: TypeAlias = Accepted | Done | Failed


class SubmitFields(TypedDict, total=False):
    """The fields of `bus.wire.messages.Submit` that `Dispatcher.dispatch` passes on as they are. Their defaults are
    those of `Submit`."""

    routed_dp_rank: int | None
    disagg_prefill_dp_rank: int | None
    instance: str
    prefill_instance: str
    model: str
    attempt: int
    offset: int
    deadline_s: float
    priority: int
    needs: tuple[str, ...]
    continue_on_disconnect: bool
    ttft_slo_s: float
    tpot_slo_s: float
    slo_class: str
    trace: TraceContext | None
    asked_us: int
    avoid: tuple[MemberKey, ...]
    pair_attempt: int
    session: str


class Dispatcher:
    """A controller in this process, on a thread of its own: `with Dispatcher(config) as dispatcher:`.

    `dispatch` hands one request over and returns at once; `poll` gives the events of requests since the last call:
    `Accepted` (dispatched; again with each new attempt), then exactly one of `Done` and `Failed`. All methods may be
    called from any thread. StartError on entry if an endpoint is taken. If the controller's thread fails (`failure`)
    or is stopped, live requests end with `Failed` (`shutting_down`), which `poll` still gives; then every call
    raises PartFailed. In another `with` it starts as a new one.
    """

    def __init__(self, config: ControllerConfig, *, max_handed_over: int = MAX_HANDED_OVER) -> None:
        self.controller = Controller(config, on_local=self._on_answer, on_failure=lambda: self._end_all("has failed"))
        self._answers: deque[Answer] = deque()
        self._arrived = threading.Condition()
        self._status: Status | None = None
        self._max_handed_over = max_handed_over
        self._rng = random.Random()
        self._live: set[str] = set()  # handed over, end not polled yet

    def __enter__(self) -> Dispatcher:
        if self.controller.inherited:
            type(self).__init__(self, self.controller.config, max_handed_over=self._max_handed_over)
        self.controller.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.controller.stop()
        if self.controller.stopped:
            self._end_all("was stopped")

    @property
    def failure(self) -> Exception | None:
        """The exception that ended the controller's thread; None while it serves."""
        return self.controller.failure

    def dispatch(
        self,
        rid: str,
        frames: Sequence[bytes],
        *,
        leg: Legs = "unified",
        max_tokens: int,
        prompt_tokens: int | None = None,
        bootstrap_room: int | None = None,
        block_tokens: int = 0,
        block_hashes: bytes = b"",
        **fields: Unpack[SubmitFields],
    ) -> bool:
        """Hand over one request, without waiting: `frames` are the prompt (int32 little-endian token ids) and its
        params, each bytes or whatever else has a buffer (`array`, numpy's arrays), passed on as they are; the rest is
        what `bus.wire.messages.Submit` carries (None: not chosen). `fields` are `routed_dp_rank`,
        `disagg_prefill_dp_rank`, `instance`, `prefill_instance`, `model`, `attempt`, `offset`, `deadline_s`,
        `priority`, `needs`, `continue_on_disconnect`, `ttft_slo_s`, `tpot_slo_s`, `slo_class`, `trace`, `asked_us`,
        `avoid`, `pair_attempt` and `session`. For `cache_aware`, `block_tokens` is the size of the ranks' KV blocks:
        the prompt is hashed here in blocks of it, unless `block_hashes` (`bus.wire.hashing.pack_hashes`) say what it
        begins with, as they must where the params have a `cache_salt`. To resume what lost its rank: prompt and output
        so far, `offset` tokens of the latter, and a higher `attempt`.

        Return false when too many are under way, or this rid is: try again after `poll`. Raises ConfigError without a
        bootstrap_room where ranks are joined or picked by it, and for a rid that is no string. Other bad requests come
        back as `Failed`.
        """
        for name in fields.keys() - SubmitFields.__annotations__:
            raise TypeError(f"dispatch has no argument {name!r}")
        self.controller.raise_if_closed()
        if not isinstance(rid, str):
            raise ConfigError(f"a rid is a string, not {rid!r:.80}")
        if bootstrap_room is None:
            self._check_roomless(leg, fields.get("routed_dp_rank"))
            # each use of a rid is another request, whatever its length
            if leg == "unified" and fields.get("attempt", 1) == 1:
                bootstrap_room = self._rng.getrandbits(63)
        try:
            sent = [bytes_of(frame) for frame in frames] or [b""]
            if block_tokens > 0 and not block_hashes:
                block_hashes = packed_hashes(sent[0], block_tokens)
            prompt_tokens = len(sent[0]) // 4 if prompt_tokens is None else prompt_tokens
            submit = Submit(
                rid, leg, prompt_tokens, max_tokens, bootstrap_room,
                block_tokens=block_tokens, block_hashes=block_hashes, **fields,
            )  # fmt: skip
            codec.decode(codec.encode(submit), CLIENT_TO_CONTROLLER)  # the same checks as for any client
        except (ProtocolError, TypeError, ValueError, OverflowError, struct.error) as error:
            return self._take(rid, Failed(rid, 0, "bad_request", str(error)[:1024], retryable=False))
        if not self._take(rid):
            return False
        with suppress(PartFailed):  # it has ended with all others
            self.controller._submit(submit, sent)
        return True

    def cancel(self, rid: str) -> None:
        """End a request, without waiting; its `Failed` (or the `Done` that was faster) comes through `poll`. A rid that
        is not live has no effect."""
        self.controller.raise_if_closed()
        if isinstance(rid, str) and rid in self._live:
            self.controller._submit(Cancel(rid))

    def poll(self, timeout_s: float = 0.0) -> list[Answer]:
        """Return the answers since the last call, waiting up to `timeout_s` for one if there is none; empty then.
        Raises PartFailed once the controller has failed or was stopped and all its answers were returned."""
        self.controller.raise_if_inherited()
        with self._arrived:
            if timeout_s > 0:
                self._arrived.wait_for(lambda: self._answers or self._over, timeout_s)
            if not self._answers:
                self.controller.raise_if_failed()
            answers = list(self._answers)
            self._answers.clear()
            for answer in answers:
                if not isinstance(answer, Accepted):
                    self._live.discard(answer.rid)
        return answers

    def status(self, timeout_s: float = 5.0) -> Status:
        """Return the controller's view of its ranks. It waits for the answer; TimeoutError after `timeout_s`."""
        self.controller.raise_if_inherited()
        with self._arrived:
            self._status = None
            self.controller._submit(StatusQuery(0))
            self._arrived.wait_for(lambda: self._over or self._complete_status() is not None, timeout_s)
            status = self._complete_status()
        self.controller.raise_if_failed()
        if status is None:
            raise TimeoutError(f"the {LOCAL} controller did not answer in {timeout_s:g} s")
        return status

    def _take(self, rid: str, failed: Failed | None = None) -> bool:
        """Count the request as handed over; with `failed` it ends at once. Return false if too many are under way, or
        this rid is."""
        with self._arrived:
            self.controller.raise_if_failed()  # so that nothing is taken once all that was taken has ended
            if len(self._live) >= self._max_handed_over or rid in self._live:
                return False
            self._live.add(rid)
            if failed is not None:
                self._answers.append(failed)
                self._arrived.notify_all()
            return True

    def _check_roomless(self, leg: Legs, routed_dp_rank: int | None) -> None:
        """ConfigError for a missing room, which only the caller can choose, because it shares the room with others.
        Other refusals come back as `Failed`."""
        if leg != "unified":
            if leg in ROLES:
                raise ConfigError(f"a {leg} request needs a bootstrap_room: draw one at random from 0..2^63-1")
        elif routed_dp_rank is None and self.controller.core.policies["unified"].fixed:
            method = self.controller.config.unified_method
            raise ConfigError(f"{method} picks the rank by bootstrap_room: give one, or a routed_dp_rank")

    def _complete_status(self) -> Status | None:
        return None if self._status is None or self._status.remaining else self._status

    @property
    def _over(self) -> bool:
        return self.failure is not None or self.controller.stopped

    def _end_all(self, what: str) -> None:
        """End all requests, also those that the controller never took in; `what` says why."""
        with self._arrived:
            ended = {answer.rid for answer in self._answers if not isinstance(answer, Accepted)}
            why = f"the controller of this process {what}"
            self._answers += [Failed(rid, 0, "shutting_down", why, retryable=True) for rid in self._live - ended]
            self._arrived.notify_all()

    def _on_answer(self, message: Message) -> None:
        """Take an answer, on the controller's thread. A request has at most `attempts` + 1 answers, so the hand-over
        is bounded."""
        with self._arrived:
            if isinstance(message, Status):
                self._status = join(self._status, message)
            elif isinstance(message, Accepted | Done | Failed):
                self._answers.append(message)
            self._arrived.notify_all()

"""`Dispatcher`: a controller embedded in an engine, in place of the engine's own data-parallel controller.

Owns the hand-over between the engine's thread and the controller's: bounded, never blocking, never raising into the
engine's loop. Decides nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import TypeAlias

import structlog

from bus import codec
from bus.errors import ProtocolError
from bus.messages import (
    CLIENT_TO_CONTROLLER,
    Accepted,
    Cancel,
    Done,
    Failed,
    Leg,
    Message,
    Status,
    StatusQuery,
    Submit,
)
from bus.status import join
from controller.config import ControllerConfig
from controller.shell import LOCAL, Controller

MAX_HANDED_OVER = 4096

log = structlog.get_logger("controller")
Answer: TypeAlias = Accepted | Done | Failed


class Dispatcher:
    """`with Dispatcher(config) as dispatcher:` starts a controller in this process, on a thread of its own.

    `dispatch` hands one request over and returns at once; `poll` gives what became of requests since the last call:
    `Accepted` (dispatched; comes again with each new attempt), then exactly one of `Done` and `Failed`. All methods
    may be called from any thread. StartError on entry if an endpoint is taken.
    """

    def __init__(self, config: ControllerConfig, *, max_handed_over: int = MAX_HANDED_OVER) -> None:
        self.controller = Controller(config, on_local=self._on_answer)
        self._answers: deque[Answer] = deque()
        self._arrived = threading.Condition()
        self._status: Status | None = None
        self._max_handed_over = max_handed_over
        self._live: set[str] = set()  # handed over, end not polled yet

    def __enter__(self) -> Dispatcher:
        self.controller.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.controller.stop()

    def dispatch(
        self,
        rid: str,
        frames: Sequence[bytes],
        *,
        leg: Leg = "unified",
        max_tokens: int,
        prompt_tokens: int | None = None,
        bootstrap_room: int | None = None,
        routed_dp_rank: int | None = None,
        disagg_prefill_dp_rank: int | None = None,
        deadline_s: float = 0.0,
        priority: int = 0,
    ) -> bool:
        """Hand over one request: `frames` are the prompt (int32 little-endian token ids) and its params, passed on as
        they are. False when too many are under way, or this rid is: try again after `poll`. Bad requests come back as
        `Failed`."""
        submit = Submit(
            rid=rid,
            leg=leg,
            prompt_tokens=len(frames[0]) // 4 if prompt_tokens is None else prompt_tokens,
            max_tokens=max_tokens,
            bootstrap_room=bootstrap_room,
            routed_dp_rank=routed_dp_rank,
            disagg_prefill_dp_rank=disagg_prefill_dp_rank,
            deadline_s=deadline_s,
            priority=priority,
        )
        with self._arrived:
            if len(self._live) >= self._max_handed_over or rid in self._live:
                return False
            self._live.add(rid)
        try:
            codec.decode(codec.encode(submit), CLIENT_TO_CONTROLLER)  # the same checks as for any client
        except ProtocolError as error:
            self._on_answer(Failed(rid[:128], 0, "bad_request", str(error)[:1024], retryable=False))
        else:
            self.controller.submit_local(submit, frames)
        return True

    def cancel(self, rid: str) -> None:
        """End a request; its `Failed` (or the `Done` that was faster) comes through `poll`."""
        self.controller.submit_local(Cancel(rid))

    def poll(self, timeout_s: float = 0.0) -> list[Answer]:
        """What happened since the last call; waits at most `timeout_s` for something to happen."""
        with self._arrived:
            if timeout_s > 0 and not self._answers:
                self._arrived.wait(timeout_s)
            answers = list(self._answers)
            self._answers.clear()
            for answer in answers:
                if not isinstance(answer, Accepted):
                    self._live.discard(answer.rid)
        return answers

    def status(self, timeout_s: float = 5.0) -> Status:
        """The controller's view of its ranks. TimeoutError when it does not answer."""
        with self._arrived:
            self._status = None
            self.controller.submit_local(StatusQuery(0))
            self._arrived.wait_for(lambda: self._complete_status() is not None, timeout_s)
            status = self._complete_status()
        if status is None:
            raise TimeoutError(f"the {LOCAL} controller did not answer in {timeout_s:g} s")
        return status

    def _complete_status(self) -> Status | None:
        return None if self._status is None or self._status.remaining else self._status

    def _on_answer(self, message: Message) -> None:
        """On the controller's thread. A request has at most `attempts` + 1 answers, so the hand-over is bounded."""
        with self._arrived:
            if isinstance(message, Status):
                self._status = join(self._status, message)
            elif isinstance(message, Accepted | Done | Failed):
                self._answers.append(message)
            self._arrived.notify_all()

"""The engine behind both servers of `front`: it computes nothing, and says the same token again and again. `rank` is it
behind the bus, `server` is vLLM's server with it as its engine core, in a process and by the protocol of vLLM's own.

Each function but `core` is a process of the benchmark; `parent` is the process that started it.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Hashable
from typing import Any, Generic, NamedTuple, TypeVar

from benchmarks import vllm_parts
from benchmarks.child import STDIN, Parent
from nodes.link import Cancel, Leg, RankFacts, RankLink, Start
from nodes.own.engines import smollm2

TOKEN = 260  # of SmolLM2: " the", a text, so that each is an event
STEP_S = 0.02  # long enough for a server to pass on each token of 16 requests by itself
IDLE_S, START_S = 1.0, 30.0
K = TypeVar("K", bound=Hashable)


class NextToken(NamedTuple, Generic[K]):
    """A token of the request `key`."""

    key: K
    is_first: bool
    is_last: bool


class Script(Generic[K]):
    """The answers: a request's first token at once, and the others in steps of STEP_S, all requests together.
    Pure: times are seconds of one clock."""

    def __init__(self) -> None:
        self._left: dict[K, int] = {}  # tokens
        self._new: list[K] = []
        self._due = 0.0

    def begin(self, key: K, tokens: int) -> None:
        """Begin a request for so many tokens."""
        self._left[key] = tokens
        self._new.append(key)

    def end(self, key: K) -> None:
        """Forget a request."""
        self._left.pop(key, None)

    def wait_s(self, now: float) -> float:
        """Return how long there is nothing to say."""
        if self._new:
            return 0.0
        return max(0.0, self._due - now) if self._left else IDLE_S

    def take(self, now: float) -> list[NextToken[K]]:
        """Return the tokens that are due."""
        new, self._new = [key for key in self._new if key in self._left], []
        tokens = [self._next(key, True) for key in new]
        if now >= self._due:
            tokens += [self._next(key, False) for key in self._left.keys() - set(new)]
            self._due = now + STEP_S
        return tokens

    def _next(self, key: K, is_first: bool) -> NextToken[K]:
        self._left[key] -= 1
        is_last = not self._left[key]
        if is_last:
            del self._left[key]
        return NextToken(key, is_first, is_last)


def rank(parent: Parent, bus: str, controller: str, data: str) -> None:
    """Run a unified rank with this engine."""
    gone = threading.Event()
    script: Script[Leg] = Script()
    facts = RankFacts(model=smollm2.NAME, max_context=1 << 20, block_tokens=16, vocab_size=1 << 16)
    with RankLink(bus, controllers=[controller], role="unified", instance="rank-0", facts=facts, data=data) as link:
        if not link.wait_ready(START_S):
            return
        parent.ready()
        threading.Thread(target=_until_parent_leaves, args=(gone,), daemon=True).start()
        while not gone.is_set():
            for order in link.poll(timeout_s=script.wait_s(time.monotonic())):
                if isinstance(order, Start):
                    script.begin(order.leg, order.leg.max_tokens)
                elif isinstance(order, Cancel):
                    script.end(order.leg)
            for token in script.take(time.monotonic()):
                link.output(token.key, (TOKEN,))
                if token.is_last:
                    link.finish(token.key, "length")


def _until_parent_leaves(gone: threading.Event) -> None:
    while os.read(STDIN, 4096):
        pass
    gone.set()


def server(parent: Parent, arguments: list[str]) -> None:
    """Run vLLM's HTTP server over this engine until the parent has gone. It takes no commands."""
    from vllm.v1.engine import utils
    from vllm.v1.engine.core import EngineCoreProc

    EngineCoreProc.run_engine_core = staticmethod(core)
    utils.get_mp_context = lambda: multiprocessing.get_context(
        "fork"
    )  # it need not import vLLM again, which takes 12 s
    vllm_parts.server(parent, arguments)


def core(*, dp_rank: int, local_dp_rank: int, **given: Any) -> None:
    """Run the process of the engine core that vLLM's server starts: vLLM's handshake, sockets and records, without
    scheduler, executor and model."""
    from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs, FinishReason
    from vllm.v1.engine.core import EngineCore, EngineCoreProc
    from vllm.v1.metrics.stats import PrefillStats, SchedulerStats

    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    class Scheduler:
        def get_kv_event_publisher_config(self) -> None: ...

    def begin(self: Any, vllm_config: Any, *_: Any) -> None:
        self.vllm_config = vllm_config
        self.scheduler = Scheduler()
        self.aborts_queue = queue.Queue()

    class Core(EngineCoreProc):  # type: ignore[misc]
        script: Script[str]

        def get_supported_tasks(self) -> tuple[str, ...]:
            return ("generate",)

        def reset_mm_cache(self) -> None: ...

        def reset_encoder_cache(self) -> None: ...

        def preprocess_add_request(self, request: Any) -> tuple[Any, int]:
            return request, 0

        def add_request(self, request: Any, request_wave: int = 0) -> None:
            self.requests[request.request_id] = request
            self.script.begin(request.request_id, request.sampling_params.max_tokens)

        def abort_requests(self, request_ids: list[str]) -> None:
            for request_id in request_ids:
                self.script.end(request_id)
                self.requests.pop(request_id, None)

        def run(self) -> None:
            self.script = Script()
            self.requests: dict[str, Any] = {}
            parent = os.getppid()
            while os.getppid() == parent:
                try:
                    self._handle_client_request(*self.input_queue.get(timeout=self.script.wait_s(time.monotonic())))
                    while True:
                        self._handle_client_request(*self.input_queue.get_nowait())
                except queue.Empty:
                    pass
                if tokens := self.script.take(time.monotonic()):
                    self.output_queue.put_nowait((0, self.outputs(tokens)))

        def outputs(self, tokens: list[NextToken[str]]) -> Any:
            made, finished, now = [], set(), time.monotonic()
            for key, is_first, is_last in tokens:
                output = EngineCoreOutput(key, [TOKEN])
                if is_first:
                    output.prefill_stats = PrefillStats()
                    output.prefill_stats.set(len(self.requests[key].prompt_token_ids), 0, 0)
                    kinds = (EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED)
                    output.events = [EngineCoreEvent.new_event(kind, now) for kind in kinds]
                if is_last:
                    output.finish_reason = FinishReason.LENGTH
                    finished.add(key)
                    del self.requests[key]
                made.append(output)
            stats = SchedulerStats(num_running_reqs=len(self.requests))
            return EngineCoreOutputs(outputs=made, finished_requests=finished or None, scheduler_stats=stats)

    EngineCore.__init__ = begin
    Core(engine_index=dp_rank, **given).run()

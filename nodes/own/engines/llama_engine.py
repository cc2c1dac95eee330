"""An engine that runs a Llama, in torch or numpy, on one worker thread. This module owns that thread and the KV
pool.

The forward step never runs on the loop's thread: a plan goes over through a queue, and its result comes back through
`Loop.call_threadsafe`. An exception in a step becomes its result's `error`; it never ends the process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, ClassVar, Protocol

import numpy

from bus.errors import ConfigError
from bus.wire.messages import TokenLogprobs
from nodes.own.engines.base import EngineSpec, Row, StepPlan, StepResult
from nodes.own.engines.faults import NO_FAULTS, Faults
from nodes.own.engines.llama_config import LlamaConfig
from nodes.own.engines.sampling import are_numbers, logprobs, sample

CLOSE_S = 10.0
Done = Callable[[StepResult], None]


class Threadsafe(Protocol):
    """The part of a `bus.runtime.loop.Loop` that the engine needs: run a function on the loop's thread."""

    def call_threadsafe(self, function: Callable[[], None], /) -> None: ...


class Model(Protocol):
    """A Llama. Its arrays are numpy's, or can be read by numpy in place, such as torch's tensors. `new_pool` makes KV
    memory, `forward` computes the logits of a step's rows and writes their K and V."""

    config: LlamaConfig

    def new_pool(self, blocks: int, block_tokens: int, /) -> Any: ...

    def forward(self, pool: Any, rows: Sequence[Row], /) -> Any: ...


class LlamaEngine:
    """The Llama engine in numpy; torch's is in `torch_engine`. Its methods are those of
    `nodes.own.engines.base.Engine`."""

    kind: ClassVar[str] = "numpy"

    def __init__(
        self,
        loop: Threadsafe,
        model: Model,
        *,
        blocks: int,
        block_tokens: int,
        max_context: int = 0,
        faults: Faults = NO_FAULTS,
    ) -> None:
        """Start the worker. `max_context` 0: the model's own; ConfigError when it is more than that."""
        c = model.config
        if max_context > c.max_context:
            raise ConfigError(f"--max-context {max_context} is more than the {c.max_context} of model {c.name}")
        self.spec = EngineSpec(
            model=c.name,
            layout=f"{self.kind}/{c.name}/f32/{c.layers}x2x{block_tokens}x{c.kv_heads}x{c.head_dim}",
            max_context=max_context or c.max_context,
            block_tokens=block_tokens,
            blocks=blocks,
            block_bytes=block_tokens * c.kv_bytes_per_token,
            vocab_size=c.vocab_size,
            eos_ids=c.eos_ids,
            params=("logprobs",),
        )
        self._loop = loop
        self._model = model
        self._faults = faults
        self._pool = model.new_pool(blocks, block_tokens)
        self._bytes = numpy.asarray(self._pool).data.cast("B")  # the pool itself, no copy
        self._plans: SimpleQueue[tuple[StepPlan, Done] | None] = SimpleQueue()
        self._closed = threading.Event()
        self._worker = threading.Thread(target=self._work, name="engine", daemon=True)
        self._worker.start()

    def submit(self, plan: StepPlan, done: Done) -> None:
        """Hand the plan to the worker; `done` gets the result on the loop's thread, unless the engine is closed
        meanwhile."""
        self._plans.put((plan, done))

    def export_block(self, block: int) -> memoryview:
        """Return the bytes of a block in the pool itself, read-only. IndexError for a block that is not there."""
        return self._bytes[self._span(block)].toreadonly()

    def import_block(self, block: int, data: memoryview | bytes) -> None:
        """Copy `data` into a block of the pool. IndexError for a block that is not there, ValueError if the size is
        wrong."""
        span = self._span(block)
        if memoryview(data).nbytes != self.spec.block_bytes:
            raise ValueError(f"a block of {self.spec.layout} has {self.spec.block_bytes} bytes, not {len(data)}")
        self._bytes[span] = memoryview(data).cast("B")

    def close(self) -> None:
        """Stop after the step that runs, if any, whose result is dropped. It waits for that, CLOSE_S at most."""
        if not self._closed.is_set():
            self._closed.set()
            self._plans.put(None)
        self._worker.join(CLOSE_S)

    def _span(self, block: int) -> slice:
        if not 0 <= block < self.spec.blocks:
            raise IndexError(f"block {block} of {self.spec.blocks}")
        return slice(block * self.spec.block_bytes, (block + 1) * self.spec.block_bytes)

    def _work(self) -> None:
        self._begin()
        while (work := self._plans.get()) is not None:
            plan, done = work
            self._answer(self._run(plan), done)

    def _begin(self) -> None:
        """Prepare the worker thread before its first step."""

    def _answer(self, result: StepResult, done: Done) -> None:
        def on_loop() -> None:
            if not self._closed.is_set():
                done(result)

        if not self._closed.is_set():
            self._loop.call_threadsafe(on_loop)

    def _run(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        tokens: tuple[tuple[int, int], ...] = ()
        log_probabilities: tuple[tuple[int, TokenLogprobs], ...] = ()
        damaged: tuple[int, ...] = ()
        error = ""
        try:
            self._inject(plan)
            asked = [(row.seq, row.params, row.output_index) for row in plan.rows if row.params is not None]
            logits = numpy.asarray(self._model.forward(self._pool, plan.rows))
            if asked and not (whole := are_numbers(logits)).all():
                damaged = tuple(seq for (seq, _, _), good in zip(asked, whole, strict=True) if not good)
                asked, logits = [each for each in asked if each[0] not in damaged], logits[whole]
            sampled = sample(logits, [(params, output_index) for _, params, output_index in asked])
            tokens = tuple((seq, token) for (seq, _, _), token in zip(asked, sampled, strict=True))
            log_probabilities = tuple(
                (seq, logprobs(row, token, params.logprobs))
                for row, (seq, params, _), token in zip(logits, asked, sampled, strict=True)
                if params.logprobs >= 0
            )
        except Exception as failure:
            error = " ".join(f"{type(failure).__name__}: {failure}".split())[:500]
        return StepResult(plan.number, tokens, time.perf_counter() - began, error, log_probabilities, damaged)

    def _inject(self, plan: StepPlan) -> None:
        fault = self._faults.fed(plan.rows) if self._faults else ""
        if fault == "hang":
            self._closed.wait()
        if fault:
            raise RuntimeError("injected fault: a row fed the fail token")

"""vLLM's records and errors as this package makes them. It imports vLLM, and nothing that starts anything."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import numpy as np
import torch
from vllm.exceptions import GenerationError, GracefulHTTPError, VLLMValidationError
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
)
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from bus.wire.messages import FinishReason as BusFinish
from bus.wire.messages import TokenLogprobs
from nodes.link.logprobs import LEAST
from pdbus.vllm_front.asked import Failure

FINISHES: dict[BusFinish, Any] = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class BusFailed(GracefulHTTPError, GenerationError):  # type: ignore[misc]
    """The bus failed a request. vLLM hands it through with its status, and logs no traceback of it."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message, HTTPStatus(failure.status))
        self.status_code = HTTPStatus(failure.status)


class BusRefused(VLLMValidationError, GenerationError):  # type: ignore[misc]
    """The bus found a request invalid. As with `BusFailed`, vLLM logs no traceback of it."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message, parameter=failure.param)
        self.status_code = HTTPStatus(failure.status)


def error_of(failure: Failure) -> Any:
    """Return vLLM's error for a failure; where a client's field is at fault, with its name."""
    if failure.status == 400:
        return BusRefused(failure)
    return BusFailed(failure)


def output(
    request_id: str,
    ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    top: int | None,
    finish: BusFinish | None,
    stop_reason: int | None,
) -> Any:
    """Return vLLM's record of new output tokens of one request. `finish`: how it ended with them; None: it goes on.
    `top`: how many of the likeliest tokens were asked for at each place; None: no log probabilities."""
    return EngineCoreOutput(
        request_id,
        list(ids),
        new_logprobs=None if top is None or not ids else logprobs_lists(ids, logprobs, top),
        finish_reason=None if finish is None else FINISHES[finish],
        stop_reason=stop_reason,
    )


def began(record: Any, prompt_tokens: int, cached_tokens: int, written_tokens: int, queued_at: float) -> None:
    """Complete the first output of a request: what of the prompt came from a prefix cache and what was written to it,
    and since when it waited (seconds of time.monotonic)."""
    stats = PrefillStats()
    cached = min(cached_tokens, prompt_tokens)
    stats.set(prompt_tokens, cached, 0)
    stats.finalize(cached + written_tokens)
    record.prefill_stats = stats
    kinds = (EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED)
    record.events = [EngineCoreEvent.new_event(kind, queued_at) for kind in kinds]


def of_prompt(record: Any, ids: Sequence[int], logprobs: Sequence[TokenLogprobs], top: int) -> None:
    """Add to the first output of a request the log probabilities of its prompt's tokens, from the second token on."""
    if not logprobs:
        return
    tokens, values, ranks, _ = logprobs_lists(ids[1:], logprobs, top)
    record.new_prompt_logprobs_tensors = LogprobsTensors(*map(torch.from_numpy, (tokens, values, ranks)))


def outputs(records: list[Any], counts: tuple[int, int] | None) -> Any:
    """Return vLLM's one record of the outputs that came together. `counts`: how many of this server's requests run and
    how many wait, for vLLM's gauges, which cost more than a token; None: as vLLM was told last."""
    finished = {record.request_id for record in records if record.finish_reason is not None}
    stats = None if counts is None else SchedulerStats(num_running_reqs=counts[0], num_waiting_reqs=counts[1])
    return EngineCoreOutputs(outputs=records, finished_requests=finished or None, scheduler_stats=stats)


def logprobs_lists(ids: Sequence[int], logprobs: Sequence[TokenLogprobs], top: int) -> Any:
    """Return vLLM's arrays of log probabilities: a row for each output token, the sampled token first, then the `top`
    likeliest. A sampled
    token whose rank was not reported, and which is not among these, ranks behind them."""
    tokens = np.zeros((len(ids), top + 1), dtype=np.int32)
    values = np.full((len(ids), top + 1), LEAST, dtype=np.float32)
    ranks = np.full(len(ids), top + 1, dtype=np.int32)
    for row, (token, each) in enumerate(zip(ids, logprobs, strict=True)):
        tokens[row, 0], values[row, 0] = token, each.logprob
        ranks[row] = each.rank or top + 1
        tokens[row, 1:] = token
        for column, (other, value) in enumerate(each.top[:top], 1):
            tokens[row, column], values[row, column] = other, value
            if other == token and not each.rank:
                ranks[row] = column
    return LogprobsLists(tokens, values, ranks)


def fail(processor: Any, request_id: str, error: Exception) -> list[str]:
    """End a request of vLLM's `OutputProcessor` with an error, its sibling answers too. Return the ids of all that
    ended so; empty for an unknown request."""
    state = processor.request_states.get(request_id)
    if state is None:
        return []
    parent = state.parent_req
    ended: list[str] = processor.abort_requests([request_id if parent is None else parent.request_id], internal=True)
    state.queue.put(error)
    return ended

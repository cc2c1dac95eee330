"""The code of other engines that picks a rank and sends the request there, each in a Python that has the engine.
Functions with `parent` are processes of the `peers` benchmark, which run until the parent has gone; the others are
called once in a process.

SGLang's: its data-parallel controller, whole, in its own loop. vLLM's: the client of its engines that runs inside its
API server, and the coordinator that brings it their loads. In the place of engines are ranks of
`benchmarks.peers_parts`. No model runs, and nothing of theirs is changed but SGLang's watchdog, which counts.
"""

from __future__ import annotations

import asyncio
import os
import random
import select
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.child import STDIN, Parent
from benchmarks.peers_parts import ID, LOADS_S, MARK
from benchmarks.sglang_parts import Hosted, encoded, generate

VOCABULARY = 128_000
ROUNDS = 7


def prompt(tokens: int) -> list[int]:
    """Return `tokens` random token ids, the same for the same number."""
    rng = random.Random(tokens)
    return [rng.randrange(VOCABULARY) for _ in range(tokens)]


# --- SGLang ----------------------------------------------------------------------------------------------------------


class Turns:
    """Replaces SGLang's watchdog: counts how often the loop has looked for a request."""

    def __init__(self) -> None:
        self.count = 0

    def feed(self) -> None:
        """Count one turn; SGLang's loop calls it."""
        self.count += 1


def sglang(parent: Parent, folder: str, endpoints: list[str], tokens: list[int]) -> None:
    """Run a DP controller in front of ranks at `endpoints`. It writes an encoded request of each length in `tokens` to
    `folder`, sends the parent a JSON line that says where it takes requests and where these files are, then answers
    each command with the number of its loop's turns."""
    from sglang.srt.utils.common import kill_itself_when_parent_died

    kill_itself_when_parent_died()  # a process that stands still at that moment would never learn of it
    place = Path(folder)
    place.mkdir()
    hosted = Hosted(place, endpoints, 0, None, sglang_method="total_tokens", split=False)
    from sglang.srt.observability.req_time_stats import APIServerReqTimeStats

    turns = hosted.controller.soft_watchdog = Turns()
    requests = {str(length): str(place / f"{length}") for length in tokens}
    for length in tokens:
        request = generate(ID.format(number=0, sent_ns=0), prompt(length), time_stats=APIServerReqTimeStats())
        (data,) = encoded([request])
        Path(requests[str(length)]).write_bytes(data)

    def answer() -> None:
        while not parent.gone:
            for _ in parent.commands():
                parent.send(turns.count)
        os._exit(0)  # its loop never ends

    parent.ready()
    parent.send({
        "takes": hosted.ports.scheduler_input_ipc_name, "server": hosted.ports.instance_id, "requests": requests
    })  # fmt: skip
    threading.Thread(target=answer, daemon=True).start()
    hosted.controller.event_loop()


def sglang_loads(parent: Parent, servers: list[str], ranks: int) -> None:
    """Write idle loads of `ranks` ranks of each of `servers` into SGLang's shared memory, every LOADS_S, as its
    schedulers do."""
    from sglang.srt.managers.load_snapshot import LoadSnapshot, ShmLoadSnapshotWriter, shm_path_for

    writers = [
        (rank, ShmLoadSnapshotWriter(shm_path_for(server), ranks, rank)) for server in servers for rank in range(ranks)
    ]
    parent.ready()
    while not parent.gone:
        if select.select([STDIN], [], [], LOADS_S)[0]:
            parent.commands()
        for rank, writer in writers:
            writer.write(LoadSnapshot(timestamp=time.time(), dp_rank=rank))


def sglang_pick(ranks: list[int], picks: int) -> dict[str, list[float]]:
    """Measure SGLang's pick with its raise by `total_tokens`: return microseconds of CPU by number of ranks, several
    values each."""
    from sglang.srt.managers.data_parallel_controller import DPBudget, LoadBalanceMethod

    rng = random.Random(1)
    lengths = [rng.randint(1, 4_096) for _ in range(picks)]

    def pick_all(budget: DPBudget) -> None:
        for tokens in lengths:
            budget.dispatch(LoadBalanceMethod.TOTAL_TOKENS, tokens)

    taken = {}
    for count in ranks:
        taken[str(count)] = _timed(partial(pick_all, DPBudget(count)), picks)
    return taken


# --- vLLM ------------------------------------------------------------------------------------------------------------


def vllm(parent: Parent, takes: str, replies: str, loads: str, ranks: int, tokens: list[int]) -> None:
    """Run vLLM's client of `ranks` engines, with a sender of requests, in the event loop of vLLM's API server. The
    endpoints are those of its sockets. Commands are those of `benchmarks.client`, with `tokens`."""
    import uvloop

    uvloop.run(_serve(parent, takes, replies, loads, ranks, tokens))


async def _serve(parent: Parent, takes: str, replies: str, loads: str, ranks: int, tokens: list[int]) -> None:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.v1.engine.core_client import EngineCoreClient
    from vllm.v1.executor.abstract import Executor

    config = VllmConfig(parallel_config=ParallelConfig(data_parallel_size=ranks, data_parallel_size_local=ranks))
    addresses = {"input_address": takes, "output_address": replies, "stats_update_address": loads}
    client = EngineCoreClient.make_async_mp_client(config, Executor, False, addresses)
    caller = _Caller(client, {length: _vllm_request(length) for length in tokens})
    doings: dict[str, Callable[..., Any]] = {"burst": caller.burst, "paced": caller.paced}
    loop = asyncio.get_running_loop()
    asked: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    def commands() -> None:
        for command in parent.commands():
            asked.put_nowait(command)
        if parent.gone:
            loop.remove_reader(STDIN)
            asked.put_nowait(None)

    loop.add_reader(STDIN, commands)
    parent.ready()
    while command := await asked.get():
        parent.send(await doings[command.pop("do")](**command))
    client.shutdown()


class _Caller:
    """The sender of requests in vLLM's API server, which takes its engines' answers too."""

    def __init__(self, client: Any, requests: dict[int, Any]) -> None:
        self._client = client
        self._requests = requests
        self._sent = self._ended = 0

    async def burst(self, count: int, window: int, tokens: int) -> dict[str, Any]:
        """Send as `benchmarks.client.Traffic` does; so does `paced`."""
        began = time.perf_counter()
        goal, first = self._sent + count, self._ended
        while self._ended - first < count:
            while self._sent < goal and self._sent - self._ended < window:
                await self._submit(tokens, 0)
            await self._take()
        return {"elapsed_s": time.perf_counter() - began}

    async def paced(self, count: int, rate: float, tokens: int) -> dict[str, Any]:
        began, first = time.perf_counter(), self._ended

        async def send() -> None:
            for number in range(count):
                if (due_s := began + number / rate - time.perf_counter()) > 0:
                    await asyncio.sleep(due_s)
                await self._submit(tokens, time.monotonic_ns())

        sending = asyncio.create_task(send())
        while self._ended - first < count:
            await self._take()
        await sending
        return {"elapsed_s": time.perf_counter() - began}

    async def _submit(self, tokens: int, sent_ns: int) -> None:
        self._sent += 1
        request = self._requests[tokens]
        request.request_id = ID.format(number=self._sent, sent_ns=sent_ns)
        await self._client.add_request_async(request)

    async def _take(self) -> None:
        outputs = await self._client.get_output_async()
        self._ended += len(outputs.finished_requests or ())


def vllm_coordinator(parent: Parent, front: str, outputs: str, waves: str, ranks: int) -> None:
    """Run the process that brings the engines' loads to vLLM's API servers, as for a dense model."""
    from vllm.v1.engine.coordinator import DPCoordinatorProc

    def leave() -> None:
        while not parent.gone:
            parent.commands()
        os._exit(0)

    threading.Thread(target=leave, daemon=True).start()
    parent.ready()
    DPCoordinatorProc.run_coordinator(ranks, front, outputs, waves, enable_wave_coordination=False)


def vllm_forms() -> dict[str, Any]:
    """Return an engine's messages, for ranks to imitate: `ended`, that the request MARK has ended, and `load` in
    hexadecimal."""
    import msgspec
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.serial_utils import MsgpackEncoder

    encoder, name = MsgpackEncoder(), MARK.decode()
    output = EngineCoreOutput(name, [1], finish_reason=FinishReason.LENGTH)
    (ended,) = encoder.encode(EngineCoreOutputs(outputs=[output], finished_requests={name}))
    (load,) = encoder.encode(EngineCoreOutputs(scheduler_stats=SchedulerStats()))
    return {"ended": msgspec.msgpack.decode(ended), "load": bytes(load).hex()}


def vllm_pick(ranks: list[int], picks: int) -> dict[str, list[float]]:
    """Measure vLLM's pick with its raise: return microseconds of CPU by number of ranks, several values each. The end
    of each request is not counted."""
    from collections import Counter

    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.core_client import DPLBAsyncMPClient

    def pick_all(client: Any) -> None:
        for request in requests:
            client.get_core_engine_for_request(request)

    def end_all(client: Any) -> None:
        ended = EngineCoreOutputs(finished_requests={request.request_id for request in requests})
        asyncio.run(DPLBAsyncMPClient.process_engine_outputs(client, ended))

    requests = [SimpleNamespace(request_id=str(n), data_parallel_rank=None, pooling_params=None) for n in range(picks)]
    taken = {}
    for count in ranks:
        client: Any = object.__new__(DPLBAsyncMPClient)
        client.reqs_in_flight, client.engine_inflight = {}, Counter()
        client.client_count, client.eng_start_index = 1, 0
        client.core_engines = [rank.to_bytes(2, "little") for rank in range(count)]
        client.lb_engines = [[0, 0, 0.0] for _ in range(count)]
        taken[str(count)] = _timed(partial(pick_all, client), picks, between=partial(end_all, client))
    return taken


def _vllm_request(tokens: int) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id="", prompt_token_ids=prompt(tokens), mm_features=None, sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None, arrival_time=time.time(), lora_request=None, cache_salt=None, data_parallel_rank=None,
    )  # fmt: skip


# --- both ------------------------------------------------------------------------------------------------------------


def _timed(function: Callable[[], object], count: int, between: Callable[[], object] = lambda: None) -> list[float]:
    """Microseconds of CPU a piece of `count` that `function` does, ROUNDS values after one for warmth."""
    taken = []
    for _ in range(1 + ROUNDS):
        began = time.thread_time()
        function()
        taken.append((time.thread_time() - began) / count * 1e6)
        between()
    return taken[1:]

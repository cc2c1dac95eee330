"""A replay with real processes in real time: broker, controller and nodes of one machine.

Owns the cluster's settings and the times of the submits. Equal block hashes of the trace become equal tokens of
prompts, so that the nodes' caches find the same prefixes.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import count
from random import Random

from bus.errors import BusError, ConfigError, RequestFailed
from bus.wire.messages import Status
from controller.policies.registry import POLICIES, find
from controller.trips import TRIPS
from nodes.engines import kind_of
from nodes.own.engines.sim import SIM_VOCAB_SIZE, SPECIALS
from pdbus.client import AsyncClient, Client
from pdbus.client.options import Options, block_tokens_for
from pdbus.lab.arrivals import Arrivals
from pdbus.lab.capacity import stretch
from pdbus.lab.choosers import method_of
from pdbus.lab.config import LabConfig
from pdbus.lab.outcome import Outcome, RequestOutcome
from pdbus.lab.simulate import rooms_of, unified_of
from pdbus.lab.traces import Trace, TraceRequest
from pdbus.launcher import Cluster, ClusterSpec

RANKS_PER_PROCESS = 8
CONTEXT = 1 << 20
VLLM_WAIT_S = 300.0  # how long an engine may take to start, or for one long step
_TIMING_OPTIONS = {
    "base_s": "--sim-base-s",
    "per_prefill_token_s": "--sim-prefill-s-per-token",
    "per_decode_row_s": "--sim-decode-s",
    "per_context_token_s": "--sim-context-s-per-token",
    "batched_s": "--sim-batched-s",
}


@dataclass(frozen=True, slots=True)
class LiveEngine:
    """The engine of the ranks in a live run, and its model."""

    name: str = "sim"  # or vllm
    model: str = "sim"
    args: tuple[str, ...] = ()  # vllm's own arguments


def virtual_twin(config: LabConfig, engine: LiveEngine = LiveEngine()) -> LabConfig:
    """Return `config` for the virtual run that is compared with a live one: reports have no delay and no loss, there is
    one controller, and outputs are cached in vain, because an engine's own are not what the trace's next turns begin
    with. For sim, fetching a KV cache takes almost no time and prefill makes the first token; for other engines
    `config` keeps its own values for both."""
    alike = replace(config, report_delay_s=0.0, report_loss=0.0, controllers=1, outputs_cached=False)
    return replace(alike, kv_fetch_token_s=1e-7, first_at_decode=False) if engine.name == "sim" else alike


def run_live(
    trace: Trace, method: str, config: LabConfig, engine: LiveEngine, on_progress: Callable[[str], None]
) -> Outcome:
    """Start a cluster as `config` says, replay `trace` on it in real time, stretched to `config.load`, and return the
    outcome, in seconds from the start of the trace.

    Raises ConfigError where no controller can run a method or prefill ranks have no decode ranks, StartError where the
    cluster does not start, and BusError when a request fails, because figures without it would be too good."""
    if any(find(name) is None for name in (method, config.decode_method)):
        raise ConfigError(f"--live runs what a controller can: {', '.join(POLICIES)}, or module:Class of your own")
    if config.ranks and not config.decode_ranks:
        raise ConfigError("--live needs decode ranks beside prefill ranks")
    if config.link_s_per_token or config.fetch_by_layer:
        raise ConfigError("--link-s-per-token and --fetch-by-layer are for virtual time, not --live")
    if config.decode_cache != config.decode_prefills:
        raise ConfigError("--live needs --decode-cache and --decode-prefills together: our decode ranks do both")
    if config.decode_cache and not kind_of(engine.name).our_options:
        raise ConfigError(f"--decode-cache is for our own engines, not --live --engine {engine.name}")
    if config.trip:
        raise ConfigError("--trip is for virtual time, not --live")
    stretched = stretch(trace, config)
    spec = spec_of(method, config, trace.block_tokens, engine)
    with Cluster(spec, on_progress) as cluster:
        with cluster.client() as client:
            _warm_up(client, config)
        return replay_on(cluster, stretched, method, config, on_progress)


def _warm_up(client: Client, config: LabConfig) -> None:
    """Have each rank compute something before the clock starts."""
    for number in range(max(config.ranks, config.decode_ranks) if config.ranks else 0):
        prefill, decode = number % config.ranks, number % config.decode_ranks
        client.generate_tokens(
            _tokens("warm", 8), max_tokens=2, ignore_eos=True, disagg_prefill_dp_rank=prefill, routed_dp_rank=decode
        ).tokens()

    for number in range(config.unified_ranks):
        client.generate_tokens(
            _tokens("warm", 8), max_tokens=2, ignore_eos=True, leg="unified", routed_dp_rank=number
        ).tokens()


def replay_on(
    cluster: Cluster, trace: Trace, method: str, config: LabConfig, on_progress: Callable[[str], None]
) -> Outcome:
    """Submit the trace's requests to a cluster that serves nothing else, at their times, and later turns of sessions
    after the ends that they wait for. Return the outcome once all that count have ended; the others are cancelled then.
    It blocks all that time. Raises BusError when a request fails."""

    async def run() -> Outcome:
        async with AsyncClient(cluster.controller, keys=cluster.spec.keys) as client:
            return await _Replay(client, trace, method, config, on_progress).run()

    return asyncio.run(run())


class _Replay:
    """A replay in real time; its seconds count from its start."""

    def __init__(
        self, client: AsyncClient, trace: Trace, method: str, config: LabConfig, on_progress: Callable[[str], None]
    ) -> None:
        self._client, self._trace, self._config, self._on_progress = client, trace, config, on_progress
        self._rooms, self._is_unified = rooms_of(trace, config), unified_of(trace, config, method)
        self._courses = [RequestOutcome(request) for request in trace.requests]
        self._arrivals = Arrivals(trace, config, self._begin)
        self._outcome = Outcome(method, [], config.sample_s)
        self._tasks: set[asyncio.Task[None]] = set()
        self._over: asyncio.Queue[asyncio.Task[None]] = asyncio.Queue()
        self._before: Status | None = None  # when requests began to count
        # the controller's policy may send a pair to a unified rank
        self._may_be_unified = bool(config.ranks and config.unified_ranks) and method_of(method).prefills_here
        self._may_be_alone = self._may_be_unified or config.decode_cache
        self._unified_way: Options = {}  # options of a unified request, where pairs are the client's default
        self._came = 0

    async def run(self) -> Outcome:
        if self._config.ranks and self._config.unified_ranks:  # a client that is given the leg asks for no block size
            block_tokens = block_tokens_for(await self._client.status())
            self._unified_way = {"leg": "unified", "block_tokens": block_tokens}
        async with sampling(self._sample, self._config.sample_s):
            self._arrivals.start()  # which makes prompts; no task has run yet
            self._began = time.monotonic()
            try:
                while not self._arrivals.done(self._now()):
                    left_s = self._config.end_s - self._now()
                    with suppress(TimeoutError):
                        task = await asyncio.wait_for(self._over.get(), left_s if left_s > 0 else None)
                        self._tasks.discard(task)
                        task.result()  # raises what it failed with
            finally:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
        outcome = self._outcome
        outcome.count(self._courses, self._arrivals, self._now())
        _totals(outcome, self._before, await self._client.status(), self._config)
        return outcome

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _begin(self, place: int, at_s: float) -> None:
        prompt = make_prompt(self._trace.requests[place], self._trace.block_tokens, place)
        task = asyncio.get_running_loop().create_task(self._one(place, at_s, prompt))
        task.add_done_callback(self._over.put_nowait)
        self._tasks.add(task)

    async def _one(self, place: int, at_s: float, prompt: array[int]) -> None:
        """Run a request from its arrival to its end."""
        course = self._courses[place]
        await asyncio.sleep(at_s - self._now())
        course.arrived_s = self._now()
        self._arrivals.arrived(place, course.arrived_s)
        self._came += 1
        output, room = max(1, course.request.output_tokens), self._rooms[place]
        unified = self._is_unified[place]
        options: Options = {"max_tokens": output, "ignore_eos": True, "bootstrap_room": room}
        if unified:
            options.update(self._unified_way)
        stream = await self._client.generate_tokens(prompt, **options)
        result = await stream.wait()
        alone = unified or self._may_be_alone
        if result.finish != "length" or result.decode is None or (result.prefill is None and not alone):
            raise BusError(f"a request of the live run failed: {RequestFailed(result.code, result.message)}")
        if result.prefill is not None:
            course.prefill_rank, course.decode_rank = result.prefill.dp_rank, result.decode.dp_rank
        elif result.decode.instance.startswith("decode"):
            course.decode_rank = result.decode.dp_rank
        else:
            course.unified_rank = result.decode.dp_rank
        course.cached_tokens = result.cached_tokens
        course.first_token_s = course.arrived_s + result.ttft_s
        course.finished_s = course.arrived_s + result.total_s
        self._arrivals.ended(place, course.finished_s)

    async def _sample(self) -> None:
        status = await self._client.status()
        if self._now() >= self._arrivals.began_s:
            self._before = self._before or status
            self._outcome.load.append(_queued(status, self._config))
        share = self._arrivals.share(self._now())
        self._on_progress(f"{self._outcome.method}: {self._now():.0f} s, {self._came} requests sent, {share:.0%} done")


@asynccontextmanager
async def sampling(sample: Callable[[], Awaitable[None]], every_s: float) -> AsyncIterator[None]:
    """Await `sample` now and every `every_s` seconds until the end of the `async with`. If the block raises nothing, an
    error of `sample` is raised at its end."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        for number in count(1):
            await sample()
            await asyncio.sleep(began + number * every_s - loop.time())

    task = asyncio.create_task(run())
    try:
        yield
    finally:
        failed = task.done()
        task.cancel()
    if failed:
        await task


def make_prompt(request: TraceRequest, block_tokens: int, number: int) -> array[int]:
    """Return `prompt_tokens` token ids. A full block with a hash depends on that hash alone; all other tokens depend on
    `number`, which must be different for each request."""
    prompt = array("i")
    for block in range(request.prompt_tokens // block_tokens):
        if block < len(request.hashes):
            prompt.extend(_block(request.hashes[block], block_tokens))
        else:
            prompt.extend(_tokens(f"own {number} {block}", block_tokens))
    prompt.extend(_tokens(f"rest {number}", request.prompt_tokens - len(prompt)))
    return prompt


@lru_cache(1 << 14)
def _block(block_hash: int, count: int) -> array[int]:
    """Return the tokens of a block that may come in many prompts."""
    return _tokens(f"{block_hash}", count)


def _tokens(name: str, count: int) -> array[int]:
    span = SIM_VOCAB_SIZE - SPECIALS
    return array("i", (SPECIALS + (byte * 2 + (byte >> 7)) % span for byte in Random(name).randbytes(count)))


def _queued(status: Status, config: LabConfig) -> array[int]:
    row = array("q", [0] * config.prompt_ranks)
    for rank in status.ranks:
        if rank.role == "prefill":
            row[rank.dp_rank] = rank.estimate_tokens
        elif rank.role == "unified":  # whose estimate has what it holds too
            held = 0 if rank.load is None else rank.load.kv_tokens
            row[config.ranks + rank.dp_rank] = max(0, rank.estimate_tokens - held)
    return row


def _totals(outcome: Outcome, before: Status | None, after: Status, config: LabConfig) -> None:
    """Set the figures that only the controller and nodes know, by their counts when requests began to count and at the
    end."""

    def total(status: Status | None, role: str, name: str) -> int:
        ranks = () if status is None else status.ranks
        return sum(int(getattr(rank.load, name)) for rank in ranks if rank.role == role and rank.load)

    def grown(role: str, name: str) -> int:
        return total(after, role, name) - total(before, role, name)

    def busy(role: str, ranks: int) -> float:
        return min(1.0, grown(role, "busy_us_total") / (ranks * elapsed_us)) if ranks else 0.0

    prompt = grown("prefill", "admitted_tokens_total") + grown("unified", "admitted_tokens_total")
    cached = grown("prefill", "cached_tokens_total") + grown("unified", "cached_tokens_total")
    if config.decode_cache:  # decode ranks count the prompts that they fetch too: what requests say is surer
        early = {} if before is None else before.counts
        outcome.trips = {trip: after.counts.get(f"trip_{trip}", 0) - early.get(f"trip_{trip}", 0) for trip in TRIPS}
    else:
        outcome.cache_hit_rate = cached / prompt if prompt else 0.0
    elapsed_us = (outcome.ended_s - outcome.began_s) * 1e6
    outcome.prefill_busy = busy("prefill", config.ranks)
    outcome.decode_busy = busy("decode", config.decode_ranks)
    outcome.unified_busy = busy("unified", config.unified_ranks)


def spec_of(method: str, config: LabConfig, block_tokens: int, engine: LiveEngine) -> ClusterSpec:
    """Return the ClusterSpec for `config`: methods, numbers of ranks and queue settings. The timing, the capacities
    (tokens) and `block_tokens` are used for sim alone."""
    spec = ClusterSpec(
        prefill=config.ranks,
        decode=config.decode_ranks,
        unified=config.unified_ranks,
        prefill_method=method,
        decode_method=config.decode_method,
        unified_method=method,
        engine=engine.name,
        model=engine.model,
        log_level="warning",
        decode_args=("--decode-cache",) if config.decode_cache else (),
        controller_args=(
            "--cache-weight",
            str(config.cache_weight),
            "--request-overcommit",
            "1000",
            "--queue-requests",
            "100000",
            "--queue-order",
            config.queue_order,
            "--late-tokens",
            str(config.late_tokens),
            "--overtake-tokens",
            str(config.overtake_tokens),
            "--ttft-slo-s",
            str(config.slo_ttft_s),
            "--tpot-slo-s",
            str(config.slo_tpot_s if config.tpot_admission else 0.0),
        ),
    )
    if engine.name == "sim":
        return _with_sim(spec, config, block_tokens)
    return replace(
        spec,
        node_args=("--hold-s", str(VLLM_WAIT_S)),
        engine_args=engine.args,
        controller_args=(*spec.controller_args, "--lease-s", str(VLLM_WAIT_S), "--hang-s", str(VLLM_WAIT_S)),
        start_timeout_s=VLLM_WAIT_S,
        stop_grace_s=60.0,
    )


def _with_sim(spec: ClusterSpec, config: LabConfig, block_tokens: int) -> ClusterSpec:
    timing = [
        text
        for field in fields(config.timing)
        for text in (_TIMING_OPTIONS[field.name], repr(getattr(config.timing, field.name)))
    ]
    common = ("--block-tokens", block_tokens, "--max-context", CONTEXT, "--chunk-tokens", config.chunk_tokens,
              "--report-interval-s", config.report_interval_s, "--max-waiting", 100_000, "--hold-s", 600)  # fmt: skip
    return replace(
        spec,
        ranks_per_process=RANKS_PER_PROCESS,
        node_args=(*map(str, common), *timing),
        prefill_args=(
            "--kv-tokens",
            str(config.blocks(block_tokens) * block_tokens),
            "--max-running",
            str(config.prefill_running),
        ),
        decode_args=(
            *spec.decode_args,
            "--kv-tokens",
            str(config.decode_kv_tokens),
            "--max-running",
            str(config.decode_running),
        ),
        unified_args=(
            "--kv-tokens",
            str(config.unified_kv_tokens),
            "--max-running",
            str(config.unified_running),
        ),
    )

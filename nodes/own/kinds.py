"""Our own engines as entries of the engine registry, and the runner of a rank over one of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from bus.runtime.loop import Loop
from nodes.config import NodeConfig
from nodes.engines import Demo, EngineKind, Opened, Progress
from nodes.own.blocks import BlockPool
from nodes.own.engines import factory
from nodes.own.engines.base import Engine
from nodes.own.engines.factory import MODELS, EngineConfig
from nodes.own.engines.faults import Faults
from nodes.own.engines.sim import SIM_VOCAB_SIZE
from nodes.own.engines.timing import SimTiming, timing_named
from nodes.own.kv_events import KvEventLog
from nodes.own.runner import OwnRunner
from nodes.own.scheduler import Scheduler

TIMING = {
    "base_s": "sim_base_s",
    "per_prefill_token_s": "sim_prefill_s_per_token",
    "per_decode_row_s": "sim_decode_s",
    "per_context_token_s": "sim_context_s_per_token",
    "batched_s": "sim_batched_s",
}


def settings(name: str, options: Mapping[str, Any], arguments: Sequence[str]) -> EngineConfig:
    """Return the settings of the engine called `name` from `options`, the node's options by their names; an option that
    is missing has its default, and one that is not the engine's is ignored. `arguments` are those after `--`, which
    these engines do not take. ConfigError for an invalid value."""
    timing = timing_named(options["sim_timing"])
    changes = {part: options[option] for part, option in TIMING.items() if options.get(option) is not None}
    return EngineConfig(
        engine=name,
        model=options["model"],
        kv_tokens=options["kv_tokens"],
        block_tokens=options.get("block_tokens", EngineConfig().block_tokens),
        max_context=options.get("max_context", 0),
        timing=SimTiming(**{**dataclasses.asdict(timing), **changes}),
        vocab_size=options.get("sim_vocab_size", SIM_VOCAB_SIZE),
        kv_bytes_per_token=options.get("sim_kv_bytes_per_token", 0),
        faults=Faults(
            options.get("fault_fail_token"), options.get("fault_hang_token"), options.get("fault_crash_token")
        ),
    )


@contextmanager
def opened(config: NodeConfig, loop: Loop, progress: Progress) -> Iterator[Opened]:
    """Load one engine for each rank of the node, and close them at the end of the `with`. Errors as in
    `factory.build_engine`."""
    engines: list[Engine] = []
    try:
        for _ in config.dp_ranks:
            engines.append(factory.build_engine(config.engine, loop, progress))
        pairs = zip(config.dp_ranks, engines, strict=True)
        yield Opened([own_runner(config, dp_rank, engine) for dp_rank, engine in pairs], config.chunk_tokens)
    finally:
        for engine in engines:
            engine.close()


def own_runner(config: NodeConfig, dp_rank: int, engine: Engine) -> OwnRunner:
    """Return the runner of one rank, over `engine`, which the caller closes. Prefill and unified ranks publish their
    prefix caches, and decode ranks that have one."""
    spec = engine.spec
    decode_cache = config.role == "decode" and config.decode_cache
    keeps_prefixes = config.role != "decode" or decode_cache
    pool = BlockPool(spec.blocks, spec.block_tokens, record_events=keeps_prefixes)
    scheduler = Scheduler(pool, max_running=config.max_running, chunk_tokens=config.chunk_tokens)
    kv_events = KvEventLog(config.instance, dp_rank, spec.block_tokens) if keeps_prefixes else None
    reads_back = decode_cache or config.role == "prefill"
    return OwnRunner(engine, scheduler, kv_events, decode_cache=decode_cache, reads_back=reads_back)


def _kind(name: str, max_running: int, chunk_tokens: int, demo: Demo | None) -> EngineKind:
    return EngineKind(
        settings=partial(settings, name),
        opened=opened,
        prepare=partial(factory.prepare, name),
        max_running=max_running,
        chunk_tokens=chunk_tokens,
        our_options=True,
        decode_cache=True,
        demo=demo,
    )


TORCH = _kind("torch", 16, 256, Demo(models=MODELS))
NUMPY = _kind("numpy", 16, 256, Demo(models=MODELS, reference="numpy"))
SIM = _kind("sim", 256, 2048, None)

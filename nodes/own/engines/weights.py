"""The models of the torch engine, by name. Each is loaded once in a process, so that several ranks in it share one
copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from safetensors import SafetensorError, safe_open

from bus.errors import StartError
from nodes.own.engines import smollm2
from nodes.own.engines.cache import Progress, no_progress
from nodes.own.engines.llama import Llama
from nodes.own.engines.tiny import load_tiny


def _load_smollm2(progress: Progress) -> Llama:
    path = smollm2.converted(progress) / smollm2.WEIGHTS_FILE
    try:
        with safe_open(str(path), framework="pt") as file:  # the tensors are views of the mapped file
            config = smollm2.read_config(file.metadata())
            return Llama(config, {name: file.get_tensor(name) for name in config.shapes()})
    except (SafetensorError, OSError, KeyError, TypeError) as error:
        raise StartError(f"the cached model {path} cannot be read ({error}); delete {path.parent} and retry") from None


LOADERS: dict[str, Callable[[Progress], Llama]] = {
    smollm2.NAME: _load_smollm2,
    "tiny": lambda progress: load_tiny(),
}
_loaded: dict[str, Llama] = {}
_lock = threading.Lock()


def load_model(name: str, progress: Progress = no_progress) -> Llama:
    """Return the model `name` (one of `factory.MODELS`), ready to run; it blocks while it loads. ConfigError when its
    package is missing, StartError when its cached file cannot be read."""
    with _lock:
        if name not in _loaded:
            _loaded[name] = LOADERS[name](progress)
        return _loaded[name]

"""The models of the numpy engine, by name. Each is loaded once in a process, so that several ranks in it share one
copy.
"""

from __future__ import annotations

import json
import mmap
import threading
from collections.abc import Callable
from pathlib import Path

import numpy

from bus.errors import StartError
from nodes.own.engines import smollm2
from nodes.own.engines.cache import Progress, no_progress
from nodes.own.engines.numpy_llama import Array, NumpyLlama


def _load_smollm2(progress: Progress) -> NumpyLlama:
    path = smollm2.converted(progress) / smollm2.WEIGHTS_FILE
    try:
        metadata, arrays = mapped(path)
        return NumpyLlama(smollm2.read_config(metadata), arrays)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise StartError(f"the cached model {path} cannot be read ({error}); delete {path.parent} and retry") from None


def _load_tiny(progress: Progress) -> NumpyLlama:
    from nodes.own.engines.tiny import TINY, tiny_weights  # torch's generator makes its weights

    return NumpyLlama(TINY, {name: tensor.numpy() for name, tensor in tiny_weights().items()})


def mapped(path: Path) -> tuple[dict[str, str], dict[str, Array]]:
    """Return the metadata and the arrays (by name) of a safetensors file in fp32. The arrays are mapped, and read as
    they are used.

    safetensors itself would copy them all. ValueError for any other file.
    """
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    start = 8 + int.from_bytes(data[:8], "little")
    head = json.loads(data[8:start])
    metadata = head.pop("__metadata__", {})
    arrays = {}
    for name, tensor in head.items():
        if tensor["dtype"] != "F32":
            raise ValueError(f"{name} is {tensor['dtype']}, not F32")
        first, end = tensor["data_offsets"]
        flat = numpy.frombuffer(data, numpy.float32, (end - first) // 4, start + first)
        arrays[name] = flat.reshape(tensor["shape"])
    return metadata, arrays


LOADERS: dict[str, Callable[[Progress], NumpyLlama]] = {smollm2.NAME: _load_smollm2, "tiny": _load_tiny}
_loaded: dict[str, NumpyLlama] = {}
_lock = threading.Lock()


def load_model(name: str, progress: Progress = no_progress) -> NumpyLlama:
    """Return the model `name` (one of `factory.MODELS`), ready to run; it blocks while it loads. ConfigError when its
    package is missing, StartError when its cached file cannot be read."""
    with _lock:
        if name not in _loaded:
            _loaded[name] = LOADERS[name](progress)
        return _loaded[name]

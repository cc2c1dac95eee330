"""The fingerprint of a model, from its configuration and a little of its weights, so that different models never
exchange KV caches.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

_SAMPLE = 65_536
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt")


def fingerprint(model: str, config: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits that differ for different models. `model` is a folder or a name, `config` its
    configuration. For weights on this machine, names, sizes, first and last bytes count: they hold the tensors' layout
    and some values. For others, the name counts, and the revision of the configuration."""
    found = blake2b(json.dumps(config, sort_keys=True, default=str).encode(), digest_size=8)
    folder = Path(model)
    if not folder.is_dir():
        found.update(model.encode())
        return found.hexdigest()
    for path in sorted(each for pattern in _WEIGHTS for each in folder.glob(pattern)):
        size = path.stat().st_size
        found.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            found.update(file.read(_SAMPLE))
            file.seek(max(0, size - _SAMPLE))
            found.update(file.read(_SAMPLE))
    return found.hexdigest()

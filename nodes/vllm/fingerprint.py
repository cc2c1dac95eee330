"""Which model it is, so that no two exchange KV caches: of the configuration, and of the weights a little."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

_SAMPLE = 65_536
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt")


def fingerprint(model: str, config: Mapping[str, Any]) -> str:
    """16 hexadecimal digits. Of weights on this machine the names, sizes, first and last bytes count, which hold the
    tensors' layout and the values of some; of others the name, and the revision that the configuration came from."""
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

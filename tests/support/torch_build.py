"""Says in one line which build of torch is installed, and what of CUDA came with it: `make check-torch`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions

_CUDA = ("nvidia", "cuda", "triton")


def describe(installed: Iterable[Distribution]) -> str:
    """One line; LookupError where there is no torch."""
    versions: dict[str, str] = {}
    cuda: dict[str, int] = {}  # sizes in bytes by name
    for each in installed:
        versions[each.name] = each.version
        if each.name.startswith(_CUDA):
            cuda[each.name] = sum(file.size or 0 for file in each.files or ())
    if "torch" not in versions:
        raise LookupError("torch is not installed: run make setup")
    torch = f"torch {versions['torch']}"
    if not cuda:
        return torch
    return (
        f"{torch}, with {len(cuda)} CUDA packages ({sum(cuda.values()) / 1e9:.1f} GB) that nothing here uses; to be "
        "rid of them point PIP_INDEX_URL or PIP_EXTRA_INDEX_URL at an index with the CPU build, then: make clean setup"
    )


if __name__ == "__main__":
    try:
        print(describe(distributions()))
    except LookupError as error:
        sys.exit(f"check-torch: error: {error.args[0]}")

"""Finds the files of a model's tokenizer on this machine. Loads none of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeAlias

from bus.errors import ConfigError

TOKENIZER_FILE = "tokenizer.json"
BYTES: Literal["bytes"] = "bytes"
Place: TypeAlias = Path | Literal["bytes"]  # a folder with a tokenizer, or one byte for each token
Places: TypeAlias = Mapping[str, Place]  # by model; the empty name is for all others


def places_of(given: Iterable[str]) -> dict[str, Place]:
    """Return the places that `--tokenizer` gives, by model: each of `given` is DIR or MODEL=DIR, where DIR may be the
    word `bytes`; the name of DIR alone is empty. Raises ConfigError for a folder without tokenizer.json."""
    places: dict[str, Place] = {}
    for each in given:
        model, _, place = each.rpartition("=")
        if place != BYTES and not _has_tokenizer(Path(place)):
            raise ConfigError(f"--tokenizer {each}: {place or '.'} has no {TOKENIZER_FILE}")
        places[model] = BYTES if place == BYTES else Path(place)
    return places


def folder_of(model: str) -> Path | None:
    """Return the folder with the tokenizer of `model`: `model` itself if it is such a path, or its folder in the
    Hugging Face cache of this machine. None: there is none; nothing is downloaded."""
    if _has_tokenizer(Path(model)):
        return Path(model)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and find_spec("huggingface_hub"):
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, TOKENIZER_FILE)
        return Path(found).parent if isinstance(found, str) else None
    return None


def _has_tokenizer(folder: Path) -> bool:
    try:
        return (folder / TOKENIZER_FILE).is_file()
    except OSError:  # a name that no file can have
        return False

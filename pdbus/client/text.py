"""Text and token ids: which tokenizer, and text as it becomes whole. Loads tokenizers only when text is used."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nodes.own.engines.tokenizer import Tokenizer


class Texts:
    """A client's tokenizers by model, each loaded once. Any thread."""

    def __init__(self, model: str = "") -> None:
        self.model = model
        self._lock = threading.Lock()
        self._tokenizers: dict[str, Tokenizer] = {}

    def learn(self, model: str) -> str:
        self.model = model
        return model

    def tokenizer(self, model: str) -> Tokenizer:
        """ConfigError when the model's packages are missing."""
        from nodes.own.engines.tokenizer import tokenizer_for

        with self._lock:
            found = self._tokenizers.get(model)
            if found is None:
                found = self._tokenizers[model] = tokenizer_for(model)
            return found


class Writer:
    """The text of one request's output; bytes of a character that is not whole yet are held back."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        from nodes.own.engines.tokenizer import StreamDecoder

        self._decoder = StreamDecoder(tokenizer)

    def push(self, ids: Sequence[int]) -> str:
        return self._decoder.push(ids)

    def finish(self) -> str:
        return self._decoder.finish()

"""A file that a command writes at its end: it is there under its name only when it is whole. Owns the file."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from bus.errors import ConfigError

_numbers = count()


class WholeFile:
    """The file at `path`, before there is anything to write: it is opened under another name in the same
    folder, and has its own at the end of `whole`. Raises ConfigError if it cannot be written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._part = path.parent / f".pdbus-{os.getpid()}-{next(_numbers)}.part"
        try:
            with suppress(FileNotFoundError):
                mode = path.stat().st_mode
                if not stat.S_ISREG(mode):  # a pipe or a device, or the error for a folder
                    self._part = path
                elif not os.access(path, os.W_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            self._out: IO[bytes] = open(self._part, "wb")  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # what is still buffered does not fit, which the writing has said
            self._out.close()
        if self._part != self.path:
            self._part.unlink(missing_ok=True)

    @contextmanager
    def whole(self) -> Iterator[IO[bytes]]:
        """Give what the whole content is to be written to. Raises ConfigError if that fails."""
        try:
            yield self._out
            self._out.flush()
            if self._part != self.path:
                os.replace(self._part, self.path)
        except OSError as error:
            raise ConfigError(f"cannot write {self.path}: {error.strerror}") from None

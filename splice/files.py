"""Text files: read with an error that names the file, written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

from splice.errors import SpliceError, StoreError


class Closing:
    """Something to be closed, which `with` does."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of what is held; a second time does nothing."""
        raise NotImplementedError


def read_text(path: Path, error: type[SpliceError]) -> str:
    """The text of a UTF-8 file; an `error` is raised if it is missing, unreadable or not UTF-8."""
    try:
        return path.read_text("utf-8")
    except OSError as problem:
        raise error(f"{path}: {problem.strerror}") from None
    except UnicodeDecodeError as problem:
        raise error(f"{path}: not UTF-8 (byte {problem.start})") from None


def write_whole(path: Path, text: str) -> None:
    """Write a file, in a folder that is made if need be.

    Raises:
        StoreError: the file can't be written; what was there before is still there.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(text, "utf-8")
        os.replace(new, path)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}") from None

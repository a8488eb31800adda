"""A file of lines that only grows: one writer at a time, each line whole or not there.

A line is written by one call to the operating system as soon as there is one. A writer that is
killed leaves at most one incomplete line at the end.
"""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path

from splice.errors import StoreError
from splice.files import Closing


class LineFile(Closing):
    """A file opened for adding lines; the operating system locks it for this writer."""

    def __init__(
        self, path: str | os.PathLike[str], *, create: bool = True, sync: bool = False
    ) -> None:
        """Open and lock the file; nothing is read.

        Args:
            path: the file.
            create: whether to begin it where there is none.
            sync: whether `flush` waits until the disk has what was written.

        Raises:
            StoreError: the file can't be opened, or another writer has it.
        """
        self.path = Path(path)
        self.end = 0
        """Bytes up to the end of the last whole line. Whoever reads the file sets it."""
        self._sync = sync
        self._is_torn = False
        self._file: int | None = self._open(create)
        try:
            self._lock()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the file. What was written is in it already."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def append(self, data: bytes) -> None:
        """Add bytes: all of them or, as far as the system lets us, none.

        Raises:
            StoreError: the file can't be written; what was there before is safe.
        """
        file = self._descriptor()
        if self._is_torn:
            self.cut()
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._write_some(file, rest) :]
        except BaseException as error:
            self._is_torn = True
            if isinstance(error, OSError):
                with suppress(StoreError):
                    self.cut()
                raise self._unwritable(error) from error
            raise
        self.end += len(data)

    def cut(self) -> None:
        """Cut off what stands behind `end`."""
        try:
            os.ftruncate(self._descriptor(), self.end)
        except OSError as error:
            raise self._unwritable(error) from error
        self._is_torn = False

    def flush(self) -> None:
        """Wait until the disk has everything, if that was asked for."""
        if not self._sync:
            return
        try:
            os.fsync(self._descriptor())
        except OSError as error:
            raise self._unwritable(error) from error

    def _write_some(self, file: int, data: memoryview) -> int:
        """Write some of `data`, and return how many bytes."""
        return os.write(file, data)

    def _open(self, create: bool) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        try:
            check_regular(self.path)
            return os.open(self.path, flags, 0o666)
        except OSError as error:
            raise StoreError(
                f"{self.path} can't be opened for writing: {error.strerror}"
            ) from error

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreError(
                f"{self.path} is in use by another writer; it has one writer at a time"
            ) from error
        except OSError as error:
            raise StoreError(f"{self.path} can't be locked: {error.strerror}") from error

    def _descriptor(self) -> int:
        if self._file is None:
            raise StoreError(f"{self.path} is closed")
        return self._file

    def _unwritable(self, error: OSError) -> StoreError:
        return StoreError(
            f"{self.path} can't be written: {error.strerror}; every record before is safe"
        )


def resumed(path: Path) -> tuple[LineFile, bytes]:
    """A file to add lines to, without what a killed writer left incomplete, and what it held before.

    Raises:
        StoreError: the file can't be opened or read, or another writer has it.
    """
    file = LineFile(path)
    try:
        data = path.read_bytes()
        file.end = data.rfind(b"\n") + 1
        if file.end < len(data):
            file.cut()
    except OSError as error:
        file.close()
        raise StoreError(f"{path} can't be read: {error.strerror}") from error
    except BaseException:
        file.close()
        raise
    return file, data


def check_regular(path: Path) -> None:
    """Refuse folders, devices and pipes, which would be read forever.

    Raises:
        StoreError: there is something at `path` and it is no regular file.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(path.stat().st_mode):
            raise StoreError(f"{path} is not a regular file")

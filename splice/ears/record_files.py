"""Files of records that only grow, one a line: verdicts, replies, cycles."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import ClassVar, Generic, Protocol, TypeVar

from pydantic import BaseModel, ValidationError

from splice.errors import DataError, StoreError
from splice.files import Closing, read_text
from splice.lines import resumed


class Keyed(Protocol):
    """A record that a key tells from the others of its file."""

    @property
    def key(self) -> Hashable:
        """What makes it this record."""
        ...

    def model_dump_json(self) -> str:
        """The record as one line of JSON."""
        ...


M = TypeVar("M", bound=BaseModel)
R = TypeVar("R", bound=Keyed)


class RecordFile(Closing, Generic[R]):
    """Records in a file that only grows, one a line; opened by one writer at a time.

    Of records with the same key the first counts. Subclasses say of which kind the records are.
    """

    kind: ClassVar[type[BaseModel]]

    def __init__(self, path: str | Path) -> None:
        """Open the file, or begin it, in a folder that is made if need be.

        A last line that a killed writer left incomplete is cut off.

        Raises:
            StoreError: the file can't be read or written, or another writer has it.
            DataError: a line is no such record; the message names file, line and field.
        """
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{path.parent}: {error.strerror}") from None
        self._file, data = resumed(path)
        self._records: dict[Hashable, R] = {}
        try:
            for record in records_in(path, data, self.kind):
                self._records.setdefault(record.key, record)  # type: ignore[attr-defined, arg-type]
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Let go of the file. What was written is in it already."""
        self._file.close()

    def find(self, key: Hashable) -> R | None:
        """The record with this key; None if there is none yet."""
        return self._records.get(key)

    def put(self, record: R) -> None:
        """Write a record, unless there is one with its key.

        Raises:
            StoreError: the disk is full or broken; what was written before is safe.
        """
        if record.key not in self._records:
            self._file.append(record.model_dump_json().encode() + b"\n")
            self._records[record.key] = record


def records_in(path: Path, data: bytes, kind: type[M]) -> Iterator[M]:
    """The records in a file's lines; an incomplete last line is passed over.

    Raises:
        DataError: a line is no such record; the message names file, line and field.
    """
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            yield kind.model_validate_json(line)
        except ValidationError as error:
            raise DataError(f"{path}:{number}: {problem_of_line(error)}") from None


def numbered_records(path: Path, kind: type[M]) -> Iterator[tuple[int, M]]:
    """The records of a file that somebody else wrote, with their lines' numbers; empty lines aside.

    Raises:
        DataError: the file can't be read, or a line is no such record; the message names file, line
            and field.
    """
    # Not `splitlines`: JSON strings may hold U+2028 and the like as they are.
    for number, line in enumerate(read_text(path, DataError).split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield number, kind.model_validate_json(line)
        except ValidationError as error:
            raise DataError(f"{path}:{number}: {problem_of_line(error)}") from None


def problem_of_line(error: ValidationError) -> str:
    """What is wrong with a line of JSON, with the field if it is one."""
    problems: dict[str, list[str]] = {}
    for found in error.errors(include_url=False, include_input=False, include_context=False):
        # Each kind of value that a field may have is tried; `literal[...]` says which it was.
        place = ".".join(str(part) for part in found["loc"] if "[" not in str(part))
        problems.setdefault(place, []).append(found["msg"])
    place, messages = next(iter(problems.items()))
    text = f"{' / '.join(messages):.300}"
    return f"{place:.80}: {text}" if place else text

"""Reading data files: everything of a file or nothing, and errors that say where."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from splice.errors import DataError
from splice.files import read_text
from splice.queries import Split

M = TypeVar("M", bound=BaseModel)

STEMS: Mapping[Split, str] = {"train": "train", "validation": "val", "test": "test"}
"""Name of each split's file in a folder, without its suffix."""


def split_file(data: Path, split: Split) -> Path:
    """`data` if it is a file; of a folder, the file of `split`, `.jsonl` or `.json`.

    Raises:
        DataError: the folder holds neither.
    """
    if not data.is_dir():
        return data
    names = [f"{STEMS[split]}{suffix}" for suffix in (".jsonl", ".json")]
    for name in names:
        if (data / name).is_file():
            return data / name
    raise DataError(f"{data}: neither {' nor '.join(names)} is there")


def sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, as 64 hex digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_json(path: Path) -> Any:
    """The value that a JSON file holds.

    Raises:
        DataError: the file can't be read or is not JSON.
    """
    return _parsed(read_text(path, DataError), f"{path}")


def raw_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a JSONL file, or of a JSON file that holds one list, each with its place.

    A place reads `FILE:LINE` for JSONL and `FILE: row N` for JSON; both count from 1.

    Raises:
        DataError: the file can't be read, is not JSON, or holds no row.
    """
    text = read_text(path, DataError)
    if path.suffix == ".json":
        value = _parsed(text, f"{path}")
        if not isinstance(value, list):
            raise DataError(f"{path}: not a list of rows")
        places = [(f"{path}: row {number}", row) for number, row in enumerate(value, 1)]
    else:
        # Not `splitlines`: JSON strings may hold U+2028 and the like as they are.
        places = [
            (f"{path}:{number}", _parsed(line, f"{path}:{number}"))
            for number, line in enumerate(text.split("\n"), 1)
            if line.strip()
        ]
    if not places:
        raise DataError(f"{path}: no rows")
    yield from places


def read_rows(path: Path, kind: type[M]) -> tuple[M, ...]:
    """The rows of a JSONL file, or of a JSON list, each as a `kind`.

    Raises:
        DataError: a row is not a `kind`; the message names file, line and field.
    """
    return tuple(as_row(row, kind, place) for place, row in raw_rows(path))


def as_row(row: Any, kind: type[M], place: str) -> M:
    """One row as a `kind`; `place` opens the message of an error.

    Raises:
        DataError: the row is not a `kind`.
    """
    try:
        return kind.model_validate(row)
    except ValidationError as error:
        raise DataError(f"{place}: {_problem(error)}") from None


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not JSON: {error}") from None


def _problem(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(map(str, first["loc"]))
    if not field:
        return f"not a row: {first['msg']}"
    if first["type"] == "missing":
        return f"field {field!r} is missing"
    if first["type"] == "extra_forbidden":
        return f"unknown field {field!r}"
    return f"field {field!r}: {first['msg']}"
